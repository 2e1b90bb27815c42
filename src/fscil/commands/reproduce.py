"""`fscil reproduce`: the paper's tables and figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fscil.commands import compare as shared
from fscil.text import printable

PANEL = "Experiments"


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="`all`, or some of: main, curves, base-new, ablation, ablation-backbone, merging, margins, shots, "
            "bias, calibration, fisher, tradeoff. `beyond`: the tables of CHORD, or some of: beyond-ablation, "
            "beyond-heads, beyond-shots, beyond-sessions, beyond-openset, beyond-correction.",
        ),
    ],
    dataset: Annotated[str, typer.Option("--dataset", "-d", help="One or more, with commas.")] = "glyphs",
    seeds: Annotated[
        str | None, typer.Option(help="How many, or which (2023,2024). Default: 3, as the paper; 1 with --fast.")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="One seed and the recipes' `fast:` blocks; says so on everything it makes.")
    ] = False,
    settings: shared.Settings = None,
    backbone: shared.Backbone = None,
    weights: shared.Weights = None,
    second_backbone: Annotated[
        str | None, typer.Option(help="Of `ablation-backbone`. Default: the paper's, on glyphs glyph_vit_b.")
    ] = None,
    second_weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="Local safetensors file of the second backbone.")
    ] = None,
    data_root: shared.DataRoot = None,
    limit: shared.Limit = None,
    output: shared.Output = Path("runs/grid"),
    markdown: shared.Markdown = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Runs at a time. Default: one per CPU core; one in all with a GPU."),
    ] = None,
    engine: shared.EngineName = "local",
    address: shared.Address = None,
    cpus: shared.Cpus = None,
    gpus: shared.Gpus = None,
    memory: shared.Memory = None,
    device: shared.Device = None,
    precision: shared.Precision = None,
    tensorboard: shared.Tensorboard = False,
    track: shared.Track = None,
    quiet: shared.Quiet = False,
) -> None:
    """Make tables and figures of the paper, on any dataset.

    Runs that several of them need are made once; what is finished is not run again, and a stopped command goes on
    where it was when it is given again. Figures come as PNG, SVG and PDF, tables as CSV, Markdown and LaTeX. What the
    columns mean: `fscil list metrics`.

    **Examples**

    `fscil reproduce all --fast`

    `fscil reproduce margins shots --dataset cifar100 --backbone deit_tiny_patch16_224.fb_in1k`

    `fscil reproduce beyond --dataset cub200 --data-root data/cub`

    `fscil reproduce main curves --dataset cifar100 --data-root data/cifar --engine ray --gpus 0.25`
    """
    from fscil.display import output_console
    from fscil.evaluation.rendering import print_table, render
    from fscil.evaluation.tables import Table
    from fscil.experiments.api import place_flags
    from fscil.experiments.comparison import check_places, load_cells, parse_seeds, splice, split_names
    from fscil.experiments.engines import default_jobs
    from fscil.experiments.grid import plan
    from fscil.experiments.reproduce import SEEDS, Request, choose, make_artefacts, write_index
    from fscil.text import file_name

    request = Request(
        choose(names),
        split_names(dataset),
        parse_seeds(seeds or ("1" if fast else str(SEEDS))),
        fast,
        settings or [],
        place_flags(
            backbone=backbone,
            weights=weights,
            data_root=data_root,
            limit=limit,
            device=device,
            precision=precision,
            tensorboard=tensorboard,
            track=track,
        ),
        second_backbone,
        second_weights,
    )
    of_dataset = places = [f"{name}-{chosen}" for name in request.experiments for chosen in request.datasets]
    if markdown is not None and markdown.exists():
        text = markdown.read_text(encoding="utf-8")
        places = [place for place in places if f"<!-- fscil:{place} -->" in text]
        check_places(markdown, places)
    todo = plan(output, request.configs())
    at_a_time = jobs or default_jobs(device)
    overview = shared.work(todo, shared.engine_of(engine, at_a_time, address, cpus, gpus, memory), quiet)

    folder = output / "reproduce" / (file_name("+".join(request.datasets)) + ("-fast" if fast else ""))
    results, damaged = load_cells(todo)
    shared.leave_out(damaged)
    made, problems = make_artefacts(request, results, folder)
    console = output_console()
    blocks: dict[str, str] = {}
    for name, parts in made.items():
        for suffix, part in parts.items():
            if isinstance(part, Table):
                print_table(part, console)
                # all tables of a dataset stand in its one place, whatever else their names say
                place = max((p for p in of_dataset if f"{name}{suffix}".startswith(p)), key=len)
                blocks[place] = f"{blocks.get(place, '')}\n{render(part, 'markdown')}"
    if markdown is not None:
        splice(markdown, {place: block for place, block in blocks.items() if place in places})
    index = write_index(request, made, folder)
    for problem in problems:
        print(printable(problem), file=sys.stderr)
    if not quiet:
        print(f"{len(made)} of {len(request.experiments)} made in {folder}; all on one page: {index}")
    shared.end(overview)
    if problems:
        raise typer.Exit(1)


COMMANDS = {"reproduce": reproduce}
