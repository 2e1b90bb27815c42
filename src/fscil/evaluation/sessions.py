"""The columns of a session, defined once: terminal, report, tables with their CSV and TensorBoard all read them here.

A new metric is a value that `metrics.evaluate_session` returns and an entry of `COLUMNS`:

    "worst": SessionColumn("worst_class", "worst", "Worst class", about="Accuracy of the class that is worst off."),
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fscil.text import duration, points, size

if TYPE_CHECKING:
    from rich.table import Table

Session = Mapping[str, Any]  # a line of a run's metrics.jsonl


@dataclass(frozen=True)
class SessionColumn:
    """A figure of a session: where it stands, what it is called, how it is written."""

    key: str  # in the session; also its tag in TensorBoard
    name: str  # on the terminal
    title: str  # on pages and in tables
    latex: str = ""
    paper: str = ""  # its name in `paper.reported`
    better: str | None = "high"  # "high", "low", or None for a cost, which tables over seeds leave out
    averaged: bool = False  # has a value for each way of averaging base and new classes
    in_line: bool = False  # also in the line that a session prints when it is done
    in_details: bool = True  # also in the table behind the averages of `fscil compare`
    bar: bool = False  # pages draw it as a share of the largest
    about: str = ""  # what it means, for the glossary
    show: Callable[[Any], str] = field(default=points, repr=False)

    def read(self, session: Session, averaging: str = "group") -> float | None:
        """Its value, None where it is undefined, and in runs from before it existed.

        >>> COLUMNS["hacc"].read({"hacc": {"group": 60.0, "class": 61.0}}, "class")
        61.0
        """
        return session[self.key][averaging] if self.averaged else session.get(self.key)


COLUMNS: dict[str, SessionColumn] = {  # by name in tables
    "accuracy": SessionColumn(
        "accuracy",
        "A",
        "Accuracy",
        in_line=True,
        in_details=False,
        about="Percent of the test images of all classes seen so far whose best class is right: A_t.",
    ),
    "top5": SessionColumn(
        "top5",
        "top-5",
        "Top-5",
        in_line=True,
        in_details=False,
        about="Percent of these images whose class is among the five best.",
    ),
    "base": SessionColumn(
        "base_accuracy",
        "base",
        "Base",
        "$A_o$",
        "base_accuracy",
        in_line=True,
        about="Accuracy on test images of base classes, with all classes seen to choose from.",
    ),
    "new": SessionColumn(
        "new_accuracy",
        "new",
        "New",
        "$A_n$",
        "new_accuracy",
        in_line=True,
        about="Accuracy on test images of the classes that came after the base task, all of them together.",
    ),
    "hacc": SessionColumn(
        "hacc",
        "HAcc",
        "HAcc",
        paper="hacc",
        averaged=True,
        in_line=True,
        about="Harmonic mean 2·Base·New / (Base + New): low where either is low. As in the paper's code, base and "
        "new accuracy are averaged over groups of as many classes as a task brings; `class` and `sample` average "
        "otherwise.",
    ),
    "fnr": SessionColumn(
        "fnr",
        "FNR",
        "FNR",
        paper="fnr",
        better="low",
        about="False negative rate: percent of base images that are taken for any new class.",
    ),
    "fpr": SessionColumn(
        "fpr",
        "FPR",
        "FPR",
        paper="fpr",
        better="low",
        about="False positive rate: percent of new images that are taken for any base class.",
    ),
    "seconds": SessionColumn("seconds", "time", "Time", better=None, bar=True, show=duration),
    "memory": SessionColumn("peak_memory", "memory", "Memory", better=None, bar=True, show=size),
    "gpu_memory": SessionColumn("peak_gpu_memory", "GPU", "GPU", better=None, show=size),
}


def columns_of(sessions: Sequence[Session], averaging: str = "group") -> list[SessionColumn]:
    """The columns that have a value in any of these sessions."""
    return [c for c in COLUMNS.values() if any(c.read(session, averaging) is not None for session in sessions)]


def session_line(session: Session, total: int, averaging: str = "group") -> str:
    """ "session 3/8  75 classes  A 71.20 …": one session in one line."""
    parts = [f"session {session['session']}/{total}", f"{session['seen']:>3} classes"]
    for column in COLUMNS.values():
        value = column.read(session, averaging)
        if column.in_line and value is not None:
            parts.append(f"{column.name} {column.show(value):>5}")
    return "  ".join([*parts, duration(session["seconds"])])


def session_table(sessions: Sequence[Session], summary: Mapping[str, Any], averaging: str, title: str) -> Table:
    """The final table: a row per session, the summary below it."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left")
    columns = columns_of(sessions, averaging)
    names = [f"{column.name} ({averaging})" if column.averaged else column.name for column in columns]
    for name in ("session", "classes", *names):
        table.add_column(name, justify="right")
    for session in sessions:
        values = [column.read(session, averaging) for column in columns]
        cells = ["–" if value is None else column.show(value) for column, value in zip(columns, values)]
        table.add_row(str(session["session"]), str(session["seen"]), *cells)
    table.caption = (
        f"A_avg {points(summary['A_avg'])}   A_final {points(summary['A_final'])}   PD {points(summary['PD'])}   "
        f"HAcc {points(summary['hacc'][averaging])}   forgetting {points(summary['forgetting'])}"
    )
    return table
