"""What is suggested for labelling, and pictures sorted into folders."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from fscil.errors import UserError
from fscil.teachable.model import Teachable
from fscil.teachable.sorting import Sorted, pictures_beside, place_file
from fscil.teachable.suggesting import suggest, suggest_from
from made_up_pictures import BACKBONE, pictures


@pytest.fixture(scope="module")
def model(weights):
    return Teachable(backbone=BACKBONE, weights=weights, train="never", device="cpu").fit(*pictures(range(4), 8))


def test_strangers_come_before_what_is_certain_and_what_was_taught_does_not_come(model):
    taught, certain, strange = pictures(range(4), 8)[0], pictures(range(4), 5, seed=4)[0], pictures([20, 21], 6)[0]
    pool = taught + certain + strange
    found = suggest(model, pool, 4)
    assert {item.position >= 52 for item in found} == {True}  # from 52 on they are strangers
    everything = suggest(model, pool, 1000)
    assert sorted(item.position for item in everything) == list(range(32, 64))
    with pytest.raises(UserError, match="nothing to suggest"):
        suggest(model, taught, 3)


def test_groups_of_strangers_are_numbered_as_they_come(model):
    knowledge = model.knowledge_
    generator = torch.Generator().manual_seed(0)
    away = torch.randn(2, knowledge.method.feature_dim, generator=generator)
    scale = 30 * knowledge.space.within.diagonal().sqrt()
    features = knowledge.space.means.mean(0) + scale * away.repeat_interleave(5, 0)  # two scenes, five times each
    features = torch.cat([features, features[:1] - 2 * scale * away[:1]])  # and something else, once
    found = suggest_from(knowledge, features, 11)
    assert all(item.unknown for item in found)
    groups = {item.position: item.group for item in found}
    assert len({groups[at] for at in range(5)}) == len({groups[at] for at in range(5, 10)}) == 1
    assert {groups[0], groups[5]} == {1, 2} and groups[10] is None
    assert {item.group_size for item in found if item.group} == {5}
    assert {item.position // 5 for item in found[:3]} == {0, 1, 2}  # one of each first
    first = next(item for item in found if item.group)
    assert first.group == 1 and first.folder == "new group 1" and "one of 5 that look alike" in first.reason


def test_files_are_placed_once_and_never_over_others(tmp_path):
    first, other = tmp_path / "a.jpg", tmp_path / "elsewhere" / "a.jpg"
    other.parent.mkdir()
    first.write_bytes(b"one")
    other.write_bytes(b"two")
    folder = tmp_path / "jay"
    assert place_file(first, folder) == place_file(first, folder) == folder / "a.jpg"
    assert place_file(other, folder).name == "a-2.jpg" and place_file(other, folder).name == "a-2.jpg"
    assert sorted(path.read_bytes() for path in folder.iterdir()) == [b"one", b"two"] and first.exists()
    link = place_file(first, tmp_path / "links", "link")
    assert link.is_symlink() and os.path.samefile(link, first)
    moved = place_file(other, tmp_path / "moved", "move")
    assert moved.read_bytes() == b"two" and not other.exists()


def test_moving_again_after_a_crash_leaves_one_file(tmp_path):
    file = tmp_path / "a.jpg"
    file.write_bytes(b"one")
    shutil.copy(file, place_file(file, tmp_path / "jay"))  # copied, and then the power went
    assert place_file(file, tmp_path / "jay", "move").read_bytes() == b"one"
    assert not file.exists() and len(list((tmp_path / "jay").iterdir())) == 1


def test_what_was_sorted_is_known_again(tmp_path):
    file = tmp_path / "a.jpg"
    file.write_bytes(b"one")
    into = Sorted(tmp_path / "out")
    assert file not in into
    assert into.put(file, "and/or", 0.5) == tmp_path / "out" / "and_or" / "a.jpg"
    assert file in into and file in Sorted(tmp_path / "out") and tmp_path / "b.jpg" not in Sorted(tmp_path / "out")
    (tmp_path / "out" / "and_or" / "a.jpg").rename(tmp_path / "out" / "corrected.jpg")
    assert file in Sorted(tmp_path / "out")  # what somebody put right is not sorted wrong again
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "answers.csv").write_text("something else\n1\n")
    with pytest.raises(UserError, match="no table of sorted pictures"):
        Sorted(tmp_path / "odd")


@pytest.mark.parametrize("how", ["copy", "link", "move"])
def test_another_picture_under_an_old_name_is_a_new_one(tmp_path, how):
    file, out = tmp_path / "latest.png", tmp_path / "out"
    file.write_bytes(b"one")
    Sorted(out, how).put(file, "jay", 0.5)
    assert (file in Sorted(out, how)) == (how != "move")
    file.write_bytes(b"two")
    again = Sorted(out, how)
    assert file not in again
    if how != "link":  # a link shows what lies there now
        again.put(file, "jay", 0.5)
        assert sorted(path.read_bytes() for path in (out / "jay").iterdir()) == [b"one", b"two"]
        assert file.exists() == (file in again) == (how == "copy")


def test_a_folder_within_what_is_looked_through_is_passed_over_unless_it_is_asked_for(tmp_path):
    own, done = tmp_path / "a.png", tmp_path / "sorted" / "unknown" / "b.png"
    done.parent.mkdir(parents=True)
    own.touch()
    done.symlink_to(own)  # as --link puts it there
    assert pictures_beside(tmp_path / "sorted", [tmp_path]) == [own]
    assert pictures_beside(tmp_path / "sorted", [own, tmp_path / "sorted"]) == [own]  # as a shell expands *
    assert pictures_beside(tmp_path / "sorted", [done.parent, own, done]) == [done, own, done]
    assert pictures_beside(tmp_path / "elsewhere", [tmp_path]) == pictures_beside(None, [tmp_path]) == [own, done]
