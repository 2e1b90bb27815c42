"""`fscil compare` and `fscil report` as a user calls them, and how a grid is described."""

import csv
import json
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest

from fscil.commands.compare import compare
from fscil.config import resolve
from fscil.errors import UserError
from fscil.evaluation.tables import group_runs
from fscil.experiments.comparison import GridSpec, load_folders, parse_seeds, parse_variants, read_grid, splice
from fscil.files import read_json, write_json
from made_up_runs import as_stored, made_up_result

SMALL = ["--limit", "3", "--device", "cpu", "--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=2"]
SMALL += ["--set", "options.epochs=1"]


# ---- how a grid is described ---------------------------------------------------------------------------------------


def test_seeds_are_counted_or_named():
    assert parse_seeds("3") == (2023, 2024, 2025)
    assert parse_seeds("2024") == (2024,)
    assert parse_seeds("7,") == (7,)
    for wrong in ("", "0", "two", "-1", "1.5"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(wrong)


def test_settings_multiply():
    grid = GridSpec(("baseline", "smp"), ("glyphs",), (1, 2), parse_variants(["data.shots=1,5", "options.rank=2,4,8"]))
    configs = grid.configs()
    assert len(configs) == 2 * 2 * 2 * 3
    assert {(c.method, c.seed, c.data.shots, c.options["rank"]) for c in configs} == {
        (m, s, k, r) for m in ("baseline", "smp") for s in (1, 2) for k in (1, 5) for r in (2, 4, 8)
    }
    for wrong in ("data.shots", "=1", "data.shots=", "data.shots=[1"):
        with pytest.raises(UserError, match="--vary"):
            parse_variants([wrong])


def test_all_methods_are_the_fifteen_of_the_main_tables():
    assert len(GridSpec(("all",)).methods) == 15
    assert GridSpec(("smp", "all")).methods[0] == "smp" and len(GridSpec(("smp", "all")).methods) == 15
    with pytest.raises(UserError, match='Did you mean "smp"'):
        GridSpec(("smpp",))


def test_a_grid_from_yaml(tmp_path):
    path = tmp_path / "grid.yaml"
    path.write_text(
        "methods: baseline, smp\nseeds: 2\nset: {options: {epochs: 3}}\n"
        "settings:\n  - {}\n  - {data.shots: 1}\n  - {options: {margin: 0.1}}\n"
    )
    grid = read_grid(path)
    assert grid.methods == ("baseline", "smp") and grid.seeds == (2023, 2024)
    configs = grid.configs()
    assert len(configs) == 12 and {c.options["epochs"] for c in configs} == {3}
    assert {c.data.shots for c in configs} == {None, 1} and 0.1 in {c.options["margin"] for c in configs}
    path.write_text("method: smp\n")
    with pytest.raises(UserError, match='unknown key "method". Did you mean "methods"'):
        read_grid(path)
    path.write_text("settings: []\n")
    with pytest.raises(UserError, match="settings is empty"):
        read_grid(path)


def test_what_a_grid_says_by_itself_cannot_be_set():
    for key, value, said in (
        ("seed", 7, "--seeds"),
        ("method", "teen", "--methods"),
        ("dataset", "cub200", "--dataset"),
    ):
        for where in ({"set": {key: value}}, {"settings": ({}, {key: value})}):
            with pytest.raises(UserError, match=f"{key}={value} cannot be set: {said} says the {key}"):
                GridSpec(**where)
    with pytest.raises(UserError, match="fscil run --recipe"):
        GridSpec(set={"recipe": "glyphs/smp_full"})


def test_variants_that_would_be_one_row_are_refused():
    for key, values in (("runtime.precision", "fp32,bf16"), ("evaluation.hacc", "group,class"), ("data.root", "a,b")):
        with pytest.raises(UserError, match=f'^{key}: runs are told apart.*, and "{key}={values.split(",")[0]}" and'):
            GridSpec(settings=parse_variants([f"{key}={values}"])).configs()
    with pytest.raises(UserError, match='"options.rank=4" and "options.rank=4" are the same runs'):
        GridSpec(settings=parse_variants(["options.rank=4,4"])).configs()
    # margin 0.2 is SMP's own and not the baseline's, so that the second is a row of its own
    assert len(GridSpec(("smp", "baseline"), settings=({}, {"options.margin": 0.2})).configs()) == 4


def test_what_is_said_for_all_runs_and_by_a_variant_is_refused(fscil, tmp_path):
    both = r"options.epochs=3 for all runs .* and options.epochs=5 of a variant .* exclude one another"
    for variants in (parse_variants(["options.epochs=5"]), ({}, {"options": {"epochs": 5}})):
        with pytest.raises(UserError, match=both):
            GridSpec(set={"options.epochs": 3}, settings=variants)
    with pytest.raises(UserError, match="data.limit=1 for all runs .* and data.limit=2 of a variant"):
        GridSpec(settings=parse_variants(["data.limit=2,3"])).configs(data={"limit": 1})
    status, _, err = fscil(
        "compare", "--vary", "options.epochs=5", "--set", "options.epochs=3", "-o", tmp_path / "grid"
    )
    assert status == 2 and re.search(both, err) and len(err.splitlines()) == 1 and not (tmp_path / "grid").exists()


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(weights, tmp_path_factory):
    """A finished comparison: baseline and TEEN, two seeds; and a third setting whose loss explodes."""
    folder = tmp_path_factory.mktemp("compared")
    document = folder / "RESULTS.md"
    document.write_text("before\n<!-- fscil:compare-glyphs -->\nold\n<!-- /fscil:compare-glyphs -->\nafter\n")
    command = ["compare", "--methods", "baseline,teen", "--seeds", "2", "--weights", weights, *SMALL]
    command += ["--vary", "options.lr=0.01,1e30", "-o", folder / "grid", "--markdown", document]
    done = subprocess.run([sys.executable, "-m", "fscil", *map(str, command)], capture_output=True, text=True)
    return folder, command, done


def test_what_fails_is_shown_and_the_rest_is_tabulated(grid):
    folder, _, done = grid
    assert done.returncode == 1, done.stderr
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 4 and all("no numbers" in line and "lr=1e+30" in line for line in failed)
    shown = done.stderr.split(failed[0])[-1].split("(log: ")[0]
    assert "training diverged" in shown.strip().splitlines()[-1]  # how its log ends
    assert "Missing: " in done.stdout and "Baseline" in done.stdout and "TEEN" in done.stdout
    cells = list((folder / "grid" / "cells").glob("*/results.json"))
    assert len(cells) == 4


def test_the_table_is_the_mean_of_the_result_files(grid):
    folder, _, _ = grid
    results = [read_json(path) for path in (folder / "grid" / "cells").glob("*/results.json")]
    with open(folder / "grid" / "compare" / "glyphs.csv", encoding="utf-8") as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["kind"] == "ours"}
    for title, method in (("Baseline", "baseline"), ("TEEN", "teen")):
        averages = [result["summary"]["A_avg"] for result in results if result["config"]["method"] == method]
        assert len(averages) == 2
        assert float(rows[title]["A_avg"]) == pytest.approx(statistics.mean(averages))
        assert float(rows[title]["A_avg_std"]) == pytest.approx(statistics.stdev(averages))
    assert r"\toprule" in (folder / "grid" / "compare" / "glyphs.tex").read_text()
    assert (folder / "grid" / "compare" / "glyphs-differences.md").exists()


