"""`fscil export`, `fscil push`, `fscil pull`: models for other libraries and other people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fscil.commands.teach import Model, Weights

PANEL = "Your own photos"
Repo = Annotated[str, typer.Argument(metavar="REPO", help="A repository on the Hugging Face hub, as `name/model`.")]


def export(
    model: Model,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="timm, peft, onnx, or a target of another package.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Default: MODEL-timm, MODEL-peft, MODEL.onnx."),
    ] = None,
    weights: Weights = None,
) -> None:
    """Write the model for timm (folded weights), peft (adapter for the Hugging Face ViT) or ONNX (one file).

    **Examples**

    `fscil export birds --to onnx`

    `fscil export birds --to timm -o birds-timm`
    """
    from fscil.commands._shared import check_model, notes, open_model

    check_model(model, weights)
    from fscil.files import check_place
    from fscil.teachable.export import default_path, exporter
    from fscil.text import size

    target = output or default_path(model, to)
    write = exporter(to)
    check_place(target)
    with notes():
        write(open_model(model, weights, device="cpu"), target)
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    print(f"wrote {target} ({size(sum(file.stat().st_size for file in files))})")


def push(
    model: Model,
    repo: Repo,
    private: Annotated[bool, typer.Option("--private", help="If the repository is new: only you can see it.")] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Upload earlier versions too; they may hold classes forgotten since.")
    ] = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a generated model card.

    **Example**

    `fscil push birds name/birds`
    """
    from fscil.teachable import hub

    print(f"pushed to {hub.push(model, repo, private, history)}")


def pull(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder to make.")],
    repo: Repo,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="REV", help="A commit, tag or branch; without it the latest commit."),
    ] = None,
) -> None:
    """Download a model from the Hugging Face hub; every file's size and hash is checked.

    **Examples**

    `fscil pull birds name/birds`

    `fscil pull birds name/birds --revision 5ae7b1c0d9e1f2a3b4c5d6e7f8091a2b3c4d5e6f`
    """
    from fscil.commands._shared import read_head
    from fscil.teachable import hub
    from fscil.text import size

    commit = hub.pull(model, repo, revision)
    head = read_head(model)
    print(f"pulled {len(head.current.record['classes'])} classes -> {model} ({size(head.bytes)}, commit {commit})")


COMMANDS = {"export": export, "push": push, "pull": pull}
