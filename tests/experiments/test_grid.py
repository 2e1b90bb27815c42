"""Grids of runs: what is planned, who may work on what, what is found in a folder, and how jobs end."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from fscil.config import resolve
from fscil.errors import UserError
from fscil.evaluation.results import find_runs, load_results
from fscil.experiments import claims
from fscil.experiments import run as protocol
from fscil.experiments.claims import claim, claim_path
from fscil.experiments.engines import LocalEngine, make_engine, run_jobs
from fscil.experiments.grid import Job, inspect, plan
from fscil.experiments.jobs import run_job
from fscil.experiments.overview import last_lines
from fscil.files import read_json, write_json

TINY = ["data.base=6", "data.way=2", "data.tasks=2", "data.limit=3", "options.epochs=2", "options.lr=0.01"]
MPCC = [*TINY, "options.views=1", "options.calibration_epochs=1"]


def tiny(method="smp", *settings, weights=None, seed=2023):
    """Float64, so that rounding decides no prediction."""
    chosen = [*(MPCC if method in ("smp", "miam", "mpcc", "baseline") else TINY), *settings, "runtime.precision=fp64"]
    return resolve(
        method, "glyphs", None, chosen, seed=seed, weights=weights and str(weights), runtime={"device": "cpu"}
    )


# ---- what is planned -----------------------------------------------------------------------------------------------


def test_each_run_is_planned_once_and_shared_parts_come_first(tmp_path):
    configs = [tiny("smp"), tiny("miam"), tiny("smp", "options.margin=0.1"), tiny("smp", "options.margin=0.2")]
    configs += [tiny("baseline"), tiny("l2p"), tiny("smp", seed=7)]
    jobs = plan(tmp_path, configs)
    passes, cells = [job for job in jobs if job.specs], [job for job in jobs if not job.specs]
    assert len(cells) == 6  # margin 0.2 is SMP's own
    assert len(passes) == 1 and jobs[0] is passes[0]
    assert set(passes[0].specs) == {(0.0, 16.0, False), (0.1, 16.0, False), (0.2, 16.0, False), (0.0, 1.0, True)}
    after = {(job.config.method, job.config.seed): job.after for job in cells}
    assert after["smp", 2023] == after["baseline", 2023] == passes[0].name
    assert after["l2p", 2023] is None  # trains prompts
    assert after["smp", 7] is None  # alone with its seed: it trains its two sets itself


def test_runs_that_differ_after_the_base_task_share_its_model(tmp_path):
    configs = [tiny("smp"), tiny("smp", "data.shots=1"), tiny("smp", "options.calibration_margin=0.0")]
    shared = {job.apart: job.share_base for job in plan(tmp_path, [*configs, tiny("smp", "options.margin=0.1")])}
    assert [shares for _, shares in sorted(shared.items())].count(True) == 3
    assert not shared[", margin=0.1"]
    rank = [tiny("smp"), tiny("smp", "options.rank=4")]
    assert not any(job.share_base for job in plan(tmp_path, rank))


def test_a_job_travels_as_json(tmp_path):
    for job in plan(tmp_path, [tiny("smp"), tiny("baseline")]):
        again = Job.from_dict(json.loads(json.dumps(job.to_dict())))
        assert again == job and again.name == job.name


# ---- sharing changes nothing ---------------------------------------------------------------------------------------


def test_cells_of_a_grid_give_what_single_runs_give(tmp_path, weights):
    """Adapters of one common pass, a base model and Fisher norms from the shelf, against runs that know of no shelf."""
    configs = [
        tiny("smp", weights=weights),
        tiny("smp", "data.shots=2", weights=weights),
        tiny("mpcc", weights=weights),
    ]
    jobs = plan(tmp_path / "grid", configs)
    assert [bool(job.specs) for job in jobs] == [True, False, False, False]
    for job in jobs:
        assert run_job(job.to_dict())["state"] == "done", last_lines(job.log)
    reused = [read_json(job.folder / "results.json")["sessions"][0]["parts_from_shelf"] for job in jobs[1:]]
    assert reused[0] == 2 and reused[1] == 1 and reused[2] == 1  # both sets; the whole base model; its one set
    for number, job in enumerate(jobs[1:]):
        alone = protocol.run(job.config, tmp_path / f"alone{number}")
        shared = load_results(job.folder)
        assert shared.summary["accuracies"] == alone.summary["accuracies"]
        assert shared.confusion == alone.confusion
        for ours, theirs in zip(shared.sessions, alone.sessions):
            for name, values in theirs["diagnostics"].items():
                if name in ("fisher_norms", "merge_weights"):
                    torch.testing.assert_close(torch.tensor(ours["diagnostics"][name]), torch.tensor(values))


def test_a_cell_killed_at_any_point_goes_on(tmp_path, weights):
    job = plan(tmp_path, [tiny("smp", weights=weights)])[0]
    whole = protocol.run(job.config, tmp_path / "whole")
    job.folder.mkdir(parents=True)
    (job.folder / ".lock").touch()  # killed while the data were read
    (job.folder / "shots.json").write_text("{}")
    script = (
        "import os, sys, json\n"
        "from fscil.experiments.jobs import run_job\n"
        "from fscil.experiments.keeper import RunKeeper\n"
        "save = RunKeeper.save\n"
        "def last_words(self, stage, tensors):\n"
        "    save(self, stage, tensors)\n"
        "    os.kill(os.getpid(), 9)\n"
        "RunKeeper.save = last_words\n"
        "run_job(json.loads(sys.argv[1]))\n"
    )
    for _ in range(2):  # each attempt gets one epoch further
        dead = subprocess.run([sys.executable, "-c", script, json.dumps(job.to_dict())], capture_output=True)
        assert dead.returncode == -signal.SIGKILL
        assert inspect(job.folder, job.config)[0] == "unfinished"
    assert run_job(job.to_dict())["state"] == "done"
    log = job.log.read_text()
    assert log.count("continuing from the checkpoints") == 2 and "going on after epoch 1" in log
    assert "going on after epoch 2" in log
    assert load_results(job.folder).confusion == whole.confusion


# ---- folders -------------------------------------------------------------------------------------------------------


def test_what_is_in_the_way_is_named_and_left_alone(tmp_path):
    job = plan(tmp_path, [tiny()])[0]
    assert inspect(job.folder, job.config) == ("new", "")
    job.folder.mkdir(parents=True)
    (job.folder / "holiday.jpg").touch()
    state, why = inspect(job.folder, job.config)
    assert state == "foreign" and "holiday.jpg" in why
    outcome = run_job(job.to_dict())
    assert outcome["state"] == "failed" and "holiday.jpg" in outcome["error"]
    assert (job.folder / "holiday.jpg").exists()
    assert "holiday.jpg" in last_lines(job.log)[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"config": {"method": "smp"}}, "another configuration (data.base: null -> 6"),
        ({"config": {"methud": "smp"}}, 'unknown key "methud"'),
    ],
)
def test_results_that_are_not_this_cell_s(tmp_path, change, said):
    job = plan(tmp_path, [tiny("smp", "options.margin=0.1")])[0]
    write_json(job.folder / "results.json", {"config": job.config.to_dict(), **change})
    state, why = inspect(job.folder, job.config)
    assert state == "foreign" and said in why, why


def test_find_runs_among_other_folders(tmp_path):
    for name in ("b/deep", "a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "c").mkdir()
    assert find_runs([tmp_path]) == [tmp_path / "a", tmp_path / "b/deep"]
    assert find_runs([tmp_path / "a", tmp_path]) == [tmp_path / "a", tmp_path / "b/deep"]
    with pytest.raises(UserError, match="holds none"):
        find_runs([tmp_path / "c"])
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


# ---- claims --------------------------------------------------------------------------------------------------------

HOLD = (
    "import json, sys, time\n"
    "from fscil.experiments.claims import claim\n"
    "from fscil.experiments.grid import Job\n"
    "with claim(Job.from_dict(json.loads(sys.argv[1]))) as mine:\n"
    "    print('mine' if mine else 'busy', flush=True)\n"
    "    time.sleep(60)\n"
)


def test_a_claim_excludes_others_until_its_process_is_gone(tmp_path):
    job = plan(tmp_path, [tiny()])[0]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, json.dumps(job.to_dict())], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "mine"
        with claim(job) as mine:
            assert mine is None
        assert claims.owner_of(claim_path(job))["pid"] == holder.pid
        outcome = run_job(job.to_dict())
        assert outcome["state"] == "busy" and outcome["owner"]["pid"] == holder.pid
        holder.kill()
        holder.wait()
        with claim(job) as mine:  # what it wrote is still there, but nobody stands behind it
            assert mine is not None
            assert claims.owner_of(claim_path(job))["pid"] == os.getpid()
        assert not claim_path(job).exists()
    finally:
        holder.kill()
        holder.wait()


def test_another_machine_s_claim_counts_while_it_shows_signs_of_life(tmp_path):
    """Where locks do not reach other machines, the claim's age decides."""
    job = plan(tmp_path, [tiny()])[0]
    path = claim_path(job)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 0.0, "doing": ""}))
    with claim(job) as mine:
        assert mine is None
    ahead = time.time() + 1e6  # its clock jumped, or ours did: somebody may still be there
    os.utime(path, (ahead, ahead))
    with claim(job) as mine:
        assert mine is None and claims.owner_of(path)["silent"] == 0
    long_ago = time.time() - 2 * claims.SILENT
    os.utime(path, (long_ago, long_ago))
    with claim(job) as mine:
        assert mine is not None


