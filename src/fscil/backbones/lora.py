"""Low-rank adapters on the key and value projections of a frozen ViT (methods.md 3.1; paper Eq. 2-4).

For each block and each of k, v an adapter adds  x (B A)ᵀ  to the frozen projection; q is never touched. Several sets of adapters run as
*streams* of one pass: their tensors are stacked along a set axis, the frozen weights see one larger batch, and the low-rank parts are
batched products.

    A  (blocks, sets, 2, r, d)        axis 2: 0 = key, 1 = value
    B  (blocks, sets, 2, d, r)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SPARSE_STD = 0.01  # of the one non-zero entry per column of B at the start


class LoRA(nn.Module):
    """One or more sets of K/V adapters for every block.

    >>> lora = LoRA(torch.zeros(12, 2, 2, 10, 768), torch.zeros(12, 2, 2, 768, 10))
    >>> lora.sets, lora.rank, sum(p.numel() for p in lora.parameters())
    (2, 10, 737280)
    """

    def __init__(self, A: Tensor, B: Tensor, folded: bool = False):
        super().__init__()
        self.A, self.B = nn.Parameter(A), nn.Parameter(B)
        self.folded = folded  # multiply with W + B A instead of adding the low-rank product to the output

    @property
    def depth(self) -> int:
        return self.A.shape[0]

    @property
    def sets(self) -> int:
        return self.A.shape[1]

    @property
    def rank(self) -> int:
        return self.A.shape[3]

    def layer(self, index: int) -> tuple[Tensor, Tensor, bool]:
        return self.A[index], self.B[index], self.folded

    def dense(self) -> Tensor:
        """ΔW = B A of every block, set and projection: (blocks, sets, 2, d, d)."""
        return self.B @ self.A

    def select(self, *sets: int) -> LoRA:
        """The given sets alone, frozen."""
        return LoRA(
            self.A[:, list(sets)].detach().clone(), self.B[:, list(sets)].detach().clone(), self.folded
        ).requires_grad_(False)


def initial_lora(
    depth: int,
    dim: int,
    rank: int,
    sets: int,
    generator: torch.Generator,
    init: str = "sparse",
    dtype: torch.dtype = torch.float32,
) -> LoRA:
    """Fresh adapters, every set identical (methods.md 3.1): A Kaiming-uniform, B zero or with one small entry per column (9.4)."""
    bound = 1 / math.sqrt(dim)  # kaiming_uniform with a = √5 on fan-in d
    A = (torch.rand(depth, 1, 2, rank, dim, generator=generator, dtype=torch.float64) * 2 - 1) * bound
    B = torch.zeros(depth, 1, 2, dim, rank, dtype=torch.float64)
    if init == "sparse":
        rows = torch.randint(dim, (depth, 1, 2, 1, rank), generator=generator)
        B.scatter_(3, rows, SPARSE_STD * torch.randn(rows.shape, generator=generator, dtype=torch.float64))
    expand = (-1, sets, -1, -1, -1)
    return LoRA(A.expand(expand).to(dtype).clone(), B.expand(expand).to(dtype).clone())


class KVLinear(nn.Module):
    """Wraps a frozen fused qkv projection and adds the adapters of the sets in use. Without adapters it is the plain projection."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features, self.in_features = linear.out_features, linear.in_features

    def forward(self, x: Tensor, factors: tuple[Tensor, Tensor, bool] | None = None, shared: bool = False) -> Tensor:
        """qkv of tokens (S·B, T, d), streams outermost; with `shared`, x is (B, T, d) and every stream reads the same tokens."""
        if factors is None:
            return F.linear(x, self.weight, self.bias)
        A, B, folded = factors
        sets, _, rank, dim = A.shape
        width = self.out_features // 3
        lead = x.shape[:-1]
        if folded and not shared:
            out = FoldedKV.apply(x.view(sets, -1, dim), self.weight, self.bias, A, B)
            return out.view(*lead, -1)
        A, B = A.to(x.dtype), B.to(x.dtype)
        base = F.linear(x, self.weight, self.bias)
        tokens = x.reshape(1 if shared else sets, -1, dim)
        low = tokens @ A.reshape(sets, 2 * rank, dim).transpose(1, 2)  # (S, N, 2r)
        delta = torch.cat(
            [low[..., :rank] @ B[:, 0].transpose(1, 2), low[..., rank:] @ B[:, 1].transpose(1, 2)], -1
        )  # (S, N, 2d)
        if shared:
            base = base.reshape(1, -1, 3 * width).expand(sets, -1, -1)
            lead = (sets * lead[0], *lead[1:])
        base = base.reshape(sets, -1, 3 * width)
        return torch.cat([base[..., :width], base[..., width:] + delta], -1).view(*lead, -1)


class FoldedKV(torch.autograd.Function):
    """x (W + [0; B_k A_k; B_v A_v])ᵀ + b per stream, with the gradients of A and B through the dense gradient of the k and v rows."""

    @staticmethod
    def forward(ctx, x, weight, bias, A, B):
        width = weight.shape[0] // 3
        delta = (B @ A).reshape(A.shape[0], 2 * width, A.shape[-1])
        kv = (weight[width:] + delta).to(x.dtype)
        folded = torch.cat([weight[:width].to(x.dtype).expand(A.shape[0], -1, -1), kv], 1)  # (S, 3d, d)
        ctx.save_for_backward(x, folded, A, B)
        out = x @ folded.transpose(1, 2)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx, grad):
        x, folded, A, B = ctx.saved_tensors
        width = folded.shape[1] // 3
        grad_x = grad @ folded if ctx.needs_input_grad[0] else None
        dense = (grad[..., width:].transpose(1, 2) @ x).view(*B.shape[:2], width, -1).to(A.dtype)  # (S, 2, d, d)
        return grad_x, None, None, B.transpose(2, 3) @ dense, dense @ A.transpose(2, 3)
