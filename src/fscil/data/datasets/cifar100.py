"""CIFAR-100: 60,000 images of 32 x 32 pixels in 100 classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fscil.config import DataConfig
from fscil.data.datasets.common import Dataset, array_dataset, locate, no_split_choice
from fscil.data.downloads import Archive
from fscil.data.manifests import TEST, TRAIN, manifest_of_lists
from fscil.errors import UserError
from fscil.reading import read_text

ARCHIVES = (
    Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
    Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
    ),
)
Content = tuple[list[str], dict[str, np.ndarray], dict[str, np.ndarray]]  # class names; images and labels by split


def cifar100(config: DataConfig) -> Dataset:
    """CIFAR-100 from its official archive, binary or python version, in the official order."""
    no_split_choice("cifar100", config, "official")
    root = locate(
        "cifar100",
        config,
        archives=ARCHIVES,
        is_here=lambda folder: _is_binary(folder) or _is_python(folder),
        inside=("", "cifar-100-binary", "cifar-100-python"),
        expected="the folder cifar-100-binary or cifar-100-python, or either official archive",
    )
    read = _read_binary if _is_binary(root) else _read_python
    class_names, images, labels = read(root)
    pairs = [enumerate(labels[split].tolist()) for split in (TRAIN, TEST)]
    return array_dataset(manifest_of_lists("cifar100", "official", class_names, *pairs), images, base=60, way=5)


def _is_binary(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("train.bin", "test.bin", "fine_label_names.txt"))


def _is_python(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("train", "test", "meta"))


def _pixels(planes: np.ndarray) -> np.ndarray:
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_binary(folder: Path) -> Content:
    class_names = read_text(folder / "fine_label_names.txt").split()
    images, labels = {}, {}
    for split in (TRAIN, TEST):
        path = folder / f"{split}.bin"
        if path.stat().st_size == 0 or path.stat().st_size % 3074:
            raise UserError(
                f'"{path}" is damaged: its size is no multiple of 3074 bytes (two labels and 3072 pixels a record)'
            )
        records = np.memmap(path, np.uint8, "r").reshape(-1, 3074)  # coarse label, fine label, 3 planes of 32 x 32
        images[split], labels[split] = _pixels(records[:, 2:]), np.array(records[:, 1], np.int64)
    return class_names, images, labels


def _read_python(folder: Path) -> Content:
    from fscil.data.plain_pickle import read_plain_pickle

    meta = read_plain_pickle(folder / "meta")
    images, labels = {}, {}
    try:
        class_names = [name.decode() if isinstance(name, bytes) else name for name in meta["fine_label_names"]]
        for split in (TRAIN, TEST):
            batch = read_plain_pickle(folder / split)
            images[split], labels[split] = _pixels(batch["data"]), np.array(batch["fine_labels"], np.int64)
            if len(images[split]) != len(labels[split]):
                raise ValueError(f"{split} has {len(images[split])} images and {len(labels[split])} labels")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'"{folder}" is not the python version of CIFAR-100: {error}') from error
    return class_names, images, labels
