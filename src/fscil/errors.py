"""Errors that are the user's to fix, and being told to stop. This module imports nothing heavy."""

from __future__ import annotations

import contextlib
import difflib
import signal
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(ValueError):
    """A mistake in what was asked for: the command line prints its text alone, no traceback, and exits with 2.

    >>> import fscil
    >>> try:
    ...     config = fscil.resolve("smq")
    ... except fscil.UserError as error:
    ...     print(error)
    unknown method "smq". Did you mean "smp"? See: fscil list methods
    """


def nearest(name: object, choices: Iterable[str]) -> str:
    """`' Did you mean "cifar100"?'` for the choice most like `name`, or `''` when none is close.

    >>> nearest("cifar10", ["cifar100", "cub200"])
    ' Did you mean "cifar100"?'
    """
    folded = {choice.casefold(): choice for choice in map(str, choices)}
    match = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    return f' Did you mean "{folded[match[0]]}"?' if match else ""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """A polite kill (SIGTERM) ends the block the way Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
