"""A model folder from a stranger, with hashes made right: nothing outside of it is opened, read or written."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fscil.errors import UserError
from fscil.files import digest_file, load_tensors, save_tensors
from fscil.teachable.folder import ModelFolder
from fscil.teachable.hub import pull
from fscil.teachable.model import Teachable
from made_up_pictures import BACKBONE, pictures
from strangers_head import rewrite_head

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.recognition.Notice")


@pytest.fixture(scope="module")
def original(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "birds"
    Teachable(backbone=BACKBONE, weights=weights).fit(*pictures(range(4), 5)).learn(*pictures([10], 3)).save(path)
    return path


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original, tmp_path / "birds")


def rewrite_tensor(path, name, change):
    """Alter a tensor of the present version and list its file's new hash."""
    file = ModelFolder(path).read().current.files[name]
    tensors, meta = load_tensors(path / file)
    save_tensors(path / file, {**tensors, name: change(tensors[name])}, meta)
    rewrite_head(path, lambda head: head["files"][file].update(sha256=digest_file(path / file)))


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (["config", "seed"], -1, "config.seed"),
        (["config", "method"], 7, "config.method"),
        (["config", "method"], "nothing", 'unknown method "nothing"'),
        (["config", "backbone", "image_size"], 10**6, "config.backbone.image_size"),
        (["config", "transform", "std"], [0.0, 0.0, 0.0], r"config.transform.std\[0\]"),
        (["config", "transform", "size"], 10**7, "config.transform.size"),
        (["config", "parameters", "thumbnails"], "many", "config.parameters.thumbnails"),
        (["config", "options"], [], "config.options"),
        (["config", "options"], {"no such": 1}, "options.no such"),
        (["versions"], {}, '"versions" must be a list'),
        (["versions"], [], "no version"),
        (["versions", 1, "record", "calibration", "temperature"], 0.0, "calibration.temperature"),
        (["versions", 1, "record", "classes"], [{}], "classes"),
        (["versions", 1, "record", "classes"], [], "does not fit|class names"),
        (["versions", 1, "tensors", "known.means"], "../../etc/passwd", "etc/passwd"),
        (["files", "state-0001.safetensors", "bytes"], -5, "bytes"),
        (["revision"], None, "revision"),
    ],
)
def test_wrong_values_are_named_in_one_line(saved, keys, value, words, fscil):
    def change(head):
        for key in keys[:-1]:
            head = head[key]
        head[keys[-1]] = value

    rewrite_head(saved, change)
    with pytest.raises(UserError, match=words):
        Teachable.load(saved)
    status, _, said = fscil("predict", saved, "any.jpg")
    assert status == 2 and said.startswith("fscil: error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("known.means", lambda tensor: tensor * torch.nan),
        ("known.within", lambda tensor: tensor + torch.inf),
        ("known.means", lambda tensor: tensor[:, :-1]),
        ("method.class_counts", lambda tensor: tensor.float()),
        ("method.class_counts", lambda tensor: tensor[:-1]),
        ("held.labels", lambda tensor: tensor[:-1]),
        ("held.features", lambda tensor: tensor[0]),
        ("fingerprints", lambda tensor: tensor.float()),
        ("fingerprints", lambda tensor: tensor.flatten()),
        ("taught.labels", lambda tensor: tensor + 99),
    ],
)  # fmt: skip
def test_tensors_that_are_none_or_do_not_fit_are_refused(saved, name, change):
    rewrite_tensor(saved, name, change)
    with pytest.raises(UserError, match="NaN or infinity|does not fit"):
        Teachable.load(saved)


# ---- weights --------------------------------------------------------------------------------------------------------


def test_the_weights_a_model_names_are_used_if_they_are_the_same(saved, weights):
    head = ModelFolder(saved).read()
    assert head.config["backbone"]["weights"] == str(weights)
    assert head.config["backbone"]["weights_sha256"] == digest_file(weights)
    assert Teachable.load(saved).predict_proba(pictures([0], 1)[0]).shape == (1, 5)