def test_the_document_holds_the_same_table_and_keeps_the_rest(grid):
    folder, _, _ = grid
    text = (folder / "RESULTS.md").read_text()
    table = (folder / "grid" / "compare" / "glyphs.md").read_text().strip()
    assert text.startswith("before\n<!-- fscil:compare-glyphs -->\n") and text.endswith(
        "/fscil:compare-glyphs -->\nafter\n"
    )
    assert table in text and "old" not in text


def test_nothing_finished_is_run_again(grid, fscil):
    folder, command, _ = grid
    paths = list((folder / "grid" / "cells").glob("*/results.json"))
    before = {path: path.stat().st_mtime_ns for path in paths}
    kept = [part for part in command if part not in ("--vary", "options.lr=0.01,1e30")]
    status, out, err = fscil(*kept, "--set", "options.lr=0.01")
    assert status == 0, err
    assert "6 jobs, 6 of them already done" in err  # two seeds: adapters of both methods at once, and each method
    assert {path: path.stat().st_mtime_ns for path in paths} == before
    assert "Lead of" in out


def test_bad_input_is_one_line(fscil, tmp_path, weights):
    document = tmp_path / "R.md"
    document.write_text("no marks here\n")
    grid_file = tmp_path / "g.yaml"
    grid_file.write_text("methods: [smp]\n")
    for arguments, said in (
        (["--methods", "smq"], 'Did you mean "smp"'),
        (["--dataset", "glyph"], 'Did you mean "glyphs"'),
        (["--set", "options.epoch=1"], 'Did you mean "options.epochs"'),
        (["--markdown", document], "<!-- fscil:compare-glyphs -->"),
        (["--grid", grid_file, "--methods", "smp"], "leave --methods out"),
        (["--engine", "slurm"], "--engine"),
        (["--seeds", "x"], "--seeds"),
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path], "holds none"),
        ([tmp_path, "--methods", "smp"], "leave it out"),
        ([tmp_path, "--set", "foo=bar"], "--set describes runs to make"),
        ([tmp_path, "--limit", "99"], "--limit describes runs to make"),
        ([tmp_path, "--fast"], "--fast describes runs to make"),
        ([tmp_path, "--engine", "ray"], "--engine describes runs to make"),
        (["--set", "seed=7"], "--seeds"),
        (["--vary", "seed=1,2"], "--seeds"),
        (["--vary", "runtime.precision=fp32,bf16"], "runtime.precision"),
    ):
        status, out, err = fscil("compare", *arguments)
        assert status == 2 and said in err and len(err.splitlines()) == 1, (arguments, err)
    assert not (tmp_path / "runs").exists()


