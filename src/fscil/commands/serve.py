"""`fscil serve`: a model over HTTP."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fscil.commands._shared import read_secret
from fscil.commands.teach import Device, Model, Weights

PANEL = "Your own photos"
SHORTEST_TOKEN = 16  # characters


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Anything but this machine needs a token.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the token clients must send; or set FSCIL_TOKEN."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Processes that answer; each has the model in memory.")
    ] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Pictures that go through the model at once.")] = 32,
    access_log: Annotated[bool, typer.Option(help="A line on stderr for every request.")] = True,
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Serve a model over HTTP: recognise, teach, forget, undo; docs at /docs, metrics at /metrics.

    **Examples**

    `fscil serve birds`

    `fscil serve birds --host 0.0.0.0 --token-file token.txt --workers 4`
    """
    from fscil.commands._shared import check_model
    from fscil.errors import UserError

    check_model(model, weights)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f'fscil serve needs {error.name}; install it with: pip install "fscil[serve]"') from None
    from fscil.serving.gate import is_local
    from fscil.serving.listening import listen
    from fscil.serving.workers import Service, serve_with
    from fscil.teachable.folder import ModelFolder

    token = _token(token_file)
    if token is None and not is_local(host):
        raise UserError(
            f'--host "{host}" lets other machines in, which needs a token: put one into a file and pass --token-file, '
            "or set FSCIL_TOKEN."
        )
    known = len(ModelFolder(model).read().current.record["classes"])
    service = Service(str(model), weights and str(weights), device or "auto", token, host, max_batch, access_log)
    with contextlib.closing(listen(host, port)) as listening:
        where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"

        def announce(*_: object) -> None:
            what = f"{model} ({known} classes{f', {workers} processes' if workers > 1 else ''})"
            print(f"serving {what} at {where}, docs at {where}/docs; stop with Ctrl-C", file=sys.stderr, flush=True)

        if workers == 1:
            service.run(listening, announce)
        else:
            serve_with(workers, service, listening, announce)


def _token(file: Path | None) -> str | None:
    from fscil.errors import UserError

    token, source = os.environ.get("FSCIL_TOKEN"), "FSCIL_TOKEN"
    if file is not None:
        source = f'--token-file "{file}"'
        token = read_secret("--token-file", file)
    if token is None:
        return None
    token = token.strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"{source} must hold one token of at least {SHORTEST_TOKEN} letters, digits and signs without spaces; "
            "make one with: openssl rand -hex 24"
        )
    return token


COMMANDS = {"serve": serve}
