"""Folders that pictures are sorted into, for classes of any name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fscil.errors import UserError
from fscil.teachable.sorting import Sorted, folder_name, place_file


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


def test_a_line_of_the_table_is_written_whole_or_not_at_all(tmp_path):
    """A limit on the size of files stands for the disk that is full."""
    resource = pytest.importorskip("resource")
    pictures = [tmp_path / f"{number}.png" for number in range(3)]
    for number, picture in enumerate(pictures):
        picture.write_bytes(bytes([number]))
    into = Sorted(tmp_path / "out")
    into.put(pictures[0], "jay", 0.5)
    before, limits = into.table.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(UserError, match=r'cannot write ".*answers.csv": No space left'):
            into.put(pictures[1], "jay", 0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert into.table.read_bytes() == before
    into.table.write_bytes(before.rstrip() + b"\r\n/cut,sho")  # a process was killed, or somebody's editor did it
    again = Sorted(tmp_path / "out")
    assert pictures[0] in again and pictures[1] not in again
    again.put(pictures[1], "jay", 0.5)
    again.put(pictures[2], "jay", 0.5)
    assert all(picture in Sorted(tmp_path / "out") for picture in pictures)
    assert sorted(path.name for path in (tmp_path / "out" / "jay").iterdir()) == ["0.png", "1.png", "2.png"]


def test_a_table_that_a_full_disk_left_empty_gets_its_first_line(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"a picture")
    into = Sorted(tmp_path / "out")
    into.folder.mkdir()
    into.table.touch()  # the disk had room for its name, not for a line
    for sorting in (into, Sorted(into.folder)):
        into.table.write_bytes(b"")
        sorting.put(picture, "jay", 0.5)
        assert picture in Sorted(into.folder)


def test_a_file_in_the_place_of_a_class_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a picture")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "jay").touch()
    with pytest.raises(UserError, match='cannot copy ".*a.png" into ".*jay": File exists'):
        Sorted(tmp_path / "out").put(tmp_path / "a.png", "jay", 0.5)


def test_pictures_are_not_put_into_a_model_or_below_a_file(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.json").touch()
    with pytest.raises(UserError, match='--sort-into ".*model" is a model; name another folder'):
        Sorted(tmp_path / "model")
    with pytest.raises(UserError, match='"model.json" is a file; choose another folder'):
        Sorted(tmp_path / "model" / "model.json" / "sorted")
    assert not (tmp_path / "model" / "answers.csv").exists()


def test_a_picture_that_cannot_be_moved_stays_where_it_is_alone(tmp_path, monkeypatch):
    """As on a camera's card that is locked."""
    card = tmp_path / "card" / "a.png"
    card.parent.mkdir()
    card.write_bytes(b"a picture")
    unlink = Path.unlink

    def locked(path, *arguments, **named):
        if path == card:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, *arguments, **named)

    monkeypatch.setattr(Path, "unlink", locked)
    for _ in range(2):
        with pytest.raises(UserError, match=r'cannot move ".*a.png" into ".*jay": Read-only file system'):
            place_file(card, tmp_path / "sorted" / "jay", "move")
        assert card.exists() and not list((tmp_path / "sorted" / "jay").iterdir())
    place_file(card, tmp_path / "sorted" / "jay")
    with pytest.raises(UserError, match="cannot move"):
        place_file(card, tmp_path / "sorted" / "jay", "move")
    assert card.exists() and (tmp_path / "sorted" / "jay" / "a.png").exists()  # the copy was somebody's wish
