"""Pictures of made-up classes (a coloured pattern each, with noise) and a small random ViT that tells them apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

BACKBONE = "glyph_vit_a"


def weights_file(folder: Path) -> Path:
    """Random weights of the package's small ViT, strong enough that features of different patterns differ."""
    from timm.models.vision_transformer import VisionTransformer

    from fscil.backbones.loading import GLYPH_VITS

    with torch.random.fork_rng():
        torch.manual_seed(0)
        vit = VisionTransformer(num_classes=0, **GLYPH_VITS[BACKBONE])
    with torch.no_grad():
        for block in vit.blocks:
            block.mlp.fc1.weight.mul_(4)
            block.attn.qkv.weight.mul_(4)
    path = Path(folder) / "random_vit.safetensors"
    save_file(vit.state_dict(), path)
    return path


def pictures(classes, count: int, seed: int = 0) -> tuple[list[np.ndarray], list[str]]:
    """`count` pictures uint8 (48, 48, 3) of each class, and their labels "class 3"."""
    images, labels = [], []
    for number in classes:
        pattern = np.kron(np.random.default_rng(number).integers(0, 255, (6, 6, 3)), np.ones((8, 8, 1)))
        noise = np.random.default_rng([seed, number]).normal(0, 25, (count, 48, 48, 3))
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
