"""The columns of a session: one definition behind everything that shows them."""

import csv
import io
import json
import re

import pytest
from rich.console import Console

from fscil.evaluation import metrics, sessions
from fscil.evaluation.sessions import COLUMNS, SessionColumn, session_line, session_table
from fscil.evaluation.tables import metric
from made_up_runs import made_up_result

SMALL = ["--limit", "3", "--device", "cpu", "--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=2"]
SMALL += ["--set", "options.epochs=1", "--method", "teen", "--quiet"]


def printed(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_the_line_of_a_session():
    session = {"session": 3, "seen": 75, "accuracy": 7.125, "top5": 100.0, "base_accuracy": 66.0, "seconds": 95.0}
    new = {"new_accuracy": 55.0, "hacc": {"group": 60.0, "class": 61.0}}
    assert session_line({**session, **new}, 8, "class") == (
        "session 3/8   75 classes  A  7.12  top-5 100.00  base 66.00  new 55.00  HAcc 61.00  1 min 35 s"
    )
    none = {"new_accuracy": None, "hacc": {"group": None}}
    assert session_line({**session, **none}, 8).endswith("base 66.00  1 min 35 s")


def test_the_table_shows_every_session_and_only_columns_with_values():
    result = made_up_result()
    text = printed(session_table(result["sessions"], result["summary"], "group", "title"))
    rows = [re.findall(r"[\d.]+(?: [sMG]\S*)?|–", line) for line in text.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [["0", "12"], ["1", "16"], ["2", "20"], ["3", "24"]]
    last = result["sessions"][-1]
    wanted = [last["accuracy"], last["top5"], last["base_accuracy"], last["new_accuracy"], last["hacc"]["group"]]
    assert rows[-1][2:7] == [f"{value:.2f}" for value in wanted] and rows[-1][-2:] == ["33.0 s", "300.0 MB"]
    assert "GPU" not in text and "HAcc (group)" in text
    with_gpu = [{**session, "peak_gpu_memory": 2.5e9} for session in result["sessions"]]
    assert "2.5 GB" in printed(session_table(with_gpu, result["summary"], "group", ""))
    base_alone = made_up_result(tasks=0)
    assert "HAcc (" not in printed(session_table(base_alone["sessions"], base_alone["summary"], "group", ""))


def test_tables_read_the_last_session():
    result = made_up_result()
    last = result["sessions"][-1]
    assert metric("fnr").read(result) == last["fnr"] and metric("fnr").column.better == "low"
    assert metric("hacc").read(result) == last["hacc"]["group"]
    assert metric("hacc_sample").read(result) == last["hacc"]["sample"]


def test_a_metric_added_in_two_files_appears_everywhere(fscil, weights, tmp_path, monkeypatch):
    """What a change of metrics.py and of sessions.py does, and no other: a run, a comparison, a report, TensorBoard."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    known = metrics.evaluate_session

    def with_worst(*arguments):
        session = known(*arguments)
        return {**session, "worst_class": min(session["per_class"])}

    monkeypatch.setattr(metrics, "evaluate_session", with_worst)
    monkeypatch.setitem(sessions.COLUMNS, "worst", SessionColumn("worst_class", "worst", "Worst class", in_line=True))

    status, out, err = fscil("run", *SMALL, "--weights", weights, "--tensorboard", "--output", "run")
    assert status == 0, err
    stored = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    worst = [min(session["per_class"]) for session in stored]
    heading = next(line for line in out.splitlines() if "session" in line and "classes" in line)
    place = [cell.strip() for cell in re.split("[┃│]", heading)].index("worst")
    rows = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert [row[place].strip() for row in rows] == [f"{value:.2f}" for value in worst]
    assert f"worst {worst[-1]:5.2f}" in session_line(stored[-1], 2)

    log = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    log.Reload()
    assert [event.value for event in log.Scalars("session/worst_class")] == pytest.approx(worst)

    status, _, err = fscil("compare", "run", "-o", "tables")
    assert status == 0, err
    with open(tmp_path / "tables" / "compare" / "glyphs-details.csv", encoding="utf-8") as file:
        assert float(next(csv.DictReader(file))["worst"]) == pytest.approx(worst[-1])

    assert fscil("report", "run", "--no-images")[0] == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    headings, body = re.search(r"<tr>(<th>Task</th>.*?)</tr>.*?<tbody>(.*?)</tbody>", page, re.DOTALL).groups()
    place = re.findall(r"<th>(.*?)</th>", headings).index("Worst class")
    shown = [re.findall(r"<td.*?>(.*?)</td>", row)[place] for row in re.findall(r"<tr>(.*?)</tr>", body)]
    assert shown == [f"{value:.2f}" for value in worst]


def test_runs_from_before_a_metric_existed_do_without_it(monkeypatch):
    monkeypatch.setitem(COLUMNS, "worst", SessionColumn("worst_class", "worst", "Worst class"))
    result = made_up_result()
    assert "worst" not in printed(session_table(result["sessions"], result["summary"], "group", ""))
    assert metric("worst").read(result) is None
