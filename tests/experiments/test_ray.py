"""A real Ray cluster on this machine: a worker is killed in the middle of a cell, and the table is the same."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fscil.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.extra("cluster"), pytest.mark.timeout(1200)]


def compare(folder, weights, *more):
    command = [sys.executable, "-m", "fscil", "compare", "--methods", "smp,coda", "--weights", str(weights)]
    for setting in ("data.base=10", "data.way=2", "data.tasks=2", "options.epochs=8"):
        command += ["--set", setting]
    command += ["--limit", "20", "--device", "cpu", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_worker_s_cell_goes_on_from_its_checkpoint_and_the_table_is_the_same(weights, tmp_path):
    from fscil.experiments.claims import owner_of

    local = compare(tmp_path, weights, "-o", "local")
    assert local.wait(600) == 0, local.stderr.read()

    cluster = compare(tmp_path, weights, "-o", "ray", "--engine", "ray", "--cpus", "1")
    killed = None
    deadline = time.time() + 600
    while killed is None:
        assert cluster.poll() is None and time.time() < deadline, cluster.stderr.read()
        # in the middle of the base task: an epoch is kept, and the cell is still claimed
        kept = list((tmp_path / "ray").glob("cells/*-smp-*/checkpoints/task_0_*.safetensors"))
        owner = owner_of(tmp_path / "ray" / "claims" / f"{kept[0].parent.parent.name}.json") if kept else None
        if owner:
            os.kill(owner["pid"], signal.SIGKILL)
            killed = owner["pid"], kept[0].parent.parent.name
        time.sleep(0.02)
    out, err = cluster.communicate(timeout=600)
    assert cluster.returncode == 0, err

    tables = [(tmp_path / engine / "compare" / "glyphs.csv").read_text() for engine in ("local", "ray")]
    assert tables[0] == tables[1]
    log = (tmp_path / "ray" / "logs" / f"{killed[1]}.log").read_text()
    first, second = log.split("---- ")[1:]
    assert f"process {killed[0]} " in first and f"process {killed[0]} " not in second
    assert "continuing from the checkpoints" in second and "going on after epoch" in second
    assert second.count("session 2/2") == 1 and "session" not in first


def test_a_cell_whose_workers_die_again_and_again_is_one_line_and_the_others_are_done(weights, tmp_path):
    """As on a machine with too little memory for one method: the kernel kills its process, however often it starts."""
    from fscil.experiments.claims import owner_of

    cluster = compare(tmp_path, weights, "-o", "grid", "--engine", "ray", "--cpus", "1")
    killed, deadline = set(), time.time() + 900
    while cluster.poll() is None:
        assert time.time() < deadline
        for claim in (tmp_path / "grid").glob("claims/*-smp-*.json"):
            owner = owner_of(claim)
            if owner and owner["pid"] not in killed:
                os.kill(owner["pid"], signal.SIGKILL)
                killed.add(owner["pid"])
        time.sleep(0.02)
    out, err = cluster.communicate()
    said = [line for line in err.splitlines() if line.startswith("failed: smp")]  # at the end, after the progress
    assert cluster.returncode == 1 and len(killed) == 4 and len(said) == 1, err
    assert "Ray gave it up after 3 retries: a worker was killed again and again (out of memory?)" in said[0]
    assert "Traceback" not in err
    assert len(list((tmp_path / "grid").glob("cells/*-coda-*/results.json"))) == 1

    again = compare(tmp_path, weights, "-o", "grid")
    out, err = again.communicate(timeout=600)
    assert again.returncode == 0, err
    assert len(list((tmp_path / "grid").glob("cells/*/results.json"))) == 2


def test_a_cluster_that_cannot_do_it_is_one_line(tmp_path):
    import ray

    from fscil.experiments.engines import Resources, make_engine

    try:
        with pytest.raises(UserError, match="asks for 64 GPU"):
            make_engine("ray", resources=Resources(gpus=64))
    finally:
        ray.shutdown()
