"""Class means and scatter, in one pass or accumulated (paper Eq. 12-13)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean feature of labels 0..classes-1: (n, d), (n,) -> (classes, d)."""
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, labels, features)
    return sums.div_(torch.bincount(labels, minlength=classes).clamp(min=1).to(features.dtype)[:, None])


def class_covariances(features: Tensor, labels: Tensor, classes: int, unbiased: bool = True) -> Tensor:
    """Covariance of each class about its own mean: (classes, d, d)."""
    result = features.new_zeros(classes, features.shape[1], features.shape[1])
    for label in range(classes):
        own = features[labels == label]
        centred = own - own.mean(0)
        result[label] = centred.T @ centred / max(1, len(own) - unbiased)
    return result


def combine_moments(
    count: Tensor | int, mean: Tensor, scatter: Tensor, new_count: Tensor | int, new_mean: Tensor, new_scatter: Tensor
) -> tuple[Tensor | int, Tensor, Tensor]:
    """Chan's formula: count, mean and scatter Σ (f − μ)(f − μ)ᵀ of two sets joined."""
    total = count + new_count
    shift = new_mean - mean
    joined = mean + shift * (new_count / total)
    return total, joined, scatter + new_scatter + torch.outer(shift, shift) * (count * new_count / total)


def nearest_rows(queries: Tensor, rows: Tensor) -> Tensor:
    """Index of the row with the largest cosine to each query; ties go to the lowest index."""
    cosines = F.normalize(queries, dim=-1) @ F.normalize(rows, dim=-1).T
    best = cosines.amax(1, keepdim=True)
    return (cosines == best).int().argmax(1)  # argmax returns the first maximum
