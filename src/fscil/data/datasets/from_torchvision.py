"""`torchvision:NAME`: any classification dataset of torchvision that has training and test images.

Its classes agree on little: some take `train=True`, others `split="train"`, and labels go by several names. What is
offered is found by the signature, and labels are compared with the images' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fscil.config import DataConfig
from fscil.data.datasets.common import Dataset, Part, may_fetch, part_names, parts_dataset, place_of
from fscil.errors import UserError, nearest
from fscil.files import digest_file

TESTS = ("test", "val", "valid")  # what the part to test on is called, the best first
LABELS = ("targets", "labels", "_labels")
PAIRS = ("samples", "_samples", "imgs")  # lists of (image, label)


def from_torchvision(config: DataConfig, name: str) -> Dataset:
    """The dataset that torchvision calls `name`, read from --data-root or fetched into the cache."""
    full = f"torchvision:{name}"
    cls = _class(name)
    root = place_of(full, config)
    open_part, usual = _opener(full, cls, root, config)
    train, test = part_names(full, config, usual, None)
    opened = {part: open_part(part) for part in (*train, *test)}
    if None in opened.values():
        wrong = next(part for part, data in opened.items() if data is None)
        raise UserError(f'dataset {full} has no part "{wrong}"; data.split takes its own names, as train/test')
    if not test:
        found = next(((part, data) for part in TESTS if (data := open_part(part)) is not None), None)
        if found is None:
            raise UserError(f"dataset {full} has no test images; use --dataset folder on its pictures")
        test, opened[found[0]] = [found[0]], found[1]
    parts = [[_part(full, part, opened[part]) for part in side] for side in (train, test)]
    classes = 1 + max(max(part.labels) for side in parts for part in side)
    identity = [str(root.resolve()), *sorted(f"{item.name} {item.stat().st_mtime_ns}" for item in root.iterdir())]
    return parts_dataset(full, _names(opened[train[0]], classes), parts, config, " ".join(identity))


def _class(name: str) -> type:
    from torchvision import datasets

    choices = [key for key in dir(datasets) if inspect.isclass(getattr(datasets, key))]
    if name not in choices:
        raise UserError(f'torchvision has no dataset "{name}".{nearest(name, choices)}')
    found: type = getattr(datasets, name)
    return found


def _opener(full: str, cls: type, root: Path, config: DataConfig) -> tuple[Callable[[str], Any], str]:
    """(function from the name of a part to it, or None where it is not offered; the part to train on)."""
    from torchvision import datasets

    if issubclass(cls, datasets.CIFAR10):  # and CIFAR100: torchvision would unpickle the files
        return lambda part: _Cifar(full, cls, root, part, config) if part in ("train", "test") else None, "train"
    parameters = inspect.signature(cls).parameters
    known = ("root", "split", "train", "download")
    asked = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD and key not in known
    ]
    by = next((key for key in ("split", "train") if key in parameters), None)
    if asked or by is None or parameters[by].default is inspect.Parameter.empty or "root" not in parameters:
        lack = f"needs {', '.join(asked)}" if asked else "has no training and test images of its own"
        raise UserError(f"dataset {full} {lack}; use --dataset folder on its pictures")

    def open_part(part: str) -> Any:
        if by == "train" and part not in ("train", "test"):
            return None
        arguments = {"root": str(root), by: part if by == "split" else part == "train"}
        return _opened(full, cls, arguments, "download" in parameters, root, config)

    usual = parameters[by].default
    return open_part, usual if isinstance(usual, str) else "train"


def _opened(full: str, cls: type, arguments: dict[str, Any], fetchable: bool, root: Path, config: DataConfig) -> Any:
    """The dataset with these arguments, fetched if it must and may be; None where it does not take them."""
    try:
        return cls(**arguments)
    except ValueError:  # no such split
        return None
    except (RuntimeError, OSError) as error:
        problem: Exception = error
    if fetchable and may_fetch(config):
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(**arguments, download=True)
        except Exception as error:  # torchvision raises whatever the network and the archive raise
            problem = error
    said = " ".join(str(problem).split())[:200]
    how = "" if may_fetch(config) else " To have it downloaded, leave --data-root out or set data.download=true."
    raise UserError(
        f'dataset {full} is not in "{root}" and could not be fetched ({type(problem).__name__}: {said}). Put its files '
        f"there as torchvision lays them out, or copy the folder from a machine where `fscil fetch {full}` ran.{how}"
    ) from problem


class _Cifar:
    """A part of CIFAR-10 or CIFAR-100 from the python archive, whose pickles are read as data."""

    def __init__(self, full: str, cls: Any, root: Path, part: str, config: DataConfig):
        from fscil.data.plain_pickle import read_plain_pickle

        folder = root / cls.base_folder
        files = [*(cls.train_list if part == "train" else cls.test_list), (cls.meta["filename"], cls.meta["md5"])]
        if not all((folder / file).is_file() for file, _ in files):
            _fetch_cifar(full, cls, root, config)
        for file, md5 in files:
            if digest_file(folder / file, "md5") != md5:
                raise UserError(f'"{folder / file}" is damaged: its md5 is not {md5}; remove it and fetch it again')
        try:
            self.classes = [_text(name) for name in read_plain_pickle(folder / cls.meta["filename"])[cls.meta["key"]]]
            batches = [read_plain_pickle(folder / file) for file, _ in files[:-1]]
            key = "fine_labels" if "fine_labels" in batches[0] else "labels"
            self.targets = [label for batch in batches for label in batch[key]]
            planes = np.concatenate([batch["data"] for batch in batches])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f'"{folder}" is not the python version of {full}: {error}') from error
        self.pixels = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, at: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.fromarray(self.pixels[at]), self.targets[at]


def _fetch_cifar(full: str, cls: Any, root: Path, config: DataConfig) -> None:
    from fscil.data.downloads import Archive, fetch, unpack

    advice = f'put {cls.filename} or the folder {cls.base_folder} into "{root}"'
    local = root / cls.filename
    if not local.is_file() and not may_fetch(config):
        raise UserError(f"dataset {full} is not there: {advice}, or set data.download=true")
    try:
        unpack(fetch(Archive(cls.url, cls.filename, cls.tgz_md5), root), root)
    except UserError as error:
        raise UserError(f"dataset {full}: {error}; without a network, {advice}") from error


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _part(full: str, name: str, data: Any) -> Part:
    """A part with its labels, which must be one number for each image."""
    from fscil.data.decode import picture_array

    labels = _labels(data)
    try:
        numbers = [int(label) for label in (labels if labels is not None else (data[at][1] for at in range(len(data))))]
        agree = len(numbers) == len(data) > 0 and all(int(data[at][1]) == numbers[at] for at in (0, len(data) - 1))
    except (TypeError, ValueError):
        agree = False
    if not agree or min(numbers) < 0:
        raise UserError(f"dataset {full}: its {name} images do not have one class number each; it cannot be classified")
    return Part(name, numbers, lambda at, short_side: picture_array(data[at][0], short_side))


def _labels(data: Any) -> list[Any] | None:
    """Labels without opening a picture, where the dataset has them at hand."""
    for attribute in LABELS:
        if (found := getattr(data, attribute, None)) is not None and len(found) == len(data):
            listed: list[Any] = np.asarray(found).tolist()
            return listed
    for attribute in PAIRS:
        found = getattr(data, attribute, None)
        if found is not None and len(found) == len(data) and all(len(pair) == 2 for pair in found):
            return [pair[1] for pair in found]
    return None


def _names(data: Any, classes: int) -> list[str]:
    """Names of the classes by number; numbers where there are no names, and behind a name that comes twice."""
    known: Sequence[Any] = list(getattr(data, "classes", None) or [])
    names = [", ".join(name) if isinstance(name, tuple) else str(name) for name in known]
    if len(names) < classes:
        return [str(number) for number in range(classes)]
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names[:classes])]
