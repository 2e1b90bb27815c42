"""What reducing images to a short side of 256 before training costs in accuracy, against keeping them whole.

    python benchmarks/store.py --weights deit_tiny_patch16_224.fb_in1k.safetensors

Draws large pictures with fine detail (a character of the built-in benchmark in a rough scene, 960 x 720), then runs the
baseline on the same folder with `--store full` and `--store 256`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import environment
from PIL import Image, ImageDraw, ImageFont

from fscil.backbones.loading import make_backbone
from fscil.config import DataConfig, resolve
from fscil.data.datasets import load_dataset
from fscil.data.glyphs import class_name, font_path, glyph_classes
from fscil.data.stream import make_stream
from fscil.data.transforms import make_transform
from fscil.experiments.run import run

SIZE = (960, 720)


def draw_picture(code: int, fonts: list[str], rng: np.random.Generator) -> Image.Image:
    """A character, in one to three places, thin and textured, on noise of all scales."""
    scene = np.zeros((SIZE[1], SIZE[0], 3), np.float32)
    for cells in (4, 16, 64, 256):
        rough = rng.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
        scene += np.asarray(Image.fromarray(rough).resize(SIZE, Image.Resampling.BICUBIC), np.float32) / 4
    for _ in range(rng.integers(1, 4)):
        mask = Image.new("L", SIZE)
        font = ImageFont.truetype(str(font_path(rng.choice(fonts))), int(rng.integers(150, 400)))
        place = (int(rng.integers(0, SIZE[0] - 300)), int(rng.integers(0, SIZE[1] - 350)))
        ImageDraw.Draw(mask).text(place, chr(code), font=font, fill=255)
        mask = np.asarray(mask.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC), np.float32)[..., None] / 255
        ink = rng.uniform(0, 255, 3) + rng.normal(0, 30, scene.shape)  # grain finer than the reduced image can hold
        scene = scene * (1 - mask) + ink * mask
    return Image.fromarray(np.clip(scene, 0, 255).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="deit_tiny_patch16_224.fb_in1k")
    parser.add_argument("--weights")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--per-class", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2023, 2024])
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "pictures"
        for entry in glyph_classes()["benchmark"][: chosen.classes]:
            folder = root / class_name(entry["code"])
            folder.mkdir(parents=True)
            for number in range(chosen.per_class):
                draw_picture(entry["code"], entry["fonts"], rng).save(folder / f"{number}.jpg", quality=92)
        base = chosen.classes // 2
        data = {"root": str(root), "base": base, "way": base // 2, "test_fraction": 0.33}
        print(f"{environment()}; {chosen.classes} classes of {chosen.per_class} pictures {SIZE[0]} x {SIZE[1]}")
        print("| store | A_0 | A_final | A_avg | seconds | MB |\n|---|---|---|---|---|---|")
        views = {}
        for store in ("full", "256"):
            rows, began = [], time.perf_counter()
            for seed in chosen.seeds:
                config = resolve(
                    "baseline", "folder", None, [f"options.epochs={chosen.epochs}", "options.lr=0.05"], False,
                    seed=seed, backbone=chosen.backbone, weights=chosen.weights, data={**data, "store": store},
                )  # fmt: skip
                found = run(config, Path(place) / f"{store}-{seed}").summary
                rows.append([found[key] for key in ("A_0", "A_final", "A_avg")])
            elapsed = time.perf_counter() - began
            stream_config = DataConfig(**data, store=store)
            backbone = make_backbone(chosen.backbone, chosen.weights)
            stream = make_stream(
                load_dataset("folder", stream_config), stream_config, make_transform(config.transform, backbone), 0
            )
            size = stream.tasks[0].images.store.nbytes / 1e6
            part = torch.arange(min(64, len(stream.tasks[0].labels)))
            with torch.no_grad():
                views[store] = [
                    backbone(pictures) for pictures in (stream.tasks[0].images.plain(part),
                                                        stream.tasks[0].images.augmented(part, 0))
                ]  # fmt: skip
            print(
                f"| {store} | {' | '.join(f'{value:.2f}' for value in np.mean(rows, 0))} | {elapsed:.0f} | {size:.0f} |"
            )
        for name, *pair in zip(("plain", "augmented"), *views.values()):
            likeness = torch.cosine_similarity(*pair, dim=1)
            print(f"cosine of {name} features, full and 256: mean {likeness.mean():.4f}, least {likeness.min():.4f}")


if __name__ == "__main__":
    main()
