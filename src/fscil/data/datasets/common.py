"""What the datasets share: where their files are, how a split is chosen, how images become a store."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fscil.config import DataConfig
from fscil.data import cache_dir
from fscil.data.downloads import Archive, fetch, unpack, verify
from fscil.data.manifests import TEST, TRAIN, Manifest, manifest_of_lists, stratified_split
from fscil.errors import UserError, nearest
from fscil.registry import dataset_entry, load_target
from fscil.text import file_name

if TYPE_CHECKING:
    from fscil.data.pixels import ImageStore


@dataclass(frozen=True)
class Dataset:
    """A benchmark before it is cut into tasks: what it holds, its usual protocol, and how its images are read.

    >>> from fscil.data.datasets import load_dataset
    >>> glyphs = load_dataset("glyphs", DataConfig())
    >>> len(glyphs.manifest.class_names), glyphs.base, glyphs.way, glyphs.shots
    (100, 60, 5, 5)
    """

    manifest: Manifest
    base: int  # classes of the base task,
    way: int  # new classes per task and
    shots: int  # images per new class, where the configuration leaves them open
    read: Callable[[Sequence[int]], tuple[ImageStore, list[int]]]  # see `store`

    @property
    def name(self) -> str:
        return self.manifest.dataset

    def complete(self, config: DataConfig) -> DataConfig:
        """`config` with the usual protocol where it says None."""
        return replace(
            config,
            base=self.base if config.base is None else config.base,
            way=self.way if config.way is None else config.way,
            shots=self.shots if config.shots is None else config.shots,
        )

    def store(self, positions: Sequence[int]) -> tuple[ImageStore, list[int]]:
        """The images at these positions of the manifest, and which of them could be read (without `skip_bad`, all)."""
        return self.read(positions)


def load_dataset(name: str, config: DataConfig) -> Dataset:
    """The dataset of this name: built in, or of another package.

    >>> load_dataset("glyphs", DataConfig()).manifest.class_names[:1]
    ('U+A786 LATIN CAPITAL LETTER INSULAR T',)
    """
    load = load_target(dataset_entry(name).target)
    dataset: Dataset = load(config, name.partition(":")[2]) if ":" in name else load(config)
    return dataset


def array_dataset(manifest: Manifest, images: Mapping[str, np.ndarray], base: int, way: int, shots: int = 5) -> Dataset:
    """A dataset whose images of each split are the rows of a uint8 array (N, H, W, 3); `Entry.image` is the row."""

    def read(positions: Sequence[int]) -> tuple[ImageStore, list[int]]:
        from fscil.data.pixels import ImageStore

        chosen = (manifest.entries[position] for position in positions)
        return ImageStore.from_array(np.stack([images[entry.split][entry.image] for entry in chosen])), list(positions)

    return Dataset(manifest, base, way, shots, read)


def file_dataset(manifest: Manifest, root: Path, config: DataConfig, base: int, way: int, shots: int = 5) -> Dataset:
    """A dataset of image files below `root`, decoded once into the cache."""

    def read(positions: Sequence[int]) -> tuple[ImageStore, list[int]]:
        from fscil.data.decode import decode_store

        names = [str(manifest.entries[position].image) for position in positions]
        files = [root / name for name in names]
        # The manifest names the images; their sizes and times tell whether a file has changed since it was decoded.
        key = json.dumps([str(root.resolve()), list(positions), [_stamp(file) for file in files]])
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        cache = _pixel_cache(manifest, config, digest)
        store, kept = decode_store(files, cache, short_side=config.short_side, skip_bad=config.skip_bad, names=names)
        return store, [positions[row] for row in kept]

    return Dataset(manifest, base, way, shots, read)


@dataclass(frozen=True)
class Part:
    """A named part of a library's dataset (its "train", its "test"): labels at once, pictures one at a time."""

    name: str
    labels: Sequence[int]
    picture: Callable[[int, int | None], np.ndarray]  # (number, short side) -> uint8 (height, width, 3)


def parts_dataset(
    name: str, class_names: Sequence[str], parts: Sequence[Sequence[Part]], config: DataConfig, identity: str
) -> Dataset:
    """A dataset of the parts that train and the parts that test; without the latter, the split is stratified.

    An image is called "part/number". `identity` tells whether pictures have changed since they were decoded.
    """
    train, test = (
        [(f"{part.name}/{at}", label) for part in side for at, label in enumerate(part.labels)] for side in parts
    )
    if test:
        split = "/".join("+".join(part.name for part in side) for side in parts)
        manifest = manifest_of_lists(name, split, class_names, train, test)
    else:
        by_class: dict[str, list[str]] = {}
        for image, label in train:
            by_class.setdefault(class_names[label], []).append(image)
        manifest = stratified_split(name, by_class, config.test_fraction)
    picture_of = {part.name: part.picture for side in parts for part in side}

    def decode(image: str, short_side: int | None) -> np.ndarray:
        part, _, number = image.rpartition("/")
        return picture_of[part](int(number), short_side)

    def read(positions: Sequence[int]) -> tuple[ImageStore, list[int]]:
        from fscil.data.decode import decode_store

        names = [str(manifest.entries[position].image) for position in positions]
        digest = hashlib.sha256(json.dumps([identity, list(positions)]).encode()).hexdigest()[:12]
        cache = _pixel_cache(manifest, config, digest)
        store, kept = decode_store(
            names, cache, short_side=config.short_side, skip_bad=config.skip_bad, names=names, decode=decode
        )
        return store, [positions[row] for row in kept]

    return Dataset(manifest, *usual_protocol(len(class_names)), 5, read)


