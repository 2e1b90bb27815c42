"""Figures and names in words, one form each: what the terminal says, report, page and model card say too."""

from __future__ import annotations

import re
import unicodedata

BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # turn the writing of what follows


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one. Only none is 0 % and only all is 100 %, whatever rounding would say.

    >>> percent(0.9371), percent(1.0), percent(0.0), percent(None)
    ('93.7 %', '100.0 %', '0.0 %', '–')
    >>> percent(0.9371, 0), percent(0.004, 0), percent(0.996, 0), percent(0.99996)
    ('94 %', '<1 %', '>99 %', '>99.9 %')
    """
    if share is None:
        return "–"
    step = 10.0**-digits
    if 0 < share < 0.005 * step:
        return f"<{step:.{digits}f} %"
    if 1 - 0.005 * step <= share < 1:
        return f">{100 - step:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def points(value: float | None) -> str:
    """A figure that is in per cent already (accuracy, forgetting, …), as the tables of the field write it.

    >>> points(71.2), points(None)
    ('71.20', '–')
    """
    return "–" if value is None else f"{value:.2f}"


def duration(seconds: float) -> str:
    """
    >>> duration(3.21), duration(59.97), duration(95), duration(7300)
    ('3.2 s', '1 min 0 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(amount: float) -> str:
    """Bytes, in powers of a thousand.

    >>> size(271_012), size(999_600), size(3_400_000), size(1_500_000_000)
    ('271 kB', '1.0 MB', '3.4 MB', '1.5 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if amount >= 0.9995 * factor:
            return f"{amount / factor:.1f} {unit}"
    return f"{amount / 1e3:.0f} kB"


def file_name(text: str) -> str:
    """A name as part of a file's: "hf:birds/north" holds characters that mean something to some file system.

    >>> file_name("hf:birds/north"), file_name("mini_imagenet")
    ('hf-birds-north', 'mini_imagenet')
    """
    return re.sub(r"[^\w.+-]", "-", text)


def count(number: int, one: str, many: str | None = None) -> str:
    """
    >>> count(1, "picture"), count(5, "picture"), count(2, "class", "classes")
    ('1 picture', '5 pictures', '2 classes')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def printable(text: object) -> str:
    """Text as it can be shown on a terminal: what would be obeyed, turned or not encoded is escaped.

    >>> printable("red\\x1b[31m"), printable("caf\\udce9"), printable("Möwe 鷺")
    ('red\\\\x1b[31m', 'caf\\\\udce9', 'Möwe 鷺')
    """
    return "".join(
        ascii(letter)[1:-1] if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or letter in BIDI else letter
        for letter in str(text)
    )
