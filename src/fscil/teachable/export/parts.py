"""What exports share: the folded ViT and the classifier as plain tensors, and the files beside them.

Exports hold the model as a plain ViT whose key and value projections carry the adapters, and a linear classifier on its
features. Folded into the projections, the adapters cost nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from fscil.backbones.lora import LoRA
from fscil.errors import UserError
from fscil.files import atomic_folder, atomic_write, write_json
from fscil.methods.represented import Represented
from fscil.teachable.model import Teachable


def folded_weights(clf: Teachable) -> dict[str, Tensor]:
    """The ViT's weights in float32 with ΔW = B A added to the key and value rows of every qkv."""
    lora, width = adapters_of(clf), clf.backbone_.heads * clf.backbone_.head_dim
    tensors = {
        name: value.detach().float().cpu().clone()
        for name, value in clf.backbone_.in_float32().vit.state_dict().items()
    }
    if lora.rank:
        update = lora.dense()[:, 0].detach().float().cpu()  # (blocks, 2, d, d)
        for block, delta in enumerate(update):
            tensors[f"blocks.{block}.attn.qkv.weight"][width:] += delta.flatten(0, 1)
    return tensors


def scorer(clf: Teachable) -> nn.Module:
    """The head as a module of matrix products, in float64."""
    head = represented(clf).head
    module = head.scorer()
    if module is None:
        raise UserError(
            f"head {type(head).__name__} cannot be exported: its scores are no matrix products of the features; heads "
            "that can: prototypes, mpcc, closed_form, slca."
        )
    return module


def linear_head(clf: Teachable) -> tuple[Tensor, Tensor]:
    """The classifier as a linear layer on raw features, temperature included: the same best class, and the same
    probabilities unless the scores are cosines."""
    method = represented(clf)
    linear = method.head.linear()
    # the length of a feature changes no order of cosines, but does where something is added to them
    of_directions = method.unit_spaces is not None or (linear is not None and linear.unit)
    if linear is None or (of_directions and bool((linear.biases != 0).any())):
        raise UserError(
            f"the scores of method {clf.config_['method']} with head {type(method.head).__name__} are not linear in "
            "the features of a ViT, so they are no layer on top of one; export to onnx."
        )
    temperature = clf.calibration_["temperature"]
    return (linear.weights / temperature).float(), (linear.biases / temperature).float()


def adapters_of(clf: Teachable) -> LoRA:
    """The adapters that make the plain ViT give the model's features, but for their length where that is one."""
    method = represented(clf)
    lora = method.plain_adapters if method.unit_spaces is None else method.unit_spaces.lora
    if lora is None or lora.sets > 1:
        raise UserError(
            f"method {clf.config_['method']} has features of more than one pass of a ViT, and those of {lora.sets} "
            "sets of adapters make no plain one; export to onnx."
            if lora is not None
            else f"method {clf.config_['method']} cannot be exported: its features are not those of a ViT's pass."
        )
    return lora


def represented(clf: Teachable) -> Represented:
    """The method of a fitted model, if it is features under a head."""
    clf.check_fitted()
    method = clf.knowledge_.method
    if not isinstance(method, Represented):
        raise UserError(
            f"method {clf.config_['method']} cannot be exported: only smp, its relatives and methods under a head are "
            "a plain ViT with a classifier on top."
        )
    return method


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` once it is whole; one that holds something is refused."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f'--output "{path}" exists already; choose another folder.')
    with atomic_folder(path) as aside:
        yield aside


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """safetensors as other libraries write them: {"format": "pt"} as the only metadata."""
    atomic_write(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}))


def describe(clf: Teachable, output: Path) -> None:
    """What a user of the exported files has to know: class names, image pipeline, calibration."""
    facts = {
        "classes": [str(label) for label in clf.classes_],
        "transform": asdict(clf.transform_),
        "calibration": clf.calibration_,
        "backbone": clf.config_["backbone"]["name"],
    }
    write_json(output / "fscil.json", facts)
