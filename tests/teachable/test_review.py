"""Pictures that look wrong, and lessons that failed: what is found, and what is said about it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from fscil.data.picture_files import labelled_files
from fscil.errors import UserError
from fscil.teachable.health import model_notes
from fscil.teachable.model import Teachable
from fscil.teachable.recognition import Notice
from fscil.teachable.review import look, review, twins
from fscil.teachable.unknown import KnownSpace
from made_up_pictures import BACKBONE, pictures


def fresh(weights, **changes) -> Teachable:
    return Teachable(backbone=BACKBONE, weights=weights, train="never", device="cpu", **changes)


def said_by(lesson) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lesson()
    return [str(notice.message) for notice in caught if issubclass(notice.category, Notice)]


@pytest.fixture(scope="module")
def model(weights):
    """Four classes of eight clear pictures; nothing about them is worth a word."""
    clf, said = fresh(weights), []
    said += said_by(lambda: clf.fit(*pictures(range(4), 8)))
    assert not [text for text in said if "backbone stays" not in text]
    return clf


def test_a_look_without_the_picture_is_a_look_after_learning_without_it(weights):
    """All of `look` against a model fitted again on the other pictures, with the same shrinkage and score."""
    images, labels = pictures(range(4), 6)
    clf = fresh(weights).fit(images, labels)
    knowledge, space = clf.knowledge_, clf.knowledge_.space
    features = torch.from_numpy(clf.embed(images))
    number = torch.arange(4).repeat_interleave(6)
    looks = look(knowledge, features, number, torch.ones(24, dtype=torch.bool))
    for row in (0, 7, 23):
        rest = torch.arange(24) != row
        without = KnownSpace.of(features[rest], number[rest], 4, space.shrinkage)
        without.background, without.softness = space.background, space.softness
        scores = without.scores(features[[row]])[0]
        assert int(scores.argmax()) == int(looks.best[row])
        assert bool(without.fit(features[[row]]) < knowledge.calibration["threshold"]) == bool(looks.unknown[row])


def test_swapped_odd_and_doubled_pictures_are_found_worst_first(model):
    images, labels = pictures(range(4), 8)
    given = list(labels)
    given[3] = "class 2"  # is of class 0
    images[12] = np.random.default_rng(0).integers(0, 255, (48, 48, 3)).astype(np.uint8)
    images[20] = images[21].copy()
    images[20][0, 0, 0] ^= 1  # nearly the same: one level of one pixel
    found, names = review(model, images, given)
    by_position = {finding.position: finding for finding in found}
    assert by_position[3].kind == "other class" and names[by_position[3].looks_like] == "class 0"
    assert by_position[3].doubt > 0.9 and by_position[12].kind == "odd"
    assert by_position[21].kind == "twin" and by_position[21].twin == 20
    assert {finding.position for finding in found if finding.kind != "odd"} == {3, 21}
    assert [finding.doubt for finding in found] == sorted((finding.doubt for finding in found), reverse=True)


def test_classes_that_are_not_known_yet_are_judged_by_their_own_pictures(model):
    images, labels = pictures([10, 11], 6, seed=3)
    strayed = list(labels)
    strayed[2] = "class 11"
    found, names = review(model, images, strayed)
    swapped = [finding for finding in found if finding.kind == "other class"]
    assert [(finding.position, names[finding.looks_like]) for finding in swapped] == [(2, "class 10")]
    assert [*names] == [*(f"class {number}" for number in range(4)), "class 10", "class 11"]
    assert len(model.classes_) == 4  # looking teaches nothing


def test_the_only_picture_of_a_class_is_not_judged(model):
    images, labels = pictures([10], 1)
    assert review(model, images, labels)[0] == []


def test_what_moves_cannot_be_reviewed(weights):
    images, labels = pictures(range(2), 1)
    with pytest.raises(UserError, match="no class had two different pictures"):
        review(fresh(weights).fit(images, labels), images, labels)


def test_twins_go_by_the_spread_within_classes():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat_interleave(20)
    features = torch.randn(60, 8, generator=generator) + 4 * labels[:, None]
    space = KnownSpace.of(features, labels, 3)
    again = torch.cat([features, features[5:6] + 0.01, features[5:6] - 0.01])
    assert twins(space, again) == [(5, 60), (5, 61)]
    scaled = KnownSpace.of(1000 * features, labels, 3)
    assert twins(scaled, 1000 * again) == [(5, 60), (5, 61)]


def test_a_lesson_that_was_not_learned_is_said(weights):
    clf = fresh(weights).fit(*pictures(range(4), 8))
    (one,), (two,) = pictures([20], 1)[0], pictures([33], 1)[0]
    said = said_by(lambda: clf.learn([one, two], ["mixed"] * 2))
    assert any(text.startswith('"mixed" was not learned: 2 of its 2 pictures would be called unknown') for text in said)
    assert all("add more pictures" in text for text in said if "not learned" in text)


def test_a_class_that_is_another_one_is_said_and_so_is_what_it_takes(weights):
    clf = fresh(weights).fit(*pictures(range(4), 20))
    said = said_by(lambda: clf.learn(pictures([1], 20, seed=5)[0], ["again"] * 20))
    (told,) = [text for text in said if "hardly told" in text or "now takes" in text][:1]
    assert '"class 1"' in told
    answers, truth = clf.knowledge_.judged
    taken = int((answers[truth == 1] == 4).sum())
    assert any(f'"again" now takes {taken} of 20 pictures of "class 1"' in text for text in said) == (taken >= 4)


def test_a_strayed_picture_is_named_after_the_lesson(weights):
    clf = fresh(weights).fit(*pictures(range(4), 8))
    images = pictures([10], 6)[0] + pictures([2], 1, seed=9)[0]
    said = said_by(lambda: clf.learn(images, ["new"] * 7))
    assert [text for text in said if 'picture 7, given as "new", looks like "class 2"' in text]
    assert not [text for text in said if 'looks like "' in text and "picture 7" not in text]


def test_a_model_that_is_mostly_wrong_says_so_and_what_to_do(weights):
    rng = np.random.default_rng(0)
    noise = list(rng.integers(0, 255, (40, 48, 48, 3)).astype(np.uint8))
    said = said_by(lambda: fresh(weights).fit(noise, [f"class {n % 4}" for n in range(40)]))
    assert any(
        "of 40 held-out pictures are recognised" in text and "made for drawn characters" in text for text in said
    )
    facts = {"held_out": 40, "held_out_accuracy": 0.3}
    assert "larger backbone" in model_notes(facts, 4, "vit_base_patch16_224")[0]
    assert model_notes({**facts, "held_out_accuracy": 0.7}, 4, "glyph_vit_a") == []
    assert model_notes({**facts, "held_out_accuracy": 0.7}, 2, "x")  # of two classes, half is chance
    assert model_notes({"held_out": 0, "held_out_accuracy": None}, 2, "x") == []
    assert model_notes({**facts, "held_out": 3}, 4, "x") == []  # three pictures say nothing


def test_labels_from_a_table(tmp_path):
    (tmp_path / "list.csv").write_text("\ufeffPath;Label\na/1.jpg; owl\n2.jpg;a jay;\n", encoding="utf-8")
    files, labels = labelled_files(tmp_path / "list.csv")
    assert files == [tmp_path / "a/1.jpg", tmp_path / "2.jpg"] and labels == ["owl", "a jay"]
    for text, message in (
        ("picture,label\na,b\n", "no column path .* first line must name"),
        ("path,label\n", "names no pictures"),
        ("path,label\na.jpg,\n", "line 2 .* has no label"),
        ("path,label\na.jpg,owl\n,owl\n", "line 3 .* has no path"),
    ):
        (tmp_path / "list.csv").write_text(text)
        with pytest.raises(UserError, match=message):
            labelled_files(tmp_path / "list.csv")
    with pytest.raises(UserError, match="cannot read"):
        labelled_files(tmp_path / "none.csv")
