"""`fscil tune`: settings of a head on a validation stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fscil.commands import compare as shared

PANEL = "Experiments"


def tune(
    vary: Annotated[
        list[str],
        typer.Option(metavar="head.KEY=A,B", help="Values of an option of the head; repeated: every combination."),
    ],
    method: Annotated[str, typer.Option("--method", "-m", help="What is trained on the base task.")] = "smp",
    head: Annotated[str, typer.Option(help="See `fscil list heads`. own: the method's.")] = "own",
    dataset: Annotated[str, typer.Option("--dataset", "-d", help="See `fscil list datasets`.")] = "glyphs",
    draws: Annotated[int, typer.Option(min=1, help="Draws of the shots.")] = 10,
    seeds: Annotated[str, typer.Option(help="How many, or which (2023,2024); each trains its own base.")] = "1",
    by: Annotated[str, typer.Option(help="The metric that decides, see `fscil list metrics`.")] = "A_avg",
    settings: shared.Settings = None,
    backbone: shared.Backbone = None,
    weights: shared.Weights = None,
    data_root: shared.DataRoot = None,
    limit: shared.Limit = None,
    fast: shared.Fast = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Tables, every draw, and trained adapters.")
    ] = Path("runs/tune"),
    device: shared.Device = None,
    precision: shared.Precision = None,
    quiet: shared.Quiet = False,
) -> None:
    """Compare options of a head on one trained base, over many draws of the shots, on a validation stream.

    The stream is cut from the training images of base classes; the dataset's test images and new classes are not read,
    so what is chosen may be reported on them. Nothing is retrained between settings.

    **Examples**

    `fscil tune --method chord --vary head.correction=0.5,0.75,1 --draws 20`

    `fscil tune --method miam --head closed_form --vary head.shrinkage=0.1,0.3,0.5 --vary head.correction=0.5,1`
    """
    from fscil.config import refuse_tasks_of_validation, resolve
    from fscil.display import LiveDisplay, output_console
    from fscil.errors import UserError
    from fscil.evaluation.rendering import print_table, write_table
    from fscil.evaluation.tables import dataset_title, run_title
    from fscil.experiments import tune as tuning
    from fscil.experiments.api import place_flags
    from fscil.experiments.comparison import parse_seeds, parse_variants, refuse_apart
    from fscil.strict import flatten, merge, parse_setting

    wanted = tuning.head_settings(parse_variants(vary))
    tuning.check_metric(by)
    chosen = merge(*map(parse_setting, settings or []))
    refuse_apart(chosen, "--method")
    if flatten(chosen).get("data.validation", True) is not True:
        raise UserError(
            "data.validation=false: fscil tune compares on a validation stream alone; leave it out, or compare on the "
            "real stream: fscil compare --vary head.KEY=A,B"
        )
    flags = place_flags(
        head=None if head == "own" else head,
        backbone=backbone,
        weights=weights,
        data_root=data_root,
        limit=limit,
        device=device,
        precision=precision,
    )
    flags = merge(flags, {"data": {"validation": True}})
    groups: dict[str, list] = {}
    for seed in parse_seeds(seeds):
        config = resolve(method, dataset, None, settings or [], fast, seed=seed, **flags)
        refuse_tasks_of_validation(config, chosen)
        found = tuning.tune(config, wanted, draws, output / "shelf", LiveDisplay(quiet=quiet))
        for label, results in found.items():
            groups.setdefault(label, []).extend(results)
    title = f"{run_title(method, config.head.get('name'))} on {dataset_title(dataset)}, validation stream"
    console = output_console()
    for name, table in tuning.tuning_tables(groups, title).items():
        print_table(table, console)
        write_table(table, output / name)
    tuning.save(groups, config, output / "tune.json")
    best = tuning.best_setting(groups, by)
    print(f"best by {by}: {best}" + ("" if quiet else f"; tables and every draw in {output}"))


COMMANDS = {"tune": tune}
