"""Tiny ImageNet: 110,000 pictures of 64 x 64 pixels in 200 classes of ImageNet, as the released zip lays them out."""

from __future__ import annotations

from pathlib import Path

from fscil.config import DataConfig
from fscil.data.datasets.common import Dataset, file_dataset, images_by_class, locate, no_split_choice
from fscil.data.manifests import manifest_of_lists
from fscil.data.picture_files import folders_in
from fscil.errors import UserError
from fscil.reading import read_text


def tiny_imagenet(config: DataConfig) -> Dataset:
    """train/n01443537/images/*.JPEG to train on; val/images with val/val_annotations.txt to test on (its own test/ has
    no labels). Classes go by WordNet id, in their order."""
    no_split_choice("tiny_imagenet", config, "official")
    root = locate(
        "tiny_imagenet",
        config,
        archives=(),
        is_here=lambda folder: (folder / "train").is_dir() and (folder / "val" / "val_annotations.txt").is_file(),
        inside=("", "tiny-imagenet-200"),
        expected="the folder tiny-imagenet-200 of the released zip, unpacked: train/, val/images and "
        "val/val_annotations.txt",
    )
    trained = images_by_class(root, folders_in(root / "train"))
    class_names = sorted(trained)
    number = {name: label for label, name in enumerate(class_names)}
    train = [(path, number[name]) for name in class_names for path in trained[name]]
    test = [(f"val/images/{file}", number[name]) for file, name in _annotations(root, number)]
    return file_dataset(manifest_of_lists("tiny_imagenet", "official", class_names, train, test), root, config, 100, 10)


def _annotations(root: Path, known: dict[str, int]) -> list[tuple[str, str]]:
    """(file, class) of every line `val_0.JPEG<tab>n03444034<tab>box`."""
    path = root / "val" / "val_annotations.txt"
    pairs = []
    for line in filter(str.strip, read_text(path).splitlines()):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in known:
            raise UserError(f'"{path}": "{line[:60]}" is no line of a file and one of the classes in train/')
        pairs.append((cells[0], cells[1]))
    return sorted(pairs)
