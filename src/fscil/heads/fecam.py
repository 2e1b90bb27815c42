"""FeCAM: class-specific Mahalanobis distances (Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class
Distributions in Exemplar-Free Continual Learning", NeurIPS 2023; docs/heads/fecam.md).

    R_c = corr(Σ_c + α mean(diag Σ_c) I)
    score_c(x) = −(x̂ − μ̂_c)ᵀ R_c⁻¹ (x̂ − μ̂_c),   hats: unit length
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.heads.kept import KeptFeatures
from fscil.maths.calibrating import correlation
from fscil.maths.prototypes import class_covariances, class_means
from fscil.strict import NotNegative


@dataclass(frozen=True, kw_only=True)
class FeCAMOptions:
    shrinkage: NotNegative = 1.0  # α, of the mean variance, added to the diagonal


class FeCAM(KeptFeatures):
    """A covariance for every class, as a correlation so that they compare."""

    Options: type = FeCAMOptions
    after_base = frozenset({"shrinkage"})

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Means (C, d) and covariances (C, d, d)."""
        means = class_means(self.features, self.labels, self.seen)
        return means, class_covariances(self.features, self.labels, self.seen)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Unit means (C, d) and inverse correlations (C, d, d)."""
        means, covariances = self.statistics()
        inverses = torch.stack(
            [torch.linalg.pinv(correlation(own.double(), self.options.shrinkage)).to(own.dtype) for own in covariances]
        )
        return F.normalize(means, dim=1), inverses

    def scores(self, features: Tensor) -> Tensor:
        means, inverses = self.solved
        unit = F.normalize(features.to(means.dtype), dim=1)
        distances = [
            (((unit - mean) @ inverse) * (unit - mean)).sum(1) for mean, inverse in zip(means, inverses, strict=True)
        ]
        return -torch.stack(distances, 1)
