"""Manifests: the hash names the split, saving loses nothing, the stratified split is the same everywhere."""

import hashlib
import json

import pytest

from fscil.data.manifests import Entry, Manifest, manifest_of_lists, stratified_split
from fscil.errors import UserError


@pytest.fixture
def manifest():
    return manifest_of_lists(
        "pets", "80-20", ["chat", "été"], [("c/1.jpg", 0), ("é/2.jpg", 1)], [("c/3.jpg", 0), ("é/4.jpg", 1)]
    )


def test_hash_is_sha256_of_the_canonical_json(manifest):
    canonical = (
        '{"class_names":["chat","été"],"dataset":"pets","entries":[["c/1.jpg","train",0],["é/2.jpg","train",1],'
        '["c/3.jpg","test",0],["é/4.jpg","test",1]],"split":"80-20"}'
    )
    assert manifest.hash == hashlib.sha256(canonical.encode("utf-8")).hexdigest()
    assert manifest.hash.startswith(manifest.short_hash)


def test_hash_changes_with_one_entry(manifest):
    moved = list(manifest.entries)
    moved[0], moved[2] = moved[0]._replace(split="test"), moved[2]._replace(split="train")
    assert Manifest("pets", "80-20", manifest.class_names, tuple(moved)).hash != manifest.hash


def test_save_and_load(manifest, tmp_path):
    manifest.save(tmp_path / "split.json")
    assert Manifest.load(tmp_path / "split.json") == manifest
    assert json.loads((tmp_path / "split.json").read_text())["format_version"] == 1


def test_a_changed_file_is_noticed(manifest, tmp_path):
    path = tmp_path / "split.json"
    manifest.save(path)
    path.write_text(path.read_text().replace("c/3.jpg", "c/9.jpg"))
    with pytest.raises(UserError, match="split_hash"):
        Manifest.load(path)


@pytest.mark.parametrize("content", ["[]", '{"format_version": 1}', '{"format_version": 99}', "{", '{"dataset": 3}'])
def test_files_that_are_no_manifest(content, tmp_path):
    path = tmp_path / "split.json"
    path.write_text(content)
    with pytest.raises(UserError, match="split.json"):
        Manifest.load(path)


@pytest.mark.parametrize(
    ("names", "entries", "message"),
    [
        (("a", "a"), [("x", "train", 0)], 'two classes are called "a"'),
        (("a",), [("x", "train", 0), ("x", "train", 0)], "twice"),
        (("a",), [("x", "validation", 0)], "bad entry"),
        (("a",), [("x", "train", 1)], "bad entry"),
        (
            ("a", "b"),
            [("x", "train", 0), ("y", "test", 0), ("z", "train", 1)],
            'no test images of 1 of 2 classes \\("b"\\)',
        ),
        ((), [], "no classes"),
    ],
)
def test_impossible_manifests(names, entries, message):
    with pytest.raises(UserError, match=message):
        Manifest("d", "s", names, tuple(Entry(*entry) for entry in entries))


def test_stratified_split_is_per_class_and_independent_of_listing_order():
    images = {name: [f"{name}/{i}.jpg" for i in range(count)] for name, count in (("b", 60), ("a", 41), ("c", 2))}
    split = stratified_split("d", images)
    assert split.class_names == ("a", "b", "c") and split.split == "80-20"
    tests = [sum(e.split == "test" and e.label == label for e in split.entries) for label in range(3)]
    assert tests == [8, 12, 1]  # 41 / 5 = 8.2, 60 / 5 = 12, and never none
    assert {e.image for e in split.entries} == {path for paths in images.values() for path in paths}
    assert stratified_split("d", {name: paths[::-1] for name, paths in reversed(images.items())}) == split


def test_stratified_split_of_a_class_does_not_depend_on_the_others():
    images = {name: [f"{name}/{i}.jpg" for i in range(20)] for name in "abc"}
    alone = stratified_split("d", {"b": images["b"]}, 0.3)
    among = stratified_split("d", images, 0.3)
    tests = [{e.image for e in split.entries if e.split == "test"} for split in (alone, among)]
    assert tests[0] == {image for image in tests[1] if image.startswith("b/")} and len(tests[0]) == 6


def test_stratified_split_is_fixed_for_ever():
    """Written down once: runs of different machines and versions must agree."""
    split = stratified_split("d", {"cat": [f"cat/{i}.jpg" for i in range(10)]})
    by_hash = sorted((hashlib.sha256(f"cat/{i}.jpg".encode()).hexdigest(), f"cat/{i}.jpg") for i in range(10))
    assert {e.image for e in split.entries if e.split == "test"} == {path for _, path in by_hash[:2]} == RECORDED


RECORDED = {"cat/3.jpg", "cat/8.jpg"}


def test_one_image_cannot_be_split():
    with pytest.raises(UserError, match='class "a" has 1 image'):
        stratified_split("d", {"a": ["a/1.jpg"]})
