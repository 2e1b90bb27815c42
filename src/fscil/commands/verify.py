"""`fscil verify`: whether runs are what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fscil.text import printable

if TYPE_CHECKING:
    from fscil.experiments.verify import Check

PANEL = "Results"


def verify(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders that hold some.")],
    again: Annotated[
        bool, typer.Option("--again", help="Learn a few-shot session again from its checkpoint, and compare.")
    ] = False,
    session: Annotated[
        int | None, typer.Option(min=1, help="Which one; beyond 1 the run must have kept all checkpoints. Default: 1.")
    ] = None,
    data_root: Annotated[str | None, typer.Option(metavar="DIR", help="--again: where the dataset lies now.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="--again: where the backbone's weights lie now.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="--again: auto, cpu, cuda, mps. Default: the run's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All checks as JSON.")] = False,
) -> None:
    """Check runs: hashes of their files, split, shots, and every metric recomputed from the stored predictions.

    A line for each check; exit status 1 if any fails. Hashes show damage, not invention; `--again` shows that as well.

    **Examples**

    `fscil verify runs/glyphs-smp-seed2023-1`

    `fscil verify runs/grid/cells --json`

    `fscil verify runs/cifar100-smp-seed2023-1 --again --data-root data/cifar`
    """
    from fscil.display import LiveDisplay
    from fscil.errors import UserError
    from fscil.evaluation.results import find_runs
    from fscil.experiments import verify as checks

    if not again and (session, data_root, weights, device) != (None,) * 4:
        raise UserError("--session, --data-root, --weights and --device say how to learn a session again; add --again")

    def checks_of(folder: Path) -> Iterator[Check]:
        yield from checks.verify(folder)
        if again:
            yield checks.learn_again(
                folder, session, LiveDisplay(), data_root=data_root, weights=weights, device=device
            )

    told, failed = [], False
    for folder in find_runs(folders):
        if not as_json:
            print(printable(folder))
        made = []
        for check in checks_of(folder):
            made.append(check)
            failed |= check.state == "failed"
            if not as_json:
                print(f"  {check.state:<8}  {check.name:<11}  {printable(check.text)}", flush=True)
        told.append({"run": str(folder), "checks": [vars(check) for check in made]})
    if as_json:
        print(json.dumps(told, indent=1, ensure_ascii=False))
    raise typer.Exit(1 if failed else 0)


COMMANDS = {"verify": verify}
