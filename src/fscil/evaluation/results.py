"""What a finished run came to, read back from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fscil.config import with_later_settings
from fscil.errors import UserError
from fscil.files import read_json


@dataclass(frozen=True)
class Results:
    """A finished run. `sessions` has a dict per session (metrics, time, memory), `summary` what they come to."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    stream: dict[str, Any]
    sessions: list[dict[str, Any]]
    summary: dict[str, Any]
    confusion: list[list[int]]  # of the last session: rows are true classes, columns predictions

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "folder"}


def load_results(folder: str | Path) -> Results:
    """Read a finished run's results.json."""
    folder = Path(folder)
    if not (folder / "results.json").is_file():
        reason = "is not finished" if (folder / "config.yaml").is_file() else "is not a run folder"
        raise UserError(f'"{folder}" {reason}: it has no results.json')
    content = read_json(folder / "results.json")
    try:
        return Results(folder, **{**content, "config": with_later_settings(content["config"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f'"{folder / "results.json"}" was not written by fscil ({error})') from error


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """Run folders among and below `places`, finished or not."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f'"{place}" does not exist; name a run folder, or a folder that holds some')
        inside = {path.parent for name in ("config.yaml", "results.json") for path in sorted(place.rglob(name))}
        if not inside:
            raise UserError(f'"{place}" is not a run folder and holds none')
        found.update(dict.fromkeys(sorted(inside)))
    return list(found)
