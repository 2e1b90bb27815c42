"""Prompts in a frozen ViT: chosen from a pool by key lookup, and slotted in as tokens or as key/value prefixes.

Input prompts (L2P) join the sequence once, before block 0; deep prompts (ASP) join it in front of every block and leave
after it; prefixes (DualPrompt, CODA-Prompt) are learned keys and values of a block's attention, so the sequence keeps
its length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.backbones.vit import Backbone, Prefix
from fscil.errors import UserError
from fscil.runtime import Runtime


def lookup(query: Tensor, keys: Tensor, count: int, vote: bool = False) -> Tensor:
    """Numbers (B, count) of the keys (M, d) with the largest cosine to each query (B, d), nearest first.

    `vote` gives the whole batch the `count` prompts that are chosen most often in it; results then depend on the batch.
    """
    similarity = F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).T
    chosen = similarity.argsort(dim=1, descending=True, stable=True)[:, :count]
    if vote:
        ballots = (chosen.flatten()[:, None] == torch.arange(len(keys), device=keys.device)).sum(0)
        chosen = ballots.argsort(descending=True, stable=True)[:count].expand(len(query), -1)
    return chosen


def insert_prompts(backbone: Backbone, tokens: Tensor, prompts: Tensor) -> Tensor:
    """[CLS, patches] and prompts (B, n, d) -> [CLS, prompts, patches]; prompts take the position embedding of CLS."""
    start = backbone.prefix_tokens
    prompts = backbone.vit.norm_pre((prompts + class_position(backbone)).to(tokens.dtype))
    return torch.cat([tokens[:, :start], prompts, tokens[:, start:]], 1)


def prompt_output(backbone: Backbone, tokens: Tensor, count: int) -> Tensor:
    """Mean of the `count` prompt tokens that follow the class token, after the final norm: (B, d)."""
    start, vit = backbone.prefix_tokens, backbone.vit
    features = vit.fc_norm(vit.norm(tokens)[:, start : start + count].mean(1))
    return features if features.dtype == torch.float64 else features.float()


def class_position(backbone: Backbone) -> Tensor | float:
    """Position embedding of the class token (1, 1, d), or 0 for ViTs that give it none."""
    vit = backbone.vit
    has_one = vit.pos_embed is not None and vit.cls_token is not None and not vit.no_embed_class
    return vit.pos_embed[:, :1] if has_one else 0.0


def as_prefix(backbone: Backbone, prompts: Mapping[int, Tensor]) -> Prefix:
    """Keys and values (2, B, length, d) by block, split into heads as `Backbone.blocks` wants them."""

    def prefix(block: int) -> tuple[Tensor, Tensor] | None:
        if block not in prompts:
            return None
        keys, values = prompts[block].unflatten(-1, (backbone.heads, -1)).transpose(-2, -3)
        return keys, values

    return prefix


def run_deep(backbone: Backbone, tokens: Tensor, prompts: Tensor) -> Tensor:
    """Feature (B, d) with prompts (B, blocks, n, d): appended in front of each block, dropped after it."""
    length = tokens.shape[1]
    for block in range(backbone.depth):
        joined = torch.cat([tokens, prompts[:, block].to(tokens.dtype)], 1)
        tokens = backbone.blocks(joined, block, block + 1, pooled=True)[:, :length]
    return backbone.pool(tokens)


def blocks_present(blocks: tuple[int, ...], backbone: Backbone) -> tuple[int, ...]:
    """Those of the named blocks that the backbone has."""
    if any(block < 0 for block in blocks):
        raise UserError(f"blocks are numbered from 0, got {', '.join(map(str, blocks))}")
    return tuple(block for block in blocks if block < backbone.depth)


def draw_normal(shape: tuple[int, ...], runtime: Runtime, *key: str | int) -> Tensor:
    """Initial values N(0, 1), as `draw_uniform`."""
    draws = torch.randn(shape, generator=runtime.generator(*key), dtype=torch.float64)
    return draws.to(**runtime.place)


def draw_uniform(shape: tuple[int, ...], bound: float, runtime: Runtime, *key: str | int) -> Tensor:
    """Initial values U(−bound, bound) for this key, at least float32, on the compute device."""
    draws = torch.rand(shape, generator=runtime.generator(*key), dtype=torch.float64) * 2 - 1
    return (draws * bound).to(**runtime.place)
