"""Removing a class for good: from the model, from every earlier version, and from whatever else its folder holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fscil.data.picture_files import Label
from fscil.errors import UserError
from fscil.methods.represented import Represented
from fscil.teachable.folder import FILE_NAME, HEAD, ModelFolder
from fscil.teachable.model import Teachable

# What a write that was cut off leaves behind (`fscil.files.atomic_path`): it may hold the class, too.
UNFINISHED = re.compile(rf"\.({re.escape(HEAD)}|{FILE_NAME.pattern})\..*\.part")


@dataclass(frozen=True)
class Purged:
    """What went, and what is left."""

    event: dict[str, Any]  # of the forgetting, as in the history that is gone now
    versions: int  # earlier ones that are gone
    files: list[str]  # that are gone
    bytes: int  # of these
    traces: list[str]  # ways in which the class still shows in what was learned with it
    others: list[str]  # in the folder but not the model's, and not touched


def purge(clf: Teachable, label: Label) -> Purged:
    """Forgets a class of a saved model, and everything in the model's folder that could bring it back."""
    clf.check_fitted()
    if (folder := clf.folder_) is None:
        raise UserError("save the model first; a model in memory has no folder to purge.")
    with folder.lock():
        before = _sizes(folder)
        with clf.editing():
            info = clf.class_info_[clf.knowledge_.number(label)]
            traces, versions = _traces(clf, info["base"]), len(clf.history_)
            event = clf.forget(label).history_[-1]
            clf.drop_history()
        for path in folder.path.iterdir():
            if UNFINISHED.fullmatch(path.name):
                path.unlink()
        after, own = _sizes(folder), {HEAD, ".lock", *folder.read().files}
        if stuck := sorted(name for name in after if FILE_NAME.fullmatch(name) and name not in own):
            raise UserError(f'"{folder.path / stuck[0]}" holds an earlier version and could not be removed; remove it.')
    gone = sorted(set(before) - set(after))
    size = sum(before[name] for name in gone)
    others = sorted(path.name for path in folder.path.iterdir() if path.name not in own)
    return Purged(event, versions, gone, size, traces, others)


def _sizes(folder: ModelFolder) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in Path(folder.path).iterdir() if path.is_file()}


def _traces(clf: Teachable, base: bool) -> list[str]:
    """What of a class stays because it was never kept by itself; only fitting again without it is rid of that."""
    method = clf.knowledge_.method
    traces = []
    if base and clf.config_["trained"]:
        traces.append("the adapters, which were trained on its pictures among others")
    if base:
        traces.append("the covariances of all base pictures together")
    if isinstance(method, Represented) and not method.head.exact:
        traces.append("the classifier's rows of the other classes, which were trained beside it")
    return traces
