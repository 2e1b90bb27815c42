"""`fscil.run` in Python against `fscil run` on the command line."""

import pytest

import fscil as package
from fscil.config import read_config, resolve
from fscil.errors import UserError
from fscil.evaluation.results import load_results
from fscil.experiments.api import configure

SMALL = {"data.base": 6, "data.way": 2, "data.tasks": 1, "options.epochs": 1}


def numbers(results):
    return [session["per_class"] for session in results.sessions], results.confusion


def test_python_and_the_command_do_the_same(fscil, weights, tmp_path, capsys):
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    flags = ["--method", "teen", "--limit", 3, "--seed", 7, "--device", "cpu", "--weights", weights]
    status, out, err = fscil("run", *flags, *settings, "--output", "command", "--quiet")
    assert status == 0, err
    results = package.run(
        "teen", limit=3, seed=7, device="cpu", weights=weights, settings=SMALL, folder=tmp_path / "python"
    )
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    assert read_config(tmp_path / "python" / "config.yaml") == read_config(tmp_path / "command" / "config.yaml")
    assert numbers(results) == numbers(load_results(tmp_path / "command"))
    assert results == load_results(tmp_path / "python")

    shown, printed = results.table(), out.splitlines()
    assert (
        [line.split("│")[1:10] for line in shown.splitlines() if "│" in line]
        == [  # all but time and memory
            line.split("│")[1:10] for line in printed if "│" in line
        ]
    )
    text = repr(results)
    assert "teen on glyphs, seed 7" in text and str(tmp_path / "python") in text and "2 sessions" in text
    assert f"A_final {results.summary['A_final']:.2f}" in text and "\n" not in text


def test_progress_is_shown_when_asked_for(weights, tmp_path, capsys):
    package.run("teen", limit=2, device="cpu", weights=weights, settings=SMALL, folder=tmp_path / "run", progress=True)
    assert capsys.readouterr().err.count("session ") == 2


def test_settings_as_texts_and_as_a_mapping():
    one = configure("smp", settings=["options.epochs=3", "transform.scale=[0.5, 1]"], limit=4, store=128)
    other = configure("smp", settings={"options": {"epochs": 3}, "transform.scale": [0.5, 1]}, limit=4, store="128")
    assert one == other == resolve("smp", settings=["options.epochs=3", "transform.scale=[0.5,1]"],
                                   data={"limit": 4, "store": "128"})  # fmt: skip


def test_what_is_refused(tmp_path):
    with pytest.raises(UserError, match="name it with folder"):
        package.run(resume=True)
    with pytest.raises(UserError, match="not a run folder"):
        package.run(resume=True, folder=tmp_path)
    with pytest.raises(UserError, match='Did you mean "smp"'):
        package.run("smpp")
    with pytest.raises(UserError, match='Did you mean "options.epochs"'):
        package.run(settings={"options.epoch": 1}, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
