"""What a finished run came to, read back from its folder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.config import with_later_settings
from fscil.errors import UserError
from fscil.evaluation.forms import StoredResults
from fscil.evaluation.hashes import RESULTS, RunHashes
from fscil.evaluation.limits import limits
from fscil.evaluation.sessions import session_table
from fscil.files import read_json, refuse_links
from fscil.strict import conform
from fscil.text import points as percent

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, repr=False)
class Results:
    """A finished run. `sessions` has a dict per session (metrics, time, memory), `summary` what they come to."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    stream: dict[str, Any]
    sessions: list[dict[str, Any]]
    summary: dict[str, Any]
    confusion: list[list[int]]  # of the last session: rows are true classes, columns predictions
    hashed: bool = False  # its folder lists the hashes of its files, and they were as listed when it was read

    @property
    def limits(self) -> list[str]:
        """How it differs from its recipe: images left out, settings changed; empty where it does not."""
        return limits(self.to_dict())

    @property
    def title(self) -> str:
        head = self.config.get("head")
        method = self.config["method"] + (f" + {head['name']}" if head else "")
        return f"{method} on {self.config['dataset']}, seed {self.config['seed']}"

    def table(self) -> str:
        """The sessions as text, in the form `fscil run` prints them."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=140)
        with console.capture() as captured:
            console.print(self.rich_table())
        return captured.get()

    def rich_table(self) -> Table:
        """The same for a terminal."""
        averaging = self.config.get("evaluation", {}).get("hacc", "group")
        table = session_table(self.sessions, self.summary, averaging, self.title)
        table.caption = "\n".join([str(table.caption), *(["; ".join(self.limits)] if self.limits else [])])
        return table

    def to_dict(self) -> dict[str, Any]:
        """What results.json holds."""
        return {key: value for key, value in vars(self).items() if key not in ("folder", "hashed")}

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {percent(self.summary[name])}" for name in ("A_avg", "A_final"))
        marks = "".join(f" ({text})" for text in [*self.limits, *([] if self.hashed else ["unhashed"])])
        return f"<Results: {self.title}{marks}: {figures} after {len(self.sessions)} sessions; {self.folder}>"


def load_results(folder: str | Path, check: bool = True) -> Results:
    """Read a finished run. Any file of it that is not as its hashes say is refused by name; `check=False` trusts them.
    Runs from before there were hashes are read as they are, and are not `hashed`.

    >>> import tempfile, fscil
    >>> small = {"data.base": 4, "data.way": 2, "data.tasks": 1}
    >>> with tempfile.TemporaryDirectory() as place:
    ...     run = fscil.run("simplecil", limit=2, settings=small, folder=f"{place}/run", device="cpu")
    ...     load_results(f"{place}/run").summary == run.summary
    True
    """
    folder = Path(folder)
    refuse_links(folder)
    exists = (folder / RESULTS).is_file()
    content = conform(read_json(folder / RESULTS), StoredResults, folder / RESULTS) if exists else {}
    hashes = RunHashes.read(folder)
    if hashes is not None and check and (exists or hashes.finished):
        hashes.check()
    if not exists:
        reason = "is not finished" if (folder / "config.yaml").is_file() else "is not a run folder"
        raise UserError(f'"{folder}" {reason}: it has no results.json')
    if not content["sessions"]:
        raise UserError(f'"{folder / RESULTS}" was not written by fscil: it has no session')
    known = {key: content[key] for key in StoredResults.__annotations__}
    config = with_later_settings(known["config"])
    return Results(folder, **{**known, "config": config}, hashed=hashes is not None)


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
