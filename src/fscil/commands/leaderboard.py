"""`fscil leaderboard`: finished runs as static pages, one per dataset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

PANEL = "Results"


def leaderboard(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders that hold some.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the site.")] = Path("site"),
    title: Annotated[str, typer.Option(help="Heading of the pages.")] = "Leaderboard",
    include_limited: Annotated[
        bool, typer.Option("--include-limited", help="Show runs cut short by --limit or --fast, with a mark.")
    ] = False,
    include_unverified: Annotated[
        bool, typer.Option("--include-unverified", help="Show runs that fail `fscil verify`, with a mark.")
    ] = False,
) -> None:
    """Write a static page per dataset: sortable, the paper's numbers beside ours, a link to every run's figures.

    Runs that fail `fscil verify` (or have no hashes), that were cut short, or that were scored on a validation stream
    are refused by name; the exit status is then 1. What the columns mean stands on the page.

    **Examples**

    `fscil leaderboard runs/grid -o site`

    `fscil leaderboard runs/grid runs/other -o site --include-limited`
    """
    from fscil.errors import UserError
    from fscil.evaluation.results import find_runs
    from fscil.experiments.leaderboard import choose, write_site

    entries, refused = choose(find_runs(folders), include_limited, include_unverified)
    for line in refused:
        print(f"refused: {line}", file=sys.stderr)
    if not entries:
        raise UserError("none of these folders holds a run to show")
    pages = write_site(entries, output, title)
    print(f"{len(entries)} run{'s' * (len(entries) > 1)} on {len(pages) - 1} page{'s' * (len(pages) > 2)}: {pages[-1]}")
    raise typer.Exit(1 if refused else 0)


COMMANDS = {"leaderboard": leaderboard}
