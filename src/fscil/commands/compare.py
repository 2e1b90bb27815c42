"""`fscil compare`: a grid of methods, datasets, seeds and settings as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fscil.text import printable

if TYPE_CHECKING:
    from fscil.experiments.engines import Engine
    from fscil.experiments.grid import Job
    from fscil.experiments.overview import Overview

PANEL = "Experiments"

# Options that `compare` and `reproduce` share.
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the grid: run folders, logs, tables, figures.")
]
Backbone = Annotated[str | None, typer.Option(help="`arch.tag` of timm. Default: the dataset's.")]
Weights = Annotated[str | None, typer.Option(metavar="FILE", help="Local safetensors file of the backbone.")]
DataRoot = Annotated[str | None, typer.Option(metavar="DIR", help="Where the dataset lies.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting in all runs.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Smoke runs: so many images per base class, and per class to test on.")
]
Fast = Annotated[bool, typer.Option("--fast", help="Apply the recipes' `fast:` blocks: a quick look.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time on this machine.")]
EngineName = Annotated[str, typer.Option("--engine", metavar="local|ray", help="This machine, or a Ray cluster.")]
Address = Annotated[str | None, typer.Option(help="Of a running Ray cluster. Default: start one here.")]
Cpus = Annotated[float | None, typer.Option(help="Ray: CPU cores per run. Default: 1.")]
Gpus = Annotated[float | None, typer.Option(help="Ray: GPUs per run, also a fraction. Default: 1 where there are any.")]
Memory = Annotated[float | None, typer.Option(metavar="GB", help="Ray: memory per run.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, mps.")]
Precision = Annotated[str | None, typer.Option(help="auto, fp32, bf16, fp64.")]
Tensorboard = Annotated[bool, typer.Option("--tensorboard", help="Log every run for TensorBoard.")]
Track = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="Log every run to wandb, mlflow or tensorboard; several with commas."),
]
Markdown = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Put the tables between their marks in this Markdown file.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the tables.")]


def compare(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Finished runs, or folders of runs: tabulate these, run nothing."),
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Names with commas; `all`: the paper's fifteen.")
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="One or more, with commas.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="How many (3: 2023, 2024, 2025), or which (2023,2024). Default: 1.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Run with each of these values; repeated: with every combination."),
    ] = None,
    settings: Settings = None,
    grid: Annotated[Path | None, typer.Option(metavar="FILE", help="The grid as a YAML file.")] = None,
    backbone: Backbone = None,
    weights: Weights = None,
    data_root: DataRoot = None,
    limit: Limit = None,
    fast: Fast = False,
    output: Output = Path("runs/grid"),
    name: Annotated[
        str, typer.Option(help="Of the comparison: where its tables go, below the grid's folder.")
    ] = "compare",
    markdown: Markdown = None,
    jobs: Jobs = 1,
    engine: EngineName = "local",
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    memory: Memory = None,
    device: Device = None,
    precision: Precision = None,
    tensorboard: Tensorboard = False,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Compare methods over seeds: run what is missing, then print the paper's main table.

    What is finished is not run again, and a stopped comparison goes on where it was: give the same command again.
    What the columns mean: `fscil list metrics`.

    **Examples**

    `fscil compare --methods baseline,smp --seeds 3`

    `fscil compare --dataset cifar100 --methods all --seeds 3 --markdown REPRODUCIBILITY.md`

    `fscil compare --methods smp --vary data.shots=1,5,10 --vary options.rank=4,10 --jobs 2`

    `fscil compare --grid grid.yaml --engine ray --address 10.0.0.1:6379 --gpus 0.5`

    `fscil compare runs/glyphs-smp-seed2023-1 runs/grid/cells`
    """
    from fscil import registry
    from fscil.errors import UserError
    from fscil.evaluation.results import find_runs
    from fscil.experiments.api import as_settings, place_flags
    from fscil.experiments.comparison import (
        GridSpec,
        check_places,
        comparison_tables,
        load_cells,
        load_folders,
        parse_seeds,
        parse_variants,
        read_grid,
        split_names,
    )
    from fscil.experiments.grid import plan
    from fscil.strict import merge, parse_setting

    chosen = {"--methods": methods, "--dataset": dataset, "--seeds": seeds, "--vary": vary}
    given = [flag for flag, value in chosen.items() if value is not None]
    if folders:
        of_runs: dict[str, Any] = {"--grid": grid, "--set": settings, "--backbone": backbone, "--weights": weights}
        of_runs |= {"--data-root": data_root, "--limit": limit, "--fast": fast, "--device": device}
        of_runs |= {"--precision": precision, "--tensorboard": tensorboard, "--track": track, "--jobs": jobs > 1}
        of_runs |= {"--engine": engine != "local", "--address": address, "--cpus": cpus, "--gpus": gpus}
        of_runs |= {"--memory": memory}
        given += [flag for flag, value in of_runs.items() if value]
        if stray := [str(name) for name in folders if str(name) in registry.methods() and not Path(name).exists()]:
            meant = ",".join(dict.fromkeys([*split_names(methods or ""), *stray]))
            raise UserError(f'"{stray[0]}" is a method, not a folder of runs; write: --methods {meant}')
        if given:
            raise UserError(f"{given[0]} describes runs to make; with run folders, leave it out")
        results, problems = load_folders(find_runs(folders))
        leave_out(problems)
        if not results:
            raise UserError("none of these folders holds a finished run")
        show(comparison_tables(results), output / name, markdown, name, quiet)
        raise typer.Exit(1 if problems else 0)

    if grid is not None:
        if given:
            raise UserError(f"--grid says what is compared; leave {given[0]} out")
        spec = read_grid(grid)
        common = merge(*map(parse_setting, [*as_settings(spec.set), *(settings or [])]))
        spec = GridSpec(spec.methods, spec.datasets, spec.seeds, spec.settings, common, spec.fast or fast)
    else:
        spec = GridSpec(
            split_names(methods or "smp"),
            split_names(dataset or "glyphs"),
            parse_seeds(seeds or "1"),
            parse_variants(vary or []),
            merge(*map(parse_setting, settings or [])),
            fast,
        )
    if markdown is not None:
        check_places(markdown, [f"{name}-{dataset}" for dataset in spec.datasets])
    flags = place_flags(
        backbone=backbone,
        weights=weights,
        data_root=data_root,
        limit=limit,
        device=device,
        precision=precision,
        tensorboard=tensorboard,
        track=track,
    )
    todo = plan(output, spec.configs(**flags))
    overview = work(todo, engine_of(engine, jobs, address, cpus, gpus, memory), quiet)
    cells, problems = load_cells(todo)
    leave_out(problems)
    missing = [f"{job.config.method} seed {job.config.seed}" for job in todo if not job.specs and job.name not in cells]
    if cells:
        remarks = [f"Missing: {', '.join(missing)}."] if missing else []
        show(comparison_tables(list(cells.values()), remarks), output / name, markdown, name, quiet)
    end(overview)
    if problems:
        raise typer.Exit(1)


