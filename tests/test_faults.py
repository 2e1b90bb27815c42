"""A power cut or a failing disk before any file operation leaves a folder that is usable and has lost nothing."""

import random

import pytest

from faulting import FAULTS, SCENARIOS, Bench, Disk, forked, grid_job, import_all, model_outcome, taught
from fscil.experiments.jobs import run_job

SAMPLED = 20  # points in the slow tier; `make test-faults` tries all


@pytest.mark.faults
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_point(name, fault, tmp_path):
    bench = Bench(name, tmp_path)
    problems = {at: bench.problem(fault, at) for at in range(1, bench.operations + 1)}
    assert {at: said for at, said in problems.items() if said} == {}


@pytest.mark.slow
def test_some_points(tmp_path):
    rng = random.Random(0)
    benches = {name: Bench(name, tmp_path) for name in SCENARIOS if name != "compare"}
    for _ in range(SAMPLED):
        name, fault = rng.choice([*benches]), rng.choice(FAULTS)
        at = rng.randint(1, benches[name].operations)
        assert benches[name].problem(fault, at) == "", f"{name}, {fault} before operation {at}"


@pytest.mark.parametrize("name", ["run", "resume", "fit", "learn", "export"])
def test_a_folder_that_cannot_be_written_to_is_one_line_and_stays_as_it_is(name, tmp_path):
    """As root one may write anywhere, so the disk itself refuses."""
    place = tmp_path / "start"
    place.mkdir()
    import_all()
    assert forked(lambda: SCENARIOS[name].prepare(place))[0] == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def change():
        Disk(place, "readonly").install()
        SCENARIOS[name].change(place)

    status, said = forked(change)
    assert status == 2 and str(place) in said and "\n" not in said, said
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_a_grid_that_cannot_be_written_to_fails_its_cells_in_one_line_each(tmp_path):
    import_all()

    def change():
        Disk(tmp_path, "readonly").install()
        return run_job(grid_job(tmp_path).to_dict())

    status, said = forked(change)
    assert status == 0 and said["state"] == "failed" and "Read-only" in said["error"] and "\n" not in said["error"]


def test_answers_need_no_place_to_write(tmp_path):
    import_all()
    assert forked(lambda: taught(tmp_path))[0] == 0

    def answer():
        disk = Disk(tmp_path, "readonly")
        disk.install()
        model_outcome(tmp_path)
        return disk.count

    assert forked(answer) == (0, 0)


def test_the_faults_are_real(tmp_path):
    """The disk of these tests does stop a change: without that they would show nothing."""
    bench = Bench("learn", tmp_path)
    assert bench.operations > 10
    start = sorted(path.name for path in bench.start.rglob("*"))
    folder = bench._copy()
    assert forked(lambda: bench._disturbed(folder, "kill", 3))[0] == -9
    folder = bench._copy()
    status, said = forked(lambda: bench._disturbed(folder, "enospc", 1))
    assert status in (2, 3) and "No space" in said or "disk is full" in said
    assert sorted(path.name for path in bench.start.rglob("*")) == start
