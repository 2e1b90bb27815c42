"""What a model starts from: checked parameters, a runtime, the backbone and how pictures are cut for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil import recipes, registry
from fscil.backbones.loading import make_backbone, plain_backbone
from fscil.backbones.plain_vit import PlainShape, shape_of
from fscil.backbones.vit import Backbone
from fscil.config import TransformConfig
from fscil.data.transforms import NORMALISATIONS, Transform, make_transform
from fscil.display import LiveDisplay
from fscil.errors import UserError, nearest
from fscil.files import digest_file
from fscil.registry import SHIPPED_BACKBONES
from fscil.runtime import Runtime
from fscil.strict import build
from fscil.teachable.planning import FROZEN_OPTIONS
from fscil.teachable.weights import fetched_weights

if TYPE_CHECKING:
    from fscil.teachable.model import Teachable

STORED_SHORT_SIDE = 256  # pixels that pictures are reduced to before anything else
CHOICES = {
    "train": ("auto", "always", "never"),
    "precision": ("auto", "fp32", "bf16"),  # fp64 is for runs: what is taught and saved is float32
}
BELOW = {"held_out": 0.5, "false_rejection": 1.0}


def check_parameters(clf: Teachable) -> None:
    """Refuses values that `fit` could make nothing of."""
    registry.method_entry(clf.method)
    head = clf.head if isinstance(clf.head, str) else dict(clf.head).get("name", "")
    if head != "auto":
        registry.head_entry(head)
    for name, choices in CHOICES.items():
        value = getattr(clf, name)
        if value not in choices:
            raise UserError(f'--{name} "{value}" is not one of {", ".join(choices)}.{nearest(value, choices)}')
    for name, most in BELOW.items():
        value = getattr(clf, name)
        if not (isinstance(value, (int, float)) and 0 <= value < most):
            option = f"--{name.replace('_', '-')} ({name})"
            raise UserError(f"{option} is {value}; it must be at least 0 and below {most}.")
    if not (isinstance(clf.thumbnails, int) and clf.thumbnails >= 0):
        raise UserError(f"thumbnails is {clf.thumbnails}; it must be a number of pictures per class, 0 for none.")


def check_options(method: str, options: Mapping[str, Any] | None) -> None:
    """Refuses options that the method does not have, also where nothing is trained and most would be of no effect."""
    own = {key: value for key, value in (options or {}).items() if key not in FROZEN_OPTIONS}
    build(registry.method_class(method).Options, own, "options.")


def start_runtime(device: str, precision: str, seed: int, verbose: bool) -> Runtime:
    """Without compilation, which would start anew for every number of pictures taught."""
    return Runtime.make(device, precision, seed, compile="off", display=LiveDisplay(quiet=not verbose))


def usual_backbone(runtime: Runtime) -> str:
    """The backbone if nobody names one: the paper's ViT-B/16 on a GPU; on a CPU, where that takes a second or more for
    every picture, DeiT-Tiny, which takes a fifteenth of the arithmetic."""
    return registry.CPU_BACKBONE if runtime.device.type == "cpu" else registry.PAPER_BACKBONE


def open_backbone(
    chosen: str | Backbone, weights: str | os.PathLike | None, image_size: int | None, runtime: Runtime
) -> Backbone:
    """The backbone, ready on the runtime's device; one that is open already is used as it is."""
    if isinstance(chosen, Backbone):
        return chosen.prepare(runtime)
    try:
        backbone = make_backbone(chosen, Path(weights) if weights is not None else None, image_size)
    except FileNotFoundError as error:  # a backbone of the package whose weights are not there
        raise UserError(f'the weights of backbone "{chosen}" are missing ({error}); pass --weights FILE.') from error
    return backbone.prepare(runtime)


def reopen_backbone(chosen: Mapping[str, Any], weights: Path | None, runtime: Runtime) -> Backbone:
    """The backbone that a saved model describes; a plain ViT without timm, which takes longer to import than torch."""
    name = chosen["name"]
    if chosen.get("plain") and name not in SHIPPED_BACKBONES and (file := weights or fetched_weights(name)):
        shape = build(PlainShape, chosen["plain"], "backbone.plain.")
        with contextlib.suppress(UserError):  # positions of another size, say, which timm resamples
            return plain_backbone(name, shape, file, chosen["mean"], chosen["std"]).prepare(runtime)
    return open_backbone(name, weights, chosen["image_size"], runtime)


def describe_backbone(backbone: Backbone, weights: str | os.PathLike | None) -> dict[str, Any]:
    """What a saved model says about its backbone."""
    return {
        "name": backbone.name,
        "hash": backbone.hash,
        "image_size": backbone.image_size,
        "weights": str(Path(weights).expanduser().resolve()) if weights is not None else None,
        "weights_sha256": digest_file(Path(weights).expanduser()) if weights is not None else None,
        "embedded": False,
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "plain": shape.as_dict() if (shape := shape_of(backbone.vit)) else None,  # what opens it without timm
    }


def transform_for(backbone: Backbone, chosen: Mapping[str, Any] | None) -> Transform:
    """The usual transform of a backbone with the keys that were chosen otherwise."""
    usual = recipes.load("glyphs/smp").values["transform"] if backbone.name.startswith("glyph_vit") else {}
    return make_transform(build(TransformConfig, {**usual, **(chosen or {})}, "transform."), backbone)


def preprocessing_of(transform: Transform) -> dict[str, Any]:
    """The `preprocessing` that makes this transform again."""
    levels = transform.mean, transform.std
    normalize = next((name for name, known in NORMALISATIONS.items() if known == levels), "auto")
    return {
        "size": transform.size,
        "scale": transform.scale,
        "ratio": transform.ratio,
        "flip": transform.flip,
        "resize": transform.resize,
        "normalize": normalize,
    }


def fitted_head(config: Mapping[str, Any]) -> str | dict[str, Any]:
    """The `head` that makes the classifier of a saved model again; a trained method's own is "auto"."""
    if config.get("head"):
        return dict(config["head"])
    return "auto" if config["trained"] else str(config["options"].get("calibration", "auto"))


def short_side(transform: Transform) -> int:
    """Pixels that the shorter side of a picture is reduced to before anything else."""
    return max(STORED_SHORT_SIDE, transform.resize)
