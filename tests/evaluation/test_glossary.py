"""The glossary: every column is explained, and the worked example of docs/metrics.md is what the library computes."""

import re
from pathlib import Path

import pytest

from fscil.evaluation.glossary import GLOSSARY, anchor, entry_of
from fscil.evaluation.metrics import evaluate_session, summarise
from fscil.evaluation.rendering import render
from fscil.evaluation.tables import details, group_runs, main_table, metric_table, metrics
from made_up_runs import made_up_result

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table that has this heading."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_worked_example_is_what_the_library_computes():
    base, way = 2, 1
    sessions = []
    for number, *predictions in rows_of("| after task |"):
        seen = base + way * int(number)
        guesses = [list(map(int, cell.split())) for cell in predictions[:seen]]
        labels = [label for label, row in enumerate(guesses) for _ in row]
        top = [[guess, *(c for c in range(seen) if c != guess)] for row in guesses for guess in row]
        sessions.append(evaluate_session(labels, top, base, seen, way))
    summary = summarise(sessions)
    found = {
        "base accuracy": summary["base_accuracy"],
        "new accuracy": summary["new_accuracy"],
        **{f"HAcc ({how})": value for how, value in summary["hacc"].items()},
        "FNR": summary["fnr"],
        "FPR": summary["fpr"],
        **{name: summary[name] for name in ("A_0", "A_final", "A_avg", "PD", "forgetting")},
    }
    told = {name: float(value) for name, value, _ in rows_of("| metric | value |")}
    assert told == pytest.approx(found, abs=0.005)


def test_every_column_of_every_table_is_explained():
    groups = group_runs([made_up_result("smp"), made_up_result("teen")])
    for table in (main_table(groups), metric_table(groups, details()), metric_table(groups, list(metrics()))):
        for column in table.columns.values():
            assert entry_of(column.title) is not None, column.title
        assert "fscil list metrics" in render(table, "markdown")
    assert len({anchor(name) for name in GLOSSARY}) == len(GLOSSARY)
    for name in ("A_avg", "A_final", "PD", "HAcc", "FNR", "FPR", "forgetting", "base accuracy", "new accuracy"):
        assert re.search(rf"^\|[^|]*{name}", PAGE, re.MULTILINE), name


def test_they_can_be_listed_and_the_helps_say_so(fscil):
    status, out, _ = fscil("list", "metrics")
    assert status == 0 and all(f"{name} " in out for name in GLOSSARY)
    for command in ("run", "compare", "report", "reproduce"):
        _, out, _ = fscil(command, "--help")
        assert "fscil list metrics" in " ".join(out.split()), command
