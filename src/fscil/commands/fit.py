"""`fscil fit`: a model of your own base classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

PANEL = "Your own photos"


def fit(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR|CSV", help="A folder with one folder of pictures per class; or a CSV: path,label."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="MODEL", help="The model folder to make.")],
    method: Annotated[str, typer.Option("--method", "-m", help="See `fscil list methods`.")] = "smp",
    backbone: Annotated[
        str,
        typer.Option(
            help="See `fscil list backbones`, or any plain ViT of timm as `arch.tag`. auto: ViT-B/16 on a GPU, and "
            "DeiT-Tiny, a fifteenth of the work, on a CPU."
        ),
    ] = "auto",
    weights: Annotated[str | None, typer.Option(metavar="FILE", help="Local safetensors file of the backbone.")] = None,
    embed: Annotated[bool, typer.Option("--embed", help="Put the backbone's weights into the model folder.")] = False,
    head: Annotated[
        str, typer.Option(help="See `fscil list heads`. auto: mpcc if smp is trained on a GPU, else closed_form.")
    ] = "auto",
    train: Annotated[
        str, typer.Option(help="auto, always, never. auto: on a GPU, from 10 classes with 20 pictures each on.")
    ] = "auto",
    false_rejection: Annotated[float, typer.Option(help="Rate at which known pictures may be called unknown.")] = 0.05,
    held_out: Annotated[float, typer.Option(help="Share of the pictures that calibrate instead of training.")] = 0.1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="options.NAME, head.NAME or transform.NAME; may be repeated."
        ),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read.")] = False,
    thumbnails: Annotated[
        int,
        typer.Option(min=0, help="Keep small copies of so many pictures per class and lesson, to show beside answers."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 2023,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[
        str,
        typer.Option(
            help="auto, fp32, bf16. auto: bf16 on a GPU, fp32 on a CPU, though one that has bf16 trains about three "
            "times as fast with it."
        ),
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="What was learned, and what there is to say, as JSON.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Learn the classes of a folder of photos.

    It says what it will cost first. Where training does not pay (on a CPU; below 10 classes or 20 pictures per class)
    the backbone stays as it is and only the classifier is made, which is a good start. A training that was stopped goes
    on where it was with the same command.

    **Examples**

    `fscil fit photos/base -o birds`

    `fscil fit photos/base -o birds --backbone deit_tiny_patch16_224.fb_in1k --set options.epochs=5`
    """
    from fscil.commands._shared import notes, print_json
    from fscil.data.picture_files import labelled_files
    from fscil.errors import UserError
    from fscil.files import check_place
    from fscil.strict import merge, parse_setting
    from fscil.teachable.folder import ModelFolder
    from fscil.text import percent, size

    if ModelFolder(output).exists():
        raise UserError(f'--output "{output}" holds a model already; teach it with: fscil learn {output} {folder}')
    if other := ModelFolder(output).obstacle("progress"):
        raise UserError(f'--output "{output}": {other}; name a folder that does not exist yet.')
    check_place(output)
    for text in settings or []:
        if not parse_setting(text).keys() <= {"options", "head", "transform"}:
            raise UserError(f'--set "{text}": only options.NAME, head.NAME and transform.NAME can be set here.')
    chosen = merge(*(parse_setting(text) for text in settings or []))
    of_head = chosen.get("head") or {}
    if of_head and head == "auto":
        raise UserError(f"--set head.{next(iter(of_head))} needs a head; choose one with --head NAME")
    labelled_files(folder)  # a folder that will not do is refused before torch is imported
    from fscil.teachable.model import Teachable

    with notes() as said:
        clf = Teachable(
            method=method,
            backbone=backbone,
            weights=weights,
            head={"name": head, **of_head},
            train=train,
            options=chosen.get("options"),
            preprocessing=chosen.get("transform"),
            held_out=held_out,
            false_rejection=false_rejection,
            skip_bad=skip_bad,
            thumbnails=thumbnails,
            seed=seed,
            device=device,
            precision=precision,
            verbose=not quiet,
        )
        try:
            clf.fit(folder, progress=output / "progress")
        except KeyboardInterrupt:
            print("fscil: stopped; the same command goes on after the last whole epoch", file=sys.stderr)
            raise typer.Exit(130) from None
        clf.save(output, embed=embed)
    facts = clf.calibration_
    if as_json:
        print_json({**clf.history_[-1], "calibration": facts, "bytes": clf.size_, "notes": said})
        return
    print(f"learned {len(clf.classes_)} classes -> {output} ({size(clf.size_)})")
    if facts["held_out_accuracy"] is not None:
        print(f"accuracy on {facts['held_out']} held-out pictures: {percent(facts['held_out_accuracy'])}")
    if facts["threshold"] is None:
        print("too few held-out pictures to say unknown at this rate; every picture gets a class")
    else:
        print(f"known pictures called unknown: at most {percent(false_rejection)} expected")


COMMANDS = {"fit": fit}
