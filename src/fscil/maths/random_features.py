"""Random non-linear features: what linear classifiers on them can tell apart, a kernel would (RanPAC, KLDA)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rectified(features: Tensor, projection: Tensor) -> Tensor:
    """ReLU(f W): (n, d), (d, M) -> (n, M)."""
    return (features @ projection).relu()


def fourier(features: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """√(2/D) cos(f Ω + b), whose inner products approximate exp(−σ ‖f − f'‖²) for Ω ~ N(0, 2σ), b ~ U(0, 2π)."""
    return math.sqrt(2 / frequencies.shape[1]) * torch.cos(features @ frequencies + phases)


def ridge_weights(gram: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """(G + λI)⁻¹ Q: (M, M), (M, C) -> (M, C). Cholesky where G allows it."""
    regular = gram + ridge * torch.eye(len(gram), device=gram.device, dtype=gram.dtype)
    factor, info = torch.linalg.cholesky_ex(regular)
    return torch.linalg.solve(regular, targets) if bool(info) else torch.cholesky_solve(targets, factor)


def best_ridge(inputs: Tensor, targets: Tensor, weights: Tensor, ridges: list[float], share: float = 0.8) -> float:
    """The λ whose ridge regression on the first `share` of the rows predicts the others with the least squared error.

    inputs (n, M), targets (n, C), weights (n,) of the rows in the sums. A λ that rounding swamps, below ε times the
    largest eigenvalue of the Gram matrix, is no candidate: G + λI could not be solved with it.
    """
    count = int(len(inputs) * share)
    weighted = inputs[:count] * weights[:count, None]
    joint = weighted.T @ targets[:count]
    # one factorisation of the Gram matrix serves every λ; of the rows, where there are fewer of them
    if count < inputs.shape[1]:
        _, singular, basis = torch.linalg.svd(inputs[:count] * weights[:count, None].sqrt(), full_matrices=False)
        values, vectors = singular**2, basis.T
    else:
        values, vectors = torch.linalg.eigh(inputs[:count].T @ weighted)
        values = values.clamp(min=0)
    rotated, held = vectors.T @ joint, inputs[count:] @ vectors
    swamped = float(values.max()) * torch.finfo(values.dtype).eps
    candidates = [ridge for ridge in ridges if ridge > swamped] or [max(ridges)]
    errors = [float(((held / (values + ridge)) @ rotated - targets[count:]).square().mean()) for ridge in candidates]
    finite = [error if math.isfinite(error) else math.inf for error in errors]
    return candidates[finite.index(min(finite))]
