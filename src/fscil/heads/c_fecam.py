"""C-FeCAM: FeCAM with the statistics of new classes calibrated by base classes (Goswami et al., CVPR-W 2024;
docs/heads/c_fecam.md), the nearest prior art to the closed form.

    w = softmax_b(16 cos(μ, μ_b)),   μ' = α μ̂ + (1 − α) δ̂,  δ = Σ_b w_b μ̂_b,   Σ' = β (Σ_b w_b Σ_b + Σ_shots)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.heads.fecam import FeCAM, FeCAMOptions
from fscil.maths.calibrating import likeness
from fscil.strict import NotNegative, Share


@dataclass(frozen=True, kw_only=True)
class CFeCAMOptions(FeCAMOptions):
    alpha: Share = 0.9  # share of the shots in the mean: 0.75 on CIFAR100
    beta: NotNegative = 1.0  # factor on both covariances
    sharpness: NotNegative = 16.0


class CFeCAM(FeCAM):
    """FeCAM whose few-shot classes lean on the base classes they resemble."""

    Options = CFeCAMOptions
    after_base = frozenset({"shrinkage", "alpha", "beta", "sharpness"})

    def statistics(self) -> tuple[Tensor, Tensor]:
        o, base = self.options, self.base_classes
        means, covariances = super().statistics()
        if not 0 < base < self.seen:
            return means, covariances
        weights = likeness(means[base:], means[:base], o.sharpness)
        shift = F.normalize(weights @ F.normalize(means[:base], dim=1), dim=1)
        new = o.alpha * F.normalize(means[base:], dim=1) + (1 - o.alpha) * shift
        borrowed = torch.einsum("nb,bij->nij", weights, covariances[:base])
        return torch.cat([means[:base], new]), torch.cat([covariances[:base], o.beta * (borrowed + covariances[base:])])