# ---- engines -------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine whose jobs end as told, one at a time, and which remembers the order."""

    workers = 1

    def __init__(self, *outcomes):
        self.outcomes, self.current, self.order = list(outcomes), None, []

    def free(self):
        return self.current is None

    def submit(self, job):
        self.current = job
        self.order.append(job)

    def poll(self, seconds):
        if self.current is None:
            return []
        job, self.current = self.current, None
        return [(job, self.outcomes.pop(0) if self.outcomes else {"state": "failed", "error": "told to"})]


def test_the_rest_goes_on_when_a_job_fails_and_cells_come_after_their_adapters(tmp_path):
    jobs = plan(tmp_path, [tiny("l2p"), tiny("smp"), tiny("baseline")])
    engine = Scripted()
    overview = run_jobs(jobs, engine, quiet=True)
    assert [job.name for job in engine.order] == [job.name for job in jobs]  # also after the adapters failed
    assert overview.count("failed") == 4 and len(overview.errors) == 4


def test_a_job_of_another_process_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("fscil.experiments.engines.ASK_AGAIN", 0.01)
    monkeypatch.setattr("fscil.experiments.engines.POLL", 0.01)
    monkeypatch.setattr("fscil.experiments.engines._result", lambda job: "")
    jobs = plan(tmp_path, [tiny("l2p"), tiny("l2p_plus")])
    engine = Scripted({"state": "busy", "owner": None}, {"state": "done"}, {"state": "busy"}, {"state": "done"})
    overview = run_jobs(jobs, engine, quiet=True)
    assert overview.count("done") == 2
    assert [job.config.method for job in engine.order] == ["l2p", "l2p_plus", "l2p", "l2p"]


