"""Teach and recognise: a model of a few characters that learns a new one from five pictures, and forgets it again."""

import numpy as np
from PIL import Image, ImageDraw

from fscil import FewShotClassifier


def pictures(shape: str, count: int, seed: int) -> list[Image.Image]:
    """White shapes on black, somewhere and of some size."""
    drawn, random = [], np.random.default_rng(seed)
    for _ in range(count):
        image = Image.new("RGB", (64, 64))
        left, top = random.integers(4, 20, 2).tolist()
        size = int(random.integers(28, 40))
        box, draw = (left, top, left + size, top + size), ImageDraw.Draw(image)
        if shape == "disc":
            draw.ellipse(box, fill="white")
        elif shape == "ring":
            draw.ellipse(box, outline="white", width=6)
        elif shape == "square":
            draw.rectangle(box, fill="white")
        else:
            draw.line((box[0], box[1], box[2], box[3]), fill="white", width=8)
            draw.line((box[0], box[3], box[2], box[1]), fill="white", width=8)
        drawn.append(image)
    return drawn


def main() -> None:
    base = ["disc", "square", "ring"]
    images = [image for number, name in enumerate(base) for image in pictures(name, 12, number)]
    labels = [name for name in base for _ in range(12)]
    model = FewShotClassifier(backbone="glyph_vit_a", train="never", device="cpu").fit(images, labels)
    model.learn(pictures("cross", 5, 10), ["cross"] * 5)
    tests = [image for number, name in enumerate([*base, "cross"]) for image in pictures(name, 5, 100 + number)]
    truth = [name for name in [*base, "cross"] for _ in range(5)]
    print(f"right: {100 * model.score(tests, truth):.0f} % of {len(truth)}")
    print("what it knows:", ", ".join(model.classes_), "| what happened:", [e["action"] for e in model.history_])
    model.forget("cross")
    print("after forgetting:", ", ".join(model.classes_))


if __name__ == "__main__":
    main()
