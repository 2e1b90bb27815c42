"""Folders that pictures are sorted into, for classes of any name."""

from __future__ import annotations

import pytest

from fscil.teachable.sorting import folder_name, place_file


@pytest.mark.parametrize(
    "name", ["鷺" * 150, "..", ".", "a/b", "CON", "nul.txt", "a .", "é" * 200, "x" * 200, "\u202e", " "]
)
def test_every_class_has_a_folder_on_any_system(name, tmp_path):
    found = folder_name(name)
    assert found and len(found.encode()) < 255 and not set(found) & set('\\/:*?"<>|')
    assert found.rstrip(". ") == found and found.partition(".")[0].lower() not in ("", "con", "nul")
    (tmp_path / "a.png").write_bytes(b"a picture")
    placed = place_file(tmp_path / "a.png", tmp_path / "sorted" / found)
    assert placed.parent.parent == tmp_path / "sorted" and placed.read_bytes() == b"a picture"
