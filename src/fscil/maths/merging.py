"""Margin-aware intra-task adapter merging (MIAM; paper Eq. 10-11).

      set d (margin)      ΔW_d = B_d A_d ──┐ × w_d = n_d / (n_g + n_d)
                                           ├──►  ΔW = [w_d B_d, w_g B_g] [A_d; A_g]      rank 2r, still factored
      set g (no margin)   ΔW_g = B_g A_g ──┘ × w_g = n_g / (n_g + n_d)

n is the Frobenius norm of the diagonal Fisher of the block: each block and each of key and value gets its own pair of
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_weights(norms: Tensor) -> Tensor:
    """Fisher norms (blocks, sets, 2) -> weights of the same shape that sum to one over the sets.

    >>> merge_weights(torch.tensor([[[1.0, 1.0], [3.0, 1.0]]]))
    tensor([[[0.2500, 0.5000],
             [0.7500, 0.5000]]])
    """
    total = norms.sum(1, keepdim=True)
    equal = torch.full_like(norms, 1 / norms.shape[1])
    return torch.where(total > 0, norms / total.clamp(min=torch.finfo(norms.dtype).tiny), equal)


def merge_factors(A: Tensor, B: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_s w_s B_s A_s as one factored set of rank S·r: A (L, S, 2, r, d), B (L, S, 2, d, r), weights (L, S, 2) -> (L,
    1, 2, S·r, d), (L, 1, 2, d, S·r)."""
    weighted = B * weights.to(B.dtype)[..., None, None]
    joined_A = torch.cat(A.unbind(1), dim=-2)  # stack ranks
    joined_B = torch.cat(weighted.unbind(1), dim=-1)
    return joined_A.unsqueeze(1), joined_B.unsqueeze(1)
