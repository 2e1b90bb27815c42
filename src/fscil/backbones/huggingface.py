"""The names of a ViT's tensors in timm and in published Hugging Face ViTs, either way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

LAYER = "encoder.layer."  # Hugging Face's for timm's "blocks."
PARTS = ("query", "key", "value")  # which timm keeps in one tensor, one above the other
TOP = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    "layernorm.": "norm.",
}
INNER = {
    "layernorm_before.": "norm1.",
    "layernorm_after.": "norm2.",
    "attention.output.dense.": "attn.proj.",
    "intermediate.dense.": "mlp.fc1.",
    "output.dense.": "mlp.fc2.",
}


def from_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Hugging Face ViTModel under timm's names; those of its pooler and head are left out."""
    tensors = {name.removeprefix("vit."): tensor for name, tensor in tensors.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(LAYER):
            layer, _, rest = name.removeprefix(LAYER).partition(".")
            if rest.startswith("attention.attention.query."):
                parts = [tensors[name.replace(".query.", f".{part}.")] for part in PARTS]
                renamed[f"blocks.{layer}.attn.qkv.{rest.rpartition('.')[2]}"] = torch.cat(parts)
            elif new := _renamed(rest, INNER):
                renamed[f"blocks.{layer}.{new}"] = tensor
        elif new := _renamed(name, TOP):
            renamed[new] = tensor
    return renamed


def to_huggingface(vit: nn.Module) -> dict[str, Tensor]:
    """timm's tensors, in float32, under the names of published Hugging Face ViTs: the inverse of `from_huggingface`."""
    top, inner = ({new: old for old, new in table.items()} for table in (TOP, INNER))
    renamed: dict[str, Tensor] = {}
    for name, tensor in vit.state_dict().items():
        tensor = tensor.detach().float().cpu()
        if not name.startswith("blocks."):
            new = _renamed(name, top)
        else:
            _, layer, rest = name.split(".", 2)
            if rest.startswith("attn.qkv."):
                for part, rows in zip(PARTS, tensor.chunk(3)):
                    renamed[f"{LAYER}{layer}.attention.attention.{part}.{rest.rpartition('.')[2]}"] = rows.clone()
                continue
            new = _renamed(rest, inner, f"{LAYER}{layer}.")
        if new is None:
            raise ValueError(f"{name} has no counterpart in Hugging Face's ViT")
        renamed[new] = tensor
    return renamed


def _renamed(name: str, table: Mapping[str, str], prefix: str = "") -> str | None:
    """`name` with the beginning that `table` knows exchanged for the other library's, or None."""
    return next((prefix + new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), None)
