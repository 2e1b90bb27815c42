"""An estimator as bytes: its parameters and, once fitted, its model folder, in one safetensors blob.

Every file of the folder is a tensor of bytes, the parameters are JSON in the header. Reading writes the files into a
temporary folder and opens that with all the checks of a model folder, so nothing in the bytes is ever executed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fscil.backbones.loading import plain_backbone
from fscil.backbones.plain_vit import PlainShape, shape_of
from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.files import FORMAT_VERSION, check_header, check_version, save_tensors
from fscil.reading import parse_json
from fscil.strict import build, conform
from fscil.teachable.folder import BACKBONE, FILE_NAME, HEAD
from fscil.teachable.forms import Level, Spread
from fscil.teachable.model import Teachable
from fscil.teachable.versions import Versions

if TYPE_CHECKING:
    from fscil.teachable.estimator import FewShotClassifier

WHAT = "packed estimator"


class GivenBackbone(TypedDict):
    """A backbone that was given as an object."""

    name: str
    plain: dict[str, Any]
    mean: list[Level]
    std: list[Spread]


class Packed(TypedDict):
    """The header of a blob."""

    parameters: dict[str, Any]
    plan: str | None
    backbone: GivenBackbone | None


def pack(clf: FewShotClassifier) -> bytes:
    """A blob that `unpack` reads. The backbone goes by name and hash, as in a saved model; one that was given as an
    object goes along."""
    given = clf.backbone if isinstance(clf.backbone, Backbone) else None
    parameters = clf.get_params(deep=False) | ({"backbone": None} if given is not None else {})
    meta = {"parameters": parameters, "plan": getattr(clf, "plan_", None), "backbone": None}
    with tempfile.TemporaryDirectory(prefix="fscil-") as place:
        folder = Path(place)
        if given is not None:
            meta["backbone"] = _describe(given)
            save_tensors(folder / BACKBONE, given.in_float32().vit.state_dict())
        if clf.__sklearn_is_fitted__():
            versions = Versions()
            versions.items = clf._versions.copies()
            weights = clf.backbone_.in_float32().vit.state_dict
            versions.write(folder, clf.config_, embed=given is not None, weights=weights)
        files = {path.name: _bytes(path) for path in folder.iterdir() if path.name == HEAD or _is_part(path.name)}
    header = {"format_version": str(FORMAT_VERSION), "what": WHAT, "meta": json.dumps(meta, default=_plain)}
    return save(files, header)


def unpack(clf: FewShotClassifier, packed: bytes, backbone: Backbone | None = None) -> None:
    """Makes an estimator what `pack` was given; `backbone` is the fitted one, if it is open already."""
    with tempfile.TemporaryDirectory(prefix="fscil-") as place:
        folder = Path(place)
        meta = _write_files(packed, folder)
        parameters, given = dict(meta["parameters"]), meta["backbone"]
        if strange := set(parameters) - set(clf._get_param_names()):
            raise UserError(f'a packed estimator sets "{min(strange)}", which is no parameter of it.')
        if given is not None:
            shape = build(PlainShape, given["plain"], "backbone.plain.")
            opened = plain_backbone(given["name"], shape, folder / BACKBONE, given["mean"], given["std"])
            parameters["backbone"] = opened
        if (folder / HEAD).is_file():
            how = {key: parameters[key] for key in ("device", "precision", "verbose") if key in parameters}
            fitted = Teachable.load(folder, backbone=backbone, **how)
            fitted._versions.detach()
            clf.__dict__.update(fitted.__dict__, plan_=meta["plan"])
            parameters["backbone"] = fitted.backbone_ if given is not None else parameters["backbone"]
        clf.__dict__.update(parameters)


def _describe(backbone: Backbone) -> dict[str, Any]:
    shape = shape_of(backbone.vit)
    if shape is None:
        raise UserError(
            f'backbone "{backbone.name}" was given as an object and is less plain than what can be packed; name it '
            "(backbone='arch.tag', weights=FILE) instead."
        )
    return {"name": backbone.name, "plain": shape.as_dict(), "mean": list(backbone.mean), "std": list(backbone.std)}


def _write_files(packed: bytes, folder: Path) -> Packed:
    """Lays the files of a blob out again; returns what its header says."""
    blob = folder / "packed"
    blob.write_bytes(packed)
    check_header(blob)
    try:
        with safe_open(blob, framework="pt") as file:
            header = file.metadata() or {}
            files = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise UserError(f"these bytes are no packed estimator: {error}") from error
    if header.get("what") != WHAT:
        raise UserError("these bytes are no packed estimator of fscil.")
    check_version("packed estimator", header.get("format_version"))
    for name, content in files.items():
        if not (name == HEAD or _is_part(name)) or content.dtype != torch.uint8:
            raise UserError(f'a packed estimator holds "{name}", which is no file of a model folder.')
        (folder / name).write_bytes(content.numpy().tobytes())
    meta: Packed = conform(parse_json(header.get("meta", ""), "packed estimator"), Packed, "packed estimator")
    return meta


def _is_part(name: str) -> bool:
    return FILE_NAME.fullmatch(name) is not None


def _bytes(path: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))


def _plain(value: Any) -> Any:
    """What JSON has no word for: paths, numpy's numbers."""
    return value.item() if isinstance(value, np.generic) else str(value)
