"""Which files are pictures, and what they are called: folders of class folders, tables of paths and labels.

Every walk through folders of pictures is here, so that all parts see the same files. No torch: a wrong folder is
refused at once.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fscil.data.decode import SUFFIXES
from fscil.data.manifests import TEST, TRAIN
from fscil.errors import UserError
from fscil.reading import TABLE_AT_MOST, parse_table, read_text

Label = str | int

# What the columns of a table of pictures may be called; of several such columns the first name here counts.
PATHS = ("path", "file", "filename", "filepath", "file_name", "file_path", "image", "image_path", "url")
COLUMNS = {"path": PATHS, "label": ("label", "class"), "split": ("split", "set", "subset", "part")}
FIRST_LINE = re.compile(r'[\s,;"]*[^\r\n]*')  # that holds anything, and the empty ones before it


def folders_in(root: str | os.PathLike[str]) -> list[Path]:
    """The folders directly in `root`, sorted; hidden ones are passed over."""
    root = Path(root)
    return sorted(path for path in root.iterdir() if path.is_dir() and _shown(path.name)) if root.is_dir() else []


def files_in(root: str | os.PathLike[str]) -> list[Path]:
    """All pictures in a folder and below, by suffix, sorted; what is hidden is passed over (macOS leaves ._a.jpg)."""
    found: list[Path] = []
    for where, folders, names in os.walk(root):
        folders[:] = filter(_shown, folders)  # os.walk goes into those that are left
        found += [Path(where, name) for name in filter(_shown, names)]
    return sorted(file for file in found if file.suffix.lower() in SUFFIXES)


def _shown(name: str) -> bool:
    return not name.startswith(".")


def class_folders(root: str | os.PathLike[str]) -> tuple[list[Path], list[str]]:
    """Files and class names of a folder that holds one folder of pictures per class.

    Files that are no pictures by their suffix are passed over; a class folder without any picture is an error.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise UserError(
            f'"{root}" is not a folder; give a folder with one folder of pictures per class, or a CSV file.'
        )
    by_class = {folder.name: files_in(folder) for folder in folders_in(root)}
    if not by_class:
        if files_in(root):
            hint = " (it holds pictures itself; if they are one class, name the folder above it)"
        else:
            hint = "; give a folder with one folder of pictures per class"
        raise UserError(f'"{root}" holds no class folders{hint}.')
    for name, files in by_class.items():
        if not files:
            raise UserError(f'the class folder "{root / name}" holds no pictures; add some or remove it.')
    return [file for files in by_class.values() for file in files], [name for name in by_class for _ in by_class[name]]


def labelled_files(source: str | os.PathLike[str]) -> tuple[list[Path], list[str]]:
    """Files and class names of a folder of class folders, or of a table of them: a CSV file with the columns path and
    label, whose paths start from where it lies."""
    source = Path(source).expanduser()
    if not is_table(source):
        return class_folders(source)
    rows = table_rows(read_text(source, TABLE_AT_MOST), source)
    return [source.parent / row["path"] for row in rows], [row["label"] for row in rows]


def table_rows(
    text: str, source: str | os.PathLike[str], needed: Sequence[str] = ("path", "label"), headless: bool = False
) -> list[dict[str, str]]:
    """The rows of a CSV file of pictures by the keys of COLUMNS, whatever its first line calls them. Cells are trimmed,
    those `needed` are there, and Excel's semicolons will do.

    With `headless` the first line may be a picture's already, the columns then being in the order of COLUMNS; and the
    split is in whatever column has train and test alone, if none is called so.

    >>> table_rows("label,Filename\\njay,a.jpg\\n", "some.csv")
    [{'path': 'a.jpg', 'label': 'jay'}]
    """
    text = text.removeprefix("\ufeff")
    line = FIRST_LINE.match(text)
    first = line[0] if line else ""
    delimiter = ";" if first.count(";") > first.count(",") else ","
    cells = [cell.strip(' "\t\r\n').lower() for cell in first.split(delimiter)]
    both = all(not set(cells).isdisjoint(COLUMNS[key]) for key in ("path", "label"))  # one may be the name of a class
    bare = headless and cells[0] not in PATHS and not both
    if bare:
        text = f"{delimiter.join(COLUMNS)}\n{text}"
    names, rows = parse_table(text, source, delimiter)
    columns = {name.strip().lower(): name for name in names}
    called = {key: next((columns[name] for name in known if name in columns), None) for key, known in COLUMNS.items()}
    for key in needed:
        if called[key] is None:
            others = ", ".join(COLUMNS[key][1:])
            raise UserError(f'"{source}" has no column {key} (or {others}); its first line must name the columns.')
    if not rows:
        raise UserError(f'"{source}" names no pictures.')
    if headless and called["split"] is None:
        values = {name: {row[name].strip().lower() for row in rows} for name in names if name not in called.values()}
        called["split"] = next((name for name in values if values[name] == {TRAIN, TEST}), None)
    found = [{key: row[name].strip() for key, name in called.items() if name is not None} for row in rows]
    for number, row in enumerate(found, start=1 if bare else 2):
        if missing := next((key for key in needed if not row[key]), None):
            raise UserError(f'line {number} of "{source}" has no {missing}; add it or delete the line.')
    return found


def is_table(source: str | os.PathLike[str]) -> bool:
    """Whether this is a CSV file by its name."""
    return Path(source).suffix.lower() == ".csv" and not Path(source).is_dir()


def expand(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, folders as the pictures in them."""
    files: list[Path] = []
    for path in paths:
        inside = files_in(path) if path.is_dir() else [path]
        if not inside:
            raise UserError(f'the folder "{path}" holds no pictures.')
        files += inside
    return files


def label_name(label: Any) -> Label:
    """A class name as it is kept: whole numbers stay numbers, everything else is text in one spelling (NFC, trimmed).

    >>> label_name(" Eule "), label_name(np.int64(3)), label_name("e\\u0301") == "\\u00e9"
    ('Eule', 3, True)
    """
    if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
        return int(label)
    name = unicodedata.normalize("NFC", str(label)).strip()
    if not name or len(name) > 200 or any(unicodedata.category(letter) == "Cc" for letter in name):
        raise UserError(f"{name[:60]!r} cannot be a class name: it must have 1 to 200 printable characters.")
    return name
