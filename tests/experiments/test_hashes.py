"""Damage to a run folder is noticed and named wherever the run is read; a kill at any moment is no damage."""

import json
import logging
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from fscil.config import read_config
from fscil.errors import UserError
from fscil.evaluation.charts import Chart
from fscil.evaluation.hashes import RunHashes
from fscil.evaluation.report import write_report
from fscil.evaluation.results import load_results
from fscil.experiments.comparison import load_cells, load_folders
from fscil.experiments.grid import Job
from fscil.experiments.verify import verify
from fscil.files import digest_file, load_tensors, read_json
from probe_world import (
    TASKS,
    Probe,
    ProbeOptions,
    Stop,
    numbers,
    rehash,
    run,
    stopped,
    tiny_config,
    tiny_stream,
    unhash,
)

pytestmark = pytest.mark.usefixtures("probe")


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    monkeypatch.setattr(Chart, "rendered", lambda self, suffix: b"a picture")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def append(path):
    path.write_bytes(path.read_bytes() + b"\n")


def delete(path):
    path.unlink()


DAMAGES = [flip, truncate, append, delete]


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damaged_copies(folder, damage):
    """(name of the damaged file, folder) for every file of a run."""
    for name in files_of(folder):
        copy = folder.with_name(f"{folder.name}-damaged")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        damage(copy / name)
        yield name, copy


