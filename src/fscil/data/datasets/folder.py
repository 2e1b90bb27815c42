"""Anyone's images, in folders or listed in a CSV."""

from __future__ import annotations

from pathlib import Path

from fscil.config import DataConfig
from fscil.data.datasets.common import (
    Dataset,
    choose,
    csv_rows,
    file_dataset,
    images_by_class,
    is_pack,
    manifest_by,
    pack_manifest,
    saved_split,
    usual_protocol,
)
from fscil.data.manifests import TEST, TRAIN, Manifest, stratified_split
from fscil.data.picture_files import folders_in
from fscil.errors import UserError

HEADERS = ("path", "file", "filename", "filepath", "file_name", "file_path", "image", "image_path")  # of a path


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
    elif saved := saved_split("folder", config):
        manifest = saved
    elif is_pack(root):
        choose("folder", config.split, ("pack",))
        manifest = pack_manifest("folder", root)
    else:
        choose("folder", config.split, ("stratified", "80-20"))
        by_class = {name: paths for name, paths in images_by_class(root, folders_in(root)).items() if paths}
        if not by_class:
            raise UserError(f'--data-root "{root}" holds no class folders with images')
        manifest = stratified_split("folder", by_class, config.test_fraction)
    return file_dataset(manifest, root, config, *usual_protocol(len(manifest.class_names)))


def _csv_manifest(path: Path, config: DataConfig) -> Manifest:
    """A manifest of a CSV's rows path,label[,split]; without a third column the split is stratified."""
    if saved := saved_split("folder", config):
        return saved
    rows = csv_rows(path, 2, HEADERS)
    by_class: dict[str, list[str]] = {}
    for row in rows:
        by_class.setdefault(row[1], []).append(row[0])
    if all(len(row) < 3 or not row[2] for row in rows):
        choose("folder", config.split, ("stratified", "80-20"))
        return stratified_split("folder", by_class, config.test_fraction)
    choose("folder", config.split, ("csv",))
    split_of = {row[0]: row[2].lower() if len(row) > 2 else "" for row in rows}
    strange = next((row for row in rows if split_of[row[0]] not in (TRAIN, TEST)), None)
    if strange:
        raise UserError(f'"{path}": the split of "{strange[0]}" is {split_of[strange[0]]!r}, neither train nor test')
    return manifest_by(by_class, "folder", "csv", lambda image: split_of[image] == TRAIN)
