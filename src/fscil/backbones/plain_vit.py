"""The plain Vision Transformer, module by module as timm names them: what recognising needs of timm, and nothing else.

Importing timm brings torchvision and takes longer than importing torch, and its models draw random weights that are
overwritten at once. This one is a skeleton without weights until `load_state_dict(…, assign=True)` gives it some. It
has the tensors, names and results of timm's `VisionTransformer` (tests/backbones/test_plain_vit.py), so a `Backbone`
runs either; ViTs that are less plain (`shape_of` gives None for them) are left to timm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fscil.strict import require


@dataclass(frozen=True)
class PlainShape:
    """All that distinguishes one plain ViT from another, but the weights."""

    img_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    eps: float = 1e-6  # of every layer norm

    def __post_init__(self) -> None:
        """Refuses what no ViT has: a file may say anything, and room is made for it before weights are seen."""
        for name, most in (("img_size", 8192), ("embed_dim", 2**16), ("depth", 1000), ("mlp_dim", 2**18)):
            require(1 <= getattr(self, name) <= most, name, getattr(self, name), f"from 1 to {most}")
        require(1 <= self.patch_size <= self.img_size, "patch_size", self.patch_size, f"from 1 to {self.img_size}")
        require(
            1 <= self.num_heads <= self.embed_dim and self.embed_dim % self.num_heads == 0,
            "num_heads",
            self.num_heads,
            f"a divisor of embed_dim ({self.embed_dim})",
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class PatchEmbed(nn.Module):
    """(B, 3, H, W) -> (B, patches, d)."""

    flatten = True

    def __init__(self, shape: PlainShape):
        super().__init__()
        self.img_size, self.patch_size = (shape.img_size,) * 2, (shape.patch_size,) * 2
        self.num_patches = (shape.img_size // shape.patch_size) ** 2
        self.proj = nn.Conv2d(3, shape.embed_dim, self.patch_size, self.patch_size)
        self.norm = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(images).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    """The projections of self-attention; `fscil.backbones.vit.attend` puts them together."""

    def __init__(self, shape: PlainShape):
        super().__init__()
        dim = shape.embed_dim
        self.num_heads, self.scale = shape.num_heads, (dim // shape.num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = self.k_norm = self.norm = self.proj_drop = nn.Identity()


class Mlp(nn.Module):
    def __init__(self, shape: PlainShape):
        super().__init__()
        self.fc1, self.act = nn.Linear(shape.embed_dim, shape.mlp_dim), nn.GELU()
        self.fc2 = nn.Linear(shape.mlp_dim, shape.embed_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(tokens)))


class Block(nn.Module):
    """The parts of a pre-norm block; `fscil.backbones.vit.run_block` puts them together."""

    def __init__(self, shape: PlainShape):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(shape.embed_dim, shape.eps), Attention(shape)
        self.norm2, self.mlp = nn.LayerNorm(shape.embed_dim, shape.eps), Mlp(shape)
        self.ls1 = self.ls2 = self.drop_path1 = self.drop_path2 = nn.Identity()


class PlainViT(nn.Module):
    """A ViT with a class token and learned positions; the feature is the class token after the last norm.

    >>> vit = PlainViT.skeleton(PlainShape(16, 8, 16, depth=2, num_heads=2, mlp_dim=64))
    >>> tuple(vit.pos_embed.shape), vit.pos_embed.is_meta
    ((1, 5, 16), True)
    """

    global_pool, num_prefix_tokens, no_embed_class = "token", 1, False

    def __init__(self, shape: PlainShape):
        super().__init__()
        self.shape, self.num_features = shape, shape.embed_dim
        self.patch_embed = PatchEmbed(shape)
        self.cls_token = nn.Parameter(torch.empty(1, 1, shape.embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.patch_embed.num_patches, shape.embed_dim))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.embed_dim, shape.eps)
        self.patch_drop = self.norm_pre = self.fc_norm = self.head_drop = nn.Identity()

    @classmethod
    def skeleton(cls, shape: PlainShape) -> PlainViT:
        """Without weights: nothing is drawn or allocated."""
        with torch.device("meta"):
            return cls(shape)

    def _pos_embed(self, patches: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], 1) + self.pos_embed

    def forward_head(self, tokens: Tensor, pre_logits: bool = True) -> Tensor:
        return tokens[:, 0]


def shape_of(vit: Any) -> PlainShape | None:
    """The shape of a ViT of timm's that `PlainViT` computes the same as; None where it has something more."""
    if isinstance(vit, PlainViT):
        return vit.shape
    norms = [vit.norm, *(norm for block in vit.blocks for norm in (block.norm1, block.norm2))]
    embed, block = vit.patch_embed, vit.blocks[0]
    shape = PlainShape(
        embed.img_size[0],
        embed.patch_size[0],
        vit.embed_dim,
        len(vit.blocks),
        block.attn.num_heads,
        block.mlp.fc1.out_features,
        vit.norm.eps if isinstance(vit.norm, nn.LayerNorm) else 0.0,
    )
    plain = (
        vit.global_pool == "token"
        and getattr(vit, "attn_pool", None) is None
        and not vit.no_embed_class
        and embed.img_size[0] == embed.img_size[1]
        and all(isinstance(norm, nn.LayerNorm) and norm.eps == shape.eps for norm in norms)
        and all(type(act) is nn.GELU and act.approximate == "none" for act in (block.mlp.act for block in vit.blocks))
    )
    if not plain:
        return None
    own = {name: tuple(tensor.shape) for name, tensor in PlainViT.skeleton(shape).state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in vit.state_dict().items() if not name.startswith("head.")}
    return shape if own == theirs else None  # another norm, scale, bias or token would be a tensor more or less
