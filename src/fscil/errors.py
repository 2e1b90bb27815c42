"""Errors that are the user's to fix. This module imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what was asked for: the command line prints its text alone, no traceback, and exits with 2."""


def nearest(name: object, choices: Iterable[str]) -> str:
    """`' Did you mean "cifar100"?'` for the choice most like `name`, or `''` when none is close.

    >>> nearest("cifar10", ["cifar100", "cub200"])
    ' Did you mean "cifar100"?'
    """
    folded = {choice.casefold(): choice for choice in map(str, choices)}
    match = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    return f' Did you mean "{folded[match[0]]}"?' if match else ""
