"""A lesson as it comes in: labels that fit those the model has, and pictures that count once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fscil.data import cache_dir
from fscil.data.decode import SUFFIXES
from fscil.data.picture_files import Label, files_in, folders_in, label_name
from fscil.data.pictures import Pictures, listed, name_of, pair, read_pictures, repeated
from fscil.errors import UserError
from fscil.teachable.names import check_class_names

if TYPE_CHECKING:
    from fscil.teachable.knowledge import Knowledge


def pictures_of(X: Any) -> Sequence[Any]:
    """Pictures as a sequence; of a table with one column, what is in it."""
    return listed(_one_column(X, "X"))


def labelled(X: Any, y: Any = None) -> tuple[Sequence[Any], list[Label]]:
    """(pictures, labels) of anything `fit` and `learn` take; a single name is the class of all pictures."""
    X, y = _one_column(X, "X"), _names(_one_column(y, "y"))
    if isinstance(y, (str, int)) and not isinstance(y, bool):
        X = listed(X)
        y = [y] * len(X)
    return pair(X, y)


def _names(y: Any) -> Any:
    """Labels in a row: a column of them is taken for one, and numbers that measure something are refused."""
    if hasattr(y, "__array__") and not hasattr(y, "__iter__"):
        y = np.asarray(y)
    if not isinstance(y, np.ndarray):
        return y
    if y.dtype.kind == "f" and not np.array_equal(y, np.floor(y)):
        raise UserError(f"y is continuous ({y.ravel()[0]}, …), and classes have names or whole numbers.")
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _one_column(table: Any, name: str) -> Any:
    """The column of a data frame, which would otherwise be taken for the names of its columns."""
    columns = getattr(table, "columns", None)
    if columns is None or not hasattr(table, "iloc"):
        return table
    if len(columns) != 1:
        raise UserError(f"{name} is a table with the columns {', '.join(map(str, columns))}; pass one of them.")
    return table.iloc[:, 0].tolist()


def remarks(root: str | os.PathLike) -> list[str]:
    """What is worth saying of a folder that was learned from."""
    return [said for said in (left_out(root), folders_of_folders(root)) if said]


def left_out(root: str | os.PathLike) -> str | None:
    """What of a folder of class folders is not learned from, in words: pictures beside them, files of other types."""
    root, loose, strange = Path(root).expanduser(), 0, 0
    for where, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            picture = Path(name).suffix.lower() in SUFFIXES
            loose += picture and Path(where) == root and not name.startswith(".")
            strange += not picture and Path(where) != root and not name.startswith(".")
    said = [f"{loose} picture{'s' * (loose != 1)} beside the class folders"] if loose else []
    said += [f"{strange} file{'s' * (strange != 1)} of other types"] if strange else []
    return f"left out: {' and '.join(said)}" if said else None


def folders_of_folders(root: str | os.PathLike) -> str | None:
    """What to say of a folder whose class folders all hold folders of pictures: one above the classes, perhaps."""
    above = folders_in(Path(root).expanduser())
    inside = {folder.name: [sub for sub in folders_in(folder) if files_in(sub)] for folder in above}
    if not inside or any(len(subs) < 2 or has_pictures(folder) for folder, subs in zip(above, inside.values())):
        return None
    name, subs = next(iter(inside.items()))
    shown = ", ".join(sub.name for sub in subs[:3]) + (", …" if len(subs) > 3 else "")
    whole = f'"{name}" is taken for one class with all that its folders hold ({shown})'
    return f'{whole}. If those are the classes, give "{Path(root, name)}"'


def has_pictures(folder: Path) -> bool:
    """Whether pictures lie in a folder itself."""
    return any(path.suffix.lower() in SUFFIXES for path in folder.iterdir() if path.is_file())


def fitting_labels(labels: list[Label], knowledge: Knowledge, add: bool, note: Callable[[str], None]) -> list[Label]:
    """Labels of the kind the model has (text or numbers); known classes are refused unless pictures are added."""
    names = knowledge.names
    if names and type(names[0]) is not type(labels[0]):
        labels = [label_name(str(label)) if isinstance(names[0], str) else label for label in labels]
        if type(names[0]) is not type(labels[0]):
            raise UserError(f'label "{labels[0]}" is text, but the classes of this model are numbers.')
    for text in check_class_names(labels, names):
        note(text)
    counts = Counter(labels)
    known = [label for label in counts if label in names]
    if known and not add:
        has = knowledge.classes[names.index(known[0])]["pictures"]
        raise UserError(
            f'class "{known[0]}" is known already, from {has} pictures. To add these {counts[known[0]]} to it, '
            "pass --add (add=True); for another class, choose another name."
        )
    return labels


def read_lesson(
    X: Sequence[Any],
    labels: list[Label],
    short_side: int,
    skip_bad: bool,
    note: Callable[[str], None],
    known: Mapping[int, set[Label]] | None = None,
) -> tuple[Pictures, list[Label]]:
    """Decoded pictures and their labels, each picture of a class once; `kept` then counts rows of the store.

    `known` holds the classes that each fingerprint was taught as before.
    """
    pictures = read_pictures(X, short_side, skip_bad, cache_dir() / "pixels")
    if pictures.bad:
        named = ", ".join(name_of(X[position], position) for position in list(pictures.bad)[:5])
        note(f"{len(pictures.bad)} of {len(X)} pictures cannot be read and are left out: {named}")
    labels = [labels[position] for position in pictures.kept]
    names = [_called(X[position], position) for position in pictures.kept]
    if not labels:
        raise UserError("none of the pictures can be read.")
    keep, notes = repeated(pictures.fingerprints, labels, dict(known or {}))
    for text in notes:
        note(text)
    once = replace(pictures, kept=keep, fingerprints=pictures.fingerprints[keep], names=[names[at] for at in keep])
    return once, [labels[at] for at in keep]


def _called(item: Any, position: int) -> str:
    """What people call a picture: its file, else its place among those given, from 1 on."""
    return os.path.basename(item) if isinstance(item, (str, os.PathLike)) else f"picture {position + 1}"
