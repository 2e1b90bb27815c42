"""Losses and weights of the prompt methods: L2P, DualPrompt, CODA-Prompt and ASP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_cross_entropy(logits: Tensor, labels: Tensor, current: Tensor) -> Tensor:
    """Cross-entropy over the classes of the current task alone: the logits of the others become −inf.

    `current` is a bool vector over the classes. The rows of other classes receive a gradient of exactly zero.

    >>> masked_cross_entropy(torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([1]), torch.tensor([False, True, True]))
    tensor(0.6931)
    """
    return F.cross_entropy(logits.masked_fill(~current, -torch.inf), labels)


def key_pull(query: Tensor, chosen: Tensor) -> Tensor:
    """Summed cosines of a query (B, d) with its chosen keys (B, N, d), averaged over the batch; losses subtract it."""
    return torch.einsum("bd,bnd->b", F.normalize(query, dim=-1), F.normalize(chosen, dim=-1)).mean()


def component_weights(query: Tensor, attention: Tensor, keys: Tensor) -> Tensor:
    """CODA's weights cos(q ∘ A_k, K_k): query (B, d), attention and keys (…, M, d) -> (…, B, M).

    (q ∘ A)·K̂ = q·(A ∘ K̂) and ‖q ∘ A‖² = q²·A², so no (B, M, d) tensor is made.
    """
    dot = query @ (attention * F.normalize(keys, dim=-1)).transpose(-1, -2)
    return dot / (query.square() @ attention.square().transpose(-1, -2)).clamp(min=1e-24).sqrt()


def gram_schmidt(earlier: Tensor, draws: Tensor) -> Tensor:
    """Unit rows (m, n) made from `draws`, orthogonal to the rows `earlier` (k, n) and to one another.

    No more than n rows can be orthogonal; draws beyond that are only normalised.
    """
    room = max(0, draws.shape[1] - len(earlier))
    basis, factor = torch.linalg.qr(torch.cat([earlier, draws[:room]]).cpu().double().T)  # column j: residual of row j
    oriented = basis * torch.where(factor.diagonal() < 0, -1.0, 1.0)  # LAPACK may flip a residual's sign
    free = oriented.T[len(earlier) :].to(draws)
    return torch.cat([free, F.normalize(draws[len(free) :], dim=1)])


def orthogonality(rows: Tensor) -> Tensor:
    """CODA's penalty mean((X Xᵀ − I)²) of rows (…, M, n), summed over the leading axes."""
    excess = rows @ rows.transpose(-1, -2) - torch.eye(rows.shape[-2], device=rows.device, dtype=rows.dtype)
    return excess.square().mean((-1, -2)).sum()


def kl_to_standard_normal(mean: Tensor, std: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) = ½ Σ (μ² + σ² − 2 log σ − 1), summed over the last axis and averaged over the others."""
    return 0.5 * (mean.square() + std.square() - 2 * std.log() - 1).sum(-1).mean()


def anchor_distance(features: Tensor, anchors: Tensor) -> Tensor:
    """1 − cos(feature, anchor of its class), averaged over the images; no gradient reaches the anchors (ASP)."""
    return (1 - F.cosine_similarity(features, anchors.detach(), dim=1)).mean()
