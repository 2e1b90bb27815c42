"""Closed-form calibration: linear discriminant analysis with a correction for classes known from few images
(docs/heads/closed_form.md)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 8192  # classes whose weights are solved for at once, in float64


def pooled_covariance(features: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """S = Σ_i (f_i − μ_{y_i})(f_i − μ_{y_i})ᵀ / (N − classes)."""
    centred = features - means[labels]
    return centred.T @ centred / max(1, len(features) - len(means))


def shrink(covariance: Tensor, alpha: float) -> Tensor:
    """Σ = (1 − α) S + α (tr S / d) I."""
    dim = covariance.shape[0]
    eye = torch.eye(dim, device=covariance.device, dtype=covariance.dtype)
    return (1 - alpha) * covariance + alpha * covariance.trace() / dim * eye


def discriminant(
    means: Tensor,
    counts: Tensor,
    covariance: Tensor,
    alpha: float,
    gamma: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights W (C, d) and biases b (C,) of the scores  x Wᵀ + b,  as `dtype` (None: that of the means).

    score_c(x) = xᵀ Σ⁻¹ μ_c − ½ μ_cᵀ Σ⁻¹ μ_c + γ ½ tr(Σ⁻¹ S) / n_c

    A mean estimated from n images is off by S/n on average, which inflates the squared distance of every point to it by
    tr(Σ⁻¹ S)/n; the last term takes that back.
    """
    wide = covariance.double() if covariance.device.type != "mps" else covariance
    sigma = shrink(wide, alpha)
    dtype = means.dtype if dtype is None else dtype
    inflation = torch.linalg.solve(sigma, wide).trace()
    weights = torch.empty(means.shape, dtype=dtype, device=means.device)
    squares = torch.empty(len(means), dtype=wide.dtype, device=means.device)  # μ_cᵀ Σ⁻¹ μ_c
    for start in range(0, len(means), BLOCK):  # so that nothing else is as large as all means in float64
        block = slice(start, start + BLOCK)
        centres = means[block].to(wide.dtype)
        solved = torch.linalg.solve(sigma, centres.T).T
        weights[block], squares[block] = solved, (centres * solved).sum(1)
    biases = -0.5 * squares + gamma * 0.5 * inflation / counts.to(wide.dtype)
    return weights, biases.to(dtype)
