"""`fscil report`: runs as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fscil.text import printable

PANEL = "Results"


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders that hold some.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: report.html in the first folder.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    images: Annotated[
        bool, typer.Option("--images/--no-images", help="Show shots and confused test images (not for publication).")
    ] = True,
) -> None:
    """Write one self-contained HTML page about finished runs: tables, figures, shots, confusions, time and memory.

    What its columns mean stands on the page, and in `fscil list metrics`.

    **Examples**

    `fscil report runs/glyphs-smp-seed2023-1`

    `fscil report runs/grid -o comparison.html --no-images`
    """
    from fscil.errors import UserError
    from fscil.evaluation.report import write_report
    from fscil.evaluation.results import find_runs
    from fscil.experiments.comparison import load_folders

    found = find_runs(folders)
    usable = []
    for folder in found:
        _, problems = load_folders([folder])
        for problem in problems:
            print(f"left out: {printable(problem)}", file=sys.stderr)
        usable += [] if problems else [folder]
    if not usable:
        raise UserError("none of these folders holds a finished run")
    path = write_report(usable, output or folders[0] / "report.html", title, images)
    print(f"report on {len(usable)} run{'s' * (len(usable) > 1)} in {path}")
    raise typer.Exit(1 if len(usable) < len(found) else 0)


COMMANDS = {"report": report}
