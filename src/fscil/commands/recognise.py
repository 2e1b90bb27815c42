"""`fscil predict` and `fscil evaluate`: what a model says, and how often it is right."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fscil.commands.teach import Device, Model, Quiet, Weights
from fscil.text import percent, printable

if TYPE_CHECKING:
    from fscil.teachable.model import Teachable
    from fscil.teachable.recognition import Recognition
    from fscil.teachable.sorting import Sorted

PANEL = "Your own photos"


def predict(
    model: Model,
    pictures: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|DIR", help="Pictures, or folders of pictures; with --out also lists and URLs."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="A JSON list, with the best classes of each picture; an object a line if watching."
        ),
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV: file, label, confidence, unknown, error.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many classes --json and --out list per picture.")] = 5,
    sort_into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy each picture into a folder named like its class, in there.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="With --sort-into: link instead of copying.")] = False,
    move: Annotated[bool, typer.Option("--move", help="With --sort-into: move instead of copying.")] = False,
    watch: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with pictures that come into this folder, until Ctrl-C.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="For very many pictures: write a folder of Parquet files, restartable."),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="local|ray", help="Who answers with --out.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Workers of --engine ray; default: one per GPU or core.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster; default: this machine.")] = None,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Name what pictures show, with a calibrated confidence, or `unknown`.

    Pictures that cannot be read are named on stderr; the exit status is then 1.

    With `--out`, answers go into numbered Parquet files. Pictures may then also be a list (.txt, .csv) or a URL that
    fsspec reads (s3://…, http://…), and `--engine ray` spreads them over a cluster. Whatever was interrupted, the same
    command does what is missing; pictures that could not be read have their reason in the column `error`.

    **Examples**

    `fscil predict birds some.jpg more/*.jpg`

    `fscil predict birds photos/unsorted --csv > labels.csv`

    `fscil predict birds photos/unsorted --sort-into photos/sorted`

    `fscil predict birds --watch inbox --sort-into sorted`

    `fscil predict birds s3://bucket/photos --out answers.parquet --engine ray`
    """
    from fscil.commands._shared import check_model, notes, open_model
    from fscil.errors import UserError

    if (as_json, as_csv, out is not None).count(True) > 1:
        raise UserError("--json, --csv and --out exclude one another.")
    _check_sorting(sort_into, link, move, watch, out)
    if not pictures and watch is None:
        raise UserError("give pictures, folders of pictures, or --watch DIR.")
    check_model(model, weights, pictures or ())
    if out is not None:
        _predict_all(model, pictures or [], out, engine, workers, address, top, weights, device, quiet)
        return
    if (engine, workers, address) != ("local", None, None):
        raise UserError("--engine, --workers and --address are for very many pictures: add --out results.parquet.")
    if url := next((name for name in pictures or () if "://" in name), None):
        raise UserError(f'"{url}" is a URL; add --out results.parquet to recognise what is there.')
    from fscil.teachable.sorting import Sorted, pictures_beside
    from fscil.teachable.watching import arrivals

    coming = arrivals(watch, sort_into) if watch is not None else iter(())
    next(coming, None)  # from here on pictures are new
    files = pictures_beside(sort_into, map(Path, pictures or ()))
    into = Sorted(sort_into, "link" if link else "move" if move else "copy") if sort_into is not None else None
    show = _Answers("json" if as_json else "csv" if as_csv else "text", streaming=watch is not None)
    with notes():
        clf = open_model(model, weights, device, quiet)
        if files:
            show(*_answered(clf, files, into, top))
        try:
            if watch is not None:
                print(f"watching {printable(watch)}  (Ctrl-C ends it)", file=sys.stderr)
            for fresh in coming:
                if fresh:
                    show(*_answered(clf.refresh(), fresh, into, top))
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    if show.unreadable:
        raise typer.Exit(1)


def _check_sorting(sort_into: Path | None, link: bool, move: bool, watch: Path | None, out: str | None) -> None:
    from fscil.errors import UserError

    if link and move:
        raise UserError("--link and --move exclude each other.")
    if (link or move) and sort_into is None:
        raise UserError(f"--{'link' if link else 'move'} says how to sort; add --sort-into DIR.")
    if out is not None and (watch is not None or sort_into is not None):
        raise UserError("--out answers what is there now; it excludes --watch and --sort-into.")


def _answered(clf: Teachable, files: list[Path], into: Sorted | None, top: int) -> tuple[list[Path], list[Recognition]]:
    """Files and what they show; sorted as it goes, passing over what was sorted before."""
    if into is None:
        return files, clf.recognise(files, top)
    from fscil.data.pictures import AT_ONCE

    fresh = [file for file in files if file not in into]
    if len(fresh) < len(files):
        print(
            f"{len(files) - len(fresh)} of {len(files)} pictures were sorted before and are passed over",
            file=sys.stderr,
        )
    found: list[Recognition] = []
    for start in range(0, len(fresh), AT_ONCE):
        part = fresh[start : start + AT_ONCE]
        answers = clf.recognise(part, top)
        for file, item in zip(part, answers):
            if item.error is None:
                into.put(file, item.shown, item.confidence)
        found += answers
    return fresh, found


