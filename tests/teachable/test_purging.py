"""After a purge the bytes of the folder hold nothing of the class: searched for as they were written before."""

from __future__ import annotations

import numpy as np
import pytest

from fscil import FewShotClassifier
from fscil.errors import UserError
from fscil.teachable import purging
from fscil.teachable.purging import purge
from made_up_pictures import BACKBONE, pictures

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.recognition.Notice")
QUERIES = pictures([0, 2, 3, 11], 2, seed=5)[0]


@pytest.fixture
def model(weights, tmp_path):
    """A model of four base classes and two taught ones, with a history, thumbnails, and what a crash left behind."""
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, thumbnails=2, device="cpu")
    clf.fit(*pictures(range(4), 6)).save(tmp_path / "birds")
    clf.learn(*pictures([10], 4)).save(tmp_path / "birds")
    clf.learn(*pictures([11], 4)).save(tmp_path / "birds")
    unfinished = tmp_path / "birds" / ".state-0004.safetensors.x1y2.part"
    unfinished.write_bytes(b"class 10 class 1" + clf.knowledge_.method.state()["prototypes"].numpy().tobytes())
    (tmp_path / "birds" / "notes.txt").write_text("mine")
    return tmp_path / "birds"


def traces_of(clf: FewShotClassifier, label: str) -> dict[str, bytes]:
    """What a model keeps of one class, as the bytes that its files have."""
    known, number = clf.knowledge_, clf.knowledge_.number(label)
    tensors = {
        "prototype": known.method.state()["prototypes"][number],
        "mean": known.space.means[number],
        "fingerprint": known.fingerprints[known.fingerprints[:, 1] == number][0, 0],
    }
    for lesson in known.thumbnails.values():
        for row in (lesson["labels"] == number).nonzero().flatten()[:1]:
            tensors |= {"thumbnail": lesson["pixels"][row], "its feature": lesson["features"][row]}
    for row in (known.held["labels"] == number).nonzero().flatten()[:1]:
        tensors["held-out feature"] = known.held["features"][row]
    found = {name: tensor.cpu().contiguous().numpy().tobytes() for name, tensor in tensors.items()}
    return found | {"name": f'"{label}"'.encode()}


def folder_bytes(path) -> bytes:
    return b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("label", ["class 10", "class 1"])
def test_no_byte_of_the_class_is_left(model, label):
    clf = FewShotClassifier.load(model, device="cpu")
    traces, whole = traces_of(clf, label), folder_bytes(model)
    assert {"prototype", "mean", "fingerprint", "thumbnail", "its feature", "name"} <= set(traces)
    assert all(trace in whole for trace in traces.values())
    forgotten = FewShotClassifier.load(model, device="cpu").forget(label)

    done = purge(clf, label)

    left = folder_bytes(model)
    assert not [name for name, trace in traces.items() if trace in left]
    assert not list(model.glob("*.part")) and not list(model.glob(".*.part"))
    assert len(list(model.glob("state-*"))) == 1
    assert done.versions == 3 and len(done.files) == 4 and done.others == ["notes.txt"]
    base = label == "class 1"
    assert done.traces == (["the covariances of all base pictures together"] if base else [])
    again = FewShotClassifier.load(model, device="cpu")
    assert label not in again.classes_ and len(again.history_) == 1
    np.testing.assert_array_equal(again.predict_proba(QUERIES), forgotten.predict_proba(QUERIES))
    with pytest.raises(UserError, match="none was made since the history was dropped for good"):
        again.undo()


def test_thumbnails_of_other_lessons_outlive_a_purge_and_the_lesson_after_it(model):
    clf = FewShotClassifier.load(model, device="cpu")
    purge(clf, "class 11")
    clf.learn(*pictures([12], 3))
    kept = {str(alike[0]) for alike in clf.nearest_thumbnails(pictures([11], 1)[0], count=50)[0]}
    assert kept == {"class 0", "class 1", "class 2", "class 3", "class 10", "class 12"}


def test_a_file_that_cannot_be_removed_is_named(model, monkeypatch):
    clf = FewShotClassifier.load(model, device="cpu")
    unlink = type(model).unlink

    def stuck(path, missing_ok=False):
        if path.name.startswith("state-"):
            raise PermissionError("locked")
        unlink(path, missing_ok)

    monkeypatch.setattr(type(model), "unlink", stuck)
    with pytest.raises(UserError, match="state-0001.safetensors. holds an earlier version and could not be removed"):
        purge(clf, "class 10")


def test_what_is_refused_changes_nothing(model, weights):
    before = {file: file.read_bytes() for file in model.iterdir()}
    with pytest.raises(UserError, match='no class "class 9"'):
        purge(FewShotClassifier.load(model, device="cpu"), "class 9")
    assert {file: file.read_bytes() for file in model.iterdir()} == before
    with pytest.raises(UserError, match="save the model first"):
        purge(FewShotClassifier(backbone=BACKBONE, weights=weights).fit(*pictures(range(2), 3)), "class 0")
    assert purging.UNFINISHED.fullmatch(".model.json.abc.part") and not purging.UNFINISHED.fullmatch("model.json")
