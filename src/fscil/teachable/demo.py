"""A model to try things with, made of the built-in glyphs: no photos needed, fitted in seconds, kept in the cache."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fscil.data import cache_dir
from fscil.errors import UserError
from fscil.teachable.folder import ModelFolder

if TYPE_CHECKING:
    import numpy as np

BASE, PER_CLASS = range(0, 16), 20  # classes of the benchmark that are known, and pictures of each
NEW, SHOTS = (60, 64), 5  # classes to be taught: a writing hand and a lambda
STRANGER = 80
TRIES = (13, 8, 14, *NEW, STRANGER)  # classes of the pictures to try


@dataclass(frozen=True)
class Demo:
    """Where the model lies, pictures to try on it, and lessons to teach it."""

    model: Path
    tries: list[np.ndarray]
    lessons: dict[str, list[np.ndarray]]


def make_demo(folder: Path | None = None) -> Demo:
    """The demonstration. Its model, in the cache or `folder`, is fitted if it is not there, and keeps its lessons."""
    from fscil.data.glyphs import glyph_images
    from fscil.teachable.model import Teachable

    folder = folder or cache_dir() / "demo" / "runes"
    images, labels, names = glyph_images("benchmark", "train", per_class=PER_CLASS)
    if not ModelFolder(folder).exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f'"{folder}" is in the way of the demonstration and holds no model; remove it.')
        chosen = [at for at, label in enumerate(labels) if label in BASE]
        model = Teachable(backbone="glyph_vit_a", train="never", thumbnails=3, device="cpu")
        with warnings.catch_warnings(action="ignore"):  # nobody is to check these pictures
            model.fit([images[at] for at in chosen], [plain(names[labels[at]]) for at in chosen])
        model.save(folder, embed=True)
    lessons = {plain(names[number]): list(images[labels == number][:SHOTS]) for number in NEW}
    tests, truth, _ = glyph_images("benchmark", "test", per_class=1)
    return Demo(folder, [tests[truth == number][0] for number in TRIES], lessons)


def plain(name: str) -> str:
    """A character's name without its number.

    >>> plain("U+2702 BLACK SCISSORS")
    'black scissors'
    """
    return name.partition(" ")[2].lower()
