"""`fscil app`: the web page of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fscil.commands._shared import read_secret
from fscil.commands.teach import Device, Weights

PANEL = "Your own photos"


def app(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="The model folder.")] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="No model and no photos: fit a small one, with pictures to try and to teach.")
    ] = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Anything but this machine needs a password.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    user: Annotated[str, typer.Option(metavar="NAME", help="The name to log in with.")] = "fscil",
    password_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its first line is the password. Or set FSCIL_PASSWORD."),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Recognise and teach in a web page, on a computer or a phone.

    **Examples**

    `fscil app --demo --open`

    `fscil app birds --open`

    `fscil app birds --host 0.0.0.0 --password-file secret.txt`
    """
    from fscil.commands._shared import check_model
    from fscil.errors import UserError

    if model is None and not demo:
        raise UserError("give a model folder, or --demo for one to try things with.")
    if model is not None and demo:
        raise UserError(f'--demo brings a model of its own; leave out either --demo or "{model}".')
    if model is not None:
        check_model(model, weights)
    password = read_password(password_file)
    from fscil.serving.page import serve
    from fscil.teachable.demo import make_demo

    made = None
    if model is None:
        made = make_demo()
        model = made.model
    serve(
        model,
        host,
        port,
        user=user,
        password=password,
        weights=weights,
        device=device or "auto",
        open_browser=open_browser,
        demo=made,
    )


def read_password(file: Path | None) -> str | None:
    """The first line of the file, or the environment's FSCIL_PASSWORD; None if there is neither."""
    from fscil.errors import UserError

    if file is None:
        return os.environ.get("FSCIL_PASSWORD") or None
    lines = read_secret("--password-file", file).splitlines()
    if not lines or not lines[0].strip():
        raise UserError(f'--password-file "{file}" has no password in its first line.')
    return lines[0].strip()


COMMANDS = {"app": app}
