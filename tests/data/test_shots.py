"""The shot samplers, against a literal transcription of what the released code does."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fscil.data.shots import index_file_shots, ledger_shots, load_ledger, save_ledger, seeded_shots
from fscil.errors import UserError


def released_picks(labels, sessions, shots, seed):
    """Global generator, numpy arrays, two subsets per session of which the second is used (methods reference 2.4)."""
    state = random.getstate()
    try:
        random.seed(seed)
        chosen = {}
        for session, classes in enumerate(sessions, start=1):
            for _subset in ("train transforms", "test transforms"):
                chosen[session] = {}
                for label in classes:
                    indices = np.where(np.logical_and(labels >= label, labels < label + 1))[0]
                    random.shuffle(indices)
                    chosen[session][f"class {label}"] = indices[:shots].tolist()
        return chosen
    finally:
        random.setstate(state)


def pools_of(labels, sessions):
    return {
        session: {f"class {label}": np.flatnonzero(labels == label).tolist() for label in classes}
        for session, classes in enumerate(sessions, start=1)
    }


def test_seed_2023_picks_what_the_released_code_picks():
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(100), 500))  # the shape of CIFAR-100
    sessions = [range(60 + 5 * t, 65 + 5 * t) for t in range(8)]
    assert seeded_shots(pools_of(labels, sessions), 5, 2023) == released_picks(labels, sessions, 5, 2023)


def test_recorded_list():
    pools = {1: {"cat": range(100), "dog": range(100, 200)}}
    assert seeded_shots(pools, shots=2, seed=2023) == {1: {"cat": RECORDED[0], "dog": RECORDED[1]}}


RECORDED = [40, 59], [136, 105]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(5, 30), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
def test_any_stream_matches_the_transcription(sizes, shots, seed):
    labels = np.repeat(np.arange(sum(map(len, sizes))), [size for session in sizes for size in session])
    labels = np.random.RandomState(seed % 1000).permutation(labels)
    starts = np.cumsum([0] + [len(session) for session in sizes])
    sessions = [range(start, stop) for start, stop in zip(starts, starts[1:])]
    pools = pools_of(labels, sessions)
    before = random.getstate()
    ledger = seeded_shots(pools, shots, seed)
    assert random.getstate() == before, "the global generator was touched"
    assert ledger == released_picks(labels, sessions, shots, seed)
    for session, classes in ledger.items():
        for name, images in classes.items():
            assert len(set(images)) == shots and set(images) <= set(pools[session][name])


def test_first_tasks_do_not_depend_on_how_many_follow():
    labels = np.repeat(np.arange(6), 20)
    pools = pools_of(labels, [range(2), range(2, 4), range(4, 6)])
    whole = seeded_shots(pools, 5, 1)
    assert seeded_shots({1: pools[1], 2: pools[2]}, 5, 1) == {1: whole[1], 2: whole[2]}
    assert seeded_shots(pools, 5, 2) != whole


def test_more_shots_than_images():
    with pytest.raises(UserError, match='shots is 5, but class "owl" of task 2 has only 4'):
        seeded_shots({1: {"cat": range(9)}, 2: {"owl": range(4)}}, 5, 0)


def write_sessions(folder, *sessions):
    folder.mkdir(exist_ok=True)
    for number, lines in enumerate(sessions, start=1):
        (folder / f"session_{number}.txt").write_text("\n".join(map(str, lines)) + "\n")
    return folder


def test_index_files_by_position(tmp_path):
    pools = {0: {"a": [0, 3], "b": [1]}, 1: {"c": [2, 5, 6], "d": [4, 7]}}
    base, ledger = index_file_shots(write_sessions(tmp_path / "lists", [3, 1, 0], [6, 2, 4]), pools)
    assert sorted(base) == [0, 1, 3]
    assert ledger == {1: {"c": [6, 2], "d": [4]}}


@pytest.mark.parametrize("name", ["images/{}.jpg", "{}.jpg"])
def test_index_files_by_file_name_alone(tmp_path, name):
    """miniImageNet: the lists say MINI-ImageNet/train/<class>/<file>, the images lie in one folder."""
    pools = {0: {"a": [name.format("a1")]}, 1: {"b": [name.format("b1"), name.format("b2")]}}
    lists = write_sessions(tmp_path / "lists", ["MINI-ImageNet/train/a/a1.jpg"], ["MINI-ImageNet/train/b/b2.jpg"])
    assert index_file_shots(lists, pools) == ([name.format("a1")], {1: {"b": [name.format("b2")]}})


def test_index_files_tell_equal_file_names_apart(tmp_path):
    pools = {0: {"a": ["a/1.jpg", "a/2.jpg"]}, 1: {"b": ["b/1.jpg", "b/2.jpg"]}}
    lists = write_sessions(tmp_path / "lists", ["CUB_200_2011/images/a/2.jpg"], ["CUB_200_2011/images/b/2.jpg"])
    assert index_file_shots(lists, pools) == (["a/2.jpg"], {1: {"b": ["b/2.jpg"]}})
    write_sessions(tmp_path / "lists", ["x/images/a/2.jpg"], ["x/images/gone/2.jpg"])
    with pytest.raises(UserError, match="no training image of this split"):
        index_file_shots(lists, pools)


@pytest.mark.parametrize(
    ("sessions", "message"),
    [
        ([[0], [3]], "which arrives with task 0, not 1"),
        ([[0, 3], [99]], "no training image"),
        ([[0, 3], [2]], 'no image of class "d"'),
        ([[0, 3]], "session_2.txt"),
    ],
)
def test_index_files_that_do_not_fit(tmp_path, sessions, message):
    pools = {0: {"a": [0, 3]}, 1: {"c": [2], "d": [4]}}
    with pytest.raises(UserError, match=message):
        index_file_shots(write_sessions(tmp_path / "lists", *sessions), pools)
    with pytest.raises(UserError, match="not a folder"):
        index_file_shots(tmp_path / "nowhere", pools)


def test_ledger_of_a_run_can_be_used_again(tmp_path):
    pools = {1: {"cat": list(range(20)), "dog": ["d/1.jpg", "d/2.jpg"]}, 2: {"été": list(range(20, 40))}}
    ledger = seeded_shots(pools, 2, 7)
    save_ledger(tmp_path / "shots.json", ledger, split_hash="abc")
    assert load_ledger(tmp_path / "shots.json") == ledger_shots(tmp_path / "shots.json", pools) == ledger
    (tmp_path / "bare.json").write_text(json.dumps(ledger))
    assert load_ledger(tmp_path / "bare.json") == ledger


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON file"),
        ("[]", "not a JSON ledger"),
        ("{}", "holds no tasks"),
        ('{"1": {"cat": [1.5]}}', r'"1.cat\[0\]" must be text, got 1.5'),
        ('{"1": {"cats": [1]}}', 'no shots of class "cat".*Did you mean "cats"'),
        ('{"1": {"cat": [99]}}', "99 is none of its training images"),
        ('{"1": {"cat": [1, 1]}}', "one twice"),
        ('{"1": {"cat": []}}', "none are listed"),
    ],
)
def test_bad_ledgers(tmp_path, content, message):
    path = tmp_path / "shots.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        ledger_shots(path, {1: {"cat": [1, 2, 3]}})
    with pytest.raises(UserError, match='absent.json" does not exist'):
        load_ledger(tmp_path / "absent.json")