def part_names(name: str, config: DataConfig, train: str, test: str | None) -> list[list[str]]:
    """Names of the parts that train and of those that test: the usual ones, or `data.split=A+B/C`."""
    if config.split_file:
        raise UserError(f"dataset {name} brings its own split: leave split_file out")
    if config.split is None:
        return [[train], [test] if test else []]
    sides = [[part for part in side.split("+") if part] for side in config.split.split("/")]
    if len(sides) != 2 or not all(sides):
        raise UserError(f'data.split "{config.split}": write it as TRAIN/TEST, for example train+val/test')
    return sides


def usual_protocol(classes: int) -> tuple[int, int]:
    """(base, way) where nobody says: most classes first, as in the published protocols, then five at a time.

    >>> usual_protocol(100), usual_protocol(7)
    ((60, 5), (5, 2))
    """
    base = math.ceil(0.6 * classes)
    return base, max(1, min(5, classes - base))


def place_of(name: str, config: DataConfig) -> Path:
    """Where a dataset lies, or is put: --data-root, or its folder in the cache."""
    return Path(config.root).expanduser() if config.root else cache_dir() / "datasets" / file_name(name)


def may_fetch(config: DataConfig) -> bool:
    """Into the cache unless forbidden, into a folder of the user's only when asked to."""
    return config.download if config.download is not None else not config.root


def _pixel_cache(manifest: Manifest, config: DataConfig, digest: str) -> Path:
    name = f"{file_name(manifest.dataset)}-{manifest.short_hash}-{config.store}-{digest}"
    return cache_dir() / "pixels" / name


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    except OSError:
        return -1, -1


def locate(
    name: str,
    config: DataConfig,
    *,
    archives: Sequence[Archive],
    is_here: Callable[[Path], bool],
    inside: Sequence[str],
    expected: str,
) -> Path:
    """The dataset's folder: `root` or one of the folders `inside` it; else an archive there is unpacked, or fetched."""
    root = place_of(name, config)

    def found() -> Path | None:
        return next((root / part for part in inside if is_here(root / part)), None)

    if place := found():
        return place
    local = next((archive for archive in archives if (root / archive.file).is_file()), None)
    what_to_do = f'put into "{root}" (or into another folder, named with --data-root): {expected}'
    if local:
        unpack(verify(root / local.file, local), root)
    elif archives and may_fetch(config):
        try:
            archive = fetch(archives[0], root)
        except UserError as error:
            raise UserError(f"dataset {name}: {error}; without a network, {what_to_do}") from error
        unpack(archive, root)
        archive.unlink()
    else:
        fetchable = " To have it downloaded, leave --data-root out or set data.download=true." if archives else ""
        raise UserError(f"dataset {name} is not there: {what_to_do}.{fetchable}")
    if place := found():
        return place
    raise UserError(f"dataset {name}: the archive does not hold what it should; {what_to_do}")


def choose(dataset: str, split: str | None, choices: Sequence[str]) -> str:
    """The split that was asked for, if the dataset has it as it lies there; the first of `choices` by default."""
    if split is None:
        return choices[0]
    if split not in choices:
        raise UserError(
            f'dataset {dataset} has no split "{split}" here; it has: {", ".join(choices)}.{nearest(split, choices)}'
        )
    return split


def no_split_choice(dataset: str, config: DataConfig, only: str | None = None) -> None:
    """Refuse a choice of split where there is none."""
    if config.split_file or config.split not in (None, only):
        raise UserError(f"dataset {dataset} has one fixed split: leave split and split_file out")


def saved_split(dataset: str, config: DataConfig, lists: bool = False) -> Manifest | None:
    """The manifest that split_file names (a run's split.json); only with `lists` may it name something else."""
    if not config.split_file:
        return None
    if Path(config.split_file).suffix.lower() != ".json":
        if lists:
            return None
        raise UserError(
            f'split_file "{config.split_file}": of dataset {dataset} it is the split.json of a run, which ends in .json'
        )
    manifest = Manifest.load(Path(config.split_file).expanduser())
    if manifest.dataset != dataset:
        raise UserError(f'split_file "{config.split_file}" is a split of {manifest.dataset}, not of {dataset}')
    return manifest


def is_pack(root: Path) -> bool:
    """Whether a folder holds train/ and test/, each with class folders."""
    from fscil.data.picture_files import folders_in

    return all(folders_in(root / split) for split in (TRAIN, TEST))


def images_by_class(root: Path, folders: Iterable[Path]) -> dict[str, list[str]]:
    """{class: sorted paths relative to root} of the images in each class folder and below."""
    from fscil.data.picture_files import files_in

    return {folder.name: sorted(file.relative_to(root).as_posix() for file in files_in(folder)) for folder in folders}


def manifest_by(
    by_class: Mapping[str, Sequence[str]], dataset: str, split: str, trains: Callable[[str], bool]
) -> Manifest:
    """A manifest whose images train or test as `trains` says; classes and their images sorted."""
    class_names = sorted(by_class)
    pairs = [(path, label) for label, name in enumerate(class_names) for path in sorted(by_class[name])]
    train = [pair for pair in pairs if trains(pair[0])]
    return manifest_of_lists(dataset, split, class_names, train, [pair for pair in pairs if not trains(pair[0])])


def pack_manifest(dataset: str, root: Path) -> Manifest:
    """The manifest of train/ and test/, each holding class folders."""
    from fscil.data.picture_files import folders_in

    by_class: dict[str, list[str]] = {}
    for split in (TRAIN, TEST):
        for name, paths in images_by_class(root, folders_in(root / split)).items():
            by_class.setdefault(name, []).extend(paths)
    return manifest_by(by_class, dataset, "pack", lambda path: path.startswith(f"{TRAIN}/"))
