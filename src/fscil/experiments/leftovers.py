"""What a killed process leaves in a run folder, and what of it is cleared away at the next start: only what is ours.

A run takes its lock first and writes config.yaml last, so a folder with a lock and less than that is one that never
began. Files half written have names that nobody else gives.
"""

from __future__ import annotations

from pathlib import Path

from fscil.errors import UserError
from fscil.files import PART, clear_parts

LOCK = ".lock"
FIRST_FILES = ("split.json", "shots.json", "hashes.json")  # of a run, before config.yaml


def never_began(folder: Path) -> bool:
    """Whether a folder is empty, or holds nothing but what a run leaves that is killed before it began."""
    names = {path.name for path in folder.iterdir() if not PART.fullmatch(path.name)}
    return not names or (LOCK in names and names <= {LOCK, *FIRST_FILES})


def check_began(folder: Path) -> None:
    """Refuse to go on with what is no run yet."""
    if not (folder / "config.yaml").is_file():
        stopped = folder.is_dir() and any(folder.iterdir()) and never_began(folder)
        what = "it was stopped before it began; start it again with --output" if stopped else "not a run folder"
        raise UserError(f'--resume "{folder}": {what} (no config.yaml in it)')


def clear(folder: Path) -> None:
    """Clear away leftovers of the last process. Call it with the run's lock held."""
    clear_parts(folder, folder / "checkpoints", folder / "predictions")
    if never_began(folder):
        for name in FIRST_FILES:
            (folder / name).unlink(missing_ok=True)