def test_every_file_of_a_run_is_listed_with_its_hash(tmp_path):
    run(tmp_path / "run")
    listed = read_json(tmp_path / "run" / "hashes.json")["files"]
    assert sorted([*listed, "hashes.json"]) == files_of(tmp_path / "run")
    for name, entry in listed.items():
        path = tmp_path / "run" / name
        assert entry == {"sha256": digest_file(path), "bytes": path.stat().st_size}
    assert load_results(tmp_path / "run").hashed and "unhashed" not in repr(load_results(tmp_path / "run"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_of_a_finished_run_is_noticed(tmp_path, damage):
    run(tmp_path / "run")
    for name, copy in damaged_copies(tmp_path / "run", damage):
        with pytest.raises(UserError, match=re.escape(f'"{copy / name}"')):
            load_results(copy)
        with pytest.raises(UserError, match=re.escape(f'"{copy / name}"')):
            write_report([copy], tmp_path / "report.html", images=False)
        results, problems = load_folders([copy])
        assert results == [] and len(problems) == 1 and f'"{copy / name}"' in problems[0]
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("stop_at", [(1, 0), (2, 0)])
def test_damage_to_any_file_of_an_unfinished_run_is_noticed(tmp_path, monkeypatch, damage, stop_at):
    stopped(tmp_path / "run", monkeypatch, stop_at)
    assert len(files_of(tmp_path / "run")) == 7 + 2 * (stop_at[0] - 1)
    for name, copy in damaged_copies(tmp_path / "run", damage):
        with pytest.raises(UserError, match=re.escape(name)):
            run(copy, resume=True)
        assert files_of(copy) == [other for other in files_of(tmp_path / "run") if other != name or damage != delete]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_inside_a_task_is_noticed(tmp_path, monkeypatch, caplog, damage):
    """Progress of training that was lost is learned again, with a line that says so; what was altered is refused."""
    whole = run(tmp_path / "whole")
    stopped(tmp_path / "run", monkeypatch, (0, 1))
    name = "checkpoints/task_0_map.safetensors"
    assert name in files_of(tmp_path / "run")
    damage(tmp_path / "run" / name)
    if damage is delete:
        with caplog.at_level(logging.WARNING, "fscil"):
            assert numbers(run(tmp_path / "run", resume=True)) == numbers(whole)
        assert name in caplog.text
        return
    with pytest.raises(UserError, match=re.escape(name)):
        run(tmp_path / "run", resume=True)
    (tmp_path / "run" / name).unlink()
    assert numbers(run(tmp_path / "run", resume=True)) == numbers(whole)


def test_a_line_that_is_missing_is_not_learned_again(tmp_path, monkeypatch):
    """Also in a run from before there were hashes."""
    for name in ("hashed", "unhashed"):
        folder = tmp_path / name
        stopped(folder, monkeypatch, (2, 0))
        if name == "unhashed":
            unhash(folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert len(lines) == 2
        (folder / "metrics.jsonl").write_text(lines[0])
        with pytest.raises(UserError, match="metrics.jsonl"):
            run(folder, resume=True)


def test_a_kill_at_any_moment_leaves_a_run_that_goes_on(tmp_path, monkeypatch):
    """Stop before the first, the second, … file that a run puts in place or removes; then resume as usual."""
    whole = run(tmp_path / "whole")
    put_in_place, remove, left = os.replace, Path.unlink, 0

    def step():
        nonlocal left
        if left == 0:
            raise Stop
        left -= 1

    def replace_or_die(source, target):
        step()
        put_in_place(source, target)

    def unlink_or_die(path, missing_ok=False):
        if path.name.startswith(("session_", "task_")) and path.exists():
            step()
        remove(path, missing_ok)

    count, ended = 0, False
    while not ended:
        folder, left = tmp_path / f"run{count}", count
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_or_die)
            patch.setattr(Path, "unlink", unlink_or_die)
            try:
                run(folder)
                ended = True
            except Stop:
                pass
        if not ended:
            results = run(folder, resume=(folder / "config.yaml").exists())
            assert numbers(results) == numbers(whole) == numbers(load_results(folder)), count
            assert files_of(folder) == files_of(tmp_path / "whole"), count
            count += 1
    # the split, the shots, the configuration (aside, its list, itself); three epochs and their list; of every session
    # predictions, metrics, checkpoint, list; the progress and a checkpoint removed; the picture; the results, as above
    assert count == 2 + 3 + (3 + 1) + 4 * (TASKS + 1) + 2 + 1 + 3


def test_results_that_are_lost_are_made_again(tmp_path):
    whole = run(tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    with pytest.raises(UserError, match=r"results.json.* is missing; make it again with: fscil run --resume"):
        load_results(tmp_path / "run")
    assert numbers(run(tmp_path / "run", resume=True)) == numbers(whole) == numbers(load_results(tmp_path / "run"))


def test_a_run_from_before_there_were_hashes_is_read_and_resumed(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    unhash(tmp_path / "whole")
    read = load_results(tmp_path / "whole")
    assert read.to_dict() == whole.to_dict() and not read.hashed and "unhashed" in repr(read)
    stopped(tmp_path / "run", monkeypatch, (2, 0))
    unhash(tmp_path / "run")
    results = run(tmp_path / "run", resume=True)
    assert numbers(results) == numbers(whole) and not results.hashed
    assert not (tmp_path / "run" / "hashes.json").exists()


@pytest.mark.parametrize("stop_at", [(0, 1), (1, 0)])
def test_a_run_from_before_an_option_was_there_is_resumed(tmp_path, monkeypatch, stop_at):
    """Its files carry the fingerprint of a configuration without the option; a finished one still passes."""

    @dataclass(frozen=True)
    class Later(ProbeOptions):
        form: str = "new"
        earlier: ClassVar = {"form": "old"}

    folder, finished = tmp_path / "run", tmp_path / "finished"
    stopped(folder, monkeypatch, stop_at)
    run(finished)
    before = {path: path.read_bytes() for path in folder.glob("checkpoints/task_*")}
    monkeypatch.setattr(Probe, "Options", Later)
    now, first = read_config(folder / "config.yaml"), Probe.raw
    assert now.options["form"] == "old"
    looks = []
    monkeypatch.setattr(Probe, "raw", lambda self, images: looks.append(len(images)) or first(self, images))
    whole = run(tmp_path / "whole", now)
    trained = len(looks)
    results = run(folder, now, resume=True)
    assert numbers(results)[1] == numbers(whole)[1] and len(looks) - trained == (trained if before else trained - 1)
    for place in (folder, finished):
        assert {check.name: check.state for check in verify(place)}["settings"] == "ok"
    with pytest.raises(UserError, match="another configuration"):
        stopped(tmp_path / "other", monkeypatch)
        run(tmp_path / "other", tiny_config(form="newest"), resume=True)


def test_a_list_names_files_of_its_folder_only(tmp_path):
    for name in ("/etc/passwd", "../elsewhere", "checkpoints/../../elsewhere"):
        RunHashes(tmp_path, {name: {"sha256": "0", "bytes": 0}}).write()
        with pytest.raises(UserError, match=re.escape(name)):
            RunHashes.read(tmp_path)


def test_progress_carries_its_own_hash(tmp_path, monkeypatch):
    stopped(tmp_path / "run", monkeypatch, (0, 1))
    tensors, _ = load_tensors(tmp_path / "run" / "checkpoints" / "task_0_map.safetensors")
    assert len(tensors["sha256"]) == 32 and read_json(tmp_path / "run" / "hashes.json")["progress"] == [
        "checkpoints/task_0_map.safetensors"
    ]


def test_a_list_of_a_newer_format_is_refused(tmp_path):
    run(tmp_path / "run")
    path = tmp_path / "run" / "hashes.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    with pytest.raises(UserError, match="format version 9"):
        load_results(tmp_path / "run")


def test_a_damaged_cell_of_a_grid_is_named_and_counts_as_missing(tmp_path):
    jobs = [Job(tmp_path, replace(tiny_config(), seed=seed)) for seed in (1, 2)]
    for job in jobs:
        run(job.folder, job.config)
    flip(jobs[0].folder / "checkpoints" / "session_0.safetensors")
    results, problems = load_cells(jobs)
    assert list(results) == [jobs[1].name]
    assert len(problems) == 1 and f"{jobs[0].name}/checkpoints/session_0.safetensors" in problems[0]


def test_a_damaged_run_is_left_out_of_a_comparison(tmp_path, fscil):
    for seed in (1, 2):
        run(tmp_path / f"run{seed}", replace(tiny_config("probe"), seed=seed), tiny_stream())
    rehash(tmp_path / "run1")  # nothing changed, so nothing is wrong with it
    flip(tmp_path / "run2" / "predictions" / "session_1.safetensors")
    status, out, err = fscil("compare", tmp_path / "run1", tmp_path / "run2")
    assert status == 1 and "predictions/session_1.safetensors" in err and "One seed." in out
