"""Pictures of made-up classes: a coloured pattern each, with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

BACKBONE = "glyph_vit_a"


def pictures(classes, count: int, seed: int = 0) -> tuple[list[np.ndarray], list[str]]:
    """`count` pictures uint8 (48, 48, 3) of each class, and their labels "class 3"."""
    images, labels = [], []
    for number in classes:
        pattern = np.kron(np.random.default_rng(number).integers(0, 255, (6, 6, 3)), np.ones((8, 8, 1)))
        noise = np.random.default_rng([seed, number]).normal(0, 12, (count, 48, 48, 3))
        images += list((pattern + noise).clip(0, 255).astype(np.uint8))
        labels += [f"class {number}"] * count
    return images, labels


def write_folders(root: Path, classes, count: int, seed: int = 0) -> Path:
    """The same pictures as PNG files in class folders."""
    images, labels = pictures(classes, count, seed)
    for number, (image, label) in enumerate(zip(images, labels)):
        (root / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / label / f"{number:03d}.png")
    return root
