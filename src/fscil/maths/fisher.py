"""Diagonal Fisher information of dense update blocks, without ever making them parameters (paper Eq. 8-9; methods.md
4.3).

For y = x ΔWᵀ the gradient of a loss with respect to ΔW is  Σ_tokens g xᵀ  with g = ∂L/∂y. From the inputs x and the
output gradients g of one
batched backward pass both forms follow:

* `batch`  (the released code): square of the gradient of the batch-mean loss;
* `sample` (the paper's formula): sum over samples of squared per-sample gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def batch_square(x: Tensor, g: Tensor) -> Tensor:
    """(Σ_i Σ_t g_it x_itᵀ)² for inputs (…, B, T, d) and output gradients (…, B, T, e): (…, e, d)."""
    return (g.flatten(-3, -2).transpose(-1, -2) @ x.flatten(-3, -2)) ** 2


def sample_square(x: Tensor, g: Tensor) -> Tensor:
    """Σ_i (Σ_t g_it x_itᵀ)²: per-sample products in one batched matmul, squared and summed: (…, e, d)."""
    gradients = g.transpose(-1, -2) @ x  # (…, B, e, d)
    return torch.linalg.vector_norm(gradients, dim=-3).square()  # reads the largest tensor once and makes no other


def block_norms(fisher: Tensor) -> Tensor:
    """Frobenius norm of each accumulated matrix (Eq. 9): (…, d, d) -> (…)."""
    return torch.linalg.matrix_norm(fisher.double() if fisher.device.type != "mps" else fisher)
