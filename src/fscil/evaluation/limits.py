"""Whether a run did what its recipe says, or something else: images left out, settings changed.

Everything that shows a run's numbers says so: tables by a mark and a footnote, CSV by a column, pages and figures by
a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fscil.config import RunConfig, complete, differences, resolve
from fscil.errors import UserError
from fscil.evaluation.tables import Groups, Result, Row, Table

MARK = "*"
# What a recipe leaves to the data or the backbone, and a finished run has filled in.
FILLED_IN = ("data.base", "data.way", "data.shots", "transform.size", "transform.resize")


def limits(result: Result) -> list[str]:
    """What was left out or changed, one text each; empty where a run is what its recipe says.

    >>> limits({"config": resolve("smp", settings=["data.limit=5", "options.epochs=1"]).to_dict()})
    ['limited to 5 images per class', 'epochs 1 instead of 4']
    """
    return [*reductions(result), *changed_settings(result).values()]


def reductions(result: Result) -> list[str]:
    """What made a run a quick look: `--limit` and `--fast`."""
    config = result["config"]
    limit = (config.get("data") or {}).get("limit")
    said = [f"limited to {limit} image{'s' * (limit > 1)} per class"] if limit else []
    return said + (["reduced recipe (--fast)"] if (config.get("recipe") or "").endswith("+fast") else [])


def changed_settings(result: Result) -> dict[str, str]:
    """Settings that are not those of the recipe that the run names, as texts by key; nothing where that is not here."""
    config = result["config"]
    try:
        stored = complete(config)
        recipe = (stored.recipe or "").removesuffix("+fast") or None
        usual = resolve(stored.method, stored.dataset, recipe, seed=stored.seed, weights=stored.weights)
        if stored.head and usual.head.get("name") != stored.head["name"]:  # a run's title names the head that it chose
            usual = complete({**usual.to_dict(), "head": {"name": stored.head["name"]}})
    except UserError:
        return {}
    known = (result.get("stream") or {}).get("usual") or {}  # of the dataset; runs from before this was kept: unknown
    said = {}
    for key, before, after in changes(usual, stored):
        if key in FILLED_IN and before == "null":
            before = str(known.get(key, after))
        if key != "data.limit" and before != after:
            name = key.removeprefix("options.")
            said[key] = f"{name} {after}" + (f" instead of {before}" if before != "null" else "")
    return said


def changes(old: RunConfig, new: RunConfig) -> list[tuple[str, str, str]]:
    """(key, old value, new value) of every setting that differs and can change results."""
    found = []
    for text in differences(old, new):
        key, _, values = text.partition(": ")
        before, _, after = values.partition(" -> ")
        found.append((key, before, after))
    return found


def limits_of_rows(groups: Groups) -> dict[str, list[str]]:
    """The limits of each row of a table, less the settings that its label names anyway."""
    found: dict[str, list[str]] = {}
    for label, members in groups.items():
        texts: dict[str, None] = {}
        for result in members:
            changed = changed_settings(result)
            named = [key for key in changed if f"{key.removeprefix('options.')}=" in label]
            texts |= dict.fromkeys([*reductions(result), *(text for key, text in changed.items() if key not in named)])
        found[label] = list(texts)
    return found


def with_limits(table: Table, of_rows: Mapping[str, Sequence[str]], reference: str = "") -> Table:
    """The table with its limited rows marked, and a footnote that says why. In a table of differences from `reference`
    its limits are those of every row."""
    rows: list[Row] = []
    said: dict[str, None] = {}
    for row in table.rows:
        own = of_rows.get(row.label, ()) if row.kind == "ours" else ()
        texts = dict.fromkeys([*of_rows.get(reference, ()), *own])
        rows.append(replace(row, limits="; ".join(texts)))
        said |= texts
    if not said:
        return table
    line = "; ".join(said)
    return replace(table, rows=rows, notes=[f"{MARK} {line[0].upper()}{line[1:]}.", *table.notes])
