"""A lesson as it comes in: labels that fit those the model has, and pictures that count once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fscil.data import cache_dir
from fscil.data.pictures import Label, Pictures, label_name, name_of, read_pictures, repeated
from fscil.errors import UserError

if TYPE_CHECKING:
    from fscil.teachable.knowledge import Knowledge


def fitting_labels(labels: list[Label], knowledge: Knowledge, add: bool) -> list[Label]:
    """Labels of the kind the model has (text or numbers); known classes are refused unless pictures are added."""
    names = knowledge.names
    if names and type(names[0]) is not type(labels[0]):
        labels = [label_name(str(label)) if isinstance(names[0], str) else label for label in labels]
        if type(names[0]) is not type(labels[0]):
            raise UserError(f'label "{labels[0]}" is text, but the classes of this model are numbers.')
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
    if not labels:
        raise UserError("none of the pictures can be read.")
    keep, notes = repeated(pictures.fingerprints, labels, dict(known or {}))
    for text in notes:
        note(text)
    return replace(pictures, kept=keep, fingerprints=pictures.fingerprints[keep]), [labels[at] for at in keep]
