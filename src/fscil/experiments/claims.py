"""Who works on which job of a grid: a lock that the system frees when its process dies, and a note beside it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from filelock import FileLock, Timeout

from fscil.errors import UserError
from fscil.experiments.grid import Job
from fscil.files import atomic_write
from fscil.reading import parse_json, read_text
from fscil.strict import conform

HEARTBEAT = 10.0  # seconds between two signs of life of whoever works on a cell
SILENT = 120.0  # after so long without one, a worker on another machine counts as gone


class Owner(TypedDict):
    """What a claim says."""

    host: str
    pid: int
    started: float
    doing: str


@dataclass
class Claim:
    """That this process works on a job, written down for others to see."""

    path: Path
    started: float = field(default_factory=time.time)
    doing: str = "starting"

    def write(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": self.started, "doing": self.doing}
        atomic_write(self.path, json.dumps(owner) + "\n")


def owner_of(path: Path) -> dict[str, Any] | None:
    """Who a claim names, and how long ago it gave a sign of life; None when nobody is there."""
    try:
        owner = conform(parse_json(read_text(path), path), Owner, path)
        # clocks jump, and the other machine's may run ahead of this one: better to wait for it than to work twice
        return {**owner, "silent": max(0.0, time.time() - path.stat().st_mtime)}
    except (OSError, UserError):
        return None


@contextlib.contextmanager
def claim(job: Job) -> Iterator[Claim | None]:
    """Take a job for this process; None when another has it. A dead process's claim is void.

    On one machine the lock alone decides. Some network filesystems do not carry locks to other machines; there the
    claim's last sign of life does.
    """
    path = claim_path(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield None
        return
    ended = threading.Event()
    try:
        owner = owner_of(path)
        if owner and owner.get("host") != socket.gethostname() and owner["silent"] < SILENT:
            yield None
            return
        mine = Claim(path)
        mine.write()

        def live() -> None:
            while not ended.wait(HEARTBEAT):
                with contextlib.suppress(OSError):
                    os.utime(path)

        threading.Thread(target=live, daemon=True).start()
        try:
            yield mine
        finally:
            ended.set()
            path.unlink(missing_ok=True)
    finally:
        lock.release()


def claim_path(job: Job) -> Path:
    return job.grid / "claims" / f"{job.name}.json"
