"""Cosine logits and the margin penalty (paper Eq. 5-7, CosFace form)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def cosine(features: Tensor, rows: Tensor) -> Tensor:
    """cos(f_i, w_j): (…, n, d), (…, c, d) -> (…, n, c)."""
    return F.normalize(features, dim=-1) @ F.normalize(rows, dim=-1).transpose(-1, -2)


def penalise(cosines: Tensor, labels: Tensor, margin: float | Tensor) -> Tensor:
    """Reduces the true-class cosine by the margin; the other classes are untouched.

    >>> penalise(torch.tensor([[0.9, 0.5]]), torch.tensor([0]), 0.2)
    tensor([[0.7000, 0.5000]])
    """
    target = F.one_hot(labels, cosines.shape[-1]).to(cosines.dtype)
    return cosines - margin * target


def margin_loss(
    features: Tensor,
    rows: Tensor,
    labels: Tensor,
    scale: float | Tensor = 16.0,
    margin: float | Tensor = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of  s (cos(f, w_j) − m [j = y])  (Eq. 6 for m > 0, Eq. 7 for m = 0)."""
    logits = scale * penalise(cosine(features, rows), labels, margin)
    return F.cross_entropy(logits, labels, reduction=reduction)


def streams_loss(features: Tensor, rows: Tensor, labels: Tensor, scales: Tensor, margins: Tensor) -> Tensor:
    """Mean margin loss of each stream: features (S, n, d), rows (S, c, d), labels (n,), scales and margins (S,)
    -> (S,)."""
    labels = labels.expand(len(features), -1)
    cosines = penalise(cosine(features, rows), labels, margins.view(-1, 1, 1))
    losses = F.cross_entropy((scales.view(-1, 1, 1) * cosines).flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(len(features), -1).mean(1)


def cosine_schedule(lr: float, epoch: int, epochs: int) -> float:
    """lr · ½ (1 + cos(π e / E)): cosine to zero, constant within an epoch."""
    return lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))


def rotation(before: Tensor, after: Tensor) -> Tensor:
    """Angle in degrees by which each row turned."""
    return torch.rad2deg(torch.acos(F.cosine_similarity(before, after, dim=-1).clamp(-1, 1)))
