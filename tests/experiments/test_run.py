"""A whole run on a tiny ViT: the folder, resuming at every point, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

import probe_world
from fscil.errors import UserError
from fscil.evaluation.results import load_results
from fscil.experiments import run as protocol
from fscil.experiments import run_folder
from fscil.files import load_tensors, read_json
from fscil.methods.represented import Represented
from probe_world import (
    BASE,
    TASKS,
    WAY,
    Probe,
    Stop,
    numbers,
    rehash,
    run,
    state,
    stopped,
    tiny_backbone,
    tiny_config,
    tiny_stream,
)

pytestmark = pytest.mark.usefixtures("probe")


def test_a_run_leaves_a_complete_folder(tmp_path):
    folder = tmp_path / "run"
    results = run(folder)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        *("config.yaml", "split.json", "shots.json", "metrics.jsonl", "results.json", "accuracy.png", "hashes.json"),
        *(f"predictions/session_{t}.safetensors" for t in range(TASKS + 1)),
        *("checkpoints/session_0.safetensors", f"checkpoints/session_{TASKS}.safetensors"),
    }
    assert read_json(folder / "results.json") == results.to_dict()
    assert load_results(folder) == results
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == results.sessions and [line["seen"] for line in lines] == [4, 6, 8]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["options"] == {"epochs": 3, "lr": 0.1} and config["transform"]["size"] == 16
    assert read_json(folder / "split.json")["split_hash"] == "hash0"
    assert read_json(folder / "shots.json")["tasks"] == {
        "1": {"4": [0, 1], "5": [0, 1]},
        "2": {"6": [0, 1], "7": [0, 1]},
    }
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert results.environment["backbone"]["hash"] == tiny_backbone().hash
    assert results.sessions[0]["diagnostics"]["loss"] is None  # not a number has no place in JSON


def test_the_stored_predictions_give_the_stored_accuracy(tmp_path):
    results = run(tmp_path / "run")
    labels = tiny_stream().test_labels
    for session in results.sessions:
        tensors, _ = load_tensors(tmp_path / "run" / "predictions" / f"session_{session['session']}.safetensors")
        assert torch.equal(labels[tensors["images"].long()], tensors["labels"].long())
        hits = (tensors["labels"] == tensors["top"][:, 0]).double().mean()
        assert session["accuracy"] == pytest.approx(100 * float(hits), abs=1e-9)
        assert tensors["top"].shape == (session["seen"] * 4, min(5, session["seen"]))
        assert tensors["labels"].max() == session["seen"] - 1
    assert np.sum(results.confusion) == len(labels)
    assert results.summary["A_final"] > 100 / (BASE + WAY * TASKS)  # better than guessing


def test_fixed_features_are_computed_once_and_change_nothing(tmp_path):
    fixed = run(tmp_path / "fixed")
    assert Probe.feature_calls == [len(tiny_stream().test)]
    thawed = run(tmp_path / "thawed", tiny_config("thawed"))
    assert Probe.feature_calls == [len(tiny_stream().test)]
    for session in (*fixed.sessions, *thawed.sessions):
        session.pop("open_set")  # costs a look at further images where features move, so it is not told there
    assert numbers(fixed) == numbers(thawed)


@pytest.mark.parametrize("stop_at", [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, stop_at):
    whole = run(tmp_path / "whole")
    monkeypatch.setattr(Probe, "stop_at", stop_at)
    with pytest.raises(Stop):
        run(tmp_path / "parts")
    monkeypatch.setattr(Probe, "stop_at", None)
    torch.manual_seed(99)  # nothing may hang on the global generator
    parts = run(tmp_path / "parts", resume=True)
    assert numbers(parts) == numbers(whole)
    one, other = state(tmp_path / "whole"), state(tmp_path / "parts")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert not list((tmp_path / "parts" / "checkpoints").glob("task_*"))


def test_a_resumed_run_keeps_the_diagnostics_of_the_base_task(tmp_path, monkeypatch):
    """A head that has nothing to tell of a task leaves what was told before."""
    config, learn = tiny_config("smp", epochs=1, rank=2, calibration="prototypes"), Represented.learn

    def stop(method, task):
        if task.index == 2:
            raise Stop
        learn(method, task)

    whole = run(tmp_path / "whole", config)
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(Represented, "learn", stop)
        run(tmp_path / "parts", config)
    parts = run(tmp_path / "parts", resume=True, config=config)
    assert parts.sessions[2]["diagnostics"]["fisher_norms"]
    assert [s["diagnostics"] for s in parts.sessions] == [s["diagnostics"] for s in whole.sessions]


def test_resuming_after_a_crash_between_metrics_and_checkpoint(tmp_path, monkeypatch):
    """The line of a session may be on disk when its checkpoint is not: the session is then done again, once."""
    whole = run(tmp_path / "whole")
    real = run_folder.save_tensors

    def fail(path, *rest):
        if path.name == "session_1.safetensors" and path.parent.name == "checkpoints":
            raise Stop
        real(path, *rest)

    monkeypatch.setattr(run_folder, "save_tensors", fail)
    with pytest.raises(Stop):
        run(tmp_path / "parts")
    assert len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(run_folder, "save_tensors", real)
    assert numbers(run(tmp_path / "parts", resume=True)) == numbers(whole)


def test_the_same_seed_gives_the_same_numbers_and_another_one_does_not(tmp_path):
    first, again = run(tmp_path / "a"), run(tmp_path / "b")
    other = run(tmp_path / "c", replace(tiny_config(), seed=7))
    assert numbers(first) == numbers(again)
    assert not torch.equal(state(tmp_path / "a")["map"], state(tmp_path / "c")["map"])
    assert other.config["seed"] == 7


def test_all_checkpoints_stay_when_asked_for(tmp_path):
    config = tiny_config()
    run(tmp_path / "run", replace(config, runtime=replace(config.runtime, keep="all")))
    assert len(list((tmp_path / "run" / "checkpoints").glob("session_*"))) == TASKS + 1


def test_a_finished_run_is_not_resumed(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(UserError, match="finished"):
        run(tmp_path / "run", resume=True)


def test_another_configuration_is_refused_and_named(tmp_path, monkeypatch):
    stopped(tmp_path / "run", monkeypatch)
    with pytest.raises(UserError, match="another configuration.*options.lr: 0.1 -> 0.5"):
        run(tmp_path / "run", tiny_config(lr=0.5), resume=True)


def test_other_data_are_refused(tmp_path, monkeypatch):
    stopped(tmp_path / "run", monkeypatch)
    with pytest.raises(UserError, match="split hash0.*hash3"):
        run(tmp_path / "run", stream=tiny_stream(3), resume=True)
    stream = tiny_stream()
    stream.shots[1]["4"] = [1, 0]
    with pytest.raises(UserError, match="other shots"):
        run(tmp_path / "run", stream=stream, resume=True)


@pytest.mark.parametrize("name", ["config.yaml", "split.json", "shots.json"])
def test_a_folder_of_a_newer_format_is_refused(tmp_path, monkeypatch, name):
    stopped(tmp_path / "run", monkeypatch)
    path = tmp_path / "run" / name
    path.write_text(
        path.read_text().replace("format_version: 1", "format_version: 9").replace('version": 1', 'version": 9')
    )
    rehash(tmp_path / "run")
    with pytest.raises(UserError, match="format version 9"):
        run(tmp_path / "run", resume=True)


def test_folders_that_are_no_place_for_a_run_are_refused(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a run folder"):
        run(tmp_path / "empty", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "file")
    with pytest.raises(UserError, match="cannot write"):
        run(tmp_path / "file" / "below")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").write_text("")
    with pytest.raises(UserError, match="not empty; name another folder"):
        run(tmp_path / "full")
    stopped(tmp_path / "run", monkeypatch)
    with pytest.raises(UserError, match="--resume"):
        run(tmp_path / "run")
    with pytest.raises(UserError, match="not finished"):
        load_results(tmp_path / "run")
    with pytest.raises(UserError, match="not a run folder"):
        load_results(tmp_path / "empty")


def test_a_start_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    def full(*_):
        raise UserError("cannot write: the disk is full")

    monkeypatch.setattr(run_folder, "write_config", full)
    with pytest.raises(UserError, match="disk is full"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_processes_cannot_write_one_run(tmp_path, monkeypatch):
    from filelock import FileLock

    stopped(tmp_path / "run", monkeypatch)
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(UserError, match="in use"):
        run(tmp_path / "run", resume=True)
    run(tmp_path / "run", resume=True)


def test_new_folders_count_up(tmp_path):
    config = tiny_config()
    first = run_folder.new_folder(config, tmp_path)
    first.mkdir()
    assert (first.name, run_folder.new_folder(config, tmp_path).name) == (
        "glyphs-probe-seed2023-1",
        "glyphs-probe-seed2023-2",
    )


def test_the_estimate_grows_with_the_work(tmp_path):
    from fscil.display import LiveDisplay
    from fscil.experiments.cost import estimate

    stream, backbone = tiny_stream(), tiny_backbone()
    runtime = protocol.make_runtime(tiny_config(), LiveDisplay(quiet=True))
    short, long = (estimate(tiny_config(epochs=n), stream, backbone, runtime) for n in (1, 10))
    base, shots, test = len(stream.tasks[0].images), WAY * TASKS * 2, len(stream.test)
    assert short.passes == pytest.approx(base * (1 + 2.3) + shots + test)
    assert long.passes == pytest.approx(short.passes + 9 * 2.3 * base)
    thawed = estimate(tiny_config("thawed", epochs=1), stream, backbone, runtime)  # tested anew after every task
    assert thawed.passes == pytest.approx(short.passes + 4 * (BASE + BASE + WAY))
    assert short.memory > 0 and "estimate: about" in str(short)
    assert "micro_batch" in str(replace(short, memory=2 * short.available))


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_how_to_resume_and_can_be(tmp_path, number):
    """The real command in a process of its own, stopped by a signal in the second task."""
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells pass it on as ignored
        sys.path.insert(0, {os.path.dirname(probe_world.__file__)!r})
        import probe_world as t
        from fscil import cli, registry
        from fscil.experiments import run as protocol
        registry.METHODS["probe"] = registry.MethodEntry("probe_world:Probe", "probe", "for tests")
        real_run, real_learn = protocol.run, t.Probe.learn
        def run(config, *rest, **named):
            return real_run(config, *rest, **named, stream=t.tiny_stream(), backbone=t.tiny_backbone())
        def learn(self, task):
            if task.index == 1 and "--resume" not in sys.argv:
                os.kill(os.getpid(), {int(number)})
            real_learn(self, task)
        protocol.run, t.Probe.learn = run, learn
        cli.main()
        """
    )
    folder = tmp_path / "run"
    sizes = ["--set", "transform.size=16", "--set", "transform.resize=16"]
    command = [sys.executable, "-c", script, "run"]
    first = subprocess.run([*command, "--method", "probe", "-o", folder, *sizes], capture_output=True, text=True)
    assert first.returncode == 130, first.stderr
    assert first.stderr.splitlines()[-1] == f"stopped; go on with: fscil run --resume {folder}"
    assert "Traceback" not in first.stderr
    if number == signal.SIGTERM:  # the rest is the same
        return
    second = subprocess.run([*command, "--resume", folder], capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "A_avg" in second.stdout
    whole = run(tmp_path / "whole", tiny_config())
    results = load_results(folder)
    assert [s["accuracy"] for s in results.sessions] == [s["accuracy"] for s in whole.sessions]
