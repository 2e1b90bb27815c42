"""The programs under examples/ run, and say something sensible."""

import importlib.util
import re
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name, capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # entries name classes as "module:Class"
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.main()
    return capsys.readouterr().out


def test_every_example_is_tried_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "run_and_table", "own_method", "own_head", "teach_and_recognise"
    }  # fmt: skip


def test_a_run_and_its_table(capsys, monkeypatch):
    said = run_example("run_and_table", capsys, monkeypatch)
    assert said.count("A_avg") == 2 and "smp:" in said


@pytest.fixture
def own_entries(monkeypatch):
    from fscil import registry

    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    monkeypatch.setattr(registry, "HEADS", dict(registry.HEADS))


def test_a_method_of_your_own(capsys, monkeypatch, own_entries):
    said = run_example("own_method", capsys, monkeypatch)
    assert float(re.search(r"A_final\s+([\d.]+)", said)[1]) > 30  # chance is 7 %


def test_a_head_of_your_own(capsys, monkeypatch, own_entries):
    said = run_example("own_head", capsys, monkeypatch)
    assert all(float(number) > 30 for number in re.findall(r": ([\d.]+) %", said)) and said.count("%") == 2


def test_teach_and_recognise(capsys, monkeypatch):
    said = run_example("teach_and_recognise", capsys, monkeypatch)
    assert int(re.search(r"right: (\d+) %", said)[1]) >= 80 and "after forgetting: disc, ring, square" in said
