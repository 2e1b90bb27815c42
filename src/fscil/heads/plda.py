"""PLDA: probabilistic linear discriminant analysis (Ioffe, "Probabilistic Linear Discriminant Analysis", ECCV 2006;
docs/heads/plda.md), which knows by itself how far to trust a mean of n images.

    class means μ_c ~ N(m, B),   features of a class ~ N(μ_c, Σ),   Σ = (1 − α) S + α (tr S / d) I
    in the basis where Σ = I and B = diag(l), with l shrunk towards their mean:
    s = n l / (n l + 1),   v = 1 + l / (n l + 1)
    score_c(x) = −½ Σ_j [ (z_j − s_j ẑ_cj)² / v_j + log v_j ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fscil.heads.base import Head, Lesson, check_spread
from fscil.maths.discriminant import pooled_covariance, shrink
from fscil.runtime import Runtime
from fscil.strict import NotNegative, Share


@dataclass(frozen=True, kw_only=True)
class PLDAOptions:
    shrinkage: Share = 0.3  # α, of the covariance within classes
    between_shrinkage: Share = 0.5  # b: l ← (1 − b) l + b mean(l)
    between_scale: NotNegative = 1.0  # k, a factor on l


class PLDA(Head):
    """The posterior of a class mean given its images, integrated out."""

    Options = PLDAOptions
    after_base = frozenset({"shrinkage", "between_shrinkage", "between_scale"})
    means: Tensor
    within: Tensor
    between: Tensor
    centre: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        for name, shape in (("means", (0, dim)), ("within", (dim, dim)), ("between", (dim, dim)), ("centre", (dim,))):
            self.register_buffer(name, torch.zeros(*shape, **self.place))

    def describe(self, lesson: Lesson) -> None:
        check_spread(lesson, "plda")
        self.means = lesson.means()
        self.within = pooled_covariance(lesson.features, lesson.labels, self.means)
        self.centre = self.means.mean(0)
        centred = self.means - self.centre
        # the means of the base classes scatter by B and by the error of a mean, S / n
        error = self.within * (1 / lesson.counts.to(self.within.dtype)).mean()
        self.between = centred.T @ centred / max(1, len(centred) - 1) - error

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        self.means = self.running(self.means, lesson.means(), before)

    def drop(self, label: int, keep: Tensor) -> None:
        self.means = self.means[keep]

    def scores(self, features: Tensor) -> Tensor:
        basis, spread = self.basis()
        z = (features.double() - self.centre.double()) @ basis
        known = (self.means.double() - self.centre.double()) @ basis
        n = self.counts.double()[:, None]
        known_share = n * spread / (n * spread + 1)  # s (C, d)
        variance = 1 + spread / (n * spread + 1)  # v
        target = known_share * known
        squares = z.square() @ (1 / variance).T - 2 * z @ (target / variance).T + (target.square() / variance).sum(1)
        return (-0.5 * (squares + variance.log().sum(1))).to(features.dtype)

    def basis(self) -> tuple[Tensor, Tensor]:
        """Columns (d, d) in which Σ is the identity and B diagonal, and that diagonal (d,), shrunk."""
        o = self.options
        values, vectors = torch.linalg.eigh(shrink(self.within.double(), o.shrinkage))
        whiten = vectors / values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()
        spread, turn = torch.linalg.eigh(whiten.T @ self.between.double() @ whiten)
        spread = spread.clamp(min=0)
        shrunk = (1 - o.between_shrinkage) * spread + o.between_shrinkage * spread.mean()
        return whiten @ turn, o.between_scale * shrunk
