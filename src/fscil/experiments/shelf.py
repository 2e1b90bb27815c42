"""A shelf on disk: adapters, base models and Fisher norms that several runs share, each trained once.

A part is named by everything that decides it (images, backbone, options, seed, precision: its key, a JSON object; and
the code that trains), so a run finds what any other run left, today or in another process, and never something that
merely looks alike. One safetensors file per part, written whole or not at all, carries its key; nothing is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fscil.errors import UserError
from fscil.experiments.modules import code_of_rooms
from fscil.files import load_tensors, save_tensors
from fscil.runtime import Shelf

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class DiskShelf(Shelf):
    """Parts as files below `folder`. Several processes may use it at once, also from several machines.

    >>> import tempfile, torch
    >>> shelf = DiskShelf(tempfile.mkdtemp())
    >>> shelf.put({"part": "adapter", "margin": 0.2}, {"A": torch.ones(2)})
    >>> shelf.get({"margin": 0.2, "part": "adapter"})["A"], shelf.get({"part": "adapter", "margin": 0.1})
    (tensor([1., 1.]), None)
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.hits = 0

    def path(self, key: dict[str, Any]) -> Path:
        text = json.dumps({**key, "code": code_of_rooms()}, sort_keys=True)  # other code may train otherwise
        kind = "-".join(str(key.get("part", "part")).lower().split())
        return self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.safetensors"

    @contextlib.contextmanager
    def reserve(self, keys: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Inside, parts that are missing are this process's to make: another one that wants them waits.

        Locks are taken in one order everywhere, so two processes never wait for each other; the system frees the
        locks of a process that dies.
        """
        missing = sorted({path for key in keys if not (path := self.path(key)).exists()})
        with contextlib.ExitStack() as held:
            for path in missing:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = FileLock(path.with_suffix(".lock"))
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    logger.info("waiting for %s, which another process is making", path.stem)
                    lock.acquire()
                held.callback(lock.release)
            yield

    def get(self, key: dict[str, Any]) -> dict[str, Tensor] | None:
        path = self.path(key)
        if not path.exists():
            return None
        try:
            tensors, meta = load_tensors(path)
        except UserError as error:  # a damaged part is made again
            logger.warning("%s; it is made again", error)
            path.unlink(missing_ok=True)
            return None
        if meta.get("key") != json.loads(json.dumps(key)):
            return None
        self.hits += 1
        logger.info("from the shelf: %s", path.stem)
        return tensors

    def put(self, key: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        save_tensors(self.path(key), tensors, {"key": key})
