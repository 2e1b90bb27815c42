"""Distillation between class distributions, and the class weights that balance it (iCaRL and FOSTER)."""

from __future__ import annotations

import torch
from torch import Tensor


def distillation(student: Tensor, teacher: Tensor, temperature: float = 2.0, weights: Tensor | None = None) -> Tensor:
    """−mean_i Σ_c q_ic log softmax(student_i / T)_c with q = softmax(teacher / T); no factor T².

    `weights` (classes,) rescale q per class, renormalised to sum to one: FOSTER's class-balanced form.
    """
    targets = torch.softmax(teacher / temperature, 1)
    if weights is not None:
        targets = targets * weights
        targets = targets / targets.sum(1, keepdim=True)
    return -(targets * torch.log_softmax(student / temperature, 1)).sum(1).mean()


def effective_number_weights(counts: Tensor, beta: float) -> Tensor:
    """(1 − β) / (1 − β^n_c) for classes of n_c images, scaled to sum to the number of classes (Cui et al. 2019, Eq. 2).

    >>> effective_number_weights(torch.tensor([5, 5]), 0.96)
    tensor([1., 1.], dtype=torch.float64)
    """
    weights = (1 - beta) / (1 - beta ** counts.clamp(min=1).double())
    return weights * (len(counts) / weights.sum())
