"""`fscil suggest`: the unlabelled pictures that are worth a label."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fscil.commands.teach import Device, Model, Quiet, Weights

PANEL = "Your own photos"


def suggest(
    model: Model,
    pictures: Annotated[
        list[Path], typer.Argument(metavar="DIR|FILE", help="Unlabelled pictures, or folders of them.")
    ],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many to choose.")] = 20,
    copy_to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy them there, in folders named after the best guess, to be corrected."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Choose the pictures to label next: those the model is unsure about or has never seen the like of, no two alike.

    **Examples**

    `fscil suggest birds photos/unsorted -n 20`

    `fscil suggest birds photos/unsorted --copy-to label-these`, then correct the folders, then
    `fscil learn birds label-these --add`
    """
    from fscil.commands._shared import check_model, columns, notes, open_model, print_json
    from fscil.errors import UserError
    from fscil.teachable.sorting import check_target, folder_name, pictures_beside, place_file

    check_model(model, weights, pictures)
    for path in pictures:
        if not path.exists():
            raise UserError(f'"{path}" does not exist; give pictures, or folders of them.')
    if copy_to is not None:
        check_target("--copy-to", copy_to)
    files = pictures_beside(copy_to, pictures)
    from fscil.teachable.suggesting import suggest as choose

    with notes():
        found = choose(open_model(model, weights, device, quiet), files, count)
    placed: list[Path | None] = [None] * len(found)
    if copy_to is not None:
        folders = [copy_to / folder_name(item.folder) for item in found]
        placed = [place_file(files[item.position], folder) for item, folder in zip(found, folders)]
    if as_json:
        print_json(
            [
                {
                    "file": str(files[item.position]),
                    "reason": item.reason,
                    "label": "unknown" if item.unknown else item.label,
                    "confidence": round(item.confidence, 4),
                    "group": item.group,
                    "copied_to": None if copy is None else str(copy),
                }
                for item, copy in zip(found, placed)
            ]
        )
        return
    print(columns([(files[item.position], item.reason) for item in found]))
    if copy_to is not None:
        print(
            f"copied into {copy_to}: move each into a folder named like its class, then: fscil learn {model} {copy_to} "
            "--add",
            file=sys.stderr,
        )


COMMANDS = {"suggest": suggest}
