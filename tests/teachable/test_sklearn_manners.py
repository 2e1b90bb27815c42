"""What scikit-learn asks of an estimator: its own checks, pickling, copies, cross-validation, pipelines."""

from __future__ import annotations

import copy
import io
import pickle

import joblib
import numpy as np
import pytest
import sklearn
from safetensors.torch import load, save
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.utils.validation import check_is_fitted, validate_data

from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.teachable.estimator import FewShotClassifier
from made_up_pictures import BACKBONE, pictures
from tiny_world import make_backbone

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.estimator.Notice")


class OfRows(FewShotClassifier):
    """The estimator for scikit-learn's checks, which know no pictures: numbers of a row become grey stripes of one."""

    def __init__(self, backbone=BACKBONE, device="cpu"):
        super().__init__(backbone=backbone, device=device)

    def _painted(self, X, reset=False):
        if isinstance(X, list) and X and isinstance(X[0], np.ndarray) and X[0].ndim == 3:
            return X  # painted already
        X = validate_data(self, X, reset=reset)
        levels = np.clip(128 + 20 * X, 0, 255).astype(np.uint8)
        stripes = np.repeat(levels, -(-48 // X.shape[1]), axis=1)[:, :48]
        return [np.repeat(np.repeat(row[None, :, None], 48, 0), 3, 2) for row in stripes]

    def fit(self, X, y):
        return super().fit(self._painted(X, reset=True), y)

    def partial_fit(self, X, y, classes=None):
        return super().partial_fit(self._painted(X, reset=not self.__sklearn_is_fitted__()), y, classes)

    def answers(self, X):
        check_is_fitted(self)
        return super().answers(self._painted(X))

    def score(self, X, y):
        return super().score(self._painted(X), y)

    def embed(self, X):
        check_is_fitted(self)
        return super().embed(self._painted(X))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.string, tags.no_validation = True, False, False
        return tags


# What scikit-learn asks for and a classifier of pictures cannot or should not give.
EXCEPTIONS = {
    "check_fit_score_takes_y": "it teaches the very same pictures again, which is refused: a picture counts once",
    "check_methods_subset_invariance": "a batch of another size rounds differently in float32",
    "check_requires_y_none": "y may be missing where X brings its labels (folders, datasets); the error says so",
    "check_supervised_y_2d": "a column of labels is taken for what it is, without a warning",
}


@pytest.mark.skipif(
    tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 6), reason="its checks took no exceptions"
)
def test_scikit_learns_own_checks():
    from sklearn.utils.estimator_checks import check_estimator

    found = check_estimator(OfRows(), expected_failed_checks=EXCEPTIONS, on_fail=None, on_skip=None)
    failed = {item["check_name"]: repr(item["exception"])[:300] for item in found if item["status"] == "failed"}
    assert failed == {}
    excused = {item["check_name"] for item in found if item["status"] == "xfail"}
    assert len(found) > 50 and excused <= set(EXCEPTIONS)


@pytest.fixture(scope="module")
def taught(weights):
    clf = FewShotClassifier(backbone=BACKBONE, weights=str(weights), thumbnails=1, preprocessing={"flip": 0.0})
    return clf.fit(*pictures(range(4), 6)).learn(*pictures([10], 4))


QUERIES = pictures([*range(4), 10, 30], 2, seed=1)[0]


def through_joblib(clf):
    buffer = io.BytesIO()
    joblib.dump(clf, buffer)
    buffer.seek(0)
    return joblib.load(buffer)


@pytest.mark.parametrize("travel", [lambda clf: pickle.loads(pickle.dumps(clf)), through_joblib, copy.deepcopy])
def test_a_copy_knows_the_same_and_goes_on_learning(taught, travel, tmp_path):
    twin = travel(taught)
    np.testing.assert_array_equal(twin.predict_proba(QUERIES), taught.predict_proba(QUERIES))
    np.testing.assert_array_equal(twin.is_unknown(QUERIES), taught.is_unknown(QUERIES))
    assert twin.history_ == taught.history_ and twin.get_params() == taught.get_params()
    assert twin.plan_ == taught.plan_ and twin.folder_ is None
    twin.learn(*pictures([11], 3))
    assert "class 11" in twin.classes_ and "class 11" not in taught.classes_
    twin.undo(2)
    assert twin.classes_.tolist() == [f"class {number}" for number in range(4)]
    twin.save(tmp_path / "twin")
    assert FewShotClassifier.load(tmp_path / "twin").classes_.tolist() == twin.classes_.tolist()


def test_one_that_was_saved_travels_with_its_history_and_without_its_folder(taught, tmp_path):
    clf = copy.deepcopy(taught)
    clf.save(tmp_path / "model", embed=True)
    twin = pickle.loads(pickle.dumps(FewShotClassifier.load(tmp_path / "model")))
    assert twin.undo().classes_.tolist() == [f"class {number}" for number in range(4)]
    assert len(FewShotClassifier.load(tmp_path / "model").classes_) == 5


def test_what_is_not_fitted_travels_too():
    clf = FewShotClassifier("closed_form", "glyph_vit_b", options={"views": 2}, held_out=np.float64(0.2))
    twin = pickle.loads(pickle.dumps(clf))
    assert twin.get_params() == clf.get_params() and not twin.__sklearn_is_fitted__()


def test_a_backbone_given_as_an_object_goes_along():
    clf = FewShotClassifier(backbone=make_backbone(), preprocessing={"size": 16, "resize": 16})
    twin = pickle.loads(pickle.dumps(clf))
    assert isinstance(twin.backbone, Backbone) and twin.backbone.hash == clf.backbone.hash
    clf.fit(*pictures(range(3), 4))
    twin = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(twin.predict_proba(QUERIES), clf.predict_proba(QUERIES))


def test_bytes_that_were_altered_are_refused(taught):
    packed = taught.__getstate__()
    assert isinstance(packed, bytes)
    files = load(packed)
    state = next(name for name in files if name.startswith("state-"))
    files[state][-1] ^= 1
    header = {"format_version": "1", "what": "packed estimator", "meta": _meta(packed)}
    for altered, said in (
        (save(files, header), "altered or damaged"),
        (save({"../escape": files[state]}, header), "no file of a model folder"),
        (save(files, {"format_version": "1"}), "no packed estimator"),
        (packed[:1000], "no packed estimator"),
    ):
        with pytest.raises(UserError, match=said):
            FewShotClassifier().__setstate__(altered)


def _meta(packed: bytes) -> str:
    import json

    length = int.from_bytes(packed[:8], "little")
    return json.loads(packed[8 : 8 + length])["__metadata__"]["meta"]


@pytest.mark.slow
def test_cross_validation_in_two_processes_gives_its_estimators_back(weights):
    images, labels = pictures(range(3), 6)
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights)
    found = cross_validate(clf, images, labels, cv=2, n_jobs=2, return_estimator=True)
    assert len(found["estimator"]) == 2 and (found["test_score"] > 0.5).all()
    for estimator in found["estimator"]:
        assert set(estimator.predict(images)) <= set(labels)


