"""Pictures as they come into a folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fscil.data.picture_files import files_in
from fscil.errors import UserError

EVERY = 1.0  # seconds between looks
Stamp = tuple[int, int]  # size and time of change


def arrivals(folder: Path, passing_over: Path | None = None, every: float = EVERY) -> Iterator[list[Path]]:
    """New or changed pictures in a folder and below, each once it has not changed between two looks: a camera or a
    network may take its time to write one. What lies there at the first look does not count, nor what is in
    `passing_over`. Goes on for ever; yields an empty list after a look that found nothing."""
    if not folder.is_dir():
        raise UserError(f'--watch "{folder}" is not a folder.')
    settled = waiting = _stamps(folder, passing_over)
    while True:
        yield []
        time.sleep(every)
        now = _stamps(folder, passing_over)
        ready = [file for file, stamp in now.items() if waiting.get(file) == stamp and settled.get(file) != stamp]
        settled, waiting = settled | {file: now[file] for file in ready}, now
        if ready:
            yield ready


def _stamps(folder: Path, passing_over: Path | None) -> dict[Path, Stamp]:
    aside = passing_over.resolve() if passing_over is not None else None
    stamps = {}
    for file in files_in(folder):
        if aside is not None and file.resolve().is_relative_to(aside):
            continue
        with contextlib.suppress(OSError):  # gone since
            found = os.stat(file)
            stamps[file] = found.st_size, found.st_mtime_ns
    return stamps