def test_the_command_line_wins_over_a_grid_file_however_it_is_written(fscil, tmp_path, monkeypatch):
    class Planned(Exception):
        pass

    def planned(output, configs):
        raise Planned([(config.options["epochs"], config.options["rank"]) for config in configs])

    monkeypatch.setattr("fscil.experiments.grid.plan", planned)
    path = tmp_path / "grid.yaml"
    for written in ("{options: {rank: 4}, options.epochs: 2}", "{options.epochs: 2, options: {rank: 4}}"):
        path.write_text(f"methods: smp\nset: {written}\n")
        with pytest.raises(Planned, match=r"\[\(1, 4\)\]"):
            compare(grid=path, settings=["options.epochs=1"])


def make_runs(folder):
    """Two finished runs, one unfinished, one of another version, one that is something else, one damaged."""
    for seed in (2023, 2024):
        content = made_up_result(seed=seed)
        write_json(folder / f"smp{seed}" / "results.json", as_stored(content))
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "config.yaml").write_text("format_version: 1\n")
    for name, text in (("newer", '{"format_version": 99}'), ("foreign", '{"weather": "fine"}'), ("damaged", "{")):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(text)


def test_folders_that_are_no_finished_runs_are_left_out_with_a_line_each(fscil, tmp_path):
    make_runs(tmp_path)
    status, out, err = fscil("compare", tmp_path)
    assert status == 1
    lines = err.splitlines()
    assert len(lines) == 4 and all(line.startswith("left out: ") for line in lines)
    for name, said in (
        ("unfinished", "is not finished"),
        ("newer", "format version 99"),
        ("foreign", "not written by fscil"),
        ("damaged", "not a JSON file"),
    ):
        assert sum(f"/{name}" in line and said in line for line in lines) == 1, (name, lines)
    assert "Mean ± standard deviation over 2 seeds" in out


def test_tables_of_folders_have_the_papers_order_whatever_the_folders_are_called(tmp_path):
    names = ["smp", "asp", "closed_form", "icarl", "teen"]
    for number, name in enumerate(names):
        write_json(tmp_path / str(number) / "results.json", as_stored(made_up_result(name)))
    results, problems = load_folders([tmp_path / str(number) for number in range(len(names))])
    assert not problems
    assert [r["config"]["method"] for r in results] == ["icarl", "teen", "asp", "closed_form", "smp"]


def test_runs_from_before_a_setting_existed_stand_in_one_row_with_later_ones(tmp_path):
    for seed in (2023, 2024):
        result = as_stored(made_up_result("smp", seed))
        result["config"] = resolve("smp", seed=seed).to_dict()
        if seed == 2023:
            del result["config"]["data"]["validation"], result["config"]["options"]["closed_form_views"]
        write_json(tmp_path / str(seed) / "results.json", result)
    results, _ = load_folders([tmp_path / "2023", tmp_path / "2024"])
    assert {label: len(members) for label, members in group_runs(results).items()} == {"SMP": 2}


