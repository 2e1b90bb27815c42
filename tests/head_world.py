"""Features of ten Gaussian classes, as a backbone might give them: a shared, uneven covariance and means apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fscil import registry
from fscil.heads.base import Head, Lesson
from fscil.methods.making import make_head
from fscil.runtime import Runtime

DIM, CLASSES, BASE = 12, 10, 6
SPREAD = torch.linspace(0.2, 1.5, DIM)  # standard deviation within a class, by direction
MEANS = 2.5 * torch.randn(CLASSES + 2, DIM, generator=torch.Generator().manual_seed(7)) + 1.0


# Set on every head whose Options have the field; the defaults are for real features.
SMALL = {"projections": 150, "dimensions": 60, "ensemble": 2, "draws": 40}


def small_head(name: str, dim: int = DIM, **options: Any) -> Head:
    """A head of the registry with small options."""
    fields = registry.head_class(name).Options.__dataclass_fields__
    small = {key: value for key, value in SMALL.items() if key in fields}
    return make_head({"name": name, **small, **options}, dim, Runtime())


def draw(classes: Iterable[int], each: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features (n, DIM) and labels of some classes, one class after the other."""
    labels = torch.tensor(list(classes)).repeat_interleave(each)
    noise = torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(seed))
    return MEANS[labels] + noise * SPREAD, labels


def lesson(classes: Sequence[int], shots: int, number: int) -> Lesson:
    """A task; views of an image are the image with a little noise, keyed by view and image."""
    features, labels = draw(classes, shots, seed=100 + number)

    def views(numbers: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions, numbers = torch.arange(len(labels)).repeat(len(numbers)), numbers.repeat_interleave(len(labels))
        draws = [
            torch.randn(DIM, generator=torch.Generator().manual_seed(1 + int(view) + 100_003 * int(image)))
            for view, image in zip(numbers, positions, strict=True)
        ]
        return features[positions] + 0.3 * SPREAD * torch.stack(draws)

    return Lesson(features, labels, max(classes) + 1, views, number)


def base_lesson() -> Lesson:
    return lesson(range(BASE), 30, 0)


def trained_head(name: str, taught: Iterable[int] = range(BASE, CLASSES), **options: Any) -> Head:
    """A head after the base task and two few-shot tasks of five images per class."""
    head = small_head(name, **options)
    head.fit(base_lesson())
    for label in taught:
        head.teach(lesson([label], 5, number=label - BASE + 1))
    return head


def held_out() -> tuple[Tensor, Tensor]:
    return draw(range(CLASSES), 40, seed=999)