def test_time_left_comes_from_like_jobs(tmp_path):
    from fscil.experiments.overview import Overview

    jobs = plan(tmp_path, [tiny("l2p"), tiny("l2p", seed=1), tiny("l2p", seed=2), tiny("coda")])
    overview = Overview(jobs, workers=2, quiet=True)
    assert overview.left() is None
    overview.finish(jobs[0], 10.0, "")
    assert overview.left() == pytest.approx(3 * 10.0 / 2)
    overview.finish(jobs[3], 30.0, "")
    assert overview.left() == pytest.approx(2 * 10.0 / 2)


def test_a_worker_that_dies_fails_its_job_alone(tmp_path):
    """The first job finds its worker killed under it; the next one gets a new worker."""
    job = plan(tmp_path, [tiny("l2p")])[0]
    blocked = Job(tmp_path, replace(job.config, seed=5))
    blocked.folder.mkdir(parents=True)
    (blocked.folder / "other").touch()
    with LocalEngine(1) as engine:
        engine.submit(job)
        os.kill(engine.slots[0].worker.process.pid, signal.SIGKILL)
        ended = []
        while not ended:
            ended = engine.poll(1.0)
        assert ended[0][0] == job and "signal 9" in ended[0][1]["error"]
        engine.submit(blocked)
        ended = []
        while not ended:
            ended = engine.poll(1.0)
        assert ended[0][1]["state"] == "failed" and "other" in ended[0][1]["error"]


def test_engines_by_name():
    with pytest.raises(UserError, match='Did you mean "local"'):
        make_engine("locale")
    with pytest.raises(UserError, match="--jobs is 0"):
        make_engine("local", jobs=0)
    with pytest.raises(UserError, match="--engine ray"):
        make_engine("local", address="here:1")
