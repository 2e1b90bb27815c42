"""What the commands for people with photos share: opening models, notes, tables. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.text import percent, printable

if TYPE_CHECKING:
    from fscil.teachable.folder import Head
    from fscil.teachable.model import Teachable


@contextlib.contextmanager
def notes() -> Iterator[list[str]]:
    """Notices of the library as lines on stderr, each once; the list that is given has them too, as they come."""
    with warnings.catch_warnings():
        from fscil.teachable.recognition import Notice

        warnings.simplefilter("always", Notice)
        show = warnings.showwarning
        said: list[str] = []

        def line(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
            if not issubclass(category, Notice):
                show(message, category, *rest, **named)
            elif str(message) not in said:
                said.append(str(message))
                print(f"note: {printable(message)}.", file=sys.stderr)

        warnings.showwarning = line
        yield said


def check_model(path: Path, weights: str | None = None, pictures: Iterable[str | Path] = ()) -> Head:
    """The head of a model; refuses what it alone shows cannot be opened, before anything heavy is imported. `pictures`
    are what the command gives beside it: a model among them was meant to come first."""
    from fscil.errors import UserError
    from fscil.teachable.folder import ModelFolder
    from fscil.teachable.weights import find_weights

    folder = ModelFolder(path)
    swapped = [] if folder.exists() else [other for other in pictures if ModelFolder(other).exists()]
    if swapped:
        raise UserError(f'"{path}" is no model, but "{swapped[0]}" is one: name the model first, then the pictures.')
    head = folder.read()
    find_weights(folder, head, weights)
    return head


def open_model(path: Path, weights: str | None = None, device: str | None = None, quiet: bool = False) -> Teachable:
    check_model(path, weights)
    from fscil.teachable.model import Teachable

    verbose = sys.stderr.isatty() and not quiet
    return Teachable.load(path, device=device or "auto", weights=weights, verbose=verbose)


def read_secret(option: str, file: Path) -> str:
    """What a file with a password or a token holds; any file that can be read once will do, a pipe too."""
    from fscil.errors import UserError

    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f'{option} "{file}" cannot be read: {error.strerror or error}.') from error
    except UnicodeDecodeError as error:
        raise UserError(f'{option} "{file}" is no text in UTF-8.') from error


def read_head(path: Path) -> Head:
    """The description of a model, without torch."""
    from fscil.teachable.folder import ModelFolder

    return ModelFolder(path).read()


def print_json(data: Any) -> None:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    print(text.encode("utf-8", "backslashreplace").decode())  # a name that is no UTF-8 becomes an escape of JSON's


def columns(rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Rows as text with aligned columns; those in `right` are aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = (
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths)))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def event_line(event: Mapping[str, Any]) -> str:
    """One change in words."""
    named = ", ".join(f"{printable(name)} ({count})" for name, count in list(event["classes"].items())[:6])
    more = len(event["classes"]) - 6
    text = f"{event['when']}  {event['action']}: {named}" + (f" and {more} more" if more > 0 else "")
    figures = [f"{event['known']} classes"]
    if event.get("held_out_accuracy") is not None:
        figures.append(f"held-out base accuracy {percent(event['held_out_accuracy'])}")
    if event.get("taught_rejection") is not None:
        figures.append(f"taught pictures called unknown {percent(event['taught_rejection'])}")
    return f"{text}  [{'; '.join(figures)}]"
