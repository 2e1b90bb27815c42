"""RanPAC: ridge regression on random rectified features (McDonnell et al., "RanPAC: Random Projections and Pre-trained
Models for Continual Learning", NeurIPS 2023; docs/heads/ranpac.md).

    h = ReLU(f W),  W (d, M) ~ N(0, 1)
    G = Σ_i h_i h_iᵀ,  Q = Σ_i h_i y_iᵀ,  scores = h (G + λI)⁻¹ Q

As released, sums run over images: a new class's column of Q sums 5 of them against 500 of a base class. *Balanced*
gives classes the same weight: G = mean over classes of E_c[h hᵀ], Q_c = E_c[h].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.heads.base import Lesson
from fscil.heads.kept import KeptFeatures
from fscil.maths.random_features import best_ridge, rectified, ridge_weights
from fscil.runtime import Runtime
from fscil.strict import Natural, Positive

RIDGES = [10.0**power for power in range(-8, 9)]
CHUNK = 4096  # images whose random features are held at once


@dataclass(frozen=True, kw_only=True)
class RanPACOptions:
    projections: Natural = 10_000  # M
    form: Literal["released", "balanced"] = "released"  # images or classes weigh the same
    ridge: Positive | None = None  # λ; None: by the error on the last 20 % of each task's images (balanced: the base's)


class RanPAC(KeptFeatures):
    """A linear classifier on random features, solved for in closed form."""

    Options: type = RanPACOptions
    after_base = frozenset()
    exact = False  # λ follows the data of the last task
    ridge: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        self.register_buffer("ridge", torch.zeros((), dtype=torch.float64))
        self.base_gram: Tensor | None = None  # Σ_c w_c Σ_i h hᵀ (M, M) of the base classes, kept as long as they stay

    @property
    def projection(self) -> Tensor:
        return self.runtime.randn((self.dim, self.options.projections), "ranpac", dtype=self.place["dtype"])

    def describe(self, lesson: Lesson) -> None:
        super().describe(lesson)
        self.base_gram = None
        self.choose_ridge(lesson)

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        super().learn(lesson, before)
        if bool((lesson.labels < self.base_classes).any()):
            self.base_gram = None
        if self.options.form == "released":
            self.choose_ridge(lesson)

    def drop(self, label: int, keep: Tensor) -> None:
        if label < self.base_classes:
            self.base_gram = None
        super().drop(label, keep)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        self.ridge, self.base_gram = self.ridge.cpu(), None

    def scores(self, features: Tensor) -> Tensor:
        weights: Tensor = self.solved
        return rectified(features.to(weights.dtype), self.projection) @ weights

    def solve(self) -> Tensor:
        """(M, C)."""
        joint = torch.stack([self.projected(label).sum(0) * self.weight(label) for label in range(self.seen)], 1)
        scale = self.seen if self.options.form == "balanced" else 1
        return ridge_weights(self.gram() / scale, joint, float(self.ridge))

    # ---- sums --------------------------------------------------------------------------------------------------------
    def class_features(self, label: int) -> Tensor:
        """The features that stand for a class."""
        return self.features[self.labels == label]

    def projected(self, label: int) -> Tensor:
        return rectified(self.class_features(label), self.projection)

    def weight(self, label: int) -> float:
        """Of each image of a class."""
        return 1.0 / max(1, len(self.class_features(label))) if self.options.form == "balanced" else 1.0

    def contribution(self, classes: Iterable[int]) -> Tensor:
        """Σ_c w_c Σ_i h_i h_iᵀ of some classes: (M, M)."""
        size = self.options.projections
        total = torch.zeros(size, size, **self.place)
        projection = self.projection
        for label in classes:
            for part in self.class_features(label).split(CHUNK):
                h = rectified(part, projection)
                total.addmm_(h.T, h, alpha=self.weight(label))
        return total

    def gram(self) -> Tensor:
        """Always summed in the same order, so that a model that was loaded gives the same numbers."""
        if self.base_gram is None:
            self.base_gram = self.contribution(range(self.base_classes))
        return self.base_gram + self.contribution(range(self.base_classes, self.seen))

    def choose_ridge(self, lesson: Lesson) -> None:
        """λ by the error on the last fifth of a task's images, in a keyed random order."""
        if self.options.ridge is not None:
            self.ridge = torch.tensor(self.options.ridge, dtype=torch.float64)
            return
        if len(lesson.labels) < 2:
            return
        generator = self.runtime.generator("ranpac", "order", lesson.number)
        order = torch.randperm(len(lesson.labels), generator=generator).to(lesson.labels.device)
        labels = lesson.labels[order]
        inputs = rectified(lesson.features[order].to(self.place["dtype"]), self.projection)
        targets = F.one_hot(labels, lesson.classes).to(inputs.dtype)
        weights = torch.ones(len(labels), device=labels.device, dtype=inputs.dtype)
        if self.options.form == "balanced":
            weights = weights / (lesson.counts[labels] * lesson.classes)
        self.ridge = torch.tensor(best_ridge(inputs, targets, weights, self.ridges), dtype=torch.float64)

    @property
    def ridges(self) -> list[float]:
        return RIDGES