CUT = {"flip": 0.0, "scale": (0.4, 0.9), "resize": 60, "normalize": "half"}
TRAINED = {"train": "always", "options": {"epochs": 1, "rank": 2}}


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"head": "plda", "preprocessing": CUT},
        {"head": {"name": "fecam"}},
        {"head": "mpcc"},
        {"head": "prototypes"},
        {"method": "smp", "head": "prototypes", **TRAINED},
        {"method": "chord", **TRAINED},
        {"method": "teen", "head": "plda", **TRAINED},
    ],
)
def test_a_loaded_model_is_fitted_again_as_it_was(weights, tmp_path, chosen):
    lesson = pictures(range(4), 6)
    clf = FewShotClassifier(**{"backbone": BACKBONE, "weights": str(weights), "device": "cpu", **chosen}).fit(*lesson)
    clf.save(tmp_path / "model")
    loaded = FewShotClassifier.load(tmp_path / "model", device="cpu", weights=weights)
    again = clone(loaded).fit(*lesson)
    assert again.config_ == {**clf.config_, "options": again.config_["options"]} and again.transform_ == clf.transform_
    np.testing.assert_array_equal(again.predict_proba(QUERIES), clf.predict_proba(QUERIES))


def test_partial_fit_learns_what_is_new(weights):
    (first, names), (later, more) = pictures(range(3), 5), pictures([10], 5)
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights)
    clf.partial_fit(first, names, classes=[*sorted(set(names)), "class 10"])
    clf.partial_fit(later[:3] + first[:0], more[:3]).partial_fit(later[3:], more[3:])
    whole = FewShotClassifier(backbone=BACKBONE, weights=weights).fit(first, names).learn(later, more)
    assert clf.classes_.tolist() == whole.classes_.tolist() and clf.class_info_[-1]["pictures"] == 5
    np.testing.assert_allclose(clf.predict_proba(QUERIES), whole.predict_proba(QUERIES), atol=0.05)
    with pytest.raises(UserError, match='y has the class "class 10", which is not in classes'):
        clf.partial_fit(later, more, classes=["class 1"])


def test_features_for_a_pipeline(taught):
    images, labels = pictures(range(4), 6)
    features = taught.transform(QUERIES)
    np.testing.assert_array_equal(features, taught.embed(QUERIES))
    pipeline = make_pipeline(clone(taught), LogisticRegression(max_iter=1000)).fit(images, labels)
    expected = LogisticRegression(max_iter=1000).fit(clone(taught).fit(images, labels).embed(images), labels)
    assert pipeline.predict(QUERIES).tolist() == expected.predict(features).tolist()


def test_the_old_keyword_names_the_new_one():
    with pytest.raises(UserError, match="preprocessing"):
        FewShotClassifier(transform={"flip": 0.0})


def test_numbers_that_measure_something_are_no_classes(weights):
    images, _ = pictures(range(2), 2)
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights)
    with pytest.raises(UserError, match="y is continuous"):
        clf.fit(images, np.array([0.1, 0.2, 0.3, 0.4]))
    assert clf.fit(images, np.array([[1], [1], [2], [2]])).classes_.tolist() == [1, 2]