class _Answers:
    """Prints answers in one of three forms, all at once or as they come."""

    def __init__(self, form: str, streaming: bool):
        self.form, self.streaming, self.unreadable, self.began = form, streaming, False, False

    def __call__(self, files: Sequence[Path], found: Sequence[Recognition]) -> None:
        from fscil.commands._shared import columns, print_json
        from fscil.text import printable

        if self.form == "json" and self.streaming:
            for file, item in zip(files, found):
                print(json.dumps(item.entry(file)), flush=True)
        elif self.form == "json":
            print_json([item.entry(file) for file, item in zip(files, found)])
        elif self.form == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            if not self.began:
                writer.writerow(["file", "label", "confidence", "unknown", "error"])
            for file, item in zip(files, found):
                writer.writerow([printable(file), item.shown, f"{item.confidence:.4f}", item.unknown, item.error or ""])
        else:
            readable = [(file, item) for file, item in zip(files, found) if item.error is None]
            if readable:
                print(columns([(file, item.shown, _how_sure(item)) for file, item in readable], right=[2]))
        sys.stdout.flush()
        self.began = True
        for file, item in zip(files, found):
            if item.error is not None:
                self.unreadable = True
                print(f"fscil: {printable(file)}: {printable(item.error)}", file=sys.stderr)


def _predict_all(
    model: Path,
    sources: list[str],
    out: str,
    engine: str,
    workers: int | None,
    address: str | None,
    top: int,
    weights: str | None,
    device: str | None,
    quiet: bool,
) -> None:
    from fscil.commands._shared import notes
    from fscil.serving.bulk import ModelAt, make_engine, recognise_all

    with notes():
        chosen = make_engine(engine, workers, address)
        done = recognise_all(ModelAt(str(model), weights, device), sources, out, chosen, top=top, quiet=quiet)
    unreadable = f", {done.unreadable} of which could not be read (column error)" if done.unreadable else ""
    before = done.pictures - done.answered
    print(f"{out}: {done.answered} pictures answered{unreadable}" + (f"; {before} were there before" if before else ""))


def _how_sure(item: Recognition) -> str:
    if item.unknown:
        return f"(nearest: {item.top[0][0]})"
    return percent(item.confidence)


def evaluate(
    model: Model,
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR|CSV", help="A folder with one folder of pictures per class; or a CSV: path,label."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything as JSON, the whole confusion matrix too.")
    ] = False,
    matrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the confusion matrix into this PNG file.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read.")] = False,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Accuracy on labelled pictures. Folders that name no known class count as unknown pictures.

    **Examples**

    `fscil evaluate birds photos/test`

    `fscil evaluate birds photos/test --matrix confusions.png`
    """
    from fscil.commands._shared import check_model, columns, notes, open_model, print_json

    check_model(model, weights, [folder])
    from fscil.data.picture_files import labelled_files
    from fscil.errors import UserError
    from fscil.files import check_place

    if matrix is not None and (matrix.suffix.lower() != ".png" or matrix.is_dir()):
        raise UserError(f'--matrix "{matrix}" must be a file that ends in .png.')
    if matrix is not None:
        check_place(matrix)
    files, labels = labelled_files(folder)
    from fscil.teachable.assess import assess
    from fscil.teachable.lessons import left_out

    with notes() as heard:
        clf = open_model(model, weights, device, quiet)
        if said := left_out(folder):
            clf.note(said)
        result = assess(clf, files, labels, skip_bad)
    if matrix is not None:
        _draw(result["matrix"], sum(info["base"] for info in clf.class_info_), matrix)
    if as_json:
        print_json({**result, "notes": heard})
        return
    rows = [(name, entry["pictures"], percent(entry["accuracy"])) for name, entry in result["classes"].items()]
    print(columns([("class", "pictures", "accuracy"), *rows], right=[1, 2]))
    worst = [pair for pair in result["confusions"] if pair["pictures"] > 1][:WORST]
    if worst:
        pairs = [(pair["class"], pair["taken_for"], pair["pictures"], percent(pair["share"])) for pair in worst]
        print("\nmost often confused")
        print(columns([("class", "taken for", "pictures", "of it"), *pairs], right=[2, 3]))
    print()
    for key, title in TITLES.items():
        if result[key] is not None:
            print(f"{title:44} {percent(result[key])}")


def _draw(matrix: Mapping[str, Any], base: int, path: Path) -> None:
    import numpy as np

    from fscil.evaluation.figures import confusion_matrix
    from fscil.files import atomic_write
    from fscil.text import printable

    chart = confusion_matrix(np.array(matrix["counts"]), base, names=[printable(name) for name in matrix["classes"]])
    atomic_write(path, chart.rendered("png"))


WORST = 5  # pairs of classes that are named on the screen
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
