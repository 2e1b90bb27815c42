"""The hashes of the code behind a run: what changes them, which modules are among them, what tables say of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fscil
from fscil.evaluation.tables import group_runs
from fscil.evaluation.versions import code_notes, module_line
from fscil.experiments import run as protocol
from fscil.experiments.comparison import comparison_tables
from fscil.experiments.modules import ALWAYS, code_hash, code_of_rooms, combined, imported_modules, module_hashes
from fscil.files import read_json
from made_up_runs import made_up_result
from probe_world import run, stopped
from tiny_world import make_method

SOURCE = '''
"""What it is."""
import math


class Circle:
    """Round."""

    def area(self, radius: float) -> float:
        """Its area."""
        return math.pi * radius**2
'''


def test_words_do_not_count_and_everything_else_does():
    known = code_hash(SOURCE)
    for before, after in (
        ("What it is.", "Circles,\nand nothing else."),
        ('    """Round."""\n', "    # round\n"),
        ("radius**2", "(radius ** 2)  # by Archimedes"),
        ("\n\n\nclass", "\n\nclass"),
        ('        """Its area."""\n', ""),
    ):
        assert before in SOURCE and code_hash(SOURCE.replace(before, after)) == known, before
    for before, after in (
        ("**2", "**3"),
        ("math.pi", "math.tau"),
        ("radius: float", "radius: int"),
        ("area(", "size("),
    ):
        assert before in SOURCE and code_hash(SOURCE.replace(before, after)) != known, before


def test_what_is_imported_when_the_modules_are_imported_is_among_them():
    """Against Python's own import of the same modules, in a fresh interpreter."""
    starts = [*ALWAYS, "fscil.methods.teen"]
    code = (
        f"import sys\nfor name in {starts!r}: __import__(name)\nprint(*[n for n in sys.modules if n[:6] == 'fscil.'])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rooms = ("fscil.maths.", "fscil.data.", "fscil.backbones.", "fscil.heads.", "fscil.methods.")
    packages = {name for name in loaded if any(other.startswith(f"{name}.") for other in loaded)}
    wanted = {name for name in loaded if name.startswith(rooms)} - packages
    found = imported_modules(starts)
    assert wanted <= found.keys() and "fscil.methods.clom" not in found
    assert found["fscil.methods.teen"].name == "teen.py"


def test_the_code_of_all_rooms_changes_with_any_number_in_them_and_not_with_words(tmp_path):
    copy = tmp_path / "fscil"
    shutil.copytree(Path(fscil.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    ask = "import fscil.experiments.modules as m; print(m.__file__, m.code_of_rooms())"

    def found():
        told = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        where, digest = told.stdout.split()
        assert where.startswith(str(tmp_path))
        return digest

    known = found()
    assert known == code_of_rooms()
    for name, addition, same in (
        ("maths/discriminant.py", "\n# a remark\n", True),
        ("cli.py", "\nUNUSED = 1\n", True),
        ("methods/families/adapter_sets.py", "\nUNUSED = 1\n", False),
    ):
        with open(copy / name, "a") as file:
            file.write(addition)
        assert (found() == known) == same, name


def test_a_methods_head_and_dataset_are_among_its_modules_and_other_methods_are_not():
    smp = module_hashes(make_method("smp"), "glyphs")
    assert {"methods/smp/method.py", "heads/mpcc.py", "maths/gaussians.py", "data/datasets/glyphs.py"} <= smp.keys()
    teen = module_hashes(make_method("teen"), "cifar100")
    assert "methods/teen.py" in teen and "data/datasets/cifar100.py" in teen
    assert not {"methods/smp/method.py", "heads/mpcc.py", "data/datasets/glyphs.py"} & teen.keys()
    assert all(smp[name] == teen[name] for name in smp.keys() & teen.keys())
    assert combined(smp) != combined(teen) == combined(dict(reversed(teen.items())))


@pytest.mark.usefixtures("probe")
def test_a_run_keeps_them_and_a_resumed_one_says_when_they_changed(tmp_path, monkeypatch):
    run(tmp_path / "whole")
    stored = read_json(tmp_path / "whole" / "results.json")
    assert "probe_world.py" in stored["environment"]["modules"]  # a method of another package
    assert {session["code"] for session in stored["sessions"]} == {combined(stored["environment"]["modules"])}
    assert code_notes({"Probe": [stored]}) == []

    stopped(tmp_path / "run", monkeypatch)
    known = protocol.module_hashes
    monkeypatch.setattr(protocol, "module_hashes", lambda *parts: {**known(*parts), "probe_world.py": "0" * 16})
    resumed = run(tmp_path / "run", resume=True).to_dict()
    assert "Resumed with other code than it began with: Probe." in code_notes({"Probe": [resumed]})[0]
    said = code_notes({"Whole": [stored], "Resumed": [resumed]})[0]
    assert "two versions of probe_world.py" in said and "0000000 (Resumed)" in said


def with_modules(result, **modules):
    names = {f"methods/{name}.py": digest for name, digest in modules.items()}
    return {**result, "environment": {**result["environment"], "modules": names}}


def test_tables_say_where_their_rows_differ():
    smp, teen = made_up_result("smp"), made_up_result("teen")
    same = [with_modules(smp, base="a" * 16, smp="b" * 16), with_modules(teen, base="a" * 16, teen="c" * 16)]
    assert code_notes(group_runs(same)) == []  # rows of one code, though each has modules of its own
    assert not any("version" in note for note in comparison_tables(same)["glyphs"].notes)

    other = [same[0], with_modules(teen, base="d" * 16, teen="c" * 16)]
    line = "Rows come from two versions of methods/base.py: aaaaaaa (SMP), ddddddd (TEEN)."
    assert line in comparison_tables(other)["glyphs"].notes

    seeds = [
        with_modules(made_up_result("teen", seed), teen=digit * 16) for seed, digit in ((1, "a"), (2, "b"), (3, "c"))
    ]
    assert "three versions of methods/teen.py: aaaaaaa (TEEN), bbbbbbb (TEEN)" in code_notes(group_runs(seeds))[0]

    many = [
        with_modules(smp, **{name: "a" * 16 for name in "pqrs"}),
        with_modules(teen, **{n: "b" * 16 for n in "pqrs"}),
    ]
    (line,) = code_notes(group_runs(many))
    assert line.endswith("from several versions of methods/r.py, methods/s.py.") and "\n" not in line


def test_older_runs_are_unknown():
    old, new = made_up_result("smp"), with_modules(made_up_result("teen"), teen="a" * 16)
    assert code_notes(group_runs([old, new])) == ["Version of the code: unknown for SMP."]
    assert code_notes(group_runs([old])) == ["Version of the code: unknown for all rows."]
    assert module_line([old]) == "unknown" and module_line([new]).startswith("1 modules")
