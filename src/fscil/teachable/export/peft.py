"""A taught model as a peft adapter for the Hugging Face ViT."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fscil.backbones.huggingface import to_huggingface
from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.files import atomic_write
from fscil.teachable.export.parts import adapters_of, describe, linear_head, new_folder, write_tensors
from fscil.teachable.model import Teachable


def export_peft(clf: Teachable, output: str | Path, base: bool = True) -> Path:
    """An adapter for `peft.PeftModel.from_pretrained(vit, FOLDER)`, with vit a `transformers.ViTModel`.

    Rank-2r LoRA on the key and value projections with lora_alpha = r, so its scale is one. `base` writes the backbone
    in Hugging Face's format to FOLDER/base. `head.safetensors` has the linear classifier on the class token (see
    export_timm). Module names are those of the transformers version installed here.
    """
    lora = adapters_of(clf)
    vit = _plain_vit(clf.backbone_)
    names = _attention_names()
    rank = lora.rank or 1  # an untrained model has no adapters; peft wants at least rank one
    A, B = (tensor.detach().float().cpu() for tensor in (lora.A, lora.B))
    if lora.rank == 0:
        A, B = A.new_zeros(*A.shape[:3], 1, A.shape[4]), B.new_zeros(*B.shape[:4], 1)
    tensors = {}
    for block in range(lora.depth):
        for part, name in enumerate(names):
            module = f"base_model.model.{name(block)}"
            tensors[f"{module}.lora_A.weight"] = A[block, 0, part]
            tensors[f"{module}.lora_B.weight"] = B[block, 0, part]
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": "base" if base else clf.backbone_.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [name(0).rpartition(".")[2] for name in names],
    }
    weight, bias = linear_head(clf)
    with new_folder(output) as folder:
        write_tensors(folder / "adapter_model.safetensors", tensors)
        atomic_write(folder / "adapter_config.json", json.dumps(config, indent=1))
        write_tensors(folder / "head.safetensors", {"weight": weight, "bias": bias})
        if base:
            write_tensors(folder / "base" / "model.safetensors", to_huggingface(vit))
            atomic_write(folder / "base" / "config.json", json.dumps(_huggingface_config(vit), indent=1))
        describe(clf, folder)
    return Path(output)


def _attention_names() -> list[Callable[[int], str]]:
    """Names of the key and value projections of a block, as the installed transformers calls them."""
    try:
        from transformers import ViTConfig, ViTModel
    except ImportError as error:
        raise UserError("exporting to peft needs transformers: pip install fscil[export]") from error
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8, patch_size=8
    )
    tiny = ViTModel(config, add_pooling_layer=False)
    modules = [name for name, _ in tiny.named_modules()]
    found = [next(m for m in modules if m.endswith(ends)) for ends in ((".key", ".k_proj"), (".value", ".v_proj"))]
    return [partial(_of_block, name) for name in found]


def _of_block(name: str, block: int) -> str:
    """A name in the first block as it is in another."""
    return name.replace(".0.", f".{block}.", 1)


def _plain_vit(backbone: Backbone) -> Any:
    """The timm model, if Hugging Face's ViT computes the same."""
    vit = backbone.in_float32().vit
    block = vit.blocks[0]
    plain = (
        backbone.token_pooled
        and vit.num_prefix_tokens == 1
        and isinstance(vit.norm_pre, nn.Identity)
        and isinstance(vit.fc_norm, nn.Identity)
        and isinstance(block.ls1, nn.Identity)
        and isinstance(block.attn.q_norm, nn.Identity)
        and isinstance(block.mlp.act, nn.GELU)
        and not vit.no_embed_class
    )
    if not plain:
        raise UserError(
            f'backbone "{backbone.name}" has no counterpart in Hugging Face\'s ViT; export to timm or onnx.'
        )
    return vit


def _huggingface_config(vit: Any) -> dict[str, Any]:
    block = vit.blocks[0]
    return {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": vit.num_features,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": block.norm1.eps,
        "image_size": vit.patch_embed.img_size[0],
        "patch_size": vit.patch_embed.patch_size[0],
        "num_channels": 3,
        "qkv_bias": block.attn.qkv.bias is not None,
    }
