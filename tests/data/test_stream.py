"""Sessions, class order and the cutting of a dataset into tasks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fscil.config import DataConfig
from fscil.data.datasets import Dataset, array_dataset
from fscil.data.manifests import manifest_of_lists
from fscil.data.pixels import ImageStore
from fscil.data.shots import save_ledger
from fscil.data.stream import class_order, make_stream, session_sizes
from fscil.data.transforms import Transform
from fscil.errors import UserError

CLASSES, PER_TRAIN, PER_TEST = 10, 8, 3
PLAIN = Transform(size=4, resize=4)


@pytest.fixture(scope="module")
def dataset():
    """Every image is one colour: red is the class, green the number in its split, blue 0 in train and 255 in test."""
    rng = np.random.RandomState(3)
    images, pairs = {}, []
    for split, per_class in (("train", PER_TRAIN), ("test", PER_TEST)):
        labels = rng.permutation(np.repeat(np.arange(CLASSES), per_class))
        colours = np.stack([labels, np.arange(len(labels)), np.full(len(labels), 255 * (split == "test"))], 1)
        images[split] = np.broadcast_to(colours[:, None, None, :], (len(labels), 4, 4, 3)).astype(np.uint8)
        pairs.append(list(enumerate(labels.tolist())))
    manifest = manifest_of_lists("toy", "official", [f"c{i}" for i in range(CLASSES)], *pairs)
    return array_dataset(manifest, images, base=4, way=2, shots=3)


def colours(pixels):
    return torch.stack([pixels.raw(i)[0, 0] for i in range(len(pixels))]).long()


def test_published_protocols():
    assert session_sizes(100, 60, 5) == [60] + [5] * 8
    assert session_sizes(200, 100, 10) == [100] + [10] * 10
    assert session_sizes(10, 5, 2) == [5, 2, 2, 1]  # a remainder makes a last, smaller task
    assert session_sizes(10, 10, 3) == [10]
    assert session_sizes(100, 60, 5, tasks=2) == [60, 5, 5]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 50), st.none() | st.integers(0, 60))
def test_session_sizes(n_classes, base, way, tasks):
    """The rule in words: append the increment while it fits, then what is left."""
    possible = base <= n_classes and (tasks is None or base + way * tasks <= n_classes)
    if not possible:
        with pytest.raises(UserError):
            session_sizes(n_classes, base, way, tasks)
        return
    expected = [base]
    while sum(expected) + way <= n_classes and (tasks is None or len(expected) <= tasks):
        expected.append(way)
    if tasks is None and sum(expected) < n_classes:
        expected.append(n_classes - sum(expected))
    assert session_sizes(n_classes, base, way, tasks) == expected


def test_errors_name_the_numbers():
    with pytest.raises(UserError, match=r"base 60 \+ way 5 x tasks 9 = 105 classes.* has 100; at most 8"):
        session_sizes(100, 60, 5, 9)
    with pytest.raises(UserError, match="base is 101"):
        session_sizes(100, 101, 5)


def test_natural_stream(dataset):
    stream = make_stream(dataset, DataConfig(), PLAIN, seed=2023)
    assert [task.classes for task in stream.tasks] == [(0, 1, 2, 3), (4, 5), (6, 7), (8, 9)]
    assert [stream.seen(t) for t in range(4)] == [4, 6, 8, 10]
    assert stream.class_names == [f"c{i}" for i in range(10)] and stream.base_classes == 4 and stream.way == 2
    assert stream.split_hash == dataset.manifest.hash
    base = stream.tasks[0]
    assert len(base.images) == 4 * PER_TRAIN and base.labels.dtype == torch.int64
    for task in stream.tasks:
        seen = colours(task.images)
        assert (seen[:, 0] == task.labels).all() and (seen[:, 2] == 0).all()  # right class, training split
        assert set(task.labels.tolist()) == set(task.classes)
        if task.index:
            assert torch.bincount(task.labels)[list(task.classes)].tolist() == [3, 3]
            shots = stream.shots[task.index]
            assert seen[:, 1].tolist() == [image for name in shots for image in shots[name]]
    test = colours(stream.test)
    assert (test[:, 0] == stream.test_labels).all() and (test[:, 2] == 255).all() and len(test) == 10 * PER_TEST


def test_same_seed_same_shots_other_seed_other_shots(dataset):
    first, again, other = (make_stream(dataset, DataConfig(), PLAIN, seed) for seed in (1, 1, 2))
    assert first.shots == again.shots != other.shots
    assert first.class_names == other.class_names and first.split_hash == other.split_hash


def test_seeded_order_is_numpys_legacy_permutation(dataset):
    state = np.random.get_state()
    np.random.seed(1993)
    expected = np.random.permutation(CLASSES)
    np.random.set_state(state)
    stream = make_stream(dataset, DataConfig(class_order="seed"), PLAIN, seed=0)
    assert stream.class_names == [f"c{i}" for i in expected]
    for images, labels in [(task.images, task.labels) for task in stream.tasks] + [(stream.test, stream.test_labels)]:
        assert colours(images)[:, 0].tolist() == expected[labels.numpy()].tolist()


def test_order_file(dataset, tmp_path):
    path = tmp_path / "order.txt"
    path.write_text("c9\n\n3\nc0\nc1\nc2\nc4\n")
    config = DataConfig(class_order="file", order_file=str(path), base=3, way=2)
    stream = make_stream(dataset, config, PLAIN, seed=0)
    assert stream.class_names == ["c9", "c3", "c0", "c1", "c2", "c4"]  # a file may leave classes out
    assert [len(task.classes) for task in stream.tasks] == [3, 2, 1]
    for content, message in (("c9\nc77\n", 'no class "c77"'), ("c9\n9\n", "twice")):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            class_order(config, dataset.manifest.class_names)
    with pytest.raises(UserError, match="needs order_file"):
        class_order(DataConfig(class_order="file"), dataset.manifest.class_names)


def test_fewer_tasks_leave_classes_out(dataset):
    stream = make_stream(dataset, DataConfig(base=3, way=2, tasks=2, shots=1), PLAIN, seed=0)
    assert stream.seen(2) == 7 == len(stream.class_names)
    assert sorted(set(stream.test_labels.tolist())) == list(range(7))
    whole = make_stream(dataset, DataConfig(base=3, way=2, shots=1), PLAIN, seed=0)
    assert stream.shots == {task: whole.shots[task] for task in (1, 2)}


def test_base_task_alone(dataset):
    stream = make_stream(dataset, DataConfig(base=10), PLAIN, seed=0)
    assert len(stream) == 1 and stream.shots == {} and stream.seen(0) == 10


def test_limit_caps_base_and_test_but_not_shots(dataset):
    stream = make_stream(dataset, DataConfig(limit=2), PLAIN, seed=2023)
    assert torch.bincount(stream.tasks[0].labels).tolist() == [2] * 4
    assert torch.bincount(stream.test_labels).tolist() == [2] * 10
    assert stream.shots == make_stream(dataset, DataConfig(), PLAIN, seed=2023).shots
    assert stream.about["limit"] == 2


def test_validation_plays_the_stream_on_base_training_images_alone(dataset):
    config = DataConfig(base=6, way=1, shots=2, validation=True)
    stream = make_stream(dataset, config, PLAIN, seed=1)
    assert stream.class_names == [f"c{i}" for i in range(6)]
    assert stream.base_classes == 4 and [len(task.classes) for task in stream.tasks] == [4, 1, 1]
    tested, trained = colours(stream.test), torch.cat([colours(task.images) for task in stream.tasks])
    assert tested[:, 2].eq(0).all() and trained[:, 2].eq(0).all()  # no test image of the dataset
    assert torch.equal(tested[:, 0], stream.test_labels)
    assert torch.bincount(stream.test_labels).tolist() == [2] * 6  # a fifth of eight
    numbers = [set(part[:, 1].tolist()) for part in (tested, trained)]
    assert not numbers[0] & numbers[1]
    assert len(stream.tasks[0].labels) == 4 * (PER_TRAIN - 2) and [len(t.labels) for t in stream.tasks[1:]] == [2, 2]
    again = make_stream(dataset, config, PLAIN, seed=2)
    assert set(colours(again.test)[:, 1].tolist()) == numbers[0]  # the seed draws shots, not test images
    with pytest.raises(UserError, match="at least 2 base classes"):
        make_stream(dataset, DataConfig(base=1, way=1, validation=True), PLAIN, seed=1)
    with pytest.raises(UserError, match="draws its own shots"):
        make_stream(dataset, DataConfig(validation=True, shots_file="x"), PLAIN, seed=1)
    with pytest.raises(UserError, match="validation_base is 6; of 6 base classes between 1 and 5"):
        make_stream(dataset, DataConfig(base=6, way=1, validation=True, validation_base=6), PLAIN, seed=1)


def test_validation_can_be_cut_elsewhere(dataset):
    names = dataset.manifest.class_names
    cuts = []
    for draw in (0, 1, 2):
        config = DataConfig(base=6, way=1, shots=2, validation=True, validation_base=3, validation_draw=draw)
        stream = make_stream(dataset, config, PLAIN, seed=1)
        assert stream.base_classes == 3 and len(stream.tasks) == 4
        assert sorted(stream.class_names) == sorted(names[:6])  # never one of the real stream's new classes
        cuts.append(frozenset(stream.class_names[:3]))
    assert cuts[0] == frozenset(names[:3]) and len(set(cuts)) > 1


def test_shots_of_a_former_run(dataset, tmp_path):
    former = make_stream(dataset, DataConfig(), PLAIN, seed=5)
    save_ledger(tmp_path / "shots.json", former.shots)
    again = make_stream(dataset, DataConfig(shots_file=str(tmp_path / "shots.json")), PLAIN, seed=6)
    assert again.shots == former.shots
    assert torch.equal(colours(again.tasks[2].images), colours(former.tasks[2].images))


def test_index_files(dataset, tmp_path):
    by_class = [
        [e.image for e in dataset.manifest.entries if e.split == "train" and e.label == c] for c in range(CLASSES)
    ]
    sessions = [[i for c in range(8) for i in by_class[c][:5]], [by_class[8][7], by_class[9][2]]]
    for number, lines in enumerate(sessions, start=1):
        (tmp_path / f"session_{number}.txt").write_text("\n".join(map(str, lines)))
    config = DataConfig(base=8, way=2, sampler="index_files", index_files=str(tmp_path))
    stream = make_stream(dataset, config, PLAIN, seed=0)
    assert sorted(colours(stream.tasks[0].images)[:, 1].tolist()) == sorted(sessions[0])
    assert colours(stream.tasks[1].images)[:, 1].tolist() == sessions[1] and stream.tasks[1].labels.tolist() == [8, 9]
    with pytest.raises(UserError, match="needs index_files"):
        make_stream(dataset, DataConfig(sampler="index_files"), PLAIN, seed=0)


def unreadable(dataset, bad):
    """The dataset, with some positions of the manifest unreadable."""

    def read(positions):
        store, _ = dataset.store(positions)
        kept = [row for row, position in enumerate(positions) if position not in bad]
        return ImageStore.from_list([store.image(row).numpy() for row in kept]), [positions[row] for row in kept]

    return Dataset(dataset.manifest, dataset.base, dataset.way, dataset.shots, read)


def test_unreadable_images_are_left_out_and_counted(dataset):
    whole = make_stream(dataset, DataConfig(), PLAIN, seed=2023)
    shot = whole.shots[2]["c7"][1]
    entries = dataset.manifest.entries
    bad = {next(at for at, e in enumerate(entries) if e.split == "train" and e.image == shot)}
    bad.add(next(at for at, e in enumerate(entries) if e.split == "test" and e.label == 3))
    stream = make_stream(unreadable(dataset, bad), DataConfig(), PLAIN, seed=2023)
    assert len(stream.about["skipped"]) == 2 and str(shot) in stream.about["skipped"]
    assert stream.shots[2]["c7"] == [image for image in whole.shots[2]["c7"] if image != shot]
    assert len(stream.tasks[2].labels) == 5 and len(stream.test_labels) == 29
    for images, labels in [(task.images, task.labels) for task in stream.tasks] + [(stream.test, stream.test_labels)]:
        assert (colours(images)[:, 0] == labels).all()
    all_of_one = {at for at, e in enumerate(entries) if e.split == "test" and e.label == 3}
    with pytest.raises(UserError, match='class "c3" has no test image left'):
        make_stream(unreadable(dataset, all_of_one), DataConfig(), PLAIN, seed=2023)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"class_order": "nature"}, 'Did you mean "natural"'),
        ({"sampler": "seed"}, 'Did you mean "seeded"'),
        ({"shots": 0}, "shots is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"store": "big"}, 'store "big"'),
    ],
)
def test_settings_are_checked(choice, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**choice)


def test_store_accepts_numbers():
    assert DataConfig(store=320).short_side == 320 and DataConfig(store="full").short_side is None
