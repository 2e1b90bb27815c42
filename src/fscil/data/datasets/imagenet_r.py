"""ImageNet-R: 30,000 renditions (art, cartoons, toys, …) of 200 classes of ImageNet."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from fscil.config import DataConfig
from fscil.data.datasets.common import (
    Dataset,
    choose,
    file_dataset,
    images_by_class,
    is_pack,
    locate,
    manifest_by,
    pack_manifest,
    saved_split,
)
from fscil.data.downloads import Archive
from fscil.data.manifests import TEST, TRAIN, Manifest, stratified_split
from fscil.data.picture_files import folders_in
from fscil.errors import UserError
from fscil.reading import read_yaml
from fscil.strict import conform

LISTS_AT_MOST = 16 * 2**20  # bytes of a list of images
ARCHIVE = Archive(
    "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar", "imagenet-r.tar", "a61312130a589d0ca1a8fca1f2bd3337"
)
WORDNET_ID = re.compile(r"n\d{8}")


class _Lists(TypedDict):
    data: list[str]


def imagenet_r(config: DataConfig) -> Dataset:
    """ImageNet-R: split `80-20`, `list` (CODA-Prompt's lists, named by split_file), or `pack` (train/ and test/)."""
    root = locate(
        "imagenet_r",
        config,
        archives=(ARCHIVE,),
        is_here=lambda folder: bool(_wordnet_folders(folder)) or is_pack(folder),
        inside=("", "imagenet-r"),
        expected="the folder imagenet-r with its 200 folders named by WordNet id (n01443537, …) or its official "
        "archive",
    )
    if saved := saved_split("imagenet_r", config, lists=not is_pack(root)):
        manifest = saved
    elif is_pack(root):
        choose("imagenet_r", config.split, ("pack",))
        manifest = pack_manifest("imagenet_r", root)
    else:
        by_class = images_by_class(root, _wordnet_folders(root))
        if len(by_class) != 200:
            raise UserError(
                f'"{root}" has {len(by_class)} WordNet folders, not the 200 of ImageNet-R; for a part of it use '
                "--dataset folder"
            )
        choices = ("list",) if config.split_file else ("80-20", "list")
        if choose("imagenet_r", config.split, choices) == "list":
            if not config.split_file:
                raise UserError(
                    "split list needs split_file: the folder (or one of the two files) imagenet-r_train.yaml, "
                    "imagenet-r_test.yaml"
                )
            manifest = _coda_manifest(config.split_file, by_class)
        else:
            manifest = stratified_split("imagenet_r", by_class, config.test_fraction)
    return file_dataset(manifest, root, config, base=100, way=10)


def _wordnet_folders(root: Path) -> list[Path]:
    return [folder for folder in folders_in(root) if WORDNET_ID.fullmatch(folder.name)]


def read_coda_lists(split_file: str | os.PathLike[str]) -> dict[str, list[str]]:
    """CODA-Prompt's ImageNet-R lists as {split: ["n01443537/art_0.jpg", …]}, from their folder or either file."""
    given = Path(split_file).expanduser()
    if given.is_dir():
        files = {split: given / f"imagenet-r_{split}.yaml" for split in (TRAIN, TEST)}
    else:
        files = {split: given.with_name(re.sub(r"train|test", split, given.name)) for split in (TRAIN, TEST)}
        if files[TRAIN] == files[TEST]:
            raise UserError(
                f'split_file "{given}": of the two lists, name the one with "train" or "test" in its name, or '
                "their folder"
            )
    lists = {}
    for split, path in files.items():
        try:
            content = conform(read_yaml(path, LISTS_AT_MOST), _Lists, path)
            lists[split] = ["/".join(line.split("/")[-2:]) for line in content["data"]]
        except UserError as error:
            raise UserError(
                f'split_file "{path}" is not a CODA list, a yaml file with the entry "data", a list of paths: {error}'
            ) from error
    return lists


def _coda_manifest(split_file: str, by_class: Mapping[str, Sequence[str]]) -> Manifest:
    lists = read_coda_lists(split_file)
    split_of = {path: split for split, paths in lists.items() for path in paths}
    present = {path for paths in by_class.values() for path in paths}
    missing = sorted(set(split_of) - present)
    if missing:
        raise UserError(
            f'{len(missing)} of the {len(split_of)} images that "{split_file}" lists are not there: '
            f"{', '.join(missing[:5])}, …"
        )
    listed = {name: [path for path in paths if path in split_of] for name, paths in by_class.items()}
    return manifest_by(listed, "imagenet_r", "list", lambda path: split_of[path] == TRAIN)
