"""What a person sees while work goes on: progress bars with live figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fscil.runtime import Display

T = TypeVar("T")
SHOW_AFTER = 1.0  # seconds: quicker work shows no bar


class LiveDisplay(Display):
    """Progress on a terminal; elsewhere a line per epoch, so that logs stay short. Bars nest: epochs, steps in them.

    >>> display = LiveDisplay(quiet=True)
    >>> sum(display.track([1, 2, 3], "adding"))
    6
    """

    def __init__(self, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self.active = self.console.is_terminal and not quiet
        self._progress: Progress | None = None
        self._bars: list[TaskID] = []
        self._fields: dict[str, Any] = {}

    def track(self, iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        """Yield the items of `iterable` while a bar shows how far it is and how long it will still take."""
        if not self.active:
            yield from iterable
            return
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)  # type: ignore[arg-type]
        progress = self._open()
        bar = progress.add_task(description, total=total, fields="", visible=bool(self._bars))
        began, done = time.monotonic(), 0
        self._bars.append(bar)
        try:
            for item in iterable:
                yield item
                done += 1
                visible = len(self._bars) > 1 or time.monotonic() - began > SHOW_AFTER
                progress.update(bar, completed=done, fields=self._text(), visible=visible)
                self._pull_along(progress)
        finally:
            progress.remove_task(bar)
            self._bars.remove(bar)
            if not self._bars:
                self.close()

    def _pull_along(self, progress: Progress) -> None:
        """The outer bar moves with the inner one, so that the time it has left is known before its first step ends."""
        if len(self._bars) > 1:
            outer, inner = progress.tasks[-2], progress.tasks[-1]
            if inner.total and outer.total:
                share = min(inner.completed / inner.total, 0.999)
                progress.update(outer.id, completed=int(outer.completed) + share, fields="", visible=True)

    def report(self, **fields: Any) -> None:
        """Live figures beside the bars, such as report(loss=0.31, images_per_s=1200)."""
        self._fields.update(fields)

    def line(self, text: str) -> None:
        """One line that stays on the screen (and in a log), above any bar."""
        if not self.quiet:
            console = self._progress.console if self._progress else self.console
            console.print(text, highlight=False, soft_wrap=True)

    def log(self, text: str) -> None:
        """A line of progress for logs and pipes, where no bar moves."""
        if not self.active:
            self.line(text)

    def close(self) -> None:
        """Take the bars away, also in the middle of a loop."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._fields = None, {}

    def _open(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[fields]}"),
                console=self.console,
                transient=True,
            )
            self._progress.start()
        return self._progress

    def _text(self) -> str:
        names = {"images_per_s": "images/s"}
        return "  ".join(f"{names.get(key, key)} {_figure(value)}" for key, value in self._fields.items())


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def output_console() -> Console:
    """Standard output: results. On a pipe wide enough that no column is cut."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140, highlight=False)
