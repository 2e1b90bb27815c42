"""`hf:ORG/NAME`: a table of images and labels from the Hugging Face hub, or from a folder of parquet files or images.

Read by the package `datasets` (fscil[hf]), which runs no code of the repository; pictures are decoded by our own
decoder from the bytes of the table.
"""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from fscil.config import DataConfig
from fscil.data.datasets.common import Dataset, Part, may_fetch, part_names, parts_dataset, place_of
from fscil.errors import UserError, nearest

TESTS = ("test", "validation", "valid", "val")
USUAL_LABELS = ("label", "labels", "fine_label", "class", "target")  # columns that hold classes, where none says so


def from_hub(config: DataConfig, name: str) -> Dataset:
    """The table `ORG/NAME`, `ORG/NAME:SUBSET` or a local folder. Without a part to test on the split is stratified."""
    full = f"hf:{name}"
    tables = _load(full, name, config)
    first = next(iter(tables))
    usual_test = next((part for part in TESTS if part in tables), None)
    train, test = part_names(full, config, "train" if "train" in tables else first, usual_test)
    for part in (*train, *test):
        if part not in tables:
            raise UserError(f'dataset {full} has no part "{part}"; it has: {", ".join(tables)}.{nearest(part, tables)}')
    features = tables[train[0]].features
    image, label = _image_column(full, config, features), _label_column(full, config, features)
    values = {part: tables[part][label][:] for part in (*train, *test)}
    class_names, number = _classes(features[label], values)
    parts = [[_part(part, tables[part], image, values[part], number) for part in side] for side in (train, test)]
    identity = " ".join(tables[part]._fingerprint for part in (*train, *test))
    return parts_dataset(full, class_names, parts, config, identity)


def _load(full: str, name: str, config: DataConfig) -> Any:
    """The parts by name. `datasets` keeps what it fetched below the dataset's folder in our cache."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f'dataset {full} needs the package datasets: pip install "fscil[hf]"') from error
    path, _, subset = name.partition(":")
    if path.startswith((".", "/", "~")):
        path = os.path.expanduser(path)
        if not os.path.exists(path):
            raise UserError(f'dataset {full}: there is no folder "{path}"')
    root, before = place_of(full, config), datasets.config.HF_HUB_OFFLINE
    offline = before or not (may_fetch(config) and _hub_has_a_name())
    try:
        datasets.config.HF_HUB_OFFLINE = offline
        quiet = datasets.DownloadConfig(local_files_only=offline, max_retries=1)
        found = datasets.load_dataset(path, subset or None, cache_dir=str(root), download_config=quiet)
    except Exception as error:  # datasets raises what the network, the hub and the files raise
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"dataset {full} could not be read ({type(error).__name__}: {said}). Check the name; without a network, "
            f'copy "{root}" from a machine where `fscil fetch {full}` ran, or name a local folder as hf:./FOLDER'
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    return found


def _hub_has_a_name() -> bool:
    """Whether the hub can be found; where not, its client would try for half a minute, a line each time."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        return bool(getproxies())  # a proxy may know it
    return True


def _image_column(full: str, config: DataConfig, features: Any) -> str:
    import datasets

    found = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    return _column(full, "image", config.image_column, found, features)


def _label_column(full: str, config: DataConfig, features: Any) -> str:
    import datasets

    found = [key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    found = found or [key for key in USUAL_LABELS if key in features]
    chosen = _column(full, "label", config.label_column, found, features)
    if not isinstance(features[chosen], (datasets.ClassLabel, datasets.Value)):
        raise UserError(
            f'dataset {full}: the column "{chosen}" holds no single number or text for each image; '
            "name another with --set data.label_column=NAME"
        )
    return chosen


def _column(full: str, kind: str, chosen: str | None, found: list[str], features: Any) -> str:
    if chosen is not None and chosen not in features:
        raise UserError(f'dataset {full} has no column "{chosen}".{nearest(chosen, features)} See data.{kind}_column')
    if chosen is None and len(found) != 1:
        which = (
            f"several {kind} columns ({', '.join(found)})" if found else f"no {kind} column among {', '.join(features)}"
        )
        raise UserError(f"dataset {full} has {which}; name it with --set data.{kind}_column=NAME")
    return chosen or found[0]


def _classes(feature: Any, values: dict[str, Any]) -> tuple[list[str], dict[Any, int]]:
    """Names of the classes in order, and the number of each value; values without names are sorted."""
    names = getattr(feature, "names", None)
    if names:
        return list(names), {at: at for at in range(len(names))}
    found = {value for listed in values.values() for value in listed}
    seen = sorted(value for value in found if value is not None and value == value)  # a row without a label: None, NaN
    return [str(value) for value in seen], {value: at for at, value in enumerate(seen)}


def _part(name: str, table: Any, image: str, values: Any, number: dict[Any, int]) -> Part:
    from fscil.data.decode import DecodeError, decode_image

    rows = table.with_format("arrow")  # as stored: {"bytes": …, "path": …}, not yet a picture

    def picture(at: int, short_side: int | None) -> np.ndarray:
        stored = rows[at][image][0].as_py()
        if not stored or not (stored["bytes"] or stored["path"]):
            raise DecodeError("the row has no image")
        return decode_image(stored["bytes"] or stored["path"], short_side=short_side)

    try:
        return Part(name, [number[value] for value in values], picture)
    except KeyError as error:  # -1 where a table hides the labels of its test part
        raise UserError(
            f"part {name} has images without a class (value {error}); choose others: data.split=A/B"
        ) from error
