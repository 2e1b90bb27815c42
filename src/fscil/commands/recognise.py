"""`fscil predict` and `fscil evaluate`: what a model says, and how often it is right."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fscil.commands.teach import Device, Model, Quiet, Weights
from fscil.text import percent

if TYPE_CHECKING:
    from fscil.teachable.recognition import Recognition

PANEL = "Your own photos"


def predict(
    model: Model,
    pictures: Annotated[list[Path], typer.Argument(metavar="FILES…", help="Pictures, or folders of pictures.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON list, with the best classes of each picture.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV: file, label, confidence, unknown, error.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many classes --json lists per picture.")] = 5,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Name what pictures show, with a calibrated confidence, or `unknown`.

    Pictures that cannot be read are named on stderr; the exit status is then 1.

    **Examples**

    `fscil predict birds some.jpg more/*.jpg`

    `fscil predict birds photos/unsorted --csv > labels.csv`
    """
    from fscil.commands._shared import columns, notes, open_model, print_json
    from fscil.data.pictures import expand
    from fscil.errors import UserError
    from fscil.text import printable

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other.")
    files = expand(pictures)
    with notes():
        found = open_model(model, weights, device, quiet).recognise(files, top)
    if as_json:
        print_json([item.entry(file) for file, item in zip(files, found)])
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["file", "label", "confidence", "unknown", "error"])
        for file, item in zip(files, found):
            writer.writerow([printable(file), item.shown, f"{item.confidence:.4f}", item.unknown, item.error or ""])
    else:
        readable = [(file, item) for file, item in zip(files, found) if item.error is None]
        if readable:
            print(columns([(file, item.shown, _how_sure(item)) for file, item in readable], right=[2]))
    unreadable = [(file, item.error) for file, item in zip(files, found) if item.error is not None]
    for file, error in unreadable:
        print(f"fscil: {printable(file)}: {printable(error)}", file=sys.stderr)
    if unreadable:
        raise typer.Exit(1)


def _how_sure(item: Recognition) -> str:
    if item.unknown:
        return f"(nearest: {item.top[0][0]})"
    return percent(item.confidence)


def evaluate(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with one folder of pictures per class.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read.")] = False,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Accuracy on labelled pictures. Folders that name no known class count as unknown pictures.

    **Example**

    `fscil evaluate birds photos/test`
    """
    from fscil.commands._shared import columns, notes, open_model, print_json
    from fscil.data.pictures import class_folders
    from fscil.teachable.assess import assess
    from fscil.teachable.lessons import left_out

    files, labels = class_folders(folder)
    with notes():
        clf = open_model(model, weights, device, quiet)
        if said := left_out(folder):
            clf.note(said)
        result = assess(clf, files, labels, skip_bad)
    if as_json:
        print_json(result)
        return
    rows = [(name, entry["pictures"], percent(entry["accuracy"])) for name, entry in result["classes"].items()]
    print(columns([("class", "pictures", "accuracy"), *rows], right=[1, 2]))
    print()
    for key, title in TITLES.items():
        if result[key] is not None:
            print(f"{title:44} {percent(result[key])}")


TITLES = {
    "accuracy": "accuracy",
    "base_accuracy": "accuracy of base classes",
    "taught_accuracy": "accuracy of taught classes",
    "calibration_error": "confidence off by (calibration error)",
    "known_rejected": "known pictures called unknown",
    "taught_rejected": "pictures of taught classes called unknown",
    "unknown_rejected": "pictures of other classes called unknown",
    "auroc": "known against other classes: AUROC",
    "fpr_at_95": "known against other classes: FPR@95",
}


COMMANDS = {"predict": predict, "evaluate": evaluate}
