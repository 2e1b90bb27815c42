"""A power cut or a failing disk before any file operation leaves a folder that is usable and has lost nothing."""

import random

import pytest

from faulting import FAULTS, SCENARIOS, Bench

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


def test_the_faults_are_real(tmp_path):
    """The disk of these tests does stop a change: without that they would show nothing."""
    bench = Bench("learn", tmp_path)
    assert bench.operations > 10
    start = sorted(path.name for path in bench.start.rglob("*"))
    folder = bench._copy()
    from faulting import forked

    assert forked(lambda: bench._disturbed(folder, "kill", 3))[0] == -9
    folder = bench._copy()
    status, said = forked(lambda: bench._disturbed(folder, "enospc", 1))
    assert status in (2, 3) and "No space" in said or "disk is full" in said
    assert sorted(path.name for path in bench.start.rglob("*")) == start
