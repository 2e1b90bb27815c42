"""A saved model: a folder that holds every version of what was taught, and is never half written.

    model.json                 the head: configuration, versions, and the SHA-256 of every other file; written last
    state-0001.safetensors     tensors that are new in a version; what did not change stays in the older file
    backbone.safetensors       the frozen weights, only if embedded

A change writes its tensors beside the others and then replaces the small head in one step, so a crash or a full disk at
any moment leaves the previous version whole. Undoing a change is a head without its last version. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil._version import __version__
from fscil.errors import UserError
from fscil.files import (
    check_finite,
    clear_parts,
    digest_file,
    load_tensors,
    missing_folders,
    read_json,
    refuse_links,
    remove_empty,
    save_tensors,
    write_json,
)
from fscil.strict import conform
from fscil.teachable.forms import StoredModel
from fscil.text import count

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "model.json"
BACKBONE = "backbone.safetensors"
FILE_NAME = re.compile(r"state-\d{4,9}\.safetensors|backbone\.safetensors")
MAY_LACK = ("taught.scores",)  # tensors with NaN where there is nothing to say: a class of one picture, left out
TOO_LONG = (
    "Every version names every class: save it without its history (drop_history), or elsewhere with fewer classes."
)
LOCK_SECONDS = 600  # how long one process waits for another to finish teaching


@dataclass
class Version:
    """What the model was after one change: a JSON-able record, and its tensors in memory, on disk, or both."""

    record: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # tensor -> file of the folder that holds it


# Where a history begins, by its first event; that of any other is the base classes'.
BEGINNINGS = {
    "drop history": "the history was dropped for good (as by forget --purge)",
    "push": "the model was pushed without its history",
}


def check_undo(versions: Sequence[Version], steps: int) -> None:
    """Refuse to take back more changes than are kept, or none."""
    if steps < 1:
        raise UserError(f"steps is {steps}; it must be at least 1.")
    if steps < len(versions):
        return
    since = BEGINNINGS.get(versions[0].record["event"]["action"], "the base classes were learned")
    made = {1: "none was", 2: "1 was"}.get(len(versions), f"{len(versions) - 1} were")
    raise UserError(f"cannot undo {count(steps, 'change')}: {made} made since {since}.")


@dataclass
class Head:
    """What model.json says."""

    config: dict[str, Any]
    versions: list[Version]
    files: dict[str, dict[str, Any]]  # name -> {"sha256", "bytes"}
    revision: str  # changes with every write

    @property
    def current(self) -> Version:
        return self.versions[-1]

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())


class ModelFolder:
    """Reads and writes one model folder."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path).expanduser()
        self._seen = ("", "")  # SHA-256 of the head that was read or written last, and its revision

    def exists(self) -> bool:
        return (self.path / HEAD).is_file()

    def obstacle(self, *expected: str) -> str:
        """Why a new model cannot be put here, if so; what an interrupted fit left, and `expected`, is no reason."""
        place = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not place.is_dir():
            return f'"{place.name}" is a file'
        names = {entry.name for entry in self.path.iterdir()} if place == self.path else set()
        own = {name for name in names if name[0] == "." or name in expected or FILE_NAME.fullmatch(name)}
        return f'it holds other files ("{min(names - own)}")' if names - own else ""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One writer at a time, over threads and processes; waits for the other. May be nested. Of folders made for
        it, nothing stays in which nothing was written."""
        from filelock import FileLock, Timeout

        held = None
        try:
            while held is None:
                made = missing_folders(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
                refuse_links(self.path, ".lock")
                lock = FileLock(self.path / ".lock", timeout=LOCK_SECONDS, is_singleton=True)
                try:
                    held = lock.acquire()
                except FileNotFoundError:
                    if self.path.exists():  # else it went when the first write of another failed, who held the lock
                        raise
        except Timeout:
            raise UserError(f'"{self.path}" is being changed by another process; try again when it is done.') from None
        except OSError as error:
            raise UserError(f'cannot write "{self.path}": {error.strerror or error}') from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if made and [path.name for path in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()  # while it is held: later it may be another's
            lock.release()
            remove_empty(made)

    # ---- reading ----
    def read(self) -> Head:
        """The head, checked: every name and type in it, and its own hash."""
        if not self.exists():
            what = "is not a model folder (it has no model.json)" if self.path.exists() else "does not exist"
            raise UserError(f'model "{self.path}" {what}; make one with: fscil fit PICTURES -o {self.path}')
        path = self.path / HEAD
        refuse_links(self.path, HEAD)
        digest = digest_file(path)
        data = read_json(path)
        if data.pop("sha256", None) != _digest_json(data):
            raise UserError(f'"{path}" was altered or damaged: its SHA-256 does not match what is written in it.')
        conform(data, StoredModel, path)
        versions = [Version(entry["record"], files=entry["tensors"]) for entry in data["versions"]]
        files = data["files"]
        head = Head(data["config"], versions, files, data["revision"])
        named = {file for version in versions for file in version.files.values()} | set(files)
        strange = sorted(name for name in named if not FILE_NAME.fullmatch(name) or name not in files)
        if strange or not versions:
            raise UserError(f'"{path}" is not the head of a model (it names {strange or "no version"}).')
        if digest_file(path) == digest:  # else it was replaced while it was read
            self._seen = (digest, head.revision)
        return head

    def revision(self) -> str:
        """What the head on disk is called; it is read and checked again only if it is another than last time."""
        if self.exists():
            refuse_links(self.path, HEAD)
            digest, revision = self._seen
            if digest_file(self.path / HEAD) == digest:
                return revision
        return self.read().revision

    def load(self, head: Head, version: Version | None = None) -> dict[str, Tensor]:
        """The tensors of a version (the current one by default), from memory or from files whose hash is checked."""
        version = version or head.current
        tensors = dict(version.tensors)
        missing = {name: file for name, file in version.files.items() if name not in tensors}
        for file in sorted(set(missing.values())):
            content, _ = load_tensors(self.checked(head, file))
            check_finite(content, f'"{self.path / file}"', MAY_LACK)
            for name in [name for name, place in missing.items() if place == file]:
                if name not in content:
                    raise UserError(f'"{self.path / file}" lacks "{name}", which {HEAD} says is in it.')
                tensors[name] = content[name]
        return tensors

    def open(self) -> tuple[Head, dict[str, Tensor]]:
        """The head and the current tensors, also while another process writes."""
        while True:
            head = self.read()
            try:
                return head, self.load(head)
            except UserError:
                if self.revision() == head.revision:  # else a file went away with a version just undone
                    raise

    def copies(self, head: Head, versions: Sequence[Version]) -> list[Version]:
        """Versions as if they had never been written, all in memory; tensors that they share are held once."""
        needed = {file for version in versions for name, file in version.files.items() if name not in version.tensors}
        contents = {file: load_tensors(self.checked(head, file))[0] for file in needed}
        for version in versions:
            stored = {name: file for name, file in version.files.items() if name not in version.tensors}
            for name, file in version.files.items():  # what is in memory already is what later versions share
                if name not in stored:
                    contents.setdefault(file, {})[name] = version.tensors[name]
        return [
            Version(v.record, {**{name: contents[file][name] for name, file in v.files.items()}, **v.tensors})
            for v in versions
        ]

    def checked(self, head: Head, file: str) -> Path:
        """The path of a file, after its SHA-256 was compared with the head's."""
        path = self.path / file
        refuse_links(self.path, file)
        if not path.is_file():
            raise UserError(f'"{path}" is missing; the model cannot be opened without it. Restore it from a copy.')
        found, wanted = digest_file(path), head.files[file]["sha256"]
        if found != wanted:
            raise UserError(
                f'"{path}" was altered or damaged: its SHA-256 is {found[:16]}…, {HEAD} says {wanted[:16]}…. '
                "Restore it from a copy."
            )
        return path

    # ---- writing ----
    def write(
        self,
        config: Mapping[str, Any],
        versions: Sequence[Version],
        backbone: Mapping[str, Tensor] | None = None,
        before: Head | None = None,
    ) -> Head:
        """Writes what is new in `versions`, then the head; returns it. Call it with the lock held.

        `before` is the head that `versions` were read from or written to last: if the folder has changed since, nothing
        is written. Without it the folder must not hold a model.
        """
        if self.exists() and before is None:
            raise UserError(f'"{self.path}" holds a model already; choose another folder or remove it.')
        if before is not None and self.revision() != before.revision:
            raise UserError(f'"{self.path}" was changed by another process since it was opened; open it again.')
        files = dict(before.files) if before else {}
        if backbone is not None:
            files[BACKBONE] = self._save(BACKBONE, backbone)
        clear_parts(self.path)
        number = 1 + max([0, *(int(path.stem[6:]) for path in self.path.glob("state-*.safetensors"))])
        placed: list[dict[str, str]] = []  # of each version: tensor -> file
        for version, previous in zip(versions, [None, *versions]):
            if version.files:
                placed.append(version.files)
                continue
            shared = {
                name for name in version.tensors if previous and previous.tensors.get(name) is version.tensors[name]
            }
            name = f"state-{number:04d}.safetensors"
            fresh = {key: tensor for key, tensor in version.tensors.items() if key not in shared}
            if fresh:
                files[name] = self._save(name, fresh)
                number += 1
            placed.append({key: placed[-1][key] if key in shared else name for key in version.tensors})
        used = {file for place in placed for file in place.values()} | ({BACKBONE} & set(files))
        files = {name: entry for name, entry in files.items() if name in used}
        head = Head(dict(config), list(versions), files, secrets.token_hex(8))
        self._write_head(head, placed)
        for version, place in zip(versions, placed):
            version.files = place
        for stale in set(self.path.glob("state-*.safetensors")) - {self.path / name for name in files}:
            with contextlib.suppress(OSError):
                stale.unlink()
        return head

    def _write_head(self, head: Head, placed: Sequence[Mapping[str, str]]) -> None:
        data = {
            "fscil": __version__,
            "config": head.config,
            "versions": [{"record": v.record, "tensors": place} for v, place in zip(head.versions, placed)],
            "files": head.files,
            "revision": head.revision,
        }
        write_json(self.path / HEAD, {"sha256": _digest_json(data), **data}, TOO_LONG)
        self._seen = (digest_file(self.path / HEAD), head.revision)

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        path = self.path / name
        check_finite(tensors, f'"{path}" is not written', MAY_LACK)
        save_tensors(path, tensors)
        return {"sha256": digest_file(path), "bytes": path.stat().st_size}


def _digest_json(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
