"""One run over several processes gives what one process gives, and runs side by side share out the cores."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from fscil.experiments import engines
from fscil.files import load_tensors, read_json

COMMAND = ["run", "--limit", "6", "--device", "cpu", "--quiet", "--precision", "fp32", "--set", "options.views=2"]
COMMAND += ["--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=2", "--set", "options.epochs=2"]


@pytest.mark.parametrize("chosen, threads", [(None, 3), ("2", 5)])
def test_workers_share_out_the_cores_unless_their_threads_are_chosen(monkeypatch, chosen, threads):
    """torch has read OMP_NUM_THREADS by the time that a worker starts: here it took 5."""

    class Ended:
        def recv_bytes(self):
            raise EOFError

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(engines, "_cores", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        engines._serve(Ended(), 0, 4)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("fisher, count", [("batch", 2), ("sample", 4)])
def test_several_processes_through_accelerate_equal_one(tmp_path, fisher, count):
    arguments = [*COMMAND, "--set", f"options.fisher={fisher}", "--set", "options.batch_size=7"]
    arguments += ["--set", "options.covariance_form=full"]  # a low-rank basis is unique up to signs only
    launchers = {
        "one": [sys.executable, "-m", "fscil"],
        "several": [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(count),
            "-m",
            "fscil",
        ],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, launcher in launchers.items():
        done = subprocess.run(
            [*launcher, *arguments, "-o", str(tmp_path / name)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    states = {name: load_tensors(tmp_path / name / "checkpoints" / "session_2.safetensors")[0] for name in launchers}
    assert states["one"].keys() == states["several"].keys()
    for key, expected in states["one"].items():
        torch.testing.assert_close(
            states["several"][key], expected, rtol=1e-3, atol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )
    results = {name: read_json(tmp_path / name / "results.json") for name in launchers}
    assert results["several"]["environment"]["processes"] == count
    assert results["one"]["summary"]["accuracies"] == pytest.approx(
        results["several"]["summary"]["accuracies"], abs=2.0
    )
