"""Closed-form calibration: linear discriminant analysis with a correction for classes known from few images
(methods.md 13)."""

from __future__ import annotations

import torch
from torch import Tensor


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
    means: Tensor, counts: Tensor, covariance: Tensor, alpha: float, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Weights W and biases b of the scores  x Wᵀ + b.

    score_c(x) = xᵀ Σ⁻¹ μ_c − ½ μ_cᵀ Σ⁻¹ μ_c + γ ½ tr(Σ⁻¹ S) / n_c

    A mean estimated from n images is off by S/n on average, which inflates the squared distance of every point to it by
    tr(Σ⁻¹ S)/n; the last term takes that back.
    """
    wide = covariance.double() if covariance.device.type != "mps" else covariance
    sigma = shrink(wide, alpha)
    weights = torch.linalg.solve(sigma, means.to(wide.dtype).T).T
    inflation = torch.linalg.solve(sigma, wide).trace()
    biases = -0.5 * (means.to(wide.dtype) * weights).sum(1) + gamma * 0.5 * inflation / counts.to(wide.dtype)
    return weights.to(means.dtype), biases.to(means.dtype)
