"""Names of classes: what may be one, and how any is shown. The same for commands, page, server and library; no torch.

A name is what people tell classes apart by. So one that looks like another but is not (zero-width letters, full-width
forms), that a terminal would obey instead of showing, or that is no text at all, is refused before any work is done.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from fscil.data.picture_files import label_name
from fscil.errors import UserError, nearest
from fscil.text import printable

RESERVED = "unknown"  # the answer for pictures of no class
LOST = "\ufffd"  # what decoders put in the place of bytes that are no text
UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0") | {
    chr(code) for code in range(0xFE00, 0xFE10)
}  # and Cf


def check_class_name(label: str | int, known: Iterable[str | int] = ()) -> str | int:
    """The name as it is kept; an error if it cannot be one, or looks like another of those that are `known`.

    >>> check_class_name(" rose "), check_class_name(7)
    ('rose', 7)
    >>> check_class_name("ro\\u200bse", ["rose"])
    Traceback (most recent call last):
    fscil.errors.UserError: class name "ro\\u200bse" looks like the known class "rose" but is another; choose a new one.
    """
    return _Names(known).check(label)


def place_of(label: str | int, names: Sequence[str | int]) -> int:
    """Where a class stands among those that are known; a number typed as text will do.

    >>> place_of("7", [3, 7]), place_of(" jay", ["jay"])
    (1, 0)
    """
    wanted, known = str(label_name(label)), [str(name) for name in names]
    if wanted not in known:
        some = ", ".join(known[:10]) + (" …" if len(known) > 10 else "")
        raise UserError(f'there is no class "{label}".{nearest(wanted, known) or f" Known: {some}"}')
    return known.index(wanted)


def check_class_names(labels: Iterable[str | int], known: Iterable[str | int] = ()) -> list[str]:
    """Checks all names, against one another too; returns what there is to say about those that differ in case only."""
    names, notes = _Names(known), []
    for label in dict.fromkeys(labels):
        name = names.check(label)
        twin = names.by_case.get(str(name).casefold(), name)
        if twin != name and name not in names.exact:
            notes.append(f'"{name}" and "{twin}" differ in case only and are two classes')
        names.add(name)
    return notes


class _Names:
    """Names that are taken, by what they are, look like, and are in other case."""

    def __init__(self, known: Iterable[str | int]):
        self.exact: set[str | int] = set()
        self.by_look: dict[str, str | int] = {}
        self.by_case: dict[str, str | int] = {}
        for name in known:
            self.add(name)

    def add(self, name: str | int) -> None:
        self.exact.add(name)
        self.by_look.setdefault(skeleton(str(name)), name)
        self.by_case.setdefault(str(name).casefold(), name)

    def check(self, label: str | int) -> str | int:
        if not isinstance(label, str) or label in self.exact:
            return label
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in label[:60])
        if any(unicodedata.category(letter) == "Cs" or letter == LOST for letter in label):
            raise UserError(f'class name "{shown}" is not valid text (UTF-8); choose another.')
        name = unicodedata.normalize("NFC", label).strip()
        if name in self.exact:
            return name
        if not name or len(name) > 200 or printable(name) != name:
            raise UserError(f'"{shown}" cannot be a class name: it must have 1 to 200 printable characters.')
        look = skeleton(name)
        if not look:
            raise UserError(f'"{shown}" cannot be a class name: nothing of it can be seen.')
        if look.casefold() == RESERVED:
            raise UserError(f'"{shown}" cannot be a class name: it is what pictures of no class are called.')
        other = self.by_look.get(look, name)
        if str(other) != name:
            raise UserError(
                f'class name "{ascii(name)[1:-1]}" looks like the known class "{printable(other)}" but is another; '
                "choose a new one."
            )
        return name


def skeleton(name: str) -> str:
    """What is seen of a name: one form for all that look alike (NFKC), without what does not show.

    >>> skeleton("ro\\u200bse") == skeleton("\\uff52ose") == skeleton("rose"), skeleton("Rose") == skeleton("rose")
    (True, False)
    """
    plain = unicodedata.normalize("NFKC", name)
    seen = (letter for letter in plain if letter not in UNSEEN and unicodedata.category(letter) != "Cf")
    return " ".join("".join(seen).split())
