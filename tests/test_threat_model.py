"""docs/threat-model.md: every line names a test that exists, and every number is the code's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fscil

ROOT, SOURCE = Path(__file__).parents[1], Path(fscil.__file__).parent
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
QUOTED = re.compile(r"`([\w/]+\.py): ([\w.]+) = ([\d_.]+)`")
# Modules whose every number is a limit on somebody else, and so belongs on the page.
WHOLE = ("serving/gate.py", "serving/uploads.py", "teachable/hub.py")


def constants(module: str) -> dict[str, float]:
    """Numbers that a module gives names to, also as fields of its classes."""
    found = {}

    def look(body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(node.value.value, (int, float)) and isinstance(target, ast.Name):
                    found[prefix + target.id] = node.value.value

    look(ast.parse((SOURCE / module).read_text(encoding="utf-8")).body)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_line_names_tests_that_exist(row):
    cells = row.strip("|").split("|")
    assert len(cells) == 4
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cells[3])
    assert named
    for path, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.MULTILINE), test


def test_every_number_is_the_codes():
    quoted = QUOTED.findall(PAGE)
    assert len(quoted) > 20
    for module, name, value in quoted:
        assert constants(module)[name] == float(value.replace("_", "")), (module, name)


def test_no_limit_is_left_out():
    quoted = {(module, name) for module, name, _ in QUOTED.findall(PAGE)}
    limits = {(module, name) for module in WHOLE for name in constants(module) if name.isupper()}
    limits |= {("serving/host.py", name) for name in constants("serving/host.py") if name.startswith("Limits.")}
    assert len(limits) > 10 and limits <= quoted
