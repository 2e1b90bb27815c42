"""Low-rank adapters on the key and value projections of a frozen ViT (paper Eq. 2-4).

For each block and each of k, v an adapter adds  x (B A)ᵀ  to the frozen projection; q is never touched. Several sets of
adapters run as *streams* of one pass: their tensors are stacked along a set axis, the frozen weights see one larger
batch, and the low-rank parts are batched products.

    A  (blocks, sets, 2, r, d)        axis 2: 0 = key, 1 = value
    B  (blocks, sets, 2, d, r)
"""

from __future__ import annotations

import math
from typing import Any

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

    def __init__(self, A: Tensor, B: Tensor):
        super().__init__()
        self.A, self.B = nn.Parameter(A), nn.Parameter(B)

    @property
    def depth(self) -> int:
        return self.A.shape[0]

    @property
    def sets(self) -> int:
        return self.A.shape[1]

    @property
    def rank(self) -> int:
        return self.A.shape[3]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.A[index], self.B[index]

    def dense(self) -> Tensor:
        """ΔW = B A of every block, set and projection: (blocks, sets, 2, d, d)."""
        return self.B @ self.A

    def select(self, *sets: int) -> LoRA:
        """The given sets alone, frozen."""
        chosen = list(sets)
        return LoRA(self.A[:, chosen].detach().clone(), self.B[:, chosen].detach().clone()).requires_grad_(False)


def empty_lora(depth: int, dim: int, **place: Any) -> LoRA:
    """A set of rank zero, which changes nothing; `place` has its device and dtype."""
    A, B = torch.zeros(depth, 1, 2, 0, dim, **place), torch.zeros(depth, 1, 2, dim, 0, **place)
    return LoRA(A, B).requires_grad_(False)


def initial_lora(
    depth: int,
    dim: int,
    rank: int,
    sets: int,
    generator: torch.Generator,
    init: str = "sparse",
    dtype: torch.dtype = torch.float32,
) -> LoRA:
    """Fresh adapters, every set identical: A Kaiming-uniform, B zero or with one small entry per column."""
    bound = 1 / math.sqrt(dim)  # kaiming_uniform with a = √5 on fan-in d
    A = (torch.rand(depth, 1, 2, rank, dim, generator=generator, dtype=torch.float64) * 2 - 1) * bound
    B = torch.zeros(depth, 1, 2, dim, rank, dtype=torch.float64)
    if init == "sparse":
        rows = torch.randint(dim, (depth, 1, 2, 1, rank), generator=generator)
        B.scatter_(3, rows, SPARSE_STD * torch.randn(rows.shape, generator=generator, dtype=torch.float64))
    expand = (-1, sets, -1, -1, -1)
    return LoRA(A.expand(expand).to(dtype).clone(), B.expand(expand).to(dtype).clone())


class KVLinear(nn.Module):
    """Wraps a frozen fused qkv projection and adds the adapters of the sets in use. Without adapters it is the plain
    projection."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features, self.in_features = linear.out_features, linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def split(
        self, x: Tensor, factors: tuple[Tensor, Tensor] | None = None, shared: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, each (S·B, T, d), of tokens (S·B, T, d) with streams outermost; with `shared`, x is (B, T, d) and
        all streams read it."""
        width = self.out_features // 3
        if factors is None:
            return self(x).split(width, -1)
        A, B = factors[0].to(x.dtype), factors[1].to(x.dtype)
        sets, _, rank, dim = A.shape
        lead = (sets * x.shape[0], x.shape[1]) if shared else x.shape[:2]
        if x.is_cuda and rank % 8:  # tensor cores want ranks in eights; zero columns change nothing
            A, B, rank = F.pad(A, (0, 0, 0, -rank % 8)), F.pad(B, (0, -rank % 8)), rank + -rank % 8
        if x.is_cuda and not shared and self.bias is not None:
            qkv, _ = project(x.view(sets, -1, dim), self.weight, self.bias, A, B)
            return qkv.view(*lead, 3 * width).split(width, -1)
        tokens = x.reshape(1 if shared else sets, -1, dim)
        base = self(tokens).expand(sets, -1, -1)
        low = tokens @ A.reshape(sets, 2 * rank, dim).transpose(1, 2)  # (S, N, 2r)
        k = base[..., width : 2 * width] + low[..., :rank] @ B[:, 0].transpose(1, 2)
        v = base[..., 2 * width :] + low[..., rank:] @ B[:, 1].transpose(1, 2)
        return base[..., :width].reshape(*lead, width), k.view(*lead, width), v.view(*lead, width)


# On a GPU the adapters are memory-bound: every pass over the keys and values counts. The two operators below write the
# low-rank products straight into the k and v columns of the fused projection, and read each gradient once per thin
# product.


@torch.library.custom_op("fscil::project", mutates_args=())
def project(x: Tensor, weight: Tensor, bias: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """qkv (S, N, 3d) = x Wᵀ + b + [0, x A_kᵀ B_kᵀ, x A_vᵀ B_vᵀ], and x Aᵀ (S, N, 2r): x (S, N, d), A (S, 2, r, d), B
    (S, 2, d, r)."""
    sets, _, rank, dim = A.shape
    width = weight.shape[0] // 3
    qkv = torch.addmm(bias, x.reshape(-1, dim), weight.T).view(sets, -1, 3 * width)
    low = x @ A.reshape(sets, 2 * rank, dim).transpose(1, 2)
    for part in (0, 1):
        columns = qkv[..., (1 + part) * width : (2 + part) * width]
        columns.baddbmm_(low[..., part * rank : (part + 1) * rank], B[:, part].transpose(1, 2))
    return qkv, low


@project.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:2], weight.shape[0]), x.new_empty(*x.shape[:2], 2 * A.shape[2])


@torch.library.custom_op("fscil::project_backward", mutates_args=())
def project_backward(
    grad: Tensor, x: Tensor, low: Tensor, weight: Tensor, A: Tensor, B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and B from the gradient of qkv."""
    sets, _, rank, dim = A.shape
    width = weight.shape[0] // 3
    grad_x = (grad.reshape(-1, 3 * width) @ weight).view(x.shape)
    up = grad.new_empty(*grad.shape[:2], 2 * rank)  # gradient of `low`
    grad_B = torch.empty_like(B)
    for part in (0, 1):
        columns = grad[..., (1 + part) * width : (2 + part) * width]
        ranks = slice(part * rank, (part + 1) * rank)
        up[..., ranks] = columns @ B[:, part]
        grad_B[:, part] = columns.transpose(1, 2) @ low[..., ranks]
    grad_x.baddbmm_(up, A.reshape(sets, 2 * rank, dim))
    return grad_x, (up.transpose(1, 2) @ x).view(A.shape), grad_B


@project_backward.register_fake
def _(grad: Tensor, x: Tensor, low: Tensor, weight: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(A), torch.empty_like(B)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, A, B = inputs
    ctx.save_for_backward(x, output[1], weight, A, B)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor]:
    x, low, weight, A, B = ctx.saved_tensors
    grad_x, grad_A, grad_B = project_backward(grad.contiguous(), x, low, weight, A, B)
    return grad_x, None, None, grad_A, grad_B


project.register_autograd(_backward, setup_context=_remember)
