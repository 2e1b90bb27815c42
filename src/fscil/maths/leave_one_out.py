"""How well pictures fit their class as if it had been learned without them: exact, and without learning anything again.

A class of n pictures with mean μ has the mean μ' = (n μ − x) / (n − 1) without x, so

    x − μ' = n/(n − 1) (x − μ)

and a covariance of ν degrees of freedom that x was part of loses one direction v = x − μ:

    S' = ν/(ν − 1) S − n/((n − 1)(ν − 1)) v vᵀ

Shrunken, Σ' = (1 − α) S' + α (tr S'/d) I is diagonal in the eigenvectors of S but for that direction, and
Sherman and Morrison give its inverse:  (D − c u uᵀ)⁻¹ = D⁻¹ + k D⁻¹u uᵀD⁻¹,  k = c / (1 − c uᵀD⁻¹u).
"""

from __future__ import annotations

import torch
from torch import Tensor


def left_out_densities(
    features: Tensor,
    labels: Tensor,
    means: Tensor,
    counts: Tensor,
    covariance: Tensor,
    alpha: float,
    gamma: float = 1.0,
    degrees: int | None = None,
) -> Tensor:
    """Log-densities (n, C) up to a constant of pictures that the means were made of, each without itself:

    −½ (x − μ_c)ᵀ Σ⁻¹ (x − μ_c) + γ ½ tr(Σ⁻¹ S) / n_c

    `degrees`: those of the covariance, if the pictures are part of it too; None: it is of other pictures and stays.
    The own class is NaN where nothing is left of it.
    """
    wide = torch.float64 if features.device.type != "mps" else torch.float32
    values, basis = torch.linalg.eigh(covariance.to(wide))
    values = values.clamp(min=0)
    x, centres = features.to(wide) @ basis, means.to(wide) @ basis
    n = counts[labels].to(wide)
    left = (n - 1).clamp(min=1)
    own = x - centres[labels]
    if degrees is None or degrees < 2:
        scale, lost = torch.ones_like(n), torch.zeros_like(n)
    else:
        scale, lost = torch.full_like(n, degrees / (degrees - 1)), n / (left * (degrees - 1)) * (n > 1)
    trace = scale * values.sum() - lost * own.square().sum(1)  # tr S'
    diagonal = (1 - alpha) * scale[:, None] * values + alpha * (trace.clamp(min=0) / len(values))[:, None]
    inverse = 1 / diagonal  # D⁻¹ of each picture (n, d)
    weighted = own * inverse  # D⁻¹u
    around = (own * weighted).sum(1)  # uᵀD⁻¹u
    c = (1 - alpha) * lost
    k = c / (1 - c * around).clamp(min=1e-6)

    # (x − μ)ᵀ Σ'⁻¹ (x − μ) for every class, multiplied out so that nothing of the size (n, C, d) is needed
    plain = (x * x * inverse).sum(1)[:, None] - 2 * (x * inverse) @ centres.T + inverse @ centres.square().T
    along = (x * weighted).sum(1)[:, None] - weighted @ centres.T
    squares = plain + k[:, None] * along.square()
    # tr(Σ'⁻¹ S'), S' = scale·diag(values) − lost·u uᵀ
    spread = scale * (inverse @ values) - lost * around
    spread = spread + k * (scale * (weighted.square() @ values) - lost * around.square())

    result: Tensor = -0.5 * squares + gamma * 0.5 * spread[:, None] / counts.to(wide)
    rows = torch.arange(len(labels), device=labels.device)
    alone = -0.5 * (n / left).square() * squares[rows, labels] + gamma * 0.5 * spread / left
    result[rows, labels] = torch.where(n > 1, alone, torch.full_like(alone, torch.nan))
    return result
