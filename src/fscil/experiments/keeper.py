"""Progress inside a task of a run, kept in files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from fscil.files import load_tensors, save_tensors
from fscil.runtime import Keeper


class RunKeeper(Keeper):
    """Keeps the progress of long training stages inside a run folder, so that a stopped run goes on where it was.

    A stage is named by the method ("adapters", say); files of different tasks never mix, and a task's files are
    removed once its own checkpoint is written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], fingerprint: str = "", writes: bool = True, older: Collection[str] = ()
    ):
        self.folder = Path(folder)
        self.fingerprint = fingerprint  # of the configuration: progress of another one is not picked up
        self.older = older  # further fingerprints of the same configuration
        self.writes = writes  # of several processes only one does
        self.task = 0

    def path(self, stage: str) -> Path:
        """Where the progress of a stage of the current task is kept."""
        return self.folder / f"task_{self.task}_{re.sub(r'[^A-Za-z0-9_-]+', '_', stage)}.safetensors"

    def load(self, stage: str) -> dict[str, Tensor] | None:
        path = self.path(stage)
        if not path.exists():
            return None
        tensors, meta = load_tensors(path)
        return tensors if meta.get("fingerprint") in (self.fingerprint, *self.older) else None

    def save(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        if self.writes:
            meta = {"fingerprint": self.fingerprint, "stage": stage, "task": self.task}
            save_tensors(self.path(stage), tensors, meta)

    def clear(self) -> None:
        """Forget the stages of the current task."""
        if self.writes:
            for path in self.folder.glob(f"task_{self.task}_*.safetensors"):
                path.unlink(missing_ok=True)
