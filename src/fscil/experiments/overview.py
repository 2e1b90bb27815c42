"""What a person sees of a grid: what runs and how far it is, what is done, what failed, how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fscil.display import LiveDisplay
from fscil.experiments.claims import claim_path, owner_of
from fscil.experiments.grid import Job
from fscil.text import count, duration

T = TypeVar("T")
WRITE_EVERY = 1.0  # seconds between two notes of a job's progress


class JobDisplay(LiveDisplay):
    """Display of a job that nobody watches directly: lines go to its log, progress to `note`."""

    def __init__(self, console: Console, note: Callable[[str], None]):
        super().__init__(console)
        self.active = False
        self.note, self.written = note, 0.0
        self.stack: list[str] = []

    def track(self, iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)  # type: ignore[arg-type]
        self.stack.append(description)
        depth = len(self.stack)
        try:
            for done, item in enumerate(iterable):
                self.stack[depth - 1] = f"{description} {done + 1}/{total}" if total else description
                if time.monotonic() - self.written > WRITE_EVERY:
                    self.note(self.stack[0])
                    self.written = time.monotonic()
                yield item
        finally:
            del self.stack[depth - 1 :]


class Overview:
    """The state of a grid's jobs, as a live table on a terminal and as a line per event elsewhere."""

    def __init__(self, jobs: Sequence[Job], done: Iterable[Job] = (), workers: int = 1, quiet: bool = False):
        self.jobs, self.workers, self.quiet = list(jobs), max(1, workers), quiet
        self.state: dict[str, str] = {job.name: "waiting" for job in jobs}
        self.state.update({job.name: "done" for job in done})
        self.seconds: dict[str, float] = {}  # of the jobs done by now
        self.errors: dict[str, str] = {}
        self.began: dict[str, float] = {}
        self.console = Console(stderr=True, highlight=False)
        live = self.console.is_terminal and not quiet
        self.live = Live(console=self.console, get_renderable=self.render, refresh_per_second=2) if live else None

    def __enter__(self) -> Overview:
        done = self.count("done")
        found = f", {done} of them already done" if done else ""
        self.line(f"{count(len(self.jobs), 'job')}{found}")
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.stop()

    def line(self, text: str) -> None:
        if not self.quiet:
            (self.live.console if self.live else self.console).print(text, soft_wrap=True, markup=False)

    def count(self, *states: str) -> int:
        return sum(state in states for state in self.state.values())

    def start(self, job: Job) -> None:
        self.state[job.name] = "running"
        self.began.setdefault(job.name, time.monotonic())

    def wait(self, job: Job, owner: dict[str, Any] | None) -> None:
        if self.state[job.name] != "elsewhere" and owner:
            self.line(f"{job.title}: process {owner.get('pid')} on {owner.get('host')} works on it")
        self.state[job.name] = "elsewhere"

    def finish(self, job: Job, seconds: float, text: str) -> None:
        self.state[job.name], self.seconds[job.name] = "done", seconds
        self.line(f"[{self.count('done', 'failed')}/{len(self.jobs)}] {job.title}: {text}, {duration(seconds)}")

    def fail(self, job: Job, error: str) -> None:
        self.state[job.name], self.errors[job.name] = "failed", error
        self.line(f"[{self.count('done', 'failed')}/{len(self.jobs)}] {job.title}: failed: {error}")

    def left(self) -> float | None:
        """Seconds that remain, from those of like jobs that are done; None before anything is."""
        if not self.seconds:
            return None
        by_method: dict[str, list[float]] = {}
        for job in self.jobs:
            if job.name in self.seconds:
                by_method.setdefault(_kind(job), []).append(self.seconds[job.name])
        usual = mean(self.seconds.values())
        total = 0.0
        for job in self.jobs:
            if self.state[job.name] in ("waiting", "running", "elsewhere"):
                expected = mean(by_method.get(_kind(job), [usual]))
                spent = time.monotonic() - self.began[job.name] if self.state[job.name] == "running" else 0.0
                total += max(expected - spent, 0.0)
        return total / min(self.workers, max(1, self.count("waiting", "running", "elsewhere")))

    def render(self) -> Group:
        finished, total = self.count("done", "failed"), len(self.jobs)
        head = Table.grid(padding=(0, 1))
        left = self.left()
        parts = [f"{finished}/{total} done", f"about {duration(left)} left" if left is not None else ""]
        parts += [f"{self.count('failed')} failed"] if self.errors else []
        head.add_row(ProgressBar(total=max(total, 1), completed=finished, width=30), "  ".join(filter(None, parts)))
        rows = Table.grid(padding=(0, 2))
        for job in self.jobs:
            state = self.state[job.name]
            if state not in ("running", "elsewhere"):
                continue
            owner = owner_of(claim_path(job)) or {}
            where = f"{owner.get('host')}, process {owner.get('pid')}" if state == "elsewhere" and owner else ""
            since = duration(max(0.0, time.time() - owner["started"])) if owner.get("started") else ""
            rows.add_row("●", Text(job.title), owner.get("doing", "queued"), since, where)
        return Group(head, rows)


def _kind(job: Job) -> str:
    return "adapters" if job.specs else f"{job.config.method} on {job.config.dataset}"


def explain_failures(overview: Overview, lines: int = 10) -> list[str]:
    """For every failed job its error, and how its log ends."""
    told = []
    for job in overview.jobs:
        if job.name in overview.errors:
            told.append(f"failed: {job.title}: {overview.errors[job.name]}")
            told += [f"    {line}" for line in last_lines(job.log, lines)]
            told.append(f"    (log: {job.log})")
    return told


def last_lines(path: Path, count: int = 10) -> list[str]:
    """The end of a log."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []
