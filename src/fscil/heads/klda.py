"""KLDA: discriminant analysis on random Fourier features (Momeni et al., "Continual Learning Using a Kernel-Based
Method Over Foundation Models", AAAI 2025; docs/heads/klda.md).

    φ(x) = √(2/D) cos(x Ω + b),   Σ = Σ_i (φ_i − μ_{y_i})(φ_i − μ_{y_i})ᵀ  over all classes
    p_c(x) ∝ exp(−(φ − μ_c)ᵀ Σ⁺ (φ − μ_c)),  averaged over an ensemble of draws of Ω, b
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fscil.heads.kept import KeptFeatures
from fscil.maths.prototypes import class_means
from fscil.maths.random_features import fourier
from fscil.strict import Natural, Positive


@dataclass(frozen=True, kw_only=True)
class KLDAOptions:
    dimensions: Natural = 5000  # D
    bandwidth: Positive = 1e-4  # σ of the kernel exp(−σ ‖x − x'‖²)
    ensemble: Natural = 5


class KLDA(KeptFeatures):
    """An ensemble of kernel discriminants with one shared covariance each, not shrunk."""

    Options = KLDAOptions

    def mapped(self, features: Tensor, member: int) -> Tensor:
        o, dtype = self.options, torch.float64
        normal = self.runtime.randn((self.dim, o.dimensions), "klda", "frequencies", member, dtype=dtype)
        uniform = torch.rand(o.dimensions, generator=self.runtime.generator("klda", "phases", member), dtype=dtype)
        phases = (2 * math.pi * uniform).to(features.device)
        return fourier(features.to(dtype), math.sqrt(2 * o.bandwidth) * normal, phases)

    def solve(self) -> list[tuple[Tensor, Tensor]]:
        """Of each member: Σ⁺ μ_cᵀ (D, C) and μ_cᵀ Σ⁺ μ_c (C,), all that distances of one x differ by."""
        members = []
        for member in range(self.options.ensemble):
            mapped = self.mapped(self.features, member)
            means = class_means(mapped, self.labels, self.seen)
            centred = mapped - means[self.labels]
            weights = torch.linalg.pinv(centred.T @ centred, hermitian=True) @ means.T
            members.append((weights, (means * weights.T).sum(1)))
        return members

    def scores(self, features: Tensor) -> Tensor:
        """log of the mean probability."""
        logs = [
            (2 * self.mapped(features, member) @ weights - squares).log_softmax(1)
            for member, (weights, squares) in enumerate(self.solved)
        ]
        return (torch.stack(logs).logsumexp(0) - math.log(len(logs))).to(features.dtype)
