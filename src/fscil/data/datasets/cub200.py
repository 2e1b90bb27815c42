"""CUB-200-2011: 11,788 photos of 200 kinds of birds."""

from __future__ import annotations

from pathlib import Path

from fscil.config import DataConfig
from fscil.data.datasets.common import (
    Dataset,
    choose,
    file_dataset,
    is_pack,
    locate,
    manifest_by,
    pack_manifest,
    saved_split,
)
from fscil.data.downloads import Archive
from fscil.data.manifests import stratified_split
from fscil.errors import UserError
from fscil.reading import read_text

ARCHIVE = Archive(
    "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
    "CUB_200_2011.tgz",
    "97eceeb196236b17998738112f37df78",
)


def cub200(config: DataConfig) -> Dataset:
    """CUB-200-2011: split `80-20` (the ViT papers' convention), `official`, or `pack` (train/ and test/ folders)."""
    root = locate(
        "cub200",
        config,
        archives=(ARCHIVE,),
        is_here=lambda folder: (folder / "images.txt").is_file() or is_pack(folder),
        inside=("", "CUB_200_2011"),
        expected="the folder CUB_200_2011 (with images.txt, classes.txt, train_test_split.txt and images/) or its "
        "official archive",
    )
    if is_pack(root) and not (root / "images.txt").is_file():
        choose("cub200", config.split, ("pack",))
        manifest = saved_split("cub200", config) or pack_manifest("cub200", root)
        return file_dataset(manifest, root, config, base=100, way=10)
    split = choose("cub200", config.split, ("80-20", "official"))
    paths = _numbered(root / "images.txt")
    classes = _numbered(root / "classes.txt")
    owner = _numbered(root / "image_class_labels.txt")
    is_train = _numbered(root / "train_test_split.txt")
    if not set(paths) == set(owner) == set(is_train) or not set(owner.values()) <= set(classes):
        raise UserError(
            f'"{root}": images.txt, image_class_labels.txt, train_test_split.txt and classes.txt do not fit together'
        )
    by_class: dict[str, list[str]] = {name: [] for name in classes.values()}
    for number, path in paths.items():
        by_class[classes[owner[number]]].append(path)
    if saved := saved_split("cub200", config):
        manifest = saved
    elif split == "official":
        trains = {path for number, path in paths.items() if is_train[number] == "1"}
        manifest = manifest_by(by_class, "cub200", "official", lambda path: path in trains)
    else:
        manifest = stratified_split("cub200", by_class, config.test_fraction)
    return file_dataset(manifest, root / "images", config, base=100, way=10)


def _numbered(path: Path) -> dict[str, str]:
    """The lines "<number> <value>" of CUB's text files."""
    try:
        return dict(line.split(maxsplit=1) for line in read_text(path).splitlines() if line.strip())
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f'"{path}" is damaged: a line is not "<number> <value>"') from error
