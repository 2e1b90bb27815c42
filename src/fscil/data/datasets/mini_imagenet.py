"""miniImageNet: 60,000 photos of 100 classes of ImageNet, in the layout of CEC."""

from __future__ import annotations

from pathlib import Path

from fscil.config import DataConfig
from fscil.data.datasets.common import Dataset, choose, file_dataset, is_pack, locate, saved_split
from fscil.data.manifests import TEST, TRAIN, manifest_of_lists
from fscil.data.picture_files import table_rows
from fscil.errors import UserError
from fscil.reading import read_text


def mini_imagenet(config: DataConfig) -> Dataset:
    """miniImageNet as CEC lays it out: images/ and split/train.csv, split/test.csv (filename,label)."""
    root = locate(
        "mini_imagenet",
        config,
        archives=(),
        is_here=lambda folder: (folder / "images").is_dir() or is_pack(folder),
        inside=("", "miniimagenet", "mini_imagenet", "MINI-ImageNet"),
        expected="images/ (all pictures in one folder) and split/train.csv, split/test.csv with the columns "
        "filename,label; ImageNet's licence forbids passing the pictures on, so there is no download",
    )
    choose("mini_imagenet", config.split, ("cec",))
    if saved := saved_split("mini_imagenet", config, lists=True):
        return file_dataset(saved, root, config, base=60, way=5)
    folder = Path(config.split_file).expanduser() if config.split_file else root / "split"
    lists = {split: folder / f"{split}.csv" for split in (TRAIN, TEST)}
    rows = {
        split: [(row["path"], row["label"]) for row in table_rows(read_text(file), file, headless=True)]
        for split, file in lists.items()
    }
    class_names = list(dict.fromkeys(label for _, label in rows[TRAIN]))  # by first appearance, as CEC numbers them
    number = {name: label for label, name in enumerate(class_names)}
    pairs = []
    for split in (TRAIN, TEST):
        strange = next((label for _, label in rows[split] if label not in number), None)
        if strange:
            raise UserError(f'"{lists[split]}" has class "{strange}", which train.csv does not')
        name, label = rows[split][0]
        layouts = ("images/{name}", "images/{label}/{name}", f"{split}/{{label}}/{{name}}")
        layout = next((way for way in layouts if (root / way.format(name=name, label=label)).is_file()), layouts[0])
        pairs.append([(layout.format(name=name, label=label), number[label]) for name, label in rows[split]])
    return file_dataset(manifest_of_lists("mini_imagenet", "cec", class_names, *pairs), root, config, base=60, way=5)
