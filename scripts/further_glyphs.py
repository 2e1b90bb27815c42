r"""Pictures of letters that are in neither list of the glyphs benchmark: a dataset that no setting was chosen on.

    python scripts/further_glyphs.py DIR                    # 80 letters, 50 + 60 pictures each; ten seconds
    python scripts/further_glyphs.py DIR --skip 80          # the next 80
    fscil compare --dataset folder --data-root DIR --backbone glyph_vit_a --methods chord --seeds 3 \
        --set data.split=pack --set transform.size=48 --set transform.resize=48 --set transform.scale=[0.5,1.0] \
        --set transform.flip=0.0 --set transform.normalize=none --set options.lr=0.03 --set options.epochs=20

They are drawn as the benchmark's are. `select_glyphs.py` left most of them out because they resemble one of its classes
when turned or mirrored; here only letters that look alike as they stand are kept apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from select_glyphs import candidates, is_drawable

from fscil.data.glyphs import NUISANCE, PER_CLASS, class_name, glyph_classes, glyph_mask, render
from fscil.text import file_name

CLASSES = 80
SEED = 11
MAX_CORRELATION = 0.7  # of two drawings in the first font of each
MIN_FONTS = 8


def choose(skip: int) -> list[dict]:
    """Letters of neither list in random order, each unlike those before it and the first `skip` of them passed over:
    [{"code": ..., "fonts": [...]}, ...]."""
    used = {entry["code"] for part in glyph_classes().values() for entry in part}
    fonts_of = {code: fonts for code, fonts in candidates().items() if len(fonts) >= MIN_FONTS}
    letters = [code for code in fonts_of if chr(code).isalpha() and code not in used]
    taken: list[dict] = []
    drawn: list[np.ndarray] = []
    for code in np.random.default_rng(SEED).permutation(letters).tolist():
        if not all(is_drawable(glyph_mask(code, font)) for font in fonts_of[code]):
            continue
        ink = glyph_mask(code, fonts_of[code][0]).astype(np.float64).ravel()
        if all(np.corrcoef(ink, other)[0, 1] < MAX_CORRELATION for other in drawn):
            taken.append({"code": code, "fonts": fonts_of[code]})
            drawn.append(ink)
        if len(taken) == skip + CLASSES:
            return taken[skip:]
    raise SystemExit(f"there are {len(taken)} such letters; --skip can be 0 to {len(taken) - CLASSES}, not {skip}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="letters that are passed over first")
    arguments = parser.parse_args()
    if arguments.skip < 0:
        parser.error(f"--skip {arguments.skip}: it must be 0 or more")
    out, classes = arguments.out, choose(arguments.skip)
    for split, per_class in PER_CLASS.items():
        images, labels = render(classes, split, 0, per_class, NUISANCE["benchmark"])
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = out / split / file_name(class_name(classes[label]["code"]))
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number % per_class:03d}.png")
    print(f"{len(classes)} letters below {out}: " + " ".join(chr(entry["code"]) for entry in classes))


if __name__ == "__main__":
    main()
