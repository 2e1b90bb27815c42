"""`fscil list`: everything that can be chosen."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

PANEL = "Experiments"


class Kind(str, Enum):
    methods = "methods"
    heads = "heads"
    datasets = "datasets"
    backbones = "backbones"
    recipes = "recipes"
    experiments = "experiments"
    metrics = "metrics"


def list_choices(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help=f"One of {', '.join(kind.value for kind in Kind)}.")],
) -> None:
    """List methods, heads, datasets, backbones, recipes, the experiments of the paper, or what the metrics mean.

    **Examples**

    `fscil list methods`

    `fscil list recipes`
    """
    from fscil import recipes, registry

    rows: list[tuple[str, ...]]
    if kind is Kind.methods:
        rows = [(name, entry.title, entry.summary) for name, entry in registry.methods().items()]
    elif kind is Kind.heads:
        rows = [(name, entry.title, entry.summary) for name, entry in registry.heads().items()]
    elif kind is Kind.datasets:
        families = {f"{name}:NAME": entry for name, entry in registry.FAMILIES.items()}
        rows = [(name, entry.title, entry.summary) for name, entry in {**registry.datasets(), **families}.items()]
    elif kind is Kind.backbones:
        rows = [(name, entry.summary) for name, entry in registry.BACKBONES.items()]
    elif kind is Kind.experiments:
        from fscil.experiments.reproduce import choose

        rows = [(name, experiment.title) for name, experiment in choose(["all", "beyond"]).items()]
    elif kind is Kind.metrics:
        from fscil.evaluation.glossary import GLOSSARY

        rows = list(GLOSSARY.items())
    else:
        rows = [(name, recipes.load(name).summary) for name in recipes.names()]
    widths = [max(map(len, column)) for column in list(zip(*rows))[:-1]]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip())
    if kind is Kind.backbones:
        print("\nAny other plain ViT of timm works as well; name it as arch.tag.")
    if kind is Kind.experiments:
        print("\nMake one with: fscil reproduce NAME")


COMMANDS = {"list": list_choices}
