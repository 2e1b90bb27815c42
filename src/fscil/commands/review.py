"""`fscil review`: labelled pictures that look wrong."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer

from fscil.commands.teach import Device, Model, Quiet, Weights
from fscil.text import percent

PANEL = "Your own photos"


def review(
    model: Model,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR|CSV", help="A folder with one folder of pictures per class; or a CSV: path,label."),
    ],
    most: Annotated[int, typer.Option("--most", "-n", min=1, help="How many to list on the screen.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="All of them as a JSON list.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="CSV: file, label, finding, looks_like, doubt, same_as.")
    ] = False,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Find labelled pictures that look wrong: of another class, of none, or the same picture twice. Worst first.

    Each picture is judged as if its class had been learned without it. The pictures may be those the model was taught,
    or others; classes that it does not know yet are judged by their own pictures.

    **Examples**

    `fscil review birds photos/base`

    `fscil review birds photos/new --csv > check.csv`
    """
    from fscil.commands._shared import check_model, columns, notes, open_model, print_json
    from fscil.data.picture_files import label_name, labelled_files
    from fscil.errors import UserError
    from fscil.text import printable

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other.")
    check_model(model, weights, [folder])
    files, names = labelled_files(folder)
    from fscil.teachable.review import review as look_through

    with notes():
        clf = open_model(model, weights, device, quiet)
        known = {str(name): name for name in clf.classes_.tolist()}
        labels = [known.get(str(label_name(name)), label_name(name)) for name in names]
        found, classes = look_through(clf, files, labels)
    entries = [
        {
            "file": str(files[finding.position]),
            "label": labels[finding.position],
            "finding": finding.kind,
            "looks_like": None if finding.looks_like is None else classes[finding.looks_like],
            "doubt": round(finding.doubt, 4),
            "same_as": None if finding.twin is None else str(files[finding.twin]),
        }
        for finding in found
    ]
    if as_json:
        print_json(entries)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["file", "label", "finding", "looks_like", "doubt", "same_as"])
        for entry in entries:
            writer.writerow([printable(value) if value is not None else "" for value in entry.values()])
    else:
        if entries:
            rows = [(entry["file"], _in_words(entry), percent(float(entry["doubt"]), 0)) for entry in entries[:most]]
            print(columns(rows, right=[2]))
        said = f"{len(entries)} of {len(files)} pictures look wrong"
        if len(entries) > most:
            said += f", the worst {most} are listed (--most)"
        right = clf.calibration_["held_out_accuracy"]
        if entries and right is not None and right < 1:
            said += f"; of good ones, about {percent(1 - right, 0)} look so to this model"
        print(said, file=sys.stderr)


def _in_words(entry: dict[str, object]) -> str:
    if entry["finding"] == "twin":
        return f"nearly the same as {entry['same_as']}"
    return f"looks like {entry['looks_like'] or 'none of the classes'}"


COMMANDS = {"review": review}
