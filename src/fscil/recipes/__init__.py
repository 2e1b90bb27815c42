"""Recipes: one YAML file per dataset and method, each headed by its command, source, numbers and measured time.

A recipe holds any keys of `fscil.config.RunConfig`, and may hold a `fast:` block of overrides for quick looks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fscil.errors import UserError, nearest
from fscil.reading import read_yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    name: str  # "glyphs/smp", or the path of a file
    values: dict[str, Any]
    fast: dict[str, Any] = field(default_factory=dict)
    summary: str = ""  # first line of the header comment


def names() -> list[str]:
    """All recipes that ship with the package, as "dataset/method"."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml"))


def find(dataset: str, method: str, family: str | None = None) -> Recipe | None:
    """The recipe of a method on a dataset: its own, its family's, the dataset's default, or none."""
    for name in (method, family, "default"):
        if name and f"{dataset}/{name}" in names():
            return load(f"{dataset}/{name}")
    return None


def load(name: str) -> Recipe:
    """Read a recipe by name ("glyphs/smp_full") or file."""
    path = Path(name)
    if name in names():
        path = FOLDER / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml") and not path.is_file():
        whole = [known for known in names() if known.endswith(f"/{name}")]
        hint = f" Recipes are named by dataset and method: {', '.join(whole)}." if whole else nearest(name, names())
        raise UserError(f'unknown recipe "{name}".{hint} See: fscil list recipes')
    values = read_yaml(path)
    fast = values.pop("fast", None) or {}
    if not isinstance(fast, dict):
        raise UserError(f'recipe "{name}": "fast" must be a mapping of overrides')
    with open(path, encoding="utf-8") as file:
        first = file.readline()
    return Recipe(name, values, fast, first.lstrip("# ").strip() if first.startswith("#") else "")
