"""Diagonal Fisher information of dense update blocks, without ever making them parameters (paper Eq. 8-9).

For y = x ΔWᵀ the gradient of a loss with respect to ΔW is  Σ_tokens g xᵀ  with g = ∂L/∂y. From the inputs x and the
output gradients g of one batched backward pass both forms follow:

* `batch`  (the released code): square of the gradient of the batch-mean loss;
* `sample` (the paper's formula): sum over samples of squared per-sample gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def batch_square(x: Tensor, g: Tensor) -> Tensor:
    """(Σ_i Σ_t g_it x_itᵀ)² for inputs (S, B, T, d) and output gradients (S, B, T, e): (S, e, d)."""
    return _summed_products(x.flatten(1, 2), g.flatten(1, 2)).square()


def sample_square(x: Tensor, g: Tensor) -> Tensor:
    """Σ_i (Σ_t g_it x_itᵀ)²: per-sample products in one batched matmul, squared and summed: (S, e, d)."""
    gradients = _summed_products(x.flatten(0, 1), g.flatten(0, 1)).unflatten(0, g.shape[:2])  # (S, B, e, d)
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1)  # reads the largest tensor once and makes no other
    return norms.square()


def _summed_products(x: Tensor, g: Tensor) -> Tensor:
    """Σ_t g_nt x_ntᵀ in at least float32, for x (n, T, d) and g (n, T, e): (n, e, d)."""
    if x.is_cuda and x.dtype == torch.bfloat16:  # exact products, summed in float32: what widening first would give
        return torch.bmm(g.transpose(1, 2), x, out_dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    return g.to(wide).transpose(1, 2) @ x.to(wide)


def block_norms(fisher: Tensor) -> Tensor:
    """Frobenius norm of each accumulated matrix (Eq. 9): (…, d, d) -> (…)."""
    norms: Tensor = torch.linalg.matrix_norm(fisher.double() if fisher.device.type != "mps" else fisher)
    return norms
