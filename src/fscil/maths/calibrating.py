"""Statistics of few-shot classes leaning on those of base classes they resemble (FSCIL-Calibration, TEEN)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def likeness(new: Tensor, base: Tensor, sharpness: float) -> Tensor:
    """softmax_b(τ cos(μ, μ_b)): (n, d), (B, d) -> (n, B)."""
    return torch.softmax(sharpness * F.normalize(new, dim=1) @ F.normalize(base, dim=1).T, 1)


def correlation(covariance: Tensor, shrinkage: float) -> Tensor:
    """Σ + α mean(diag Σ) I, scaled to a unit diagonal; the identity where Σ is zero. (…, d, d)."""
    eye = torch.eye(covariance.shape[-1], device=covariance.device, dtype=covariance.dtype)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)[..., None, None]
    shrunk = covariance + shrinkage * mean * eye
    spread = shrunk.diagonal(dim1=-2, dim2=-1).sqrt()
    scaled = shrunk / (spread[..., :, None] * spread[..., None, :])
    return torch.where(mean > 0, scaled, eye)
