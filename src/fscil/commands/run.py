"""`fscil run`: one method on one dataset with one seed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

PANEL = "Experiments"


def run(
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="See `fscil list methods`. Default: smp.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", "-d", help="See `fscil list datasets`. Default: glyphs.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="What makes a classifier of the features, see `fscil list heads`. Default: the method's own."
        ),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="`arch.tag` of timm, or one of `fscil list backbones`. Default: the dataset's.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Local safetensors file of the backbone."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses shots, initial weights and draws. Default: 2023.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="A recipe by name or file. Default: the one of dataset and method."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting; may be repeated."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Smoke run: so many images per base class, and per class to test on."),
    ] = None,
    data_root: Annotated[str | None, typer.Option(metavar="DIR", help="Where the dataset lies.")] = None,
    shots_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use exactly the shots of this ledger (a run's shots.json).")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="full|PIXELS", help="Keep images whole, or reduced to this short side. Default: 256."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Run folder. Default: a new one under runs/.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Go on with a stopped run.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Apply the recipe's `fast:` block: a quick look.")] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16, fp64.")] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log loss and metrics for TensorBoard, in the run folder.")
    ] = False,
    track: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Log them to wandb, mlflow or tensorboard; several with commas.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the final table.")] = False,
) -> None:
    """Run a method on a dataset: base task, every few-shot task, evaluation after each.

    Without any option: SMP on the built-in glyphs, about two minutes on two CPU cores.
    What the columns of its table mean: `fscil list metrics`.

    **Examples**

    `fscil run --method baseline --seed 2024`

    `fscil run --dataset cifar100 --data-root data/cifar`

    `fscil run --method miam --head closed_form --set head.shrinkage=0.2`

    `fscil run --recipe glyphs/smp_full --set options.rank=4 --set transform.scale=[0.3,1]`

    `fscil run --dataset cub200 --data-root data/cub --set runtime.micro_batch=8 --set runtime.checkpointing=true`

    `fscil run --resume runs/glyphs-smp-seed2023-1`
    """
    from fscil.errors import UserError, stoppable
    from fscil.experiments.api import configure

    if resume is not None and output is not None:
        raise UserError("--resume and --output exclude each other: a resumed run stays in its folder")
    config = configure(
        method,
        dataset,
        settings=settings or [],
        recipe=recipe,
        fast=fast,
        resume=resume,
        head=head,
        backbone=backbone,
        weights=weights,
        seed=seed,
        limit=limit,
        data_root=data_root,
        shots_file=shots_file,
        store=store,
        skip_bad=skip_bad,
        device=device,
        precision=precision,
        tensorboard=tensorboard,
        track=track,
    )

    # Only now, because these import torch: a name that is not known is said at once.
    from fscil.display import LiveDisplay, output_console
    from fscil.experiments import run as protocol
    from fscil.experiments.run_folder import new_folder

    first = os.environ.get("RANK", "0") == "0"  # of several processes, one talks
    display = LiveDisplay(quiet=quiet or not first)
    folder = resume or output or new_folder(config)
    try:
        with stoppable():
            results = protocol.run(config, folder, resume=resume is not None, display=display, announce=not quiet)
    except KeyboardInterrupt:
        display.close()
        started = (folder / "config.yaml").exists()
        advice = f"go on with: fscil run --resume {folder}" if started else "nothing was written yet"
        print(f"stopped; {advice}", file=sys.stderr)
        raise typer.Exit(130) from None
    if not first:
        return
    output_console().print(results.rich_table())
    print(f"results in {results.folder}")


COMMANDS = {"run": run}
