"""softmax(q kᵀ / √d) v by whichever kernel is fast where it runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

SHORT = 256  # tokens up to which the weights of all pairs are kept: 0.1 MB a head in bf16


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of queries (b, h, n, d) over keys and values (b, h, t, d).

    PyTorch's fused kernel, but for bf16 on a CPU: there it multiplies in float32, and two plain products take half of
    its time with gradients (benchmarks/RESULTS.md).

    >>> q, k, v = torch.randn(3, 2, 4, 8, 16).unbind(0)
    >>> tuple(attention(q, k, v, 0.25).shape)
    (2, 4, 8, 16)
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= SHORT:
        return ((q * scale) @ k.transpose(-2, -1)).softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, scale=scale)
