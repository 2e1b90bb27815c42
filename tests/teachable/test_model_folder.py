"""Saved models: versions, undo across restarts, damage, crashes at every write, and writers at the same time."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fscil import files as checkpoint
from fscil.errors import UserError
from fscil.teachable.estimator import FewShotClassifier
from fscil.teachable.folder import ModelFolder, Version
from made_up_pictures import BACKBONE, pictures
from strangers_head import rewrite_head

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.estimator.Notice")
QUERIES = pictures([*range(4), 10, 11], 2, seed=1)[0]


@pytest.fixture(scope="module")
def original(weights, tmp_path_factory):
    """A saved model with one class taught; tests copy it."""
    path = tmp_path_factory.mktemp("models") / "birds"
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(*pictures(range(4), 5))
    clf.learn(*pictures([10], 4)).save(path)
    return path


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "birds")


def answers(path):
    return FewShotClassifier.load(path).predict_proba(QUERIES)


def test_a_model_comes_back_as_it_was(saved):
    clf = FewShotClassifier.load(saved)
    again = FewShotClassifier.load(saved)
    np.testing.assert_array_equal(clf.predict_proba(QUERIES), again.predict_proba(QUERIES))
    assert clf.classes_.tolist() == ["class 0", "class 1", "class 2", "class 3", "class 10"]
    assert [event["action"] for event in clf.history_] == ["fit", "learn"]
    assert clf.get_params()["backbone"] == BACKBONE
    assert clf.size_ == sum(file.stat().st_size for file in saved.glob("*.safetensors"))


@pytest.mark.parametrize("precision", ["fp16", "fp64"])
def test_a_precision_that_models_do_not_have_is_refused(saved, precision):
    with pytest.raises(UserError, match=f'--precision "{precision}" is not one of auto, fp32, bf16'):
        FewShotClassifier.load(saved, precision=precision)


def test_undo_works_across_restarts(saved):
    before = answers(saved)
    clf = FewShotClassifier.load(saved).forget("class 1").learn(*pictures([11], 3))
    clf.save(saved)
    FewShotClassifier.load(saved).undo(2).save(saved)
    np.testing.assert_array_equal(answers(saved), before)
    assert len(list(saved.glob("state-*"))) == 2  # what was undone leaves nothing behind
    base = FewShotClassifier.load(saved).undo()
    assert base.classes_.tolist() == [f"class {c}" for c in range(4)]


def test_an_unchanged_head_is_read_and_checked_once(saved, monkeypatch):
    from fscil.teachable import folder

    clf, parsed, read = FewShotClassifier.load(saved), [], folder.read_json
    monkeypatch.setattr(folder, "read_json", lambda path: parsed.append(path) or read(path))
    with clf.editing():
        clf.learn(*pictures([11], 3))
    assert clf.refresh().classes_[-1] == "class 11" and parsed == []
    other = FewShotClassifier.load(saved).forget("class 11").save(saved)
    assert len(parsed) == 1 and clf.refresh().classes_[-1] == "class 10" and len(parsed) == 3 and other == saved
    assert ModelFolder(saved).revision() == clf._versions.head.revision


def test_a_head_that_could_not_be_read_again_is_not_written(saved, monkeypatch):
    before = answers(saved)
    clf = FewShotClassifier.load(saved)
    monkeypatch.setattr(checkpoint, "TEXT_AT_MOST", (saved / "model.json").stat().st_size + 100)
    with pytest.raises(UserError, match=r"model.json.*could be read again.*drop_history"), clf.editing():
        clf.learn(*pictures([11], 3))
    np.testing.assert_array_equal(answers(saved), before)
    with clf.editing():
        clf.learn(*pictures([11], 3)).drop_history()
    assert clf.classes_[-1] == "class 11"


def test_of_very_many_scores_some_pictures_calibrate(weights, monkeypatch):
    from fscil.teachable import calibration

    plain = FewShotClassifier(backbone=BACKBONE, weights=weights, train="never").fit(*pictures(range(4), 10))
    monkeypatch.setattr(calibration, "CELLS_AT_MOST", 4 * 20)  # of 40 pictures x 4 classes
    sparse = FewShotClassifier(backbone=BACKBONE, weights=weights, train="never").fit(*pictures(range(4), 10))
    assert (plain.calibration_["held_out"], sparse.calibration_["held_out"]) == (40, 20)
    assert sparse.calibration_["held_out_accuracy"] > 0.9 and sparse.calibration_["temperature"] > 0
    sparse.learn(*pictures([10], 5))
    assert sparse.calibration_["held_out"] == 14  # every third: there are five classes now
    assert sparse.predict(QUERIES).tolist() == plain.learn(*pictures([10], 5)).predict(QUERIES).tolist()


def test_only_what_changed_is_written(original, tmp_path):
    folder, made = ModelFolder(tmp_path / "m"), ModelFolder(original).read()
    large, small, record = torch.randn(1000), torch.ones(2), made.current.record
    versions = [Version(record, {"a": large, "b": small}), Version(record, {"a": large, "b": small + 1})]
    with folder.lock():
        head = folder.write(made.config, versions)
    sizes = {name: entry["bytes"] for name, entry in head.files.items()}
    assert sizes["state-0001.safetensors"] > 4000 > sizes["state-0002.safetensors"]
    read = folder.read()
    for version, wanted in zip(read.versions, (small, small + 1)):
        tensors = folder.load(read, version)
        assert torch.equal(tensors["a"], large) and torch.equal(tensors["b"], wanted)


def test_a_copy_takes_its_history_along(saved, tmp_path):
    clf = FewShotClassifier.load(saved).learn(*pictures([11], 3))
    clf.save(tmp_path / "copy")
    shutil.rmtree(saved)
    copy = FewShotClassifier.load(tmp_path / "copy")
    np.testing.assert_array_equal(copy.predict_proba(QUERIES), clf.predict_proba(QUERIES))
    assert copy.undo(2).classes_.tolist() == [f"class {c}" for c in range(4)]
    sizes = [file.stat().st_size for file in sorted((tmp_path / "copy").glob("state-*"))]
    assert len(sizes) == 3 and max(sizes[1:]) < sizes[0] / 2  # shared tensors are stored once


def test_history_can_be_dropped(saved):
    clf = FewShotClassifier.load(saved).forget("class 10").forget("class 1")
    expected = clf.predict_proba(QUERIES)
    clf.save(saved)
    clf.drop_history().save(saved)
    np.testing.assert_array_equal(answers(saved), expected)
    clf = FewShotClassifier.load(saved)
    assert len(clf.history_) == 1 and "class 10" not in (saved / "model.json").read_text()
    assert len(list(saved.glob("state-*"))) == 1 and len(clf.knowledge_.held["labels"]) == 15
    with pytest.raises(UserError, match="cannot undo 1 change: none was made since the history was dropped for good"):
        clf.undo()
    clf.forget("class 2").save(saved)
    with pytest.raises(UserError, match="cannot undo 2 changes: 1 was made since the history was dropped for good"):
        clf.undo(2)


# ---- backbone ----


def test_an_embedded_backbone_needs_nothing_else(saved, weights, tmp_path):
    before = answers(saved)
    clf = FewShotClassifier.load(saved)
    compact = clf.size_
    clf.save(saved, embed=True)
    assert clf.size_ > compact + 4_000_000
    moved = tmp_path / "elsewhere"
    saved.rename(moved)
    rewrite_head(moved, lambda data: data["config"]["backbone"].update(weights=None))
    np.testing.assert_array_equal(answers(moved), before)
    FewShotClassifier.load(moved).learn(*pictures([11], 3)).save(moved)
    assert (moved / "backbone.safetensors").is_file() and FewShotClassifier.load(moved).classes_[-1] == "class 11"


def test_other_weights_are_noticed(saved, weights, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    tensors["norm.weight"] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="hash .* fitted on"):
        FewShotClassifier.load(saved, weights=tmp_path / "other.safetensors")


# ---- damage ----


@pytest.mark.parametrize("name", ["state-0001.safetensors", "state-0002.safetensors", "model.json"])
def test_an_altered_file_is_named(saved, name):
    content = bytearray((saved / name).read_bytes())
    content[-20] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*(altered|JSON)"):
        FewShotClassifier.load(saved)


def test_missing_and_foreign_folders(saved, tmp_path):
    (saved / "state-0001.safetensors").unlink()
    with pytest.raises(UserError, match="state-0001.safetensors.* is missing"):
        FewShotClassifier.load(saved)
    with pytest.raises(UserError, match="does not exist"):
        FewShotClassifier.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a model folder"):
        FewShotClassifier.load(tmp_path)


def test_a_newer_format_is_refused(saved):
    text = (saved / "model.json").read_text().replace('"format_version": 1', '"format_version": 99')
    (saved / "model.json").write_text(text)
    with pytest.raises(UserError, match="format version 99.*Upgrade"):
        FewShotClassifier.load(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["versions"][-1]["tensors"].update({"method.rows": "../../etc/passwd"}),
        lambda d: d["files"].update({"/etc/passwd": {"sha256": "", "bytes": 1}}),
        lambda d: d.update(versions=[]),
        lambda d: d.update(versions=7),
        lambda d: d["config"].pop("transform"),
        lambda d: d["config"].update(method="os.system"),
        lambda d: d["config"]["options"].update(surprise=1),
        lambda d: d["versions"][-1]["tensors"].pop("method.prototypes"),
        lambda d: d["versions"][-1]["record"]["classes"].pop(),
        lambda d: d["versions"][-1]["record"].pop("calibration"),
        lambda d: d["versions"][-1]["tensors"].update({"method.backbone.vit.norm.weight": "state-0001.safetensors"}),
    ],
)
def test_a_head_made_by_a_stranger_is_an_error_not_a_crash(saved, change):
    rewrite_head(saved, change)
    with pytest.raises(UserError):
        FewShotClassifier.load(saved).predict(QUERIES)


# ---- crashes ----


def writes_of(action, monkeypatch):
    """How many files an action puts in place."""
    count = 0
    replace = os.replace

    def counting(*arguments):
        nonlocal count
        count += 1
        return replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", counting)
        action()
    return count


def test_a_first_write_that_fails_leaves_no_folder(saved, tmp_path, monkeypatch):
    clf = FewShotClassifier.load(saved)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(UserError, match="the disk is full"):
        patched.setattr(os, "replace", full)
        clf.save(tmp_path / "far" / "new")
    assert not (tmp_path / "far").exists()
    clf.save(tmp_path / "new")
    assert (tmp_path / "new" / "model.json").exists()


def test_who_waits_for_a_first_write_that_fails_writes_then(tmp_path):
    folder, waiting = ModelFolder(tmp_path / "new"), threading.Event()

    def write():
        waiting.set()
        with ModelFolder(tmp_path / "new").lock():
            (tmp_path / "new" / "written").touch()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ConnectionError), folder.lock():  # noqa: PT012
            done = pool.submit(write)
            waiting.wait()
            time.sleep(0.2)
            raise ConnectionError
        done.result()
    assert (tmp_path / "new" / "written").exists()


def test_a_new_folder_that_vanishes_hides_no_error(tmp_path):
    folder = ModelFolder(tmp_path / "new")
    with pytest.raises(ConnectionError), folder.lock():
        shutil.rmtree(tmp_path / "new")
        raise ConnectionError
    with folder.lock():
        (tmp_path / "new" / "written").touch()


def test_a_full_disk_at_any_write_leaves_the_previous_version(saved, monkeypatch, tmp_path):
    before = answers(saved)
    spare = shutil.copytree(saved, tmp_path / "spare")
    total = writes_of(lambda: FewShotClassifier.load(spare).learn(*pictures([11], 3)).save(spare), monkeypatch)
    assert total == 2  # the tensors, then the head
    replace = os.replace
    for failing in range(total):
        clf, left = FewShotClassifier.load(saved).learn(*pictures([11], 3)), failing

        def full(*arguments):
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            left -= 1
            return replace(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, "replace", full)
            with pytest.raises(UserError, match="disk is full"):
                clf.save(saved)
        np.testing.assert_array_equal(answers(saved), before)
        assert not list(saved.glob(".*.part"))
        clf.save(saved)  # space was made: the same model can be saved after all
        assert FewShotClassifier.load(saved).classes_[-1] == "class 11"
        FewShotClassifier.load(saved).undo().save(saved)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("write", [0, 1])
def test_a_killed_process_leaves_the_previous_version(saved, write):
    before = answers(saved)
    clf = FewShotClassifier.load(saved).learn(*pictures([11], 3))
    child = os.fork()
    if child == 0:
        replace, left = os.replace, write

        def kill(*arguments):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return replace(*arguments)

        os.replace = kill
        try:
            clf.save(saved)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    np.testing.assert_array_equal(answers(saved), before)
    with FewShotClassifier.load(saved).editing() as again:  # the dead process's lock is free
        again.learn(*pictures([11], 3))
    np.testing.assert_array_equal(answers(saved), clf.predict_proba(QUERIES))
    assert len(list(saved.glob("state-*"))) == 3


# ---- several writers ----


def test_two_who_teach_at_once_are_serialised(saved):
    started = threading.Barrier(2)
    failures = []

    def teach(number):
        try:
            clf = FewShotClassifier.load(saved)
            started.wait(60)
            with clf.editing():
                clf.learn(*pictures([number], 3))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=teach, args=(number,)) for number in (20, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    clf = FewShotClassifier.load(saved)
    assert set(clf.classes_[-2:]) == {"class 20", "class 21"} and len(clf.history_) == 4


def test_a_stale_model_does_not_overwrite(saved):
    first, second = FewShotClassifier.load(saved), FewShotClassifier.load(saved)
    first.learn(*pictures([20], 3)).save(saved)
    second.learn(*pictures([21], 3))
    with pytest.raises(UserError, match="changed by another process"):
        second.save(saved)
    with pytest.raises(UserError, match="not saved"):
        second.refresh()
    second.undo().refresh()
    assert second.classes_[-1] == "class 20"
    with pytest.raises(UserError, match="holds a model already"):
        FewShotClassifier.load(saved).save(saved.parent / "spare") and second.save(saved.parent / "spare")


def test_a_failure_while_editing_restores_memory_and_disk(saved):
    clf = FewShotClassifier.load(saved)
    before = clf.predict_proba(QUERIES)
    with pytest.raises(RuntimeError), clf.editing():
        clf.learn(*pictures([11], 3))
        raise RuntimeError("power cut")
    np.testing.assert_array_equal(clf.predict_proba(QUERIES), before)
    np.testing.assert_array_equal(answers(saved), before)
