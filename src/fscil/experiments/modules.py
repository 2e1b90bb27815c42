"""Which code trained a run: hashes of the modules that decide its numbers, whatever commit they come from.

Two commits may hold the same method, and one commit may change it; so a run keeps a hash of every module of maths,
data, backbones, heads and methods that its method, head and dataset import. The hash is of the syntax tree without
comments and docstrings: a better explanation is not another method.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fscil import registry

if TYPE_CHECKING:
    from fscil.methods.base import Method

ROOMS = ("maths", "data", "backbones", "heads", "methods")
# What every run goes through, whichever its method.
ALWAYS = (
    "fscil.backbones.loading",
    "fscil.data.stream",
    "fscil.data.transforms",
    "fscil.methods.making",
)


def module_hashes(method: Method, dataset: str) -> dict[str, str]:
    """{"methods/teen.py": hash of 16 digits, …} of the modules behind a method (its head and backbone are parts of it)
    and a dataset. Classes of another package count with their own module."""
    kinds = {kind for part in method.modules() for kind in type(part).__mro__}
    starts = {kind.__module__ for kind in kinds if _is_ours(kind.__module__)} | {type(method).__module__}
    entry = registry.datasets().get(dataset)
    found = imported_modules([*ALWAYS, *starts, *([entry.target.partition(":")[0]] if entry else [])])
    return {_short(name, path): code_hash(path.read_text(encoding="utf-8")) for name, path in sorted(found.items())}


def combined(hashes: Mapping[str, str]) -> str:
    """One hash of all of them."""
    return _digest(repr(sorted(hashes.items())))


@functools.cache
def code_of_rooms() -> str:
    """One hash of all code of `ROOMS`: what anything that is trained here may depend on."""
    top = Path(__file__).parents[1]
    files = sorted(path for room in ROOMS for path in (top / room).rglob("*.py"))
    return combined({path.relative_to(top).as_posix(): code_hash(path.read_text(encoding="utf-8")) for path in files})


def code_hash(source: str) -> str:
    """Hash of what a source does: the syntax tree without positions, comments and strings that stand alone.

    >>> code_hash("def f(x):\\n    return x + 1") == code_hash('def f(x):\\n    "Adds one."\\n    return x + 1  # one')
    True
    >>> code_hash("x = 1") == code_hash("x = 2")
    False
    """
    return _digest(_written(ast.parse(source)))


def imported_modules(names: Iterable[str]) -> dict[str, Path]:
    """The files of these modules and of those of `ROOMS` that they import, directly or through one another."""
    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        path = _source(name) if name not in found else None
        if path is not None:
            found[name] = path
            waiting += [other for other in _imports(ast.parse(path.read_text(encoding="utf-8"))) if _is_ours(other)]
    return found


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every name that a file imports as if it were a module, less those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _imports(node)


@functools.cache
def _source(name: str) -> Path | None:
    """The file of a module; None of what is none, such as a function that was imported by name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _is_ours(name: str) -> bool:
    return name.startswith(tuple(f"fscil.{room}" for room in ROOMS))


def _short(name: str, path: Path) -> str:
    """Where a module lies in its package."""
    below = name.removeprefix("fscil.").replace(".", "/")
    return f"{below}/__init__.py" if path.name == "__init__.py" else f"{below}.py"


def _written(node: object) -> str:
    """A syntax tree in words that are the same in every version of Python: fields that are empty are left out, since
    later versions have more of them."""
    if isinstance(node, list):
        return f"[{' '.join(_written(item) for item in node if not _stands_alone(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"({type(node).__name__} {' '.join(f'{name}={_written(value)}' for name, value in fields)})"


def _stands_alone(node: object) -> bool:
    """A string that is a statement: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
