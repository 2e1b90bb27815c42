"""What the files of a run folder should be: `hashes.json` lists the SHA-256 of each, and whoever reads a run compares.

The list is replaced in one step once all files of a session are in place, and so decides which sessions are done. What
a killed process leaves beyond it (a line of metrics.jsonl, files of the session that was being written) is no damage:
the session is done again. Hashes show damage, not invention: who changes a file can change its hash as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fscil.errors import UserError
from fscil.evaluation.forms import ListedFile, StoredHashes
from fscil.files import FORMAT_VERSION, atomic_write, digest_file, read_json
from fscil.reading import decode, read_bytes
from fscil.strict import conform

HASHES, METRICS, RESULTS, SHOTS = "hashes.json", "metrics.jsonl", "results.json", "shots.json"
SAFE_NAME = re.compile(r"[\w.+-]{1,200}(/[\w.+-]{1,200}){0,3}", re.ASCII)  # below the folder, nothing else
BLANK = "0" * 64  # where the list has its own hash, when that is taken
RESTORE = "Restore it from a copy."

logger = logging.getLogger(__name__)


class RunHashes:
    """The list of a run folder: names of its files with hash and size, and of files with progress inside a task, which
    change too often to be listed by content and carry a hash of their own; and the hash of the backbone's weights, by
    which a run that goes on knows them wherever they lie (None of one that began before it was kept)."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, ListedFile] | None = None,
        progress: Iterable[str] = (),
        backbone: str | None = None,
    ):
        self.folder, self.files, self.progress, self.backbone = folder, dict(files or {}), set(progress), backbone

    # ---- reading ----
    @classmethod
    def read(cls, folder: Path) -> RunHashes | None:
        """The list of a run; None of one from before there were lists."""
        path = folder / HASHES
        if not path.exists():
            if (folder / SHOTS).is_file() and "hashes" in read_json(folder / SHOTS):
                raise UserError(f'"{path}" is missing, so damage to the run could not be noticed. {RESTORE}')
            return None
        data = conform(read_json(path), StoredHashes, path)
        own = data["sha256"]
        if len(own) != len(BLANK) or _digest(read_bytes(path).replace(own.encode(), BLANK.encode(), 1)) != own:
            raise UserError(f'"{path}" was altered or damaged: its SHA-256 is not the one written in it. {RESTORE}')
        hashes = cls(folder, data["files"], data["progress"], data.get("backbone"))
        for name in (*hashes.files, *hashes.progress):
            if not SAFE_NAME.fullmatch(name) or ".." in name:
                raise UserError(f'"{path}" is not a list of hashes of this folder (it names "{name}").')
        return hashes

    @property
    def finished(self) -> bool:
        return RESULTS in self.files

    def check(self, resuming: bool = False) -> None:
        """Refuse a run with the first file that is not as listed."""
        for _, problem in self.compared(resuming):
            if problem:
                raise UserError(problem)

    def compared(self, resuming: bool = False) -> Iterator[tuple[str, str]]:
        """(name, what is wrong with it or "") of every file. A run that is resumed makes results.json again."""
        for name, entry in self.files.items():
            path = self.folder / name
            if name == METRICS and not self.finished:
                yield name, self._sessions_problem()
            elif path.is_file():
                yield name, _altered(path, digest_file(path), entry["sha256"])
            elif name != RESULTS:
                yield name, f'"{path}" is missing; {HASHES} lists it. {RESTORE}'
            elif not resuming:
                yield name, f'"{path}" is missing; make it again with: fscil run --resume {self.folder}'
        if METRICS not in self.files and (self.folder / METRICS).exists():
            yield METRICS, self._sessions_problem()
        if not self.finished and (self.folder / RESULTS).exists():
            yield RESULTS, f'"{self.folder / RESULTS}" does not belong to this run, which is not finished; remove it.'
        for name in sorted(self.progress):
            if not (self.folder / name).is_file():
                logger.warning('"%s" is missing; what it held is learned again', self.folder / name)

    def _sessions_problem(self) -> str:
        """metrics.jsonl of an unfinished run may have one line more than is listed, of a session just being written."""
        path, entry = self.folder / METRICS, self.files.get(METRICS, ListedFile(sha256=_digest(b""), bytes=0))
        if not path.is_file():
            return f'"{path}" is missing; {HASHES} lists it. {RESTORE}'
        content = read_bytes(path)
        listed, rest = content[: entry["bytes"]], content[entry["bytes"] :]
        try:
            follows = not rest or json.loads(rest)["session"] == listed.count(b"\n")
        except (ValueError, TypeError, KeyError, RecursionError):
            follows = False
        altered = _altered(path, _digest(listed), entry["sha256"])
        return altered or ("" if follows else f'"{path}" was altered or damaged: what follows is no session. {RESTORE}')

    def lines(self) -> list[str]:
        """The listed lines of metrics.jsonl: one for each session that is done."""
        if METRICS not in self.files:
            return []
        listed = read_bytes(self.folder / METRICS)[: self.files[METRICS]["bytes"]]
        return decode(listed, self.folder / METRICS).splitlines()

    # ---- writing ----
    def add(self, path: Path, name: str | None = None) -> None:
        """List a file as it is now, under its own name or the one it will take."""
        name = name or path.relative_to(self.folder).as_posix()
        self.files[name] = ListedFile(sha256=digest_file(path), bytes=path.stat().st_size)

    def remove(self, *paths: Path) -> None:
        """List these files no longer."""
        for path in paths:
            self.files.pop(path.relative_to(self.folder).as_posix(), None)

    def write(self) -> None:
        """Replace the list in the folder."""
        head = {"format_version": FORMAT_VERSION, "sha256": BLANK}
        head |= {"backbone": self.backbone} if self.backbone is not None else {}
        text = json.dumps({**head, "files": self.files, "progress": sorted(self.progress)}, indent=1) + "\n"
        atomic_write(self.folder / HASHES, text.replace(BLANK, _digest(text.encode()), 1))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _altered(path: Path, found: str, wanted: str) -> str:
    if found == wanted:
        return ""
    return f'"{path}" was altered or damaged: its SHA-256 is {found[:16]}…, {HASHES} says {wanted[:16]}…. {RESTORE}'