def test_another_file_in_their_place_is_not_opened(saved, weights, tmp_path, monkeypatch):
    other = tmp_path / "other.safetensors"
    shutil.copy(weights, other)
    other.write_bytes(other.read_bytes() + b" ")
    rewrite_head(saved, lambda head: head["config"]["backbone"].update(weights=str(other)))
    monkeypatch.setattr("fscil.teachable.starting.make_backbone", lambda *_: pytest.fail("was opened"))
    with pytest.raises(UserError, match="not those the model was fitted on"):
        Teachable.load(saved)


def test_pipes_devices_and_other_files_are_no_weights(saved, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("secret")
    monkeypatch.setattr("fscil.teachable.starting.make_backbone", lambda *given: pytest.fail(f"opened {given}"))
    rewrite_head(saved, lambda head: head["config"]["backbone"].update(weights=str(tmp_path / "text")))
    with pytest.raises(UserError, match="no safetensors file") as caught:
        Teachable.load(saved)
    assert "secret" not in str(caught.value)
    opened = []
    monkeypatch.setattr("fscil.teachable.starting.make_backbone", lambda *given: opened.append(given) or 1 / 0)
    for path in (tmp_path / "pipe", "/dev/zero"):
        rewrite_head(saved, lambda head, path=path: head["config"]["backbone"].update(weights=str(path)))
        with pytest.raises(ZeroDivisionError):
            Teachable.load(saved)
    assert [given[1] for given in opened] == [None, None]  # the backbone's own weights are asked for


def test_a_model_of_version_0_1_finds_its_weights(saved, weights):
    rewrite_head(saved, lambda head: head["config"]["backbone"].pop("weights_sha256"))
    assert len(Teachable.load(saved).classes_) == 5


def test_a_pulled_model_may_name_no_file_of_this_machine(saved, tmp_path):
    class Client:
        def model_info(self, repo, *, revision=None, files_metadata=False):
            files = [SimpleNamespace(rfilename=path.name, size=path.stat().st_size) for path in saved.iterdir()]
            return SimpleNamespace(sha="0" * 40, siblings=files)

        def hf_hub_download(self, repo, name, *, revision, local_dir):
            assert name == "model.json"  # nothing else is asked for
            Path(local_dir).mkdir(parents=True, exist_ok=True)
            shutil.copy(saved / name, local_dir)

    with pytest.raises(UserError, match="names a file of this machine"):
        pull(tmp_path / "pulled", "somebody/birds", client=Client())
    assert not (tmp_path / "pulled").exists()


# ---- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "model.json", "state-0001.safetensors"])
def test_links_are_refused_and_their_targets_untouched(saved, tmp_path, name):
    target = tmp_path / "precious"
    target.write_bytes((saved / name).read_bytes() if name != ".lock" else b"precious")
    before = target.read_bytes()
    (saved / name).unlink(missing_ok=True)
    (saved / name).symlink_to(target)
    with pytest.raises(UserError, match="symbolic link"):
        clf = Teachable.load(saved)
        with clf.editing():
            clf.forget("class 1")
    assert target.read_bytes() == before and (saved / name).is_symlink()


def test_a_folder_that_is_itself_a_link_is_fine(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved, target_is_directory=True)
    clf = Teachable.load(tmp_path / "link")
    with clf.editing():
        clf.forget("class 1")
    np.testing.assert_array_equal(Teachable.load(saved).classes_, clf.classes_)


def test_files_half_written_go_with_the_next_change(saved):
    ours, theirs = saved / ".state-0009.safetensors.abcdefgh.part", saved / "my.part"
    for path in (ours, theirs):
        path.write_text("")
    clf = Teachable.load(saved)
    with clf.editing():
        clf.forget("class 1")
    assert not ours.exists() and theirs.exists()


# ---- the terminal ---------------------------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_shown_escaped(fscil, tmp_path):
    status, _, said = fscil("info", tmp_path / "a\x1b]0;owned\x07\u202eb")
    assert status == 2 and "\\x1b]0;owned\\x07\\u202eb" in said and "\x1b" not in said
    (tmp_path / "own.yaml").write_text('"a\\e[2Jb": 1', encoding="utf-8")
    status, _, said = fscil("run", "--recipe", tmp_path / "own.yaml")
    assert status == 2 and "a\\x1b[2Jb" in said and said.count("\n") == 1
