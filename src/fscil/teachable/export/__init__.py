"""A taught model as other programs read it: one module per target, found by name and imported only when used.

Another package adds its own through an entry point, without touching this one:

    [project.entry-points."fscil.exports"]
    coreml = "my_package:COREML"       # an ExportEntry
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fscil.errors import UserError, nearest
from fscil.registry import load_target

GROUP = "fscil.exports"


@dataclass(frozen=True)
class ExportEntry:
    """A target under a name. Its function takes the model and the path to write, which must not exist yet."""

    target: str  # "module:function"
    summary: str
    suffix: str | None = None  # of the one file it writes; None: a folder


TARGETS = {
    "timm": ExportEntry("fscil.teachable.export.timm:export_timm", "folded weights, a folder that timm opens"),
    "peft": ExportEntry("fscil.teachable.export.peft:export_peft", "an adapter for the Hugging Face ViT"),
    "onnx": ExportEntry("fscil.teachable.export.onnx:export_onnx", "one file, image pipeline included", ".onnx"),
}


@functools.cache
def _third_party() -> dict[str, ExportEntry]:
    return {point.name: point.load() for point in metadata.entry_points(group=GROUP)}


def targets() -> dict[str, ExportEntry]:
    """All targets by name, those of other packages included."""
    return {**TARGETS, **_third_party()}


def target_entry(name: str) -> ExportEntry:
    found = targets()
    if name not in found:
        raise UserError(f'--to "{name}" is no export target; there are: {", ".join(found)}.{nearest(name, found)}')
    return found[name]


def default_path(model: Path, name: str) -> Path:
    """Where an export goes if nobody says: beside the model.

    >>> default_path(Path("models/birds"), "onnx").name, default_path(Path("models/birds"), "timm").name
    ('birds.onnx', 'birds-timm')
    """
    suffix = target_entry(name).suffix
    model = model if model.name not in ("", "..") else model.resolve()  # "." and ".." have no name of their own
    return model.with_name(f"{model.name}{suffix}" if suffix else f"{model.name}-{name}")


def exporter(name: str) -> Callable[[Any, Path], Any]:
    """The function of a target, imported."""
    return load_target(target_entry(name).target)
