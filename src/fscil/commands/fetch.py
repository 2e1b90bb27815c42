"""`fscil fetch`: backbones and datasets, for machines without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PANEL = "Experiments"


def fetch(
    names: Annotated[
        list[str],
        typer.Argument(metavar="BACKBONE|DATASET", help="As `--backbone` and `--dataset` take them."),
    ],
    data_root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where a dataset goes. Default: its folder in the cache.")
    ] = None,
) -> None:
    """Get backbones and datasets, check them, and say where they are and what their hashes are.

    On a machine without a network, copy the folders it names to the same places; runs then find them.

    **Examples**

    `fscil fetch cifar100 vit_base_patch16_224.augreg_in21k_ft_in1k`

    `fscil fetch torchvision:Flowers102 hf:uoft-cs/cifar10`
    """
    from fscil import registry
    from fscil.errors import UserError, nearest

    datasets = [name for name in names if _is_dataset(name)]
    if data_root is not None and len(datasets) > 1:
        raise UserError(f"--data-root is the folder of one dataset; {' and '.join(datasets[:2])} need one each")
    for name in names:
        if name not in datasets and "." not in name and name not in registry.BACKBONES:
            meant = nearest(name, [*registry.datasets(), *registry.BACKBONES])
            raise UserError(
                f'"{name}" is neither a dataset nor a backbone.{meant} See: fscil list datasets, fscil list backbones'
            )
    if data_root is not None and not datasets:
        raise UserError(f'--data-root "{data_root}" is the folder of a dataset; name one, or leave it out')
    for name in names:
        print(_fetch_dataset(name, data_root) if name in datasets else _fetch_backbone(name), flush=True)


def _is_dataset(name: str) -> bool:
    from fscil import registry

    family, _, member = name.partition(":")
    return name in registry.datasets() or bool(member and family in registry.FAMILIES)


def _fetch_dataset(name: str, data_root: str | None) -> str:
    from fscil.config import DataConfig
    from fscil.data.datasets import load_dataset
    from fscil.data.datasets.common import place_of

    config = DataConfig(root=data_root, download=True)
    dataset = load_dataset(name, config)
    place = place_of(name, config)
    where = f"in {place}" if place.exists() else "that need no files"
    manifest = dataset.manifest
    counts = f"{len(manifest.entries):,} images of {len(manifest.class_names)} classes"
    return f"{name}: {counts} {where}, split {manifest.split}, hash {manifest.hash}"


def _fetch_backbone(name: str) -> str:
    from fscil.backbones.loading import cached_weights, make_backbone

    backbone = make_backbone(name)
    parameters = sum(weight.numel() for weight in backbone.parameters())
    return f"{name}: {parameters:,} parameters in {cached_weights(name) or Path('the package')}, hash {backbone.hash}"


COMMANDS = {"fetch": fetch}
