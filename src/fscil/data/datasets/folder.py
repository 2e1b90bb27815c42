"""Anyone's images, in folders or listed in a CSV."""

from __future__ import annotations

from pathlib import Path

from fscil.config import DataConfig
from fscil.data.datasets.common import (
    Dataset,
    choose,
    file_dataset,
    images_by_class,
    is_pack,
    manifest_by,
    pack_manifest,
    saved_split,
    usual_protocol,
)
from fscil.data.manifests import TEST, TRAIN, Manifest, stratified_split
from fscil.data.picture_files import folders_in, table_rows
from fscil.errors import UserError
from fscil.reading import TABLE_AT_MOST, read_text


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
    """A manifest of a CSV's rows path,label[,split]; without a split in it that is stratified."""
    if saved := saved_split("folder", config):
        return saved
    rows = table_rows(read_text(path, TABLE_AT_MOST), path, headless=True)
    by_class: dict[str, list[str]] = {}
    for row in rows:
        by_class.setdefault(row["label"], []).append(row["path"])
    split_of = {row["path"]: row.get("split", "").lower() for row in rows}
    if not any(split_of.values()):
        choose("folder", config.split, ("stratified", "80-20"))
        return stratified_split("folder", by_class, config.test_fraction)
    choose("folder", config.split, ("csv",))
    strange = next((image for image, split in split_of.items() if split not in (TRAIN, TEST)), None)
    if strange is not None:
        raise UserError(f'"{path}": the split of "{strange}" is {split_of[strange]!r}, neither train nor test')
    return manifest_by(by_class, "folder", "csv", lambda image: split_of[image] == TRAIN)
