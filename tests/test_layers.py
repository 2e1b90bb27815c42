"""The house stays as drawn: rooms import downwards only (docs/architecture.md), read from the syntax tree.

A module directly in fscil/ is ground floor: imported by all, importing no room. `experiments` and `teachable` are
neighbours that never meet.
"""

from __future__ import annotations

import ast
from pathlib import Path

import fscil

SOURCE = Path(fscil.__file__).parent
DOORS = {"__init__", "__main__", "cli", "_version"}
GROUND = {"errors", "text", "reading", "files", "strict", "runtime", "display", "registry", "config", "recipes"}
# What each room may import besides itself and the ground floor.
MAY_IMPORT = {
    "maths": set(),
    "data": {"maths"},
    "backbones": {"maths", "data"},
    "heads": {"maths", "data", "backbones"},
    "methods": {"maths", "data", "backbones", "heads"},
    "evaluation": {"maths", "data"},
}
CORE = {"maths", "data", "backbones", "heads", "methods", "evaluation"}
MAY_IMPORT |= {"experiments": CORE, "teachable": CORE, "serving": CORE | {"teachable"}}
MAY_IMPORT["commands"] = CORE | {"experiments", "teachable", "serving"}
GROUND_FLOOR_AT_MOST = 10
LINES_AT_MOST = 480  # of a module
FUNCTION_AT_MOST = 90
# Longer, for a reason: a list of parts that stand side by side and is read from top to bottom.
LONG_FUNCTIONS: dict[str, str] = {}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    """The folder a module lies in, or its own name on the ground floor."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms and ground-floor modules that a file imports, wherever in it and for whatever purpose."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names if name.split(".")[0] == "fscil"]
        found |= {part[1] for part in parts if len(part) > 1}
    return found


def type_only(path: Path) -> set[str]:
    """What is imported under `if TYPE_CHECKING:` alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    return {
        inner.module.split(".")[1]
        for node in guarded
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom) and inner.module and inner.module.startswith("fscil.")
    }


def test_every_module_has_its_place():
    assert {room(path) for path in modules()} <= DOORS | GROUND | set(MAY_IMPORT)
    flat = {path.stem for path in SOURCE.glob("*.py")} - DOORS
    assert len(flat) <= GROUND_FLOOR_AT_MOST, sorted(flat)


def test_rooms_import_downwards_only():
    wrong = []
    for path in modules():
        own = room(path)
        if own in DOORS or own in GROUND:
            continue
        allowed = MAY_IMPORT[own] | GROUND | {own, "_version"}
        wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in sorted(imported(path) - allowed)]
    assert not wrong, "\n".join(wrong)


def test_the_ground_floor_imports_no_room():
    """`registry` and `config` name classes of rooms as text, or for type checkers alone."""
    wrong = []
    for path in modules():
        if room(path) in GROUND:
            rooms = (imported(path) - type_only(path)) & set(MAY_IMPORT)
            wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in sorted(rooms)]
    assert not wrong, "\n".join(wrong)


def test_the_two_products_never_meet():
    for one, other in (("experiments", "teachable"), ("teachable", "experiments")):
        assert not [path for path in (SOURCE / one).rglob("*.py") if other in imported(path)]


def test_modules_and_functions_can_be_read_in_a_sitting():
    long = []
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LINES_AT_MOST:
            long.append(f"{path.relative_to(SOURCE)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and room(path) != "commands":
                lines = node.end_lineno - node.lineno + 1
                if lines > FUNCTION_AT_MOST and node.name not in LONG_FUNCTIONS:
                    long.append(f"{path.relative_to(SOURCE)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_package_files_import_nothing_heavy():
    """`fscil --help`, `list` and `info` import packages without torch."""
    for path in SOURCE.rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in top if isinstance(node, ast.ImportFrom)}
        assert not names & {"torch", "timm", "numpy", "sklearn"}, path
