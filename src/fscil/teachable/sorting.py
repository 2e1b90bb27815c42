"""Pictures into folders by what they show: copied, linked or moved, never over another file, and resumable."""

from __future__ import annotations

import csv
import errno
import filecmp
import io
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from fscil.data.picture_files import expand
from fscil.errors import UserError
from fscil.files import atomic_path, check_place, digest_file
from fscil.reading import TABLE_AT_MOST, parse_table, read_text
from fscil.teachable.folder import HEAD
from fscil.text import printable

How = Literal["copy", "link", "move"]
ANSWERS = "answers.csv"  # what was sorted, in the folder it was sorted into
FOLDER_BYTES = 240  # of a name; file systems take 255
DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # Windows keeps these names
COLUMNS = ("file", "label", "confidence", "placed", "sha256")


def folder_name(label: object) -> str:
    """A class as the name of a folder, on any system.

    >>> folder_name("and/or"), folder_name(".hidden"), folder_name("jay"), folder_name("a:b "), folder_name("con")
    ('and_or', '_hidden', 'jay', 'a_b', '_con')
    """
    name = re.sub(r'[\\/:*?"<>|\x00-\x1f]', "_", printable(label)).strip()
    name = re.sub(r"^\.", "_", name).encode()[:FOLDER_BYTES].decode(errors="ignore").rstrip(". ")
    return ("_" if DEVICES.fullmatch(name) else "") + name or "_"


def pictures_beside(target: Path | None, paths: Iterable[Path]) -> list[Path]:
    """`expand`, passing over what earlier runs put into `target`, unless a path names something in there."""
    if target is None:
        return expand(paths)
    aside = target.resolve()

    def within(path: Path) -> bool:  # by its folder: a link may lead out again
        return path.parent.resolve().is_relative_to(aside)

    return [file for path in paths for file in expand([path]) if within(path) or not within(file)]


def check_target(option: str, folder: Path) -> None:
    """Refuse a folder that pictures cannot or should not be put into, before anything is recognised."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f'{option} "{folder}" is a file; name a folder.')
    if (folder / HEAD).exists():
        raise UserError(f'{option} "{folder}" is a model; name another folder.')
    check_place(folder)


def place_file(file: Path, folder: Path, how: How = "copy") -> Path:
    """Puts a picture into a folder and returns where it is; what lies there already under its name stays.

    The same picture is not put there twice; another one of its name gets a number. One that cannot be taken from where
    it is stays there alone.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100_000):
            target = folder / (file.name if number == 1 else f"{file.stem}-{number}{file.suffix}")
            if not os.path.lexists(target):
                break
            if target.exists() and filecmp.cmp(file, target, shallow=False):
                if how == "move" and not target.samefile(file):
                    file.unlink()
                return target
        if how == "link":
            target.symlink_to(file.resolve())
            return target
        with atomic_path(target) as aside:
            shutil.copyfile(file, aside)
            shutil.copystat(file, aside)
        if how == "move":
            try:
                file.unlink()
            except OSError:
                target.unlink()
                raise
    except OSError as error:
        raise UserError(f'cannot {how} "{file}" into "{folder}": {error.strerror or error}') from error
    return target


class Sorted:
    """A folder that pictures are sorted into, with a table of them; one in the table is not asked about again.

    The table knows a picture by its file and its content: another one may come under an old name.
    """

    def __init__(self, folder: Path, how: How = "copy"):
        self.folder, self.how = folder, how
        check_target("--sort-into", folder)
        self.table = folder / ANSWERS
        self.done: dict[str, str] = {}  # file -> SHA-256 of what it held when it was sorted
        self.cut_short = False  # whether the table ends within a line, as editors and killed processes leave it
        if text := read_text(self.table, TABLE_AT_MOST) if self.table.exists() else "":  # a disk may have been full
            self.cut_short = not text.endswith("\n")
            names, rows = parse_table(text, self.table)
            if tuple(names) != COLUMNS:
                raise UserError(f'"{self.table}" is no table of sorted pictures; choose another --sort-into.')
            self.done = {row["file"]: row["sha256"] for row in rows if row["placed"]}

    def __contains__(self, file: Path) -> bool:
        before = self.done.get(printable(file.resolve()))
        if before is None or self.how == "move":  # what was moved is gone: whatever lies there came since
            return False
        try:
            return digest_file(file) == before
        except OSError:
            return False

    def _note(self, *row: str) -> None:
        """Adds a line to the table, whole or not at all."""
        lines = io.StringIO(newline="")
        if self.cut_short:
            lines.write("\r\n")
        try:
            with open(self.table, "ab", buffering=0) as table:
                end = os.fstat(table.fileno()).st_size
                csv.writer(lines).writerows([row] if end else [COLUMNS, row])
                content = lines.getvalue().encode()
                if table.write(content) < len(content):
                    table.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UserError(f'cannot write "{self.table}": {error.strerror or error}') from error
        self.cut_short = False

    def put(self, file: Path, label: str, confidence: float) -> Path:
        """Sorts one picture under what it shows."""
        name = printable(file.resolve())
        placed = place_file(file, self.folder / folder_name(label), self.how)
        digest = digest_file(placed)
        self._note(name, label, f"{confidence:.4f}", printable(placed.relative_to(self.folder)), digest)
        self.done[name] = digest
        return placed
