"""FewShotClassifier: scikit-learn's manners, every kind of input, adding, forgetting and undoing, bad input."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import Pipeline
from torch.nn.functional import cosine_similarity

from fscil import registry
from fscil.backbones import loading
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.heads.embeddings import gaussian_features
from fscil.methods import cost
from fscil.runtime import Runtime
from fscil.teachable import expense, starting
from fscil.teachable.estimator import FewShotClassifier, Notice
from fscil.teachable.knowledge import Knowledge
from fscil.teachable.planning import make_plan
from made_up_pictures import BACKBONE, pictures, write_folders
from tiny_world import SMALL, make_backbone

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.estimator.Notice")
TINY_TRAINING = dict(epochs=1, rank=2, features_per_class=8, calibration_batch=16, calibration_epochs=1)


@pytest.fixture(scope="module")
def small(weights):
    """A frozen model of 5 classes with 5 pictures each; tests do not change it."""
    return FewShotClassifier(backbone=BACKBONE, weights=weights).fit(*pictures(range(5), 5))


@pytest.fixture
def model(weights):
    return FewShotClassifier(backbone=BACKBONE, weights=weights).fit(*pictures(range(5), 5))


def trained(weights, **changes):
    parameters = {"train": "always", "options": TINY_TRAINING, **changes}
    return FewShotClassifier(backbone=BACKBONE, weights=weights, **parameters).fit(*pictures(range(5), 12))


# ---- scikit-learn's manners ----


def test_parameters_are_only_stored_and_survive_a_clone():
    options = {"epochs": 3}
    clf = FewShotClassifier("closed_form", "no such backbone", options=options, false_rejection=0.1)
    assert clf.get_params()["options"] is options
    copy = clone(clf.set_params(seed=7))
    assert copy.get_params() == clf.get_params() and copy.seed == 7
    with pytest.raises(NotFittedError):
        copy.predict([np.zeros((8, 8, 3), np.uint8)])
    assert not hasattr(copy, "classes_")


def test_works_in_a_pipeline_and_in_cross_validation(weights):
    images, labels = pictures(range(4), 6)
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights)
    pipeline = Pipeline([("classify", clf)]).fit(images, labels)
    assert pipeline.score(*pictures(range(4), 4, seed=1)) > 0.9
    assert pipeline.classes_.tolist() == [f"class {c}" for c in range(4)]
    assert cross_val_score(clf, np.stack(images), np.array(labels), cv=2).mean() > 0.9


def test_closed_form_agrees_with_scikit_learns_discriminant_analysis(small):
    """Equal counts make the sample-size term a constant, so the posterior is that of LDA with the same shrinkage."""
    images, labels = pictures(range(5), 5)
    features = small.embed(images).astype(np.float64)
    numbers = np.repeat(np.arange(5), 5)
    residuals = features - np.stack([features[numbers == c].mean(0) for c in range(5)])[numbers]
    shrinkage = small.config_["options"]["shrinkage"]
    covariance = residuals.T @ residuals / (25 - 5)
    assert shrinkage > 0.5  # twenty degrees of freedom in 128 dimensions

    class Given:
        def fit(self, X):
            dim = covariance.shape[0]
            self.covariance_ = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / dim * np.eye(dim)
            return self

    lda = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Given()).fit(features, numbers)
    # scikit-learn divides within-class scatter by the counts before its estimator sees it; ours ignores its input
    queries, _ = pictures(range(5), 3, seed=2)
    logits = lda.decision_function(small.embed(queries).astype(np.float64)) / small.calibration_["temperature"]
    expected = np.exp(logits - logits.max(1, keepdims=True))
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(small.predict_proba(queries), expected, atol=2e-3)


def test_probabilities_are_a_softmax_over_the_classes(small):
    images, labels = pictures(range(5), 3, seed=1)
    probabilities = small.predict_proba(images)
    assert probabilities.shape == (15, 5)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    assert (small.classes_[probabilities.argmax(1)] == small.predict(images)).all()
    assert small.score(images, labels) == np.mean(small.predict(images) == np.array(labels))


# ---- kinds of input ----


def test_no_pictures_have_no_features(small):
    assert small.predict([]).shape == (0,)
    assert small.transform([]).shape == (0, small.embed(pictures([0], 1)[0]).shape[1])
    assert small.transform([]).dtype == np.float32


def test_every_kind_of_picture_gives_the_same_answer(small, tmp_path):
    images, labels = pictures([0, 3], 2, seed=1)
    paths = []
    for number, image in enumerate(images):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(image).save(paths[-1])
    floats = np.stack(images).astype(np.float32) / 255

    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return torch.tensor(images[index]).permute(2, 0, 1), labels[index]

    kinds = {
        "paths": paths,
        "text": [str(path) for path in paths],
        "text array": np.array([str(path) for path in paths]),
        "Pillow": [Image.fromarray(image) for image in images],
        "array": np.stack(images),
        "floats": floats,
        "tensor": torch.tensor(np.stack(images)).permute(0, 3, 1, 2),
        "float tensor": torch.tensor(floats).permute(0, 3, 1, 2),
        "dataset": Pairs(),
        "folder": tmp_path,
    }
    expected = small.predict_proba(images)
    for kind, given in kinds.items():
        np.testing.assert_allclose(small.predict_proba(given), expected, atol=1e-4, err_msg=kind)
    np.testing.assert_allclose(small.predict_proba(paths[0]), expected[:1], atol=1e-5)
    assert small.score(Pairs()) == small.score(images, labels)


def test_fit_from_a_folder_and_from_a_numbered_dataset(weights, tmp_path):
    folder = write_folders(tmp_path / "base", range(3), 4)
    from_folder = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(folder)

    class Numbered(torch.utils.data.Dataset):
        classes = ["class 0", "class 1", "class 2"]

        def __init__(self):
            self.images, labels = pictures(range(3), 4)
            self.targets = [self.classes.index(label) for label in labels]

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return Image.fromarray(self.images[index]), self.targets[index]

    from_dataset = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(Numbered())
    queries, _ = pictures(range(3), 2, seed=1)
    np.testing.assert_allclose(from_folder.predict_proba(queries), from_dataset.predict_proba(queries), atol=1e-5)


def test_whole_numbers_stay_numbers(weights):
    images, _ = pictures(range(3), 4)
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(images, np.repeat([10, 2, 7], 4))
    assert clf.classes_.tolist() == [2, 7, 10]
    assert clf.predict(images[:1]).tolist() == [10]
    clf.learn(pictures([8], 3)[0], [99] * 3)
    assert clf.classes_.tolist() == [2, 7, 10, 99]
    with pytest.raises(UserError, match="numbers"):
        clf.learn(pictures([9], 3)[0], ["cat"] * 3)


# ---- learning, adding, forgetting, undoing ----


def test_learns_uneven_shots_and_keeps_the_old_classes(model):
    images, labels = pictures([10], 5)
    more, names = pictures([11], 2)
    model.learn(images + more, labels + names)
    assert model.classes_.tolist()[5:] == ["class 10", "class 11"]
    assert [info["pictures"] for info in model.class_info_] == [5] * 5 + [5, 2]
    assert model.score(*pictures([*range(5), 10, 11], 4, seed=1)) > 0.9


def test_adding_pictures_equals_having_had_them_at_once(model):
    images, labels = pictures([10], 6)
    model.learn(images[:2], labels[:2]).learn(images[2:], labels[2:], add=True)
    other = clone(model).fit(*pictures(range(5), 5)).learn(images, labels)
    queries, _ = pictures([*range(5), 10], 3, seed=1)
    np.testing.assert_allclose(model.predict_proba(queries), other.predict_proba(queries), atol=1e-4)


def test_forgetting_equals_never_having_learned(model):
    expected = clone(model).fit(*pictures(range(5), 5)).learn(*pictures([11], 4))
    model.learn(*pictures([10], 4)).learn(*pictures([11], 4)).forget("class 10")
    queries, _ = pictures([*range(5), 10, 11], 2, seed=1)
    np.testing.assert_allclose(model.predict_proba(queries), expected.predict_proba(queries), atol=1e-4)
    np.testing.assert_allclose(model.unknown_scores(queries), expected.unknown_scores(queries), rtol=1e-3)


def test_what_too_few_pictures_are_left_to_say_stays_as_it_was(model):
    """19 pictures are needed for a promise of 5 %, of which 15 are left after two of five classes of five."""
    model.learn(*pictures([10], 5)).forget("class 0")
    before = model.calibration_
    assert before["threshold"] is not None and before["held_out"] == 20
    model.forget("class 1")
    assert model.calibration_["threshold"] == before["threshold"] and model.calibration_["held_out"] == 15
    for number in range(2, 5):
        before = model.calibration_
        model.forget(f"class {number}")
    assert model.calibration_["held_out"] == 0 and model.calibration_["held_out_rejection"] is None
    assert model.calibration_["temperature"] == before["temperature"] and model.calibration_["threshold"] is not None
    model.undo(5)
    assert model.calibration_["held_out"] == 25


def test_undo_takes_back_any_number_of_changes(model):
    queries, _ = pictures([*range(5), 10, 11], 2, seed=1)
    answers, calibrations = [model.predict_proba(queries)], [model.calibration_]
    changes = (
        lambda: model.learn(*pictures([10], 4)),
        lambda: model.learn(*pictures([0], 3, seed=5), add=True),
        lambda: model.forget("class 2"),
        lambda: model.learn(*pictures([11], 3)),
    )
    for change in changes:
        change()
        answers.append(model.predict_proba(queries))
        calibrations.append(model.calibration_)
    for steps, left in ((1, 3), (2, 1), (1, 0)):
        model.undo(steps)
        np.testing.assert_array_equal(model.predict_proba(queries), answers[left])
        assert model.calibration_ == calibrations[left]
    with pytest.raises(UserError, match="none was made since the base classes were learned"):
        model.undo()
    model.learn(*pictures([10], 4))
    np.testing.assert_array_equal(model.predict_proba(queries), answers[1])


def test_a_forgotten_class_can_be_taught_again_with_the_same_pictures(model):
    images, labels = pictures([10], 4)
    model.learn(images, labels)
    before = model.predict_proba(images)
    model.forget("class 10").learn(images, labels)
    np.testing.assert_allclose(model.predict_proba(images), before, atol=1e-5)


def test_a_failing_change_leaves_the_model_as_it_was(model, monkeypatch):
    queries, _ = pictures(range(5), 2, seed=1)
    before = model.predict_proba(queries)

    def break_down(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Knowledge, "calibrate", break_down)
    with pytest.raises(RuntimeError):
        model.learn(*pictures([10], 4))
    monkeypatch.undo()
    np.testing.assert_array_equal(model.predict_proba(queries), before)
    assert len(model.history_) == 1
    assert model.learn(*pictures([10], 4)).classes_.tolist()[-1] == "class 10"


@pytest.mark.parametrize("calibration", ["mpcc", "closed_form", "prototypes"])
def test_trained_models_learn_add_forget_and_undo(weights, calibration):
    clf = trained(weights, head=calibration)
    queries, _ = pictures([*range(5), 10], 2, seed=1)
    before = clf.predict_proba(queries)
    clf.learn(*pictures([10], 5)).learn(*pictures([1, 10], 3, seed=4), add=True).forget("class 0")
    assert [info["pictures"] for info in clf.class_info_] == [15, 12, 12, 12, 8]
    assert clf.predict_proba(queries).shape == (12, 5)
    np.testing.assert_array_equal(clf.undo(3).predict_proba(queries), before)


def test_the_last_base_class_lends_its_covariance_and_stays(weights):
    clf = trained(weights, head="mpcc").learn(*pictures([10], 3))
    for number in range(4):
        clf.forget(f"class {number}")
    with pytest.raises(UserError, match="last base class"):
        clf.forget("class 4")
    assert clf.classes_.tolist() == ["class 4", "class 10"]


# ---- every method of the library ----

EXEMPLAR_METHODS = ("icarl", "icarl_linear", "foster", "foster_student")


def of_method(name, **changes):
    """A model of four classes by any method, on a two-block ViT; enough is held out to say unknown."""
    fields = {field.name for field in dataclasses.fields(registry.method_class(name).Options)}
    options = {key: value for key, value in SMALL.items() if key in fields}
    cut = {"size": 16, "resize": 16, "scale": (0.6, 1.0)}
    parameters = {"train": "always", "options": options, "preprocessing": cut, "held_out": 0.4, **changes}
    return FewShotClassifier(name, make_backbone(), **parameters).fit(*pictures(range(4), 14))


@pytest.mark.parametrize("name", registry.METHODS)
def test_every_method_learns_comes_back_from_disk_and_goes_on(name, tmp_path):
    clf = of_method(name)
    queries, _ = pictures([*range(4), 10, 11], 2, seed=1)
    base = clf.predict_proba(queries)
    taught = clf.learn(*pictures([10], 4)).predict_proba(queries)
    assert taught.shape == (12, 5) and clf.classes_.tolist()[-1] == "class 10"
    np.testing.assert_allclose(taught.sum(1), 1, rtol=1e-5)
    assert clf.calibration_["threshold"] is not None
    clf.save(tmp_path / "m")
    loaded = FewShotClassifier.load(tmp_path / "m", backbone=make_backbone())
    np.testing.assert_array_equal(loaded.predict_proba(queries), taught)
    np.testing.assert_array_equal(loaded.is_unknown(queries), clf.is_unknown(queries))
    for model in (clf, loaded):  # what is kept on disk is all that learning needs
        model.learn(*pictures([11], 3))
    np.testing.assert_array_equal(loaded.predict_proba(queries), clf.predict_proba(queries))
    np.testing.assert_array_equal(loaded.undo().predict_proba(queries), taught)
    np.testing.assert_array_equal(loaded.undo().predict_proba(queries), base)
    assert (clf.knowledge_.method.stored_images()[0] > 0) == (name in EXEMPLAR_METHODS)


@pytest.mark.parametrize("name", EXEMPLAR_METHODS)
def test_methods_that_store_pictures_say_how_many(name, tmp_path):
    each = 48 * 48 * 3
    with pytest.warns(Notice, match=rf"{name} keeps 16 of the pictures in the model \({16 * each} bytes\)"):
        clf = of_method(name)  # four of each class
    with pytest.warns(Notice, match=rf"{name} keeps 19 of the pictures in the model \({19 * each} bytes\)"):
        clf.learn(*pictures([10], 3))
    clf.save(tmp_path / "m")
    loaded = FewShotClassifier.load(tmp_path / "m", backbone=make_backbone())
    taught = {image.tobytes() for image in [*pictures(range(4), 14)[0], *pictures([10], 3)[0]]}
    kept = {image.numpy().tobytes() for image in loaded.knowledge_.method.memory.images()}
    assert len(kept) == 19 and kept <= taught
    assert loaded.knowledge_.stored_pictures[0] == 19
    assert loaded.undo().knowledge_.stored_pictures[0] == len(loaded.knowledge_.method.memory) == 16


@pytest.mark.parametrize("name", [*EXEMPLAR_METHODS, "l2p", "l2p_plus", "teen"])
def test_methods_that_cannot_refine_refuse_and_stay_as_they_are(name):
    clf = of_method(name).learn(*pictures([10], 4))
    queries, _ = pictures([*range(4), 10], 2, seed=1)
    before = clf.predict_proba(queries)
    with pytest.raises(UserError, match="cannot forget"):
        clf.forget("class 10")
    with pytest.raises(UserError, match=f"{name} cannot add pictures to a known class"):
        clf.learn(*pictures([10], 2, seed=3), add=True)
    np.testing.assert_array_equal(clf.predict_proba(queries), before)
    assert [event["action"] for event in clf.history_] == ["fit", "learn"]


def test_held_out_figures_are_not_repeated_once_the_network_has_moved():
    clf = of_method("icarl")
    assert clf.history_[0]["held_out_accuracy"] is not None
    assert clf.learn(*pictures([10], 4)).history_[1]["held_out_accuracy"] is None
    assert clf.calibration_["threshold"] is not None


# ---- small starts ----


def test_a_small_start_says_what_it_does(weights):
    with pytest.warns(Notice, match="backbone stays as it is.*10 classes and 20 pictures"):
        clf = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(*pictures(range(5), 5))
    assert clf.knowledge_.method.lora.rank == 0
    with pytest.warns(Notice, match="class prototypes"):
        single = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(*pictures(range(5), 1))
    assert single.score(*pictures(range(5), 3, seed=1)) > 0.8
    assert single.calibration_["threshold"] is None  # one picture per class says nothing about spread


@pytest.mark.parametrize("calibration", ["mpcc", "closed_form", "prototypes"])
def test_without_training_the_calibration_that_was_asked_for_is_used(weights, calibration):
    options = {"features_per_class": 16, "views": 2}  # only those that make sense without training are taken over
    clf = FewShotClassifier(
        backbone=BACKBONE, weights=weights, train="never", head=calibration, options={**options, "epochs": 7}
    ).fit(*pictures(range(5), 6))
    method = clf.learn(*pictures([10], 5)).knowledge_.method
    features = torch.from_numpy(clf.embed(pictures(range(5), 2, seed=1)[0]))
    rows = method.head.rows if calibration != "closed_form" else method.head.prototypes
    cosines = cosine_similarity(features[:, None], rows[None], dim=2)
    scores = method.logits_from(features) / method.options.calibration_scale
    assert torch.allclose(scores, cosines, atol=1e-3) == (calibration != "closed_form")
    moved = cosine_similarity(rows, method.head.prototypes)
    assert (moved.min() < 0.9999) == (calibration == "mpcc")  # only MPCC trains rows
    assert method.options.views == 2
    assert clf.score(*pictures([*range(5), 10], 4, seed=1)) > 0.9


@pytest.mark.parametrize(
    "head", ["plda", {"name": "c_fecam", "alpha": 0.8}, {"name": "ranpac_balanced", "projections": 300}]
)
@pytest.mark.parametrize("train", ["always", "never"])
def test_any_head_teaches_adds_forgets_and_is_saved(weights, tmp_path, head, train):
    options = dict(TINY_TRAINING) if train == "always" else None
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, train=train, head=head, options=options)
    clf.fit(*pictures(range(5), 8)).learn(*pictures([10], 5))
    clf.learn(*pictures([2], 3, seed=5), add=True)
    first = clf.classes_[0]
    clf.forget(first)
    queries, labels = pictures([1, 2, 3, 4, 10], 6, seed=1)
    assert clf.score(queries, labels) > 0.8
    assert clf.calibration_["held_out"] > 0 and np.isfinite(clf.calibration_["temperature"])
    again = FewShotClassifier.load(clf.save(tmp_path / "model"), weights=weights)
    np.testing.assert_array_equal(again.predict_proba(queries), clf.predict_proba(queries))
    again.undo()
    assert first in again.classes_


def test_base_features_are_drawn_around_their_prototypes_when_no_rows_were_trained(weights):
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, train="never", head="mpcc")
    head = clf.fit(*pictures(range(5), 6)).knowledge_.method.head
    per_class, dim = head.options.features_per_class, head.prototypes.shape[1]
    draws = torch.randn(5, 2 * per_class, dim, generator=torch.Generator().manual_seed(0))
    drawn = gaussian_features(head.known_classes(torch.arange(0), None), torch.arange(5), draws, head.options)
    for half in drawn.chunk(2, 1):
        assert cosine_similarity(half.mean(1), head.prototypes).min() > 0.99
        np.testing.assert_allclose(half.mean(1).norm(dim=1), head.prototypes.norm(dim=1), rtol=0.05)


def test_held_out_accuracy_is_that_of_the_calibrated_rows(weights):
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, train="never", head="mpcc")
    clf.fit(*pictures(range(5), 6)).learn(*pictures([10], 5))
    assert clf.calibration_["held_out_accuracy"] > 0.9
    head = clf.knowledge_.method.head
    head.rows = head.rows[[1, 0, 2, 3, 4, 5]]  # two classes mixed up
    clf.knowledge_.calibrate(clf.false_rejection)
    assert clf.calibration_["held_out_accuracy"] == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("calibration", ["mpcc", "closed_form", "prototypes"])
@pytest.mark.parametrize("train", ["never", "always"])
def test_single_pictures_work_or_are_refused_in_words(weights, train, calibration):
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, train=train, head=calibration, options=TINY_TRAINING)
    if calibration == "closed_form":
        with pytest.raises(UserError, match="two pictures of some class.*--head prototypes"):
            clf.fit(*pictures(range(5), 1))
        second, name = pictures([0], 1, seed=7)
        images, names = pictures(range(5), 1)
        clf.fit(images + second, names + name)
    else:
        clf.fit(*pictures(range(5), 1))
    clf.learn(*pictures([10], 1)).learn(*pictures([10], 1, seed=3), add=True)
    assert clf.predict_proba(pictures([0, 10], 2, seed=1)[0]).shape == (4, 6)
    assert clf.class_info_[-1]["pictures"] == 2


def test_training_by_itself_is_for_gpus_and_enough_pictures():
    """Where it pays: never on a CPU, and not with too little to learn from; and only where memory suffices."""
    cases = [
        (dict(classes=10, pictures=200, on_gpu=True), True, ""),
        (dict(classes=10, pictures=200, on_gpu=False), False, "left to GPUs"),
        (dict(classes=9, pictures=900, on_gpu=True), False, "starts at 10 classes"),
        (dict(classes=10, pictures=199, on_gpu=True), False, "20 pictures per class"),
        (dict(classes=10, pictures=200, on_gpu=True, obstacle="no memory"), False, "no memory"),
        (dict(classes=2, pictures=4, on_gpu=False, train="always", obstacle="no memory"), True, ""),
        (dict(classes=10, pictures=200, on_gpu=True, train="never"), False, ""),
    ]
    for case, trains, reason in cases:
        plan = make_plan("smp", **case)
        assert plan.trains is trains and reason in plan.untrained and bool(plan.untrained) is bool(reason)
        assert plan.untrained in plan.said(10, 100, 0)


def test_large_sets_are_not_trained_on_by_a_cpu_unless_asked(weights, capsys):
    parameters = dict(backbone=BACKBONE, weights=weights, options=TINY_TRAINING, device="cpu", verbose=True)
    with pytest.warns(Notice, match="backbone stays as it is.*left to GPUs.*--train always"):
        FewShotClassifier(**parameters).fit(*pictures(range(10), 20))
    assert "estimate: about" in capsys.readouterr().err
    trained = FewShotClassifier(**parameters, train="always").fit(*pictures(range(10), 20))
    assert trained.knowledge_.method.lora.rank == 4 and "training smp on 180, 20 kept" in trained.plan_
    said = capsys.readouterr().err
    assert "estimate: about" in said and "epoch 1/" in said  # no terminal: a line per epoch


def test_training_that_does_not_fit_into_memory_is_not_begun_unasked(weights, monkeypatch):
    images = Pixels(ImageStore.from_list(pictures(range(10), 20)[0]), Transform(48, resize=55))
    runtime = Runtime()
    backbone = loading.make_backbone(BACKBONE, weights).prepare(runtime)
    clf = FewShotClassifier(backbone=BACKBONE, options=TINY_TRAINING)
    monkeypatch.setattr(expense, "make_plan", lambda *asked, on_gpu, **more: make_plan(*asked, on_gpu=True, **more))
    plan, cost = expense.choose_plan(clf, images, 10, backbone, runtime)
    assert plan.trains and cost.fits and cost.passes > 200
    estimate = expense.estimate_passes
    monkeypatch.setattr(expense, "estimate_passes", lambda *a: dataclasses.replace(estimate(*a), available=1.0))
    plan, _ = expense.choose_plan(clf, images, 10, backbone, runtime)
    assert not plan.trains and "of memory and 0 kB are free" in plan.untrained


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_long_training_says_what_would_be_faster_where_it_would(has_bf16, weights, monkeypatch):
    monkeypatch.setattr(cost, "cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(cost, "LONG", 0)
    images = Pixels(ImageStore.from_list(pictures(range(10), 20)[0]), Transform(48, resize=55))

    def said(train, precision):
        runtime = Runtime.make("cpu", precision)
        plan = make_plan("smp", 10, 200, train, options=TINY_TRAINING, on_gpu=False)
        backbone = loading.make_backbone(BACKBONE, weights).prepare(runtime)
        return str(expense.estimate_fit(plan, images, 10, backbone, runtime))

    assert ("--precision bf16" in said("always", "fp32")) is has_bf16
    assert "--precision" not in said("always", "bf16") and "--precision" not in said("never", "fp32")


def test_a_fit_that_was_stopped_goes_on_and_ends_the_same(weights, tmp_path, monkeypatch):
    def new():
        options = TINY_TRAINING | {"epochs": 3}
        return FewShotClassifier(backbone=BACKBONE, weights=weights, train="always", options=options, device="cpu")

    lesson, kept = pictures(range(4), 10), expense.FitKeeper.save
    whole = new().fit(*lesson)

    def stop(keeper, stage, tensors):
        kept(keeper, stage, tensors)
        if int(tensors["epoch"]) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(expense.FitKeeper, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            new().fit(*lesson, progress=tmp_path / "progress")
    assert list((tmp_path / "progress").iterdir())
    other = new().set_params(seed=1).fit(*lesson, progress=tmp_path / "progress")  # another fit does not take it up
    assert not np.array_equal(other.embed(lesson[0]), whole.embed(lesson[0]))
    with monkeypatch.context() as patch:
        patch.setattr(expense.FitKeeper, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            new().fit(*lesson, progress=tmp_path / "progress")
    epochs = []
    with monkeypatch.context() as patch:
        patch.setattr(expense.FitKeeper, "save", lambda k, s, tensors: epochs.append(int(tensors["epoch"])))
        again = new().fit(*lesson, progress=tmp_path / "progress")
    assert epochs == [3] and not (tmp_path / "progress").exists()
    np.testing.assert_array_equal(again.embed(lesson[0]), whole.embed(lesson[0]))


def test_a_fit_that_was_stopped_does_not_go_on_with_other_labels(weights, tmp_path, monkeypatch):
    options = TINY_TRAINING | {"epochs": 2}
    clf = FewShotClassifier("smp", BACKBONE, weights=weights, train="always", options=options, device="cpu")
    images, labels = pictures(range(4), 10)
    corrected = labels[:-2] + ["class 0"] * 2
    whole, kept = clone(clf).fit(images, corrected), expense.FitKeeper.save

    def stop(keeper, stage, tensors):
        kept(keeper, stage, tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(expense.FitKeeper, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            clone(clf).fit(images, labels, progress=tmp_path / "progress")
    again = clone(clf).fit(images, corrected, progress=tmp_path / "progress")
    np.testing.assert_array_equal(again.embed(images), whole.embed(images))


def test_without_a_gpu_the_backbone_is_one_that_a_cpu_can_carry():
    assert FewShotClassifier().backbone == "auto"
    assert starting.usual_backbone(Runtime()) == "deit_tiny_patch16_224.fb_in1k"
    assert starting.usual_backbone(Runtime(device=torch.device("cuda"))) == registry.PAPER_BACKBONE


# ---- unknown ----


def test_unknown_keeps_its_rate_and_notices_other_classes(model):
    model.learn(*pictures([10, 11], 5))
    known, unknown = pictures([*range(5), 10, 11], 10, seed=1)[0], pictures(range(30, 50), 3)[0]
    assert model.is_unknown(known).mean() < 0.15
    assert model.is_unknown(unknown).mean() > 0.6
    assert model.history_[-1]["taught_rejection"] is not None
    threshold = model.calibration_["threshold"]
    np.testing.assert_array_equal(model.is_unknown(unknown), model.unknown_scores(unknown) < threshold)


def test_predict_can_answer_unknown(model):
    model.set_params(unknown="?")
    stranger = np.random.default_rng(0).integers(0, 255, (48, 48, 3), dtype=np.uint8)
    answers = model.predict([stranger, *pictures([0], 1, seed=1)[0]])
    assert answers.tolist() == ["?", "class 0"]
    first, second = model.recognise([stranger, *pictures([0], 1, seed=1)[0]], top=2)
    assert (first.label, first.unknown, second.label, second.unknown) == (None, True, "class 0", False)
    assert len(second.top) == 2 and second.top[0] == ("class 0", second.confidence)


# ---- thumbnails ----


def test_thumbnails_are_kept_only_by_choice_and_follow_every_change(model, weights, tmp_path):
    assert model.nearest_thumbnails(pictures([0], 1)[0]) == [[]]
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, thumbnails=2).fit(*pictures(range(4), 5))
    clf.learn(*pictures([10], 4))
    query = pictures([10], 1, seed=1)[0]
    found = clf.nearest_thumbnails(query, count=3)[0]
    assert [label for label, *_ in found[:2]] == ["class 10"] * 2 and found[2][0] != "class 10"
    small = found[0][2]
    shown = [np.abs(small[::2, ::2].astype(int) - image).mean() for image in pictures([10], 2)[0]]
    assert small.shape == (96, 96, 3) and small.dtype == np.uint8 and min(shown) < 12  # one of the pictures taught
    features = clf.embed([*query, *pictures([10], 2)[0]])
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert found[0][1] == pytest.approx(max(unit[0] @ unit[1:].T), abs=1e-4)

    clf.save(tmp_path / "m")
    loaded = FewShotClassifier.load(tmp_path / "m")
    assert loaded.nearest_thumbnails(query)[0][0][1] == pytest.approx(found[0][1])
    assert loaded.forget("class 10").nearest_thumbnails(query)[0][0][0] != "class 10"
    assert loaded.undo().nearest_thumbnails(query)[0][0][0] == "class 10"
    assert len(loaded.forget("class 0").drop_history().knowledge_.thumbnails["0001"]["labels"]) == 6


# ---- bad input ----


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(method="spm"), 'Did you mean "smp"'),
        (dict(head="closed"), 'Did you mean "closed_form"'),
        (dict(train="yes"), "not one of auto, always, never"),
        (dict(precision="fp16"), '--precision "fp16" is not one of auto, fp32, bf16'),
        (dict(precision="fp64"), '--precision "fp64" is not one of auto, fp32, bf16'),
        (dict(false_rejection=2.0), "--false-rejection .false_rejection. is 2.0"),
        (dict(options={"epochz": 3}, train="always"), 'Did you mean "options.epochs"'),
        (dict(preprocessing={"flipp": 1}), 'Did you mean "transform.flip"'),
        (dict(backbone="vit_base"), "not a timm model"),
    ],
)
def test_wrong_parameters_name_the_nearest(weights, change, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        FewShotClassifier(**{"backbone": BACKBONE, "weights": weights, **change}).fit(*pictures(range(3), 4))


def test_a_backbone_of_another_size_than_the_pictures_is_refused(weights):
    backbone = make_backbone()
    size = 2 * backbone.image_size
    said = f"size of preprocessing. is {size}, but the backbone takes {backbone.image_size} pixels; .*image_size={size}"
    with pytest.raises(UserError, match=said):
        FewShotClassifier(backbone=backbone, preprocessing={"size": size}).fit(*pictures(range(3), 4))
    FewShotClassifier(backbone=backbone, preprocessing={"size": size // 2}).fit(*pictures(range(3), 4))


def test_bad_pictures_and_labels_are_refused(small, weights):
    fresh = clone(small)
    images, labels = pictures(range(3), 3)
    for X, y, message in (
        ([], [], "no pictures"),
        (images, labels[:-1], "9 pictures but 8 labels"),
        (images, None, "labels are missing"),
        (images[:3], labels[:3], "at least two classes"),
        (images, ["a", "", *labels[2:]], "cannot be a class name"),
        (images, ["a", "b\nc", *labels[2:]], "cannot be a class name"),
        (images, [*labels[:-1], None], "label at position 8 is missing .None"),
        (images, [labels[0], float("nan"), *labels[2:]], "label at position 1 is missing .nan"),
        (images, [1, 1, np.float64("nan"), *[2] * 6], "label at position 2 is missing .nan"),
        ([*images[:-1], "nowhere.png"], labels, "nowhere.png .no such file"),
        ([*images[:-1], np.full((8, 8, 3), 7.0)], labels, "within .0, 1."),
        ([*images[:-1], np.zeros((8, 8, 5), np.uint8)], labels, "not a picture"),
        ([*images[:-1], object()], labels, "object is not a picture"),
    ):
        with pytest.raises(UserError, match=message):
            fresh.fit(X, y)
    assert not fresh.__sklearn_is_fitted__()


def test_a_lesson_with_a_missing_label_teaches_nothing(model):
    images, labels = pictures([10], 3)
    with pytest.raises(UserError, match="position 2 is missing"):
        model.learn(images, [*labels[:2], None])
    assert len(model.classes_) == 5


def test_a_known_class_is_offered_for_adding(model):
    with pytest.raises(UserError, match='"class 1" is known already, from 5 pictures. To add these 2 .*add=True'):
        model.learn(*pictures([1], 2, seed=3))
    with pytest.raises(UserError, match='no class "clas 1".*Did you mean "class 1"'):
        model.forget("clas 1")


def test_the_same_picture_counts_once(model):
    images, labels = pictures([10], 3)
    with pytest.warns(Notice, match="2 of 5 pictures repeat"):
        model.learn([*images, images[0], images[2]], [*labels, *labels[:2]])
    assert model.class_info_[-1]["pictures"] == 3
    with pytest.raises(UserError, match="all of these pictures are known already"):
        model.learn(images, labels, add=True)
    with pytest.warns(Notice, match="two classes"):
        model.learn(images[:2], ["other"] * 2)
    with pytest.warns(Notice, match="from one picture"):
        model.learn(*pictures([12], 1))


def test_unreadable_pictures_can_be_left_out(weights, tmp_path):
    folder = write_folders(tmp_path, range(3), 4)
    (folder / "class 0" / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    (folder / "class 1" / "notes.txt").write_text("not a picture by its name: passed over")
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights)
    with pytest.raises(UserError, match=r"1 of 13 pictures cannot be read.*broken.jpg"):
        clf.fit(folder)
    with pytest.warns(Notice, match="left out: .*broken.jpg"):
        clf.set_params(skip_bad=True).fit(folder)
    assert [info["pictures"] for info in clf.class_info_] == [4, 4, 4]
    found = clf.recognise([folder / "class 0" / "broken.jpg", folder / "class 0" / "000.png"])
    assert found[0].label is None and "not a picture" in found[0].error and found[1].label == "class 0"


def test_folders_that_hold_no_classes(weights, tmp_path):
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no class folders"):
        clf.fit(tmp_path / "empty")
    with pytest.raises(UserError, match="holds no pictures"):
        clf.fit(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        clf.fit(tmp_path / "absent")


def test_names_are_one_whatever_their_spelling(model):
    images, _ = pictures([10], 4)
    model.learn(images[:2], ["e\u0301toile \U0001f31f"] * 2)  # decomposed, as macOS names folders
    model.learn(images[2:], ["\u00e9toile \U0001f31f "] * 2, add=True)
    assert model.classes_.tolist()[5:] == ["\u00e9toile \U0001f31f"]
    assert model.forget("e\u0301toile \U0001f31f").classes_.tolist()[5:] == []


def test_odd_pictures_are_seen_as_a_viewer_shows_them(small, tmp_path):
    image = Image.fromarray(pictures([2], 1, seed=1)[0][0])
    expected = small.predict_proba([image])
    image.convert("CMYK").save(tmp_path / "cmyk.tif")
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270° to view
    turned.save(tmp_path / "turned.png", exif=exif)
    other = Image.fromarray(pictures([3], 1)[0][0])
    image.save(tmp_path / "moving.png", save_all=True, append_images=[other])
    for name in ("cmyk.tif", "turned.png", "moving.png"):
        np.testing.assert_allclose(small.predict_proba([tmp_path / name]), expected, atol=0.05, err_msg=name)
    grey = np.asarray(image.convert("L"))
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    grey_answer = small.predict_proba([Image.fromarray(grey)])
    np.testing.assert_allclose(small.predict_proba([tmp_path / "deep.png"]), grey_answer, atol=1e-4)


def test_a_picture_of_fifty_megapixels(small, tmp_path):
    image = Image.fromarray(pictures([1], 1, seed=1)[0][0]).resize((7072, 7072), Image.Resampling.NEAREST)
    image.save(tmp_path / "large.jpg", quality=80)
    assert small.predict([tmp_path / "large.jpg"]).tolist() == ["class 1"]


# ---- what looks right and would go wrong ----


def test_one_name_is_the_class_of_all_pictures(model):
    assert list(model.learn(pictures([10], 3)[0], "house").classes_)[5:] == ["house"]
    assert model.class_info_[-1]["pictures"] == 3


def test_a_table_is_its_one_column_or_refused(model, tmp_path):
    pandas = pytest.importorskip("pandas")
    folder = write_folders(tmp_path / "new", [10, 11], 3)
    files = sorted(folder.rglob("*.png"))
    table = pandas.DataFrame({"path": files, "label": [file.parent.name for file in files]})
    model.learn(table[["path"]], table[["label"]])
    assert list(model.classes_)[5:] == ["class 10", "class 11"]
    assert (model.predict(table[["path"]]) == model.predict(table["path"])).all()
    with pytest.raises(UserError, match="X is a table with the columns path, label; pass one of them"):
        model.predict(table)


def test_a_misspelt_option_is_an_error_though_nothing_is_trained(weights):
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, options={"epohcs": 1})
    with pytest.raises(UserError, match='Did you mean "options.epochs"'):
        clf.fit(*pictures(range(3), 3))
    shrunken = FewShotClassifier("teen", BACKBONE, weights=weights, options={"shrinkage": 0.5})
    assert shrunken.fit(*pictures(range(3), 3)).config_["options"]["shrinkage"] == 0.5  # means something untrained


def test_names_are_checked_before_pictures_are_read(model, weights):
    for name, message in (("unknown", "no class are called"), ("class\u200b 1", "looks like")):
        with pytest.raises(UserError, match=message):
            model.learn(["no such file.png"], name)
    with pytest.raises(UserError, match="looks like"):
        FewShotClassifier(backbone=BACKBONE, weights=weights).fit(["a.png", "b.png"], ["a", "\uff41"])
    with pytest.warns(Notice, match="differ in case only"):
        model.learn(pictures([10], 2)[0], "CLASS 1")
