"""`fscil learn`, `fscil forget`, `fscil undo`: what changes a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fscil.teachable.model import Teachable

PANEL = "Your own photos"
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The model folder.")]
Weights = Annotated[
    str | None, typer.Option(metavar="FILE", help="The backbone's weights, if they lie elsewhere than when fitted.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]


def learn(
    model: Model,
    pictures: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|CSV|FILE",
            help="A folder of class folders, or a CSV (path,label); or, with --class, pictures or folders.",
        ),
    ],
    name: Annotated[str | None, typer.Option("--class", "-c", metavar="NAME", help="What all pictures show.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Add pictures to classes that are known already.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="What was learned, and what there is to say, as JSON.")
    ] = False,
    weights: Weights = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Teach new classes from a few pictures each; the old pictures are not needed.

    **Examples**

    `fscil learn birds photos/new`

    `fscil learn birds --class heron heron1.jpg heron2.jpg heron3.jpg`

    `fscil learn birds --class heron --add more/*.jpg`
    """
    from fscil.commands._shared import check_model, event_line, notes, open_model, print_json

    head = check_model(model, weights, pictures)
    from fscil.teachable.names import check_class_names
    from fscil.text import printable

    known = {str(info["name"]): info["pictures"] for info in head.current.record["classes"]}
    if name is not None:
        check_class_names([name], known)
    files, labels = _lesson(model, pictures, name)
    check_class_names(labels, known)
    again = [label for label in dict.fromkeys(labels) if label in known]
    if again and not add and sys.stdin.isatty():
        said = ", ".join(f'"{printable(label)}" ({known[label]} pictures)' for label in again)
        add = typer.confirm(f"{said}: known already. Add these pictures?", err=True)
    from fscil.teachable.lessons import remarks

    with notes() as heard:
        clf = open_model(model, weights, device, quiet)
        clf.skip_bad = skip_bad
        for said in remarks(pictures[0]) if name is None else ():
            clf.note(said)
        with clf.editing():
            clf.learn(files, labels, add=add)
    if as_json:
        print_json({**clf.history_[-1], "notes": heard})
    else:
        print(event_line(clf.history_[-1]))


def _lesson(model: Path, pictures: list[Path], name: str | None) -> tuple[list[Path], list[str]]:
    """Files and labels; a folder that was surely meant otherwise is refused with the command for it."""
    import shlex

    from fscil.data.picture_files import expand, files_in, is_table, label_name, labelled_files
    from fscil.errors import UserError

    def command(*words: object) -> str:
        return shlex.join(["fscil", "learn", str(model), *map(str, words)])

    if name is None:
        if len(pictures) != 1 or not (pictures[0].is_dir() or is_table(pictures[0])):
            missing = next((f'"{path}" does not exist; ' for path in pictures if not path.exists()), "")
            wanted = "one folder with a folder per class, a CSV file (path,label), or pictures with --class NAME."
            raise UserError(f"{missing}give {wanted}")
        (folder,) = pictures
        if (
            folder.is_dir()
            and not any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())
            and files_in(folder)
        ):
            one = command("--class", folder.resolve().name, folder)
            raise UserError(f'"{folder}" holds pictures and no class folders; to teach them as one class: {one}')
        files, names = labelled_files(folder)
        return files, [str(label_name(label)) for label in names]
    for folder in filter(Path.is_dir, pictures):
        inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and files_in(path)]
        if inner:
            named = ", ".join(path.name for path in inner[:5]) + (" …" if len(inner) > 5 else "")
            own = next((path for path in inner if path.name == name), inner[0])
            raise UserError(
                f'"{folder}" holds folders of its own ({named}), which --class would make one class. '
                f"A class each: {command(folder)}; one of them: {command('--class', name, own)}"
            )
    files = expand(pictures)
    return files, [str(label_name(name))] * len(files)


def forget(
    model: Model,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The class to remove.")],
    purge: Annotated[
        bool,
        typer.Option(
            "--purge",
            "--for-good",
            help="Remove its pictures, thumbnails and all earlier versions from the folder too; nothing can be undone.",
        ),
    ] = False,
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Remove a class. `fscil undo` brings it back, unless it was purged.

    **Examples**

    `fscil forget birds heron`

    `fscil forget birds heron --purge`
    """
    from fscil.commands._shared import check_model, event_line, notes, open_model
    from fscil.teachable.names import place_of

    place_of(name, [info["name"] for info in check_model(model, weights).current.record["classes"]])
    with notes():
        clf = open_model(model, weights, device)
        if purge:
            _purge(clf, name)
            return
        with clf.editing():
            clf.forget(name)
    print(event_line(clf.history_[-1]))


def _purge(clf: Teachable, name: str) -> None:
    """Purges a class and says what went and what is left."""
    from fscil.commands._shared import event_line
    from fscil.teachable.names import printable
    from fscil.teachable.purging import purge
    from fscil.text import count, size

    done = purge(clf, name)
    print(event_line(done.event))
    gone = f"{count(done.versions, 'earlier version')}, {count(len(done.files), 'file')}"
    print(f"purged: {gone} ({size(done.bytes)})")
    print(f"left: {count(len(clf.class_info_), 'class', 'classes')}, {size(clf.size_)}; nothing can be undone")
    if done.traces:
        print(f"left of the class: {'; '.join(done.traces)}. Fit again without it to be rid of that")
    if done.others:
        print(f"in the folder but not the model's, not touched: {', '.join(map(printable, done.others))}")
    print("copies elsewhere (backups, exports, what was pushed) are as they were")


def undo(
    model: Model, steps: Annotated[int, typer.Option("--steps", "-n", min=1, help="How many changes to take back.")] = 1
) -> None:
    """Take back the last change or changes, forgetting included.

    **Example**

    `fscil undo birds --steps 2`
    """
    from fscil.commands._shared import event_line
    from fscil.teachable.folder import ModelFolder, check_undo

    folder = ModelFolder(model)
    folder.read()
    with folder.lock():
        head = folder.read()
        check_undo(head.versions, steps)
        folder.write(head.config, head.versions[:-steps], before=head)
    for version in reversed(head.versions[-steps:]):
        print(f"undone: {event_line(version.record['event'])}")
    print(f"{len(head.versions[-steps - 1].record['classes'])} classes")


COMMANDS = {"learn": learn, "forget": forget, "undo": undo}
