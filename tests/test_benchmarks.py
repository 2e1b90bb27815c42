"""`benchmarks/all.py`: what it rewrites, and that a benchmark that fails stops nothing; `benchmarks/heads.py`: what it
refuses and tabulates. Of the benchmarks only those run here that nobody without a GPU would start: on a small model, to
see that they still do."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from fscil.config import DataConfig
from fscil.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def script(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"{name}_benchmarks", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def all_of_them(tmp_path, monkeypatch):
    """The script, on a folder with one benchmark that works and one that does not."""
    module = script("all", monkeypatch)
    (tmp_path / "RESULTS.md").write_text("# Speed\n\nwritten by hand: 20.14 ms\n")
    (tmp_path / "broken.py").write_text("raise SystemExit('no such thing')")
    (tmp_path / "works.py").write_text("import sys; print('said\\n| a |\\n|---|\\n| \\\\1', sys.argv[1], '|')")
    made = module.Benchmark
    entries = made("broken"), made("works", "7", released="155 s"), made("needs_gpu", gpu=True)
    for name, value in {"HERE": tmp_path, "RESULTS": tmp_path / "RESULTS.md", "BENCHMARKS": entries}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "hardware", lambda: ("two cores", False))
    return module


def test_every_script_is_run_by_it_or_needs_data():
    text = (ROOT / "benchmarks" / "all.py").read_text(encoding="utf-8")
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"all", "common", "siege"}  # parts of others
    assert scripts - {"heads", "store"} == {name for name in scripts if f'Benchmark("{name}"' in text}


def test_only_its_own_parts_are_rewritten_and_a_failure_stops_nothing(all_of_them, capsys):
    assert all_of_them.main([]) == 1
    assert "broken failed: no such thing" in capsys.readouterr().err
    first = all_of_them.RESULTS.read_text()
    assert first.startswith("# Speed\n\nwritten by hand: 20.14 ms\n") and "broken" not in first
    assert "`python benchmarks/works.py 7`" in first and "| \\1 7 |" in first and "two cores" in first
    assert "said\n\n| a |\n|---|\n" in first  # a table has room above it
    assert first.count("released code, ViT-B/16, one H200: 155 s.") == 1 and "needs_gpu" not in first

    (all_of_them.HERE / "works.py").write_text("print('changed')")
    all_of_them.RESULTS.write_text(first + "\nalso by hand\n")
    assert all_of_them.main(["--only", "works"]) == 0
    second = all_of_them.RESULTS.read_text()
    assert "changed" in second and "| \\1 7 |" not in second and second.count("works: begin") == 1
    assert second.endswith("also by hand\n") and "written by hand: 20.14 ms" in second


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("options.rank=4", "write it in --methods, as NAME:rank=4"),
        ("options={rank: 4}", "write it in --methods, as NAME:rank=4"),
        ("head.shrinkage=0.2", "write it in --heads, as NAME:shrinkage=0.2"),
        ("seed=7", "write it in --seeds"),
        ("runtime.device=cpu", "write it in --device"),
        ("method=teen", "write it in --methods"),
    ],
)
def test_heads_refuses_settings_that_would_change_nothing(setting, said, monkeypatch):
    heads = script("heads", monkeypatch)
    heads.check_settings(["options.epochs=2", "data.split=official"])
    with pytest.raises(UserError) as caught:
        heads.check_settings(["options.epochs=2", setting])
    assert said in str(caught.value)


def test_lists_of_shots_are_a_protocol_that_reads_them(monkeypatch):
    heads = script("heads", monkeypatch)
    data = heads.protocols(["data.index_files=lists"])["index_files=lists"]
    assert DataConfig(**data).sampler == "index_files"


def test_heads_says_how_paired_differences_spread(monkeypatch, capsys):
    heads = script("heads", monkeypatch)

    def rows(head, values):
        figures = [dict.fromkeys(heads.FIGURES, value) for value in values]
        return [{"method": "miam", "protocol": "", "head": head, "seconds": 1.0, **figure} for figure in figures]

    heads.print_table([*rows("own", [60, 61, 62]), *rows("mpcc", [61, 63, 62.5])])
    gaps = [1, 2, 0.5]
    assert f"+{statistics.mean(gaps):.2f} ({statistics.stdev(gaps):.2f})" in capsys.readouterr().out
    heads.print_table([*rows("own", [60]), *rows("mpcc", [61])])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "+1.00" in last and "(" not in last  # one pair says nothing about a spread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [
        ("pipeline", ("--per-class", "8", "--sessions", "1", "--epochs", "1"), ("train", "Fisher", "test features")),
        ("fisher", ("--images", "60", "--loop-images", "6"), ("loop, fp32", "batched, fp32")),
    ],
)
def test_what_is_measured_on_a_gpu_still_runs(name, options, rows):
    given = ["--device", "cpu", "--backbone", "test_vit", *options]
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert all(any(row in line for line in table) for row in rows), done.stdout
