"""Writes pictures of the built-in glyphs as files, one folder per class: something to follow the tutorial with.

python scripts/glyph_photos.py glyph-photos                     # base/, new/, test/ and overview.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from fscil.data.glyphs import glyph_images

BASE, NEW, STRANGERS = range(0, 20), range(60, 65), range(80, 85)  # classes of the benchmark, in its order
SHOWN = (*range(0, 6), *range(60, 65), *range(80, 82))


def write(root: Path, images: np.ndarray, labels: np.ndarray, names: list[str], classes, count: int) -> None:
    for number in classes:
        folder = root / names[number]
        folder.mkdir(parents=True, exist_ok=True)
        for position in np.nonzero(labels == number)[0][:count]:
            Image.fromarray(images[position]).save(folder / f"{position:05d}.png")


def overview(images: np.ndarray, labels: np.ndarray, per_class: int = 5, side: int = 56) -> Image.Image:
    """A row per picture number, a column per class."""
    sheet = Image.new("RGB", (len(SHOWN) * side, per_class * side), "white")
    for column, number in enumerate(SHOWN):
        for row, position in enumerate(np.nonzero(labels == number)[0][:per_class]):
            tile = Image.fromarray(images[position]).resize((side, side), Image.Resampling.BICUBIC)
            sheet.paste(tile, (column * side, row * side))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    root = parser.parse_args().folder
    images, labels, names = glyph_images("benchmark", "train")
    write(root / "base", images, labels, names, BASE, 30)
    write(root / "new", images, labels, names, NEW, 5)
    write(root / "more", images, labels, names, NEW[:1], 10)
    overview(images, labels).save(root / "overview.jpg")
    images, labels, names = glyph_images("benchmark", "test")
    write(root / "test", images, labels, names, [*BASE, *NEW, *STRANGERS], 20)


if __name__ == "__main__":
    main()