def leave_out(problems: Sequence[str]) -> None:
    """A line for every run that cannot be used."""
    for problem in problems:
        print(f"left out: {printable(problem)}", file=sys.stderr)


def engine_of(name: str, jobs: int, address: str | None, cpus: Any, gpus: Any, memory: Any) -> Engine:
    """The engine that the options name."""
    import os

    from fscil.errors import UserError
    from fscil.experiments.engines import Resources, make_engine

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a grid is started by one process; use --jobs or --engine ray instead of `accelerate launch`")
    return make_engine(name, jobs, address, Resources(cpus, gpus, memory))


def work(todo: Sequence[Job], engine: Engine, quiet: bool) -> Overview:
    """Do the jobs; Ctrl-C ends with advice."""
    from fscil.errors import stoppable
    from fscil.experiments.engines import run_jobs

    try:
        with stoppable(), engine:
            return run_jobs(todo, engine, quiet)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where this one was", file=sys.stderr)
        raise typer.Exit(130) from None


def show(made: dict[str, Any], folder: Path, markdown: Path | None, name: str, quiet: bool) -> None:
    """Tables on the screen, as CSV, Markdown and LaTeX, and in a document."""
    from fscil.display import output_console
    from fscil.evaluation.rendering import print_table, render, write_table
    from fscil.experiments.comparison import PARTS, splice
    from fscil.text import file_name

    console = output_console()
    for key, table in made.items():
        print_table(table, console)
        write_table(table, folder / file_name(key))
    if markdown is not None:
        datasets = [key for key in made if not key.endswith(PARTS[1:])]
        blocks = {
            f"{name}-{dataset}": "\n".join(
                render(made[dataset + part], "markdown") for part in PARTS if dataset + part in made
            )
            for dataset in datasets
        }
        splice(markdown, blocks)
    if not quiet:
        print(f"tables in {folder} (.csv, .md, .tex)" + (f" and {markdown}" if markdown else ""))


def end(overview: Overview) -> None:
    """Exit status 1 when something failed, with what its log says."""
    from fscil.experiments.overview import explain_failures

    lines = explain_failures(overview)
    if lines:
        print("\n".join(lines), file=sys.stderr)
        raise typer.Exit(1)


COMMANDS = {"compare": compare}
