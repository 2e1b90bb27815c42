"""The datasets: each gives a manifest (which images, which split) and reads its images into a uint8 store.

To add one, write a function from `DataConfig` to `Dataset` and name it in the registry, or offer it from another
package by the entry point group `fscil.datasets`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
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

if TYPE_CHECKING:
    from fscil.data.pixels import ImageStore

CIFAR_ARCHIVES = (
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
CUB_ARCHIVE = Archive(
    "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
    "CUB_200_2011.tgz",
    "97eceeb196236b17998738112f37df78",
)
IMAGENET_R_ARCHIVE = Archive(
    "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar", "imagenet-r.tar", "a61312130a589d0ca1a8fca1f2bd3337"
)
WORDNET_ID = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Dataset:
    """A benchmark before it is cut into tasks: what it holds, its usual protocol, and how its images are read."""

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
    from fscil.registry import dataset_entry, load_target

    target = dataset_entry(name).target
    return (BUILT_IN[name] if target is None else load_target(target))(config)


# ---- images in arrays ----------------------------------------------------------------------------------------------


def array_dataset(manifest: Manifest, images: Mapping[str, np.ndarray], base: int, way: int, shots: int = 5) -> Dataset:
    """A dataset whose images of each split are the rows of a uint8 array (N, H, W, 3); `Entry.image` is the row."""

    def read(positions: Sequence[int]) -> tuple[ImageStore, list[int]]:
        from fscil.data.pixels import ImageStore

        chosen = (manifest.entries[position] for position in positions)
        return ImageStore.from_array(np.stack([images[entry.split][entry.image] for entry in chosen])), list(positions)

    return Dataset(manifest, base, way, shots, read)


def glyphs(config: DataConfig) -> Dataset:
    """The built-in benchmark: 100 characters, drawn and cached on first use."""
    from fscil.data.glyphs import RENDERER_VERSION, glyph_images

    _no_split_choice("glyphs", config)
    drawn = {split: glyph_images("benchmark", split, cache=cache_dir()) for split in (TRAIN, TEST)}
    pairs = [enumerate(drawn[split][1].tolist()) for split in (TRAIN, TEST)]
    manifest = manifest_of_lists("glyphs", f"drawn-{RENDERER_VERSION}", drawn[TRAIN][2], *pairs)
    return array_dataset(manifest, {split: drawn[split][0] for split in drawn}, base=60, way=5)


def cifar100(config: DataConfig) -> Dataset:
    """CIFAR-100 from its official archive, binary or python version, in the official order."""
    _no_split_choice("cifar100", config, "official")
    root = _locate(
        "cifar100",
        config,
        CIFAR_ARCHIVES,
        lambda folder: _is_cifar_binary(folder) or _is_cifar_python(folder),
        ("", "cifar-100-binary", "cifar-100-python"),
        "the folder cifar-100-binary or cifar-100-python, or either official archive",
    )
    read = _read_cifar_binary if _is_cifar_binary(root) else _read_cifar_python
    class_names, images, labels = read(root)
    pairs = [enumerate(labels[split].tolist()) for split in (TRAIN, TEST)]
    return array_dataset(manifest_of_lists("cifar100", "official", class_names, *pairs), images, base=60, way=5)


def _is_cifar_binary(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("train.bin", "test.bin", "fine_label_names.txt"))


def _is_cifar_python(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("train", "test", "meta"))


def _cifar_pixels(planes: np.ndarray) -> np.ndarray:
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_cifar_binary(folder: Path):
    class_names = (folder / "fine_label_names.txt").read_text().split()
    images, labels = {}, {}
    for split in (TRAIN, TEST):
        path = folder / f"{split}.bin"
        if path.stat().st_size == 0 or path.stat().st_size % 3074:
            raise UserError(
                f'"{path}" is damaged: its size is no multiple of 3074 bytes (two labels and 3072 pixels a record)'
            )
        records = np.memmap(path, np.uint8, "r").reshape(-1, 3074)  # coarse label, fine label, 3 planes of 32 x 32
        images[split], labels[split] = _cifar_pixels(records[:, 2:]), np.array(records[:, 1], np.int64)
    return class_names, images, labels


def _read_cifar_python(folder: Path):
    from fscil.data.plain_pickle import read_plain_pickle

    meta = read_plain_pickle(folder / "meta")
    images, labels = {}, {}
    try:
        class_names = [name.decode() if isinstance(name, bytes) else name for name in meta["fine_label_names"]]
        for split in (TRAIN, TEST):
            batch = read_plain_pickle(folder / split)
            images[split], labels[split] = _cifar_pixels(batch["data"]), np.array(batch["fine_labels"], np.int64)
            if len(images[split]) != len(labels[split]):
                raise ValueError(f"{split} has {len(images[split])} images and {len(labels[split])} labels")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'"{folder}" is not the python version of CIFAR-100: {error}') from error
    return class_names, images, labels


# ---- images in files -----------------------------------------------------------------------------------------------


def file_dataset(manifest: Manifest, root: Path, config: DataConfig, base: int, way: int, shots: int = 5) -> Dataset:
    """A dataset of image files below `root`, decoded once into the cache."""

    def read(positions: Sequence[int]) -> tuple[ImageStore, list[int]]:
        from fscil.data.decode import decode_store

        names = [str(manifest.entries[position].image) for position in positions]
        files = [root / name for name in names]
        # The manifest names the images; their sizes and times tell whether a file has changed since it was decoded.
        key = json.dumps([str(root.resolve()), list(positions), [_stamp(file) for file in files]])
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        cache = cache_dir() / "pixels" / f"{manifest.dataset}-{manifest.short_hash}-{config.store}-{digest}"
        store, kept = decode_store(files, cache, short_side=config.short_side, skip_bad=config.skip_bad, names=names)
        return store, [positions[row] for row in kept]

    return Dataset(manifest, base, way, shots, read)


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    except OSError:
        return -1, -1


def cub200(config: DataConfig) -> Dataset:
    """CUB-200-2011: split `80-20` (the ViT papers' convention), `official`, or `pack` (train/ and test/ folders)."""
    root = _locate(
        "cub200",
        config,
        (CUB_ARCHIVE,),
        lambda folder: (folder / "images.txt").is_file() or _is_pack(folder),
        ("", "CUB_200_2011"),
        "the folder CUB_200_2011 (with images.txt, classes.txt, train_test_split.txt and images/) or its "
        "official archive",
    )
    if _is_pack(root) and not (root / "images.txt").is_file():
        _choose("cub200", config.split, ("pack",))
        manifest = _saved_split("cub200", config) or _pack_manifest("cub200", root)
        return file_dataset(manifest, root, config, base=100, way=10)
    split = _choose("cub200", config.split, ("80-20", "official"))
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
    if saved := _saved_split("cub200", config):
        manifest = saved
    elif split == "official":
        trains = {path for number, path in paths.items() if is_train[number] == "1"}
        manifest = _manifest_by(by_class, "cub200", "official", lambda path: path in trains)
    else:
        manifest = stratified_split("cub200", by_class, config.test_fraction)
    return file_dataset(manifest, root / "images", config, base=100, way=10)


def imagenet_r(config: DataConfig) -> Dataset:
    """ImageNet-R: split `80-20`, `list` (CODA-Prompt's lists, named by split_file), or `pack` (train/ and test/)."""
    root = _locate(
        "imagenet_r",
        config,
        (IMAGENET_R_ARCHIVE,),
        lambda folder: bool(_class_folders(folder, WORDNET_ID)) or _is_pack(folder),
        ("", "imagenet-r"),
        "the folder imagenet-r with its 200 folders named by WordNet id (n01443537, …) or its official archive",
    )
    if saved := _saved_split("imagenet_r", config):
        manifest = saved
    elif _is_pack(root):
        _choose("imagenet_r", config.split, ("pack",))
        manifest = _pack_manifest("imagenet_r", root)
    else:
        by_class = _scan(root, _class_folders(root, WORDNET_ID))
        if len(by_class) != 200:
            raise UserError(
                f'"{root}" has {len(by_class)} WordNet folders, not the 200 of ImageNet-R; for a part of it use '
                "--dataset folder"
            )
        choices = ("list",) if config.split_file else ("80-20", "list")
        if _choose("imagenet_r", config.split, choices) == "list":
            if not config.split_file:
                raise UserError(
                    "split list needs split_file: the folder (or one of the two files) imagenet-r_train.yaml, "
                    "imagenet-r_test.yaml"
                )
            manifest = _coda_manifest(config.split_file, by_class)
        else:
            manifest = stratified_split("imagenet_r", by_class, config.test_fraction)
    return file_dataset(manifest, root, config, base=100, way=10)


def read_coda_lists(split_file: str | os.PathLike) -> dict[str, list[str]]:
    """CODA-Prompt's ImageNet-R lists as {split: ["n01443537/art_0.jpg", …]}, from their folder or either file."""
    import yaml

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
            content = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            lists[split] = ["/".join(str(line).split("/")[-2:]) for line in content["data"]]
        except OSError as error:
            raise UserError(f'split_file: cannot read "{path}": {error.strerror or error}') from error
        except (yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(
                f'split_file "{path}" is not a CODA list: a yaml file with the entry "data", a list of paths'
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
    return _manifest_by(listed, "imagenet_r", "list", lambda path: split_of[path] == TRAIN)


def mini_imagenet(config: DataConfig) -> Dataset:
    """miniImageNet as CEC lays it out: images/ and split/train.csv, split/test.csv (filename,label)."""
    root = _locate(
        "mini_imagenet",
        config,
        (),
        lambda folder: (folder / "images").is_dir() or _is_pack(folder),
        ("", "miniimagenet", "mini_imagenet", "MINI-ImageNet"),
        "images/ (all pictures in one folder) and split/train.csv, split/test.csv with the columns filename,label; "
        "ImageNet's licence forbids passing the pictures on, so there is no download",
    )
    _choose("mini_imagenet", config.split, ("cec",))
    if saved := _saved_split("mini_imagenet", config):
        return file_dataset(saved, root, config, base=60, way=5)
    folder = Path(config.split_file).expanduser() if config.split_file else root / "split"
    rows = {split: _csv_rows(folder / f"{split}.csv", 2, ("filename",)) for split in (TRAIN, TEST)}
    class_names = list(
        dict.fromkeys(label for _, label in rows[TRAIN])
    )  # natural order: first appearance, as CEC numbers them
    number = {name: label for label, name in enumerate(class_names)}
    pairs = []
    for split in (TRAIN, TEST):
        strange = next((label for _, label in rows[split] if label not in number), None)
        if strange:
            raise UserError(f'"{folder / split}.csv" has class "{strange}", which train.csv does not')
        name, label = rows[split][0]
        layouts = ("images/{name}", "images/{label}/{name}", f"{split}/{{label}}/{{name}}")
        layout = next((way for way in layouts if (root / way.format(name=name, label=label)).is_file()), layouts[0])
        pairs.append([(layout.format(name=name, label=label), number[label]) for name, label in rows[split]])
    return file_dataset(manifest_of_lists("mini_imagenet", "cec", class_names, *pairs), root, config, base=60, way=5)


def folder(config: DataConfig) -> Dataset:
    """Anyone's images: class folders, train/ and test/ holding class folders, or a CSV of path,label[,split]."""
    if not config.root:
        raise UserError(
            "dataset folder needs --data-root: a folder with one folder of images per class, or a CSV of "
            "path,label[,split]"
        )
    root = Path(config.root).expanduser()
    if root.is_file():
        manifest, root = _csv_manifest(root, config), root.parent
    elif not root.is_dir():
        raise UserError(f'--data-root "{root}" does not exist')
    elif saved := _saved_split("folder", config):
        manifest = saved
    elif _is_pack(root):
        _choose("folder", config.split, ("pack",))
        manifest = _pack_manifest("folder", root)
    else:
        _choose("folder", config.split, ("stratified", "80-20"))
        by_class = {name: paths for name, paths in _scan(root, _class_folders(root)).items() if paths}
        if not by_class:
            raise UserError(f'--data-root "{root}" holds no class folders with images')
        manifest = stratified_split("folder", by_class, config.test_fraction)
    classes = len(manifest.class_names)
    base = math.ceil(0.6 * classes)  # of the published protocols' order, where nothing is said
    return file_dataset(manifest, root, config, base=base, way=max(1, min(5, classes - base)))


BUILT_IN: dict[str, Callable[[DataConfig], Dataset]] = {
    "glyphs": glyphs,
    "cifar100": cifar100,
    "cub200": cub200,
    "imagenet_r": imagenet_r,
    "mini_imagenet": mini_imagenet,
    "folder": folder,
}


# ---- where things are ----------------------------------------------------------------------------------------------


def _locate(
    name: str,
    config: DataConfig,
    archives: Sequence[Archive],
    is_here: Callable[[Path], bool],
    inside: Sequence[str],
    expected: str,
) -> Path:
    """The dataset's folder: `root` or one of the folders `inside` it; else an archive there is unpacked, or fetched."""
    root = Path(config.root).expanduser() if config.root else cache_dir() / "datasets" / name

    def found() -> Path | None:
        return next((root / part for part in inside if is_here(root / part)), None)

    if place := found():
        return place
    local = next((archive for archive in archives if (root / archive.file).is_file()), None)
    what_to_do = f'put into "{root}" (or into another folder, named with --data-root): {expected}'
    if local:
        unpack(verify(root / local.file, local), root)
    elif archives and (config.download or (config.download is None and not config.root)):
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


def _choose(dataset: str, split: str | None, choices: Sequence[str]) -> str:
    if split is None:
        return choices[0]
    if split not in choices:
        raise UserError(
            f'dataset {dataset} has no split "{split}" here; it has: {", ".join(choices)}.{nearest(split, choices)}'
        )
    return split


def _no_split_choice(dataset: str, config: DataConfig, only: str | None = None) -> None:
    if config.split_file or config.split not in (None, only):
        raise UserError(f"dataset {dataset} has one fixed split: leave split and split_file out")


def _saved_split(dataset: str, config: DataConfig) -> Manifest | None:
    """The manifest that split_file names, when it is one (a run's split.json)."""
    if not config.split_file or Path(config.split_file).suffix.lower() != ".json":
        return None
    manifest = Manifest.load(Path(config.split_file).expanduser())
    if manifest.dataset != dataset:
        raise UserError(f'split_file "{config.split_file}" is a split of {manifest.dataset}, not of {dataset}')
    return manifest


def _class_folders(root: Path, pattern: re.Pattern | None = None) -> list[Path]:
    if not root.is_dir():
        return []
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [path for path in folders if pattern is None or pattern.fullmatch(path.name)]


def _is_pack(root: Path) -> bool:
    """Whether a folder holds train/ and test/, each with class folders."""
    return all(_class_folders(root / split) for split in (TRAIN, TEST))


def _scan(root: Path, folders: Iterable[Path]) -> dict[str, list[str]]:
    """{class: sorted paths relative to root} of the images in each class folder and below."""
    from fscil.data.decode import SUFFIXES

    by_class = {}
    for class_folder in folders:
        files = (
            Path(where, name) for where, _, names in os.walk(class_folder) for name in names if not name.startswith(".")
        )
        images = (file for file in files if file.suffix.lower() in SUFFIXES)
        by_class[class_folder.name] = sorted(file.relative_to(root).as_posix() for file in images)
    return by_class


def _manifest_by(
    by_class: Mapping[str, Sequence[str]], dataset: str, split: str, trains: Callable[[str], bool]
) -> Manifest:
    """A manifest whose images train or test as `trains` says; classes and their images sorted."""
    class_names = sorted(by_class)
    pairs = [(path, label) for label, name in enumerate(class_names) for path in sorted(by_class[name])]
    train = [pair for pair in pairs if trains(pair[0])]
    return manifest_of_lists(dataset, split, class_names, train, [pair for pair in pairs if not trains(pair[0])])


def _pack_manifest(dataset: str, root: Path) -> Manifest:
    by_class: dict[str, list[str]] = {}
    for split in (TRAIN, TEST):
        for name, paths in _scan(root, _class_folders(root / split)).items():
            by_class.setdefault(name, []).extend(paths)
    return _manifest_by(by_class, dataset, "pack", lambda path: path.startswith(f"{TRAIN}/"))


def _numbered(path: Path) -> dict[str, str]:
    """The lines "<number> <value>" of CUB's text files."""
    try:
        return dict(line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except OSError as error:
        raise UserError(f'cannot read "{path}": {error.strerror or error}') from error
    except ValueError as error:
        raise UserError(f'"{path}" is damaged: a line is not "<number> <value>"') from error


def _csv_rows(path: Path, columns: int, headers: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows with at least `columns` cells, stripped, without a header whose first cell is one of `headers`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                tuple(cell.strip() for cell in row) for row in csv.reader(file) if any(cell.strip() for cell in row)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f'cannot read "{path}": {getattr(error, "strerror", None) or error}') from error
    rows = rows[1:] if rows and rows[0][0].lower() in headers else rows
    short = next((row for row in rows if len(row) < columns or not all(row[:columns])), None)
    if short is not None or not rows:
        raise UserError(f'"{path}": {f"row {short} lacks a cell" if rows else "no rows"}')
    return rows


def _csv_manifest(path: Path, config: DataConfig) -> Manifest:
    """A manifest of a CSV's rows path,label[,split]; without a third column the split is stratified."""
    if saved := _saved_split("folder", config):
        return saved
    rows = _csv_rows(path, 2, ("path", "file", "filename", "image"))
    by_class: dict[str, list[str]] = {}
    for row in rows:
        by_class.setdefault(row[1], []).append(row[0])
    if all(len(row) < 3 or not row[2] for row in rows):
        _choose("folder", config.split, ("stratified", "80-20"))
        return stratified_split("folder", by_class, config.test_fraction)
    _choose("folder", config.split, ("csv",))
    split_of = {row[0]: row[2].lower() if len(row) > 2 else "" for row in rows}
    strange = next((row for row in rows if split_of[row[0]] not in (TRAIN, TEST)), None)
    if strange:
        raise UserError(f'"{path}": the split of "{strange[0]}" is {split_of[strange[0]]!r}, neither train nor test')
    return _manifest_by(by_class, "folder", "csv", lambda image: split_of[image] == TRAIN)
