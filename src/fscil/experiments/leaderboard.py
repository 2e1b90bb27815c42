"""`fscil leaderboard`: finished runs as static pages, one per dataset, that only hold what was checked.

A run that does not verify, that was cut short, or that was scored on its validation stream is refused by name.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fscil.errors import UserError
from fscil.evaluation import paper, tables
from fscil.evaluation.hashes import RESULTS
from fscil.evaluation.limits import limits_of_rows, reductions, with_limits
from fscil.evaluation.pages import heading, identifier, render_page
from fscil.evaluation.rendering import format_value, row_label
from fscil.evaluation.results import load_results
from fscil.evaluation.versions import code_notes, module_line
from fscil.experiments.comparison import provenance, short_commits
from fscil.experiments.verify import verify
from fscil.files import atomic_write
from fscil.text import file_name

METRICS = ("A_avg", "A_final", "hacc", "base", "new", "A_0", "fnr", "fpr", "forgetting", "PD")
COSTS = ("seconds", "passes", "trainable_parameters", "stored_images")
SCRIPT = "sorting.js"  # beside the template
UNVERIFIED = "†"


@dataclass(frozen=True)
class Entry:
    """A finished run, and what speaks against showing it."""

    folder: Path
    result: dict[str, Any]
    failed: tuple[str, ...]  # the checks that it does not pass, with what they found
    limited: str  # what made it a quick look

    @property
    def unverified(self) -> str:
        """These checks by name: what they found names files of this machine, which have no place on a page."""
        return ", ".join(text.partition(":")[0] for text in self.failed)

    @property
    def name(self) -> str:
        """What its copy on the site is called, before counting."""
        return identifier(self.folder.resolve().name)


def read_entry(folder: Path) -> Entry:
    """Check a run. One that is unfinished, unreadable or scored on its validation stream is an error."""
    result = load_results(folder, check=False).to_dict()
    try:
        if (result["config"].get("data") or {}).get("validation"):
            raise UserError(f'"{folder}" was scored on its validation stream, which is for choosing settings')
        [tables.metric(name).read(result) for name in (*METRICS, *COSTS)]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f'"{folder / RESULTS}" is damaged: {type(error).__name__} {error}') from error
    failed = [
        f"{check.name}: {check.text}"
        for check in verify(folder)
        if check.state == "failed" or (check.name == "files" and check.state == "left out")  # it has no hashes
    ]
    return Entry(folder, result, tuple(failed), "; ".join(reductions(result)))


def choose(
    folders: Sequence[Path], include_limited: bool = False, include_unverified: bool = False
) -> tuple[list[Entry], list[str]]:
    """The runs to show, and a line for each that is refused."""
    kept, refused = [], []
    for folder in folders:
        try:
            entry = read_entry(folder)
        except UserError as error:
            refused.append(str(error))
            continue
        if entry.failed and not include_unverified:
            refused.append(f'"{folder}" does not verify ({entry.failed[0]}); --include-unverified marks it instead')
        elif entry.limited and not include_limited:
            refused.append(f'"{folder}" is {entry.limited}; --include-limited marks it instead')
        else:
            kept.append(entry)
    return kept, refused


def write_site(entries: Sequence[Entry], out: str | Path, title: str = "Leaderboard") -> list[Path]:
    """A page per dataset and an index, with a copy of every run's results.json; returns the pages."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise UserError(f'--output "{out}" is a file; name a folder')
    links = [f"runs/{name}.json" for name in _apart([entry.name for entry in entries])]
    shown = [{**entry.result, "link": link, "unverified": entry.unverified} for entry, link in zip(entries, links)]
    by_dataset = tables.by_dataset(shown)
    _, *files = _apart(["index", *map(file_name, by_dataset)])
    boards = [_board(dataset, groups, f"{file}.html") for (dataset, groups), file in zip(by_dataset.items(), files)]
    for entry, link in zip(entries, links):
        atomic_write(out / link, (entry.folder / RESULTS).read_bytes())
    pages = []
    for board in boards:
        pages.append(out / board["file"])
        atomic_write(pages[-1], _page(boards, title=f"{title}: {board['title']}", board=board))
    pages.append(out / "index.html")
    atomic_write(pages[-1], _page(boards, title=title, board=None))
    return pages


def _apart(names: Sequence[str]) -> list[str]:
    """These names, those that come again counted; case does not tell them apart, as on some file systems.

    >>> _apart(["run", "Run", "run"])
    ['run', 'Run-2', 'run-3']
    """
    taken: dict[str, str] = {}
    for name in names:
        while name.casefold() in taken:
            name = _counted(name)
        taken[name.casefold()] = name
    return list(taken.values())


def _counted(name: str) -> str:
    """The next name: run, run-2, run-3."""
    found = re.fullmatch(r"(.*)-(\d+)", name)
    return f"{found[1]}-{int(found[2]) + 1}" if found else f"{name}-2"


def _page(boards: Sequence[Mapping[str, Any]], **values: Any) -> str:
    from markupsafe import Markup

    script = resources.files("fscil.evaluation").joinpath(SCRIPT).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()  # the only script the page may run
    return render_page("leaderboard.html", boards=boards, script=Markup(script), digest=digest, **values)


def _board(dataset: str, groups: tables.Groups, file: str) -> dict[str, Any]:
    """Everything that the page of a dataset shows, best average first."""
    title = tables.dataset_title(dataset)
    table = with_limits(tables.metric_table(groups, (*METRICS, *COSTS), title), limits_of_rows(groups))
    results = [result for members in groups.values() for result in members]
    notes = [*table.notes, provenance(results), *code_notes(groups)]
    if any(key.endswith("_paper") for key in table.columns):
        notes.append(f'Columns marked "paper" quote {paper.SOURCE}.')
    doubts = [
        f"{label}, seed {result['config']['seed']} ({result['unverified']})"
        for label, members in groups.items()
        for result in members
        if result["unverified"]
    ]
    notes += [f"{UNVERIFIED} Not verified: {'; '.join(doubts)}."] if doubts else []
    rows = sorted(table.rows, key=lambda row: -row.values["A_avg"].mean)
    return {
        "title": title,
        "file": file,
        "runs": len(results),
        "best": row_label(rows[0]),
        "best_average": format_value(rows[0].values["A_avg"], table.columns["A_avg"]),
        "columns": [{**heading(column.title), "better": column.better or ""} for column in table.columns.values()],
        "rows": [_row(row, groups[row.label], table.columns) for row in rows],
        "notes": notes,
    }


def _row(row: tables.Row, members: Sequence[tables.Result], columns: Mapping[str, tables.Column]) -> dict[str, Any]:
    def cell(key: str, column: tables.Column) -> dict[str, Any]:
        value = row.values.get(key)
        if value is None:
            return {"text": "", "sort": "", "bold": False}
        return {"text": format_value(value, column), "sort": f"{value.mean:.10g}", "bold": value.bold}

    def told(read: Any) -> str:
        return ", ".join(dict.fromkeys(str(read(result) or "unknown") for result in members))

    doubtful = any(result["unverified"] for result in members)
    return {
        "label": row_label(row) + (UNVERIFIED if doubtful else ""),
        "cells": [cell(key, column) for key, column in columns.items()],
        "backbone": told(lambda result: result["config"].get("backbone")),
        "commit": told(lambda result: short_commits(result["environment"].get("commit") or "")),
        "code": module_line(members),
        "runs": [{"seed": result["config"]["seed"], "link": result["link"]} for result in members],
    }
