"""C-RanPAC: RanPAC whose new classes are drawn from calibrated Gaussians (Goswami et al., "Calibrating Higher-Order
Statistics for Few-Shot Class-Incremental Learning with Pre-trained Vision Transformers", CVPR-W 2024).

    w = softmax_b(16 cos(μ, μ_b)),   μ' = α μ + (1 − α) Σ_b w_b μ_b,   Σ' = β (Σ_b w_b Σ_b + Σ_shots)

800 draws of N(μ', Σ') stand for a new class in RanPAC's sums; λ is chosen once, on the base task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fscil.heads.base import Lesson
from fscil.heads.ranpac import RanPAC, RanPACOptions
from fscil.maths.calibrating import likeness
from fscil.maths.prototypes import class_covariances, class_means
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Share


@dataclass(frozen=True, kw_only=True)
class CRanPACOptions(RanPACOptions):
    alpha: Share = 0.9  # share of the shots in the mean: 0.75 on CIFAR100
    beta: NotNegative = 0.5  # factor on both covariances
    sharpness: NotNegative = 16.0
    draws: Natural = 800


class CRanPAC(RanPAC):
    """RanPAC with new classes filled up by draws from Gaussians that lean on similar base classes."""

    Options = CRanPACOptions
    drawn: Tensor
    drawn_labels: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        self.register_buffer("drawn", torch.zeros(0, dim, **self.place))
        self.register_buffer("drawn_labels", torch.zeros(0, dtype=torch.int64, device=runtime.device))

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        """Draws replace those of the same class before."""
        super().learn(lesson, before)
        touched = torch.unique(lesson.labels)
        new = touched[touched >= self.base_classes]
        keep = ~torch.isin(self.drawn_labels, new)
        fresh = [self.draw(int(label), lesson.number) for label in new]
        self.drawn = torch.cat([self.drawn[keep], *fresh])
        self.drawn_labels = torch.cat([self.drawn_labels[keep], new.repeat_interleave(self.options.draws)])

    def drop(self, label: int, keep: Tensor) -> None:
        super().drop(label, keep)
        mine = self.drawn_labels != label
        self.drawn, labels = self.drawn[mine], self.drawn_labels[mine]
        self.drawn_labels = labels - (labels > label).long()

    def class_features(self, label: int) -> Tensor:
        return super().class_features(label) if label < self.base_classes else self.drawn[self.drawn_labels == label]

    def draw(self, label: int, number: int) -> Tensor:
        """Draws (800, d) that stand for a class."""
        o, base = self.options, self.base_classes
        own = super().class_features(label)
        mine = self.labels < base
        means = class_means(self.features[mine], self.labels[mine], base)
        covariances = class_covariances(self.features[mine], self.labels[mine], base)
        weights = likeness(own.mean(0, keepdim=True), means, o.sharpness)[0]
        mean = o.alpha * own.mean(0) + (1 - o.alpha) * weights @ means
        spread = class_covariances(own, torch.zeros(len(own), dtype=torch.int64, device=own.device), 1)[0]
        covariance = o.beta * (torch.einsum("b,bij->ij", weights, covariances) + spread)
        values, vectors = torch.linalg.eigh(covariance.double())  # may be singular, which a draw does not mind
        root = (vectors * values.clamp(min=0).sqrt()).to(own.dtype)
        z = self.runtime.randn((o.draws, self.dim), "c_ranpac", number, label, dtype=own.dtype)
        drawn: Tensor = mean + z @ root.T
        return drawn

    def choose_ridge(self, lesson: Lesson) -> None:
        if lesson.number == 0 or self.options.ridge is not None:
            super().choose_ridge(lesson)

    @property
    def ridges(self) -> list[float]:
        return [10.0**power for power in range(1, 9)]
