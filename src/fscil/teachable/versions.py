"""Every state a model has been in since `fit`, so that changes can be undone, in memory and in the model's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fscil.errors import UserError
from fscil.teachable.folder import Head, ModelFolder, Version


class Versions:
    """The last version is the present state. Tensors of earlier ones are in memory until saved, then on disk alone."""

    def __init__(self) -> None:
        self.items: list[Version] = []
        self.folder: ModelFolder | None = None  # where they were read from or written to last,
        self.head: Head | None = None  # and what that folder said then

    def __len__(self) -> int:
        return len(self.items)

    @property
    def current(self) -> Version:
        return self.items[-1]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [version.record["event"] for version in self.items]

    @property
    def saved(self) -> bool:
        """Whether the folder has exactly these versions, unless another process changed it since."""
        return self.head is not None and [*map(id, self.items)] == [*map(id, self.head.versions)]

    # ---- changes ----------------------------------------------------------------------------------------------------
    def add(self, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """A new present state; tensors that did not change are shared with the last one."""
        older = self.current.tensors if self.items else {}

        def shared(name: str, tensor: Tensor) -> Tensor:
            before = older.get(name)
            if before is not None and before.dtype == tensor.dtype and torch.equal(before, tensor):
                return before
            return tensor.clone()

        self.items = [*self.items, Version(record, {name: shared(name, tensor) for name, tensor in tensors.items()})]

    def cut(self, count: int) -> None:
        """Keeps the first `count`."""
        self.items = self.items[:count]

    def start_anew(self, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """One version alone, which needs no older file."""
        self.items = []
        self.add(record, tensors)

    def copies(self) -> list[Version]:
        """All versions as if they had never been written, their tensors in memory."""
        if self.folder is not None and self.head is not None:
            return self.folder.copies(self.head, self.items)
        return [Version(version.record, dict(version.tensors)) for version in self.items]

    # ---- the folder -------------------------------------------------------------------------------------------------
    def load_current(self) -> Version:
        """The present version with its tensors in memory."""
        version = self.current
        if set(version.files) - set(version.tensors):
            assert self.folder is not None and self.head is not None  # what is not in memory was written by somebody
            version.tensors = self.folder.load(self.head, version)
        return version

    def detach(self) -> None:
        """Holds everything in memory and knows of no folder any more."""
        self.items, self.folder, self.head = self.copies(), None, None

    def adopt(self, folder: ModelFolder, head: Head, tensors: dict[str, Tensor]) -> None:
        """Takes over the versions of a folder that was just opened."""
        head.current.tensors = tensors
        self.folder, self.head, self.items = folder, head, list(head.versions)

    def refresh(self) -> bool:
        """Takes over what another process wrote since; whether there was anything."""
        if self.folder is None or self.head is None:
            raise UserError("this model was not saved yet; there is nothing to refresh it from.")
        if not self.saved:
            raise UserError("this model has changes that were not saved; save or undo them first.")
        if self.folder.revision() == self.head.revision:
            return False
        self.adopt(self.folder, *self.folder.open())
        return True

    def write(
        self, path: str | os.PathLike, config: dict[str, Any], embed: bool, weights: Callable[[], Mapping[str, Tensor]]
    ) -> tuple[dict[str, Any], Path]:
        """Writes what is new into a folder, `weights()` of the backbone included if `embed`; its config and path."""
        folder, versions = ModelFolder(Path(path)), self.items
        same = self.folder is not None and folder.path.resolve() == self.folder.path.resolve()
        if same and self.folder is not None:
            folder = self.folder  # which knows what it read last
        with folder.lock():
            if not same and self.folder is not None:  # a copy: all versions come along
                versions = self.copies()
            embedded = config["backbone"]["embedded"]
            fresh = embed and not embedded
            written = weights() if fresh or (embedded and not same) else None
            if fresh:
                config = {
                    **config,
                    "backbone": {**config["backbone"], "embedded": True, "weights": None, "weights_sha256": None},
                }
            self.head = folder.write(config, versions, written, self.head if same else None)
            self.items, self.folder = versions, folder
        for version in self.items[:-1]:
            version.tensors = {}  # on disk; read again if an undo asks for them
        return config, folder.path
