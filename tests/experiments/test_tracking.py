"""Trackers: what a run sends to each, to modules that take what the real ones take and write it down."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import pytest

from fscil.config import RuntimeConfig
from fscil.errors import UserError
from fscil.experiments.tracking import trackers_of

SMALL = "--limit 2 --set data.base=4 --set data.way=2 --set data.tasks=1 --set options.epochs=1 --quiet".split()


def module(name: str, **functions) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(functions)
    return made


@pytest.fixture
def wandb(monkeypatch):
    """`wandb.init` and the run it gives, with the signatures of wandb."""
    heard = {"logged": [], "axes": {}, "finished": 0}

    class Run:
        def log(self, data, step=None, commit=None):
            heard["logged"].append(data)

        def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None):
            heard["axes"][name] = step_metric

        def finish(self, exit_code=None, quiet=None):
            heard["finished"] += 1

    def init(entity=None, project=None, dir=None, id=None, name=None, *, config=None, **more):
        heard["init"] = {"project": project, "name": name, "config": config}
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=init))
    return heard


@pytest.fixture
def mlflow(monkeypatch):
    """The fluent functions of mlflow."""
    heard = {"metrics": [], "ended": 0}

    def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, **more):
        heard["name"] = run_name

    def end_run(status="FINISHED"):
        heard["ended"] += 1

    functions = {
        "set_experiment": lambda experiment_name=None, experiment_id=None: heard.update(experiment=experiment_name),
        "start_run": start_run,
        "log_params": lambda params, synchronous=None, run_id=None: heard.update(params=params),
        "log_metrics": lambda metrics, step=None, synchronous=None: heard["metrics"].append((metrics, step)),
        "end_run": end_run,
    }
    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", **functions))
    return heard


def test_a_run_is_tracked_by_both(fscil, weights, tmp_path, wandb, mlflow, monkeypatch):
    monkeypatch.setattr("fscil.methods.training.REPORT_EVERY", 2)
    arguments = ["run", "--method", "baseline", *SMALL, "--set", "options.batch_size=1"]
    status, _, err = fscil(*arguments, "--weights", weights, "--track", "wandb, mlflow", "-o", "r")
    assert status == 0, err
    sessions = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [session["accuracy"] for session in sessions]
    assert [data["session/accuracy"] for data in wandb["logged"] if "session/accuracy" in data] == accuracies
    assert [data["session/step"] for data in wandb["logged"] if "session/step" in data] == [0, 1]
    assert wandb["axes"]["session/*"] == "session/step" and wandb["finished"] == 1
    assert wandb["init"]["name"] == "r" and wandb["init"]["config"]["method"] == "baseline"
    logged = [
        (metrics["session/accuracy"], step) for metrics, step in mlflow["metrics"] if "session/accuracy" in metrics
    ]
    assert logged == list(zip(accuracies, [0, 1])) and mlflow["ended"] == 1
    assert mlflow["params"]["data.base"] == "4" and mlflow["experiment"] == "fscil" and mlflow["name"] == "r"
    losses = [key for metrics, _ in mlflow["metrics"] for key in metrics if key.endswith("/loss")]
    assert losses and not any(set(key) & set("()[],:=") for key in losses)  # letters that mlflow refuses
    assert sum("loss" in key for data in wandb["logged"] for key in data) == len(losses)


def test_a_run_that_fails_still_closes_its_trackers(fscil, weights, wandb, monkeypatch):
    def fail(*_, **__):
        raise UserError("the disk is full")

    monkeypatch.setattr("fscil.experiments.run._learn_all", fail)
    status, _, _ = fscil("run", *SMALL, "--weights", weights, "--track", "wandb", "-o", "r")
    assert status == 2 and wandb["finished"] == 1


def test_unknown_and_missing_trackers_are_said_before_anything_is_done(fscil, tmp_path, monkeypatch):
    status, _, err = fscil("run", *SMALL, "--track", "abacus", "-o", "r")
    assert status == 2 and '--track (runtime.trackers) "abacus" is not one of tensorboard, wandb, mlflow' in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'tracked by wandb, .* pip install "fscil\[wandb\]"'):
        trackers_of(RuntimeConfig(trackers="wandb"))
    assert not (tmp_path / "r").exists()


def test_one_that_is_asked_for_twice_is_one():
    pytest.importorskip("tensorboard")
    assert trackers_of(RuntimeConfig(tensorboard=True, trackers="tensorboard")) == ["tensorboard"]


def test_one_that_cannot_be_started_is_one_line_and_the_run_goes_on_later(fscil, weights, tmp_path, wandb, monkeypatch):
    """As wandb without a login, or mlflow whose server does not answer."""
    init = sys.modules["wandb"].init

    def refused(**_):
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(sys.modules["wandb"], "init", refused)
    status, _, err = fscil("run", "--method", "baseline", *SMALL, "--weights", weights, "--track", "wandb", "-o", "r")
    assert status == 2 and len(err.splitlines()) == 1, err
    assert "wandb could not be started (No API key configured. Use `wandb login` to log in.)" in err
    assert 'go on with: fscil run --resume "r"' in err
    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    status, _, err = fscil("run", "--resume", "r", "--quiet")
    assert status == 0 and wandb["finished"] == 1, err
    assert (tmp_path / "r" / "results.json").exists()