def test_a_report_on_a_whole_grid(grid, fscil, tmp_path):
    folder, _, _ = grid
    status, out, err = fscil("report", folder / "grid", "-o", tmp_path / "page.html")
    assert status == 1 and err.count("is not finished") == 4  # the failed cells
    page = (tmp_path / "page.html").read_text()
    assert (
        "report on 4 runs" in out and "TEEN" in page and "Baseline" in page and "http://" not in page.split("<body")[0]
    )
    status, out, err = fscil("report", tmp_path / "nowhere")
    assert status == 2 and "does not exist" in err


# ---- into a document -----------------------------------------------------------------------------------------------


def test_splice_replaces_only_what_is_between_the_marks(tmp_path):
    path = tmp_path / "R.md"
    splice(path, {"a": "first", "b": "second"})
    assert (
        path.read_text()
        == "<!-- fscil:a -->\nfirst\n<!-- /fscil:a -->\n\n<!-- fscil:b -->\nsecond\n<!-- /fscil:b -->\n"
    )
    splice(path, {"b": "with \\1 and a | in it"})
    assert path.read_text().count("first") == 1 and "with \\1 and a | in it" in path.read_text()
    for damaged in ("<!-- fscil:a -->", "<!-- /fscil:a -->\n<!-- fscil:a -->", "<!-- fscil:a --><!-- /fscil:a -->" * 2):
        path.write_text(damaged)
        with pytest.raises(UserError, match='has no place for "a"'):
            splice(path, {"a": "x"})
        assert path.read_text() == damaged


def test_splice_keeps_the_newlines_of_the_document(tmp_path):
    path = tmp_path / "R.md"
    path.write_bytes(b"before\r\n<!-- fscil:a -->\r\nold\r\n<!-- /fscil:a -->\r\nafter\r\n")
    splice(path, {"a": "| x |\n| y |\n"})
    assert path.read_bytes() == (b"before\r\n<!-- fscil:a -->\r\n| x |\r\n| y |\r\n<!-- /fscil:a -->\r\nafter\r\n")


# ---- several processes ---------------------------------------------------------------------------------------------


def start(folder, weights, *more):
    command = [sys.executable, "-m", "fscil", "compare", "--methods", "l2p,coda,teen", "--weights", str(weights)]
    command += [*SMALL, "--set", "options.few_shot_epochs=3", "-o", str(folder), *more]
    command = [part for part in command if part]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent)


@pytest.mark.slow
def test_two_processes_share_a_grid_and_run_no_cell_twice(tmp_path, weights):
    command = ["--methods", "l2p,coda,dualprompt,l2p_plus", "--seeds", "2"]
    both = [start(tmp_path / "grid", weights, *command) for _ in range(2)]
    outputs = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]  # the same tables
    logs = list((tmp_path / "grid" / "logs").glob("*.log"))
    assert len(logs) == 8
    for log in logs:  # a process that comes too late finds the cell done and computes nothing
        assert log.read_text().count("session 2/2") == 1


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(tmp_path, weights):
    whole = start(tmp_path / "whole", weights, "--methods", "l2p,coda")
    assert whole.wait(600) == 0
    process = start(tmp_path / "grid", weights, "--methods", "l2p,coda")
    while not list((tmp_path / "grid").glob("cells/*/checkpoints/*.safetensors")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err
    again = start(tmp_path / "grid", weights, "--methods", "l2p,coda")
    out, err = again.communicate(timeout=600)
    assert again.returncode == 0, err
    logs = "".join(path.read_text() for path in (tmp_path / "grid" / "logs").glob("*.log"))
    assert "continuing from the checkpoints" in logs
    tables = [(tmp_path / name / "compare" / "glyphs.csv").read_text() for name in ("whole", "grid")]
    assert tables[0] == tables[1]


@pytest.mark.extra("tensorboard")
def test_tensorboard_logs_training_and_sessions(fscil, weights, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    status, out, err = fscil(
        "run",
        "--method",
        "baseline",
        *SMALL,
        "--weights",
        weights,
        "--tensorboard",
        "-o",
        "r",
        "--set",
        "options.batch_size=1",
    )
    assert status == 0, err
    log = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    log.Reload()
    sessions = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    logged = [event.value for event in log.Scalars("session/accuracy")]
    assert logged == pytest.approx([session["accuracy"] for session in sessions])
    assert len(log.Scalars("session/new_accuracy")) == 2  # the base session has none
