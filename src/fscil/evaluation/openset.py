"""How well pictures of no known class are told apart, and how far a stated confidence can be trusted."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Probability in percent that a known picture scores above an unknown one; ties count half.

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    87.5
    """
    order = unknown.double().sort().values
    values = known.double()
    below = torch.searchsorted(order, values, right=False)
    not_above = torch.searchsorted(order, values, right=True)
    return float(100 * (below + not_above).double().mean() / (2 * len(order)))


def fpr_at_tpr(known: Tensor, unknown: Tensor, tpr: float = 0.95) -> float:
    """Percent of unknown pictures accepted by the highest threshold that accepts `tpr` of the known ones (FPR@95)."""
    accepted = math.ceil(tpr * len(known) - 1e-9)
    threshold = known.sort(descending=True).values[max(0, accepted - 1)]
    return float(100 * (unknown >= threshold).double().mean())


def told_apart(known: Tensor, unknown: Tensor) -> dict[str, float]:
    """AUROC and FPR@95 of the best class's probability, from the logits (n, C) of known and of unknown pictures.

    >>> told_apart(torch.tensor([[9.0, 0.0], [0.0, 8.0]]), torch.tensor([[1.0, 1.0]]))
    {'auroc': 100.0, 'fpr95': 0.0}
    """
    sure, unsure = (logits.cpu().double().log_softmax(1).amax(1) for logits in (known, unknown))
    return {"auroc": auroc(sure, unsure), "fpr95": fpr_at_tpr(sure, unsure)}


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error in percent: |confidence − accuracy| averaged over equal bins of confidence."""
    confidence, guess = probabilities.max(1)
    right = (guess == labels).to(confidence.dtype)
    number = (confidence * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=confidence.dtype).index_add_(0, number.cpu(), (confidence - right).cpu())
    return float(100 * gaps.abs().sum() / len(labels))
