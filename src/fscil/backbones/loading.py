"""Backbones by name, and their weights: shipped with the package, published by timm, or in a file of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fscil.backbones.huggingface import from_huggingface
from fscil.backbones.plain_vit import PlainShape, PlainViT
from fscil.backbones.vit import Backbone
from fscil.data.transforms import NORMALISATIONS
from fscil.errors import UserError, nearest
from fscil.files import check_finite, load_foreign_tensors
from fscil.registry import BACKBONES

PLAIN_MODULES = ("vision_transformer", "deit")  # of timm.models: where its plain ViTs are
GLYPH_VITS: dict[str, dict[str, Any]] = {
    "glyph_vit_a": dict(img_size=48, patch_size=8, embed_dim=128, depth=6, num_heads=4),
    "glyph_vit_b": dict(img_size=48, patch_size=8, embed_dim=128, depth=6, num_heads=4),
}


def make_backbone(
    name: str, weights: str | Path | None = None, image_size: int | None = None, pretrained: bool = True
) -> Backbone:
    """A frozen backbone by name: one of the package's glyph ViTs, or any plain timm ViT as `arch.tag`.

    `weights` names a local safetensors file in timm or Hugging Face ViT naming; `pretrained=False` gives random
    weights (speed measurements).

    >>> import torch
    >>> backbone = make_backbone("glyph_vit_a")
    >>> tuple(backbone(torch.zeros(2, 3, backbone.image_size, backbone.image_size)).shape) == (2, backbone.dim)
    True
    """
    if name in GLYPH_VITS:
        own = GLYPH_VITS[name]["img_size"]
        if image_size not in (None, own):
            raise UserError(
                f'transform.size is {image_size}, but backbone "{name}" takes {own} pixels only; leave it out.'
            )
        return _glyph_backbone(name, weights)
    import timm

    architecture, _, tag = name.partition(".")
    _check_architecture(name, architecture)
    if pretrained and weights is None and not tag:
        tags = timm.list_pretrained(f"{architecture}.*")
        raise UserError(
            f'backbone "{name}" has no tag, and different weights share that name; write one of: '
            f"{', '.join(tags) or '(none published)'}."
        )
    known = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in known:
        raise UserError(f'backbone "{name}" has an unknown weights tag "{tag}".{nearest(name, known)}')
    options: dict[str, Any] = dict(num_classes=0) | ({"img_size": image_size} if image_size else {})
    try:
        if pretrained and weights is None:
            published = timm.get_pretrained_cfg(name)
            if published is not None and published.hf_hub_id:
                _require_hub(published.hf_hub_id)
        vit = timm.create_model(name, pretrained=pretrained and weights is None, **options)
    except Exception as problem:  # the hub raises many kinds of errors when it cannot be reached
        if weights is None and pretrained:
            raise UserError(
                f'the weights of backbone "{name}" could not be fetched ({type(problem).__name__}). Put the '
                f"safetensors file of timm/{name} on this machine and pass --weights FILE, connect once so "
                "that it is cached, or choose another --backbone."
            ) from None
        raise
    if weights is not None:
        load_weights(vit, weights)
    config: Any = vit.pretrained_cfg
    plain = "augreg" in tag  # every prompt and LoRA code of the field feeds these [0, 1]
    mean, std = NORMALISATIONS["none"] if plain else (config["mean"], config["std"])
    return Backbone(vit, name, mean, std)


def _check_architecture(name: str, architecture: str) -> None:
    """Refuses names that timm does not know, with the name that was most likely meant, and models that are no ViT."""
    import timm

    if not timm.is_model(architecture):
        plain = [arch for module in PLAIN_MODULES for arch in timm.list_models(module=module, pretrained=True)]
        longer = [known for known in (*BACKBONES, *sorted(plain, key=len)) if known.startswith(name)]
        meant = f' Did you mean "{longer[0]}"?' if longer else nearest(name, [*BACKBONES, *plain])
        raise UserError(f'backbone "{name}" is not a timm model.{meant} See: fscil list backbones')
    home = timm.model_entrypoint(architecture).__module__
    if home.startswith("timm.models.") and home.removeprefix("timm.models.") not in PLAIN_MODULES:
        raise UserError(
            f'backbone "{name}" is not a plain ViT, and only those can be used here: ViT, DeiT, DINO, DINOv2, CLIP and '
            "SigLIP image towers; some are listed by: fscil list backbones"
        )


def cached_weights(name: str) -> Path | None:
    """Where the published weights of a timm backbone lie on this machine; None while they do not."""
    if name in GLYPH_VITS:
        return None
    import timm
    from huggingface_hub import try_to_load_from_cache

    published = timm.get_pretrained_cfg(name)
    if published is None or not published.hf_hub_id:
        return None
    found = try_to_load_from_cache(published.hf_hub_id, "model.safetensors")
    return Path(found) if isinstance(found, str) else None


def _glyph_backbone(name: str, weights: str | Path | None) -> Backbone:
    from importlib.resources import as_file, files

    sizes = GLYPH_VITS[name]
    shape = PlainShape(**sizes, mlp_dim=4 * sizes["embed_dim"])
    with as_file(files("fscil.backbones") / "weights" / f"{name}.safetensors") as shipped:
        return plain_backbone(name, shape, weights or shipped)


def plain_backbone(
    name: str,
    shape: PlainShape,
    weights: str | Path,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
) -> Backbone:
    """A plain ViT of known shape with the weights of a file, without timm."""
    vit = PlainViT.skeleton(shape)
    load_weights(vit, weights)
    return Backbone(vit, name, mean, std)


def _require_hub(repo: str) -> None:
    """Fails at once, where the hub's own retries take a minute, when weights are neither cached nor within reach."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(repo, "model.safetensors"), str) and not getproxies():
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)


def load_weights(vit: nn.Module, path: str | Path) -> None:
    """Loads a safetensors file in timm or Hugging Face ViT naming strictly, leaving out its classification head."""
    if not Path(path).exists():
        raise UserError(f'--weights "{path}" does not exist.')
    try:
        tensors = load_foreign_tensors(path)
    except UserError as problem:
        raise UserError(f'--weights "{path}" is not a readable safetensors file ({problem}).') from None
    if any(".encoder.layer." in key or key.startswith("encoder.layer.") for key in tensors):
        tensors = from_huggingface(tensors)
    wanted = vit.state_dict()
    tensors = {
        k: v for k, v in tensors.items() if k in wanted or not k.startswith(("head.", "head_dist.", "pre_logits."))
    }
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    shapes = [k for k in wanted if k in tensors and tensors[k].shape != wanted[k].shape]
    if missing or extra or shapes:
        details = [f"lacks {missing[0]}"] if missing else []
        details += [f"holds {extra[0]}, which the model has not"] if extra else []
        details += (
            [f"{shapes[0]} is {tuple(tensors[shapes[0]].shape)} where {tuple(wanted[shapes[0]].shape)} is needed"]
            if shapes
            else []
        )
        raise UserError(
            f'--weights "{path}" is of another architecture: it {"; ".join(details)}. '
            "Choose the backbone it was made for."
        )
    if whole := [k for k in wanted if wanted[k].is_floating_point() and not tensors[k].is_floating_point()]:
        raise UserError(f'--weights "{path}": tensor "{whole[0]}" holds whole numbers, no weights.')
    check_finite(tensors, f'--weights "{path}"')
    bare = any(tensor.is_meta for tensor in wanted.values())  # a skeleton: it takes over copies of the tensors
    vit.load_state_dict({k: v.to(wanted[k].dtype, copy=bare) for k, v in tensors.items()}, assign=bare)
