"""Every walk through folders of pictures sees the same files."""

import shutil

import numpy as np
import pytest
from PIL import Image

from fscil.config import DataConfig
from fscil.data.datasets import load_dataset
from fscil.data.picture_files import class_folders, expand, files_in, folders_in
from fscil.data.pictures import listed
from fscil.errors import UserError

SEEN = ["a.jpg", "b.JPEG", "deep/er/c.png"]  # what a person sees in the folder of a class, in order
UNSEEN = ["._a.jpg", ".b.jpg", ".thumbnails/d.jpg", "deep/._c.png", "deep/.cache/e.png", "notes.txt", "no_suffix"]


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / ".photos"  # the person names it: a hidden root counts
    for shade, name in enumerate(("jay", "owl", ".trash")):
        for number, file in enumerate(SEEN + UNSEEN):
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = np.full((8, 8, 3), 40 * shade + number, np.uint8)
            Image.fromarray(picture).save(path, "JPEG" if "jp" in path.suffix.lower() else "PNG")
    (root / "stray.txt").touch()
    return root


def test_all_walks_pass_over_what_is_hidden(photos):
    expected = [photos / name / file for name in ("jay", "owl") for file in SEEN]
    assert folders_in(photos) == [photos / "jay", photos / "owl"]
    assert files_in(photos) == expected
    assert expand([photos / "jay", photos / "owl"]) == expected
    assert listed(photos) == expected
    assert class_folders(photos) == (expected, ["jay"] * 3 + ["owl"] * 3)
    manifest = load_dataset("folder", DataConfig(root=str(photos))).manifest
    assert sorted(entry.image for entry in manifest.entries) == [str(path.relative_to(photos)) for path in expected]


def test_train_and_test_folders_pass_over_what_is_hidden(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "pack" / "train")
    shutil.copytree(photos, tmp_path / "pack" / "test")
    entries = load_dataset("folder", DataConfig(root=str(tmp_path / "pack"))).manifest.entries
    expected = [f"{split}/{name}/{file}" for split in ("test", "train") for name in ("jay", "owl") for file in SEEN]
    assert sorted(entry.image for entry in entries) == expected


def test_a_hidden_file_that_is_named_counts_and_an_empty_folder_is_an_error(photos, tmp_path):
    assert expand([photos / "jay" / "._a.jpg"]) == [photos / "jay" / "._a.jpg"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty.*holds no pictures"):
        expand([photos, tmp_path / "empty"])
    assert folders_in(tmp_path / "nowhere") == []
