"""Metrics against hand-made confusion matrices, the naive loops they abbreviate, and their own invariants."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fscil.evaluation.metrics import (
    Averaging,
    confusion,
    evaluate_session,
    harmonic,
    summarise,
    task_bounds,
)


def predictions_from(counts):
    """Labels and top-1 predictions that have exactly this confusion matrix."""
    counts = np.asarray(counts)
    pairs = [(i, j) for i in range(len(counts)) for j in range(len(counts)) for _ in range(counts[i, j])]
    labels, predicted = np.array(pairs).T
    return labels, predicted


def ranked(predicted, seen, k=5):
    """Complete top-1 predictions to top-k rows with the remaining classes in ascending order."""
    rows = [[p] + [c for c in range(seen) if c != p] for p in predicted]
    return np.array(rows)[:, : min(k, seen)]


def evaluate(counts, base_classes, way):
    labels, predicted = predictions_from(counts)
    return evaluate_session(labels, ranked(predicted, len(counts)), base_classes, len(counts), way)


# 3 base classes and 2 new ones with unequal numbers of test images
COUNTS = [
    [8, 1, 0, 1, 0],  # 10 images, 80 %
    [0, 3, 1, 0, 0],  # 4 images, 75 %
    [0, 0, 2, 0, 0],  # 2 images, 100 %
    [3, 0, 1, 4, 0],  # 8 images, 50 %
    [0, 0, 0, 1, 1],  # 2 images, 50 %
]


def test_hand_made_confusion_matrix():
    session = evaluate(COUNTS, base_classes=3, way=2)
    assert session["images"] == 26
    assert session["accuracy"] == pytest.approx(100 * 18 / 26)
    assert session["base"] == {
        "sample": pytest.approx(100 * 13 / 16),
        "class": pytest.approx((80 + 75 + 100) / 3),
        # blocks (0, 1) and (2,): the base block of two must not reach into the new classes
        "group": pytest.approx((round(100 * 11 / 14, 2) + 100) / 2),
    }
    assert session["new"] == {"sample": 50.0, "class": 50.0, "group": 50.0}
    for how in Averaging:
        base = session["base"][how.value]
        assert session["hacc"][how.value] == pytest.approx(2 * base * 50 / (base + 50))
    assert session["base_accuracy"] == session["base"]["sample"] and session["new_accuracy"] == 50.0
    assert session["fnr"] == pytest.approx(100 * 1 / 16)  # one base image called new
    assert session["fpr"] == pytest.approx(100 * 4 / 10)  # four new images called base
    assert session["per_class"] == [80.0, 75.0, 100.0, 50.0, 50.0]
    assert session["per_task"] == [pytest.approx(100 * 13 / 16), 50.0]
    json.dumps(session, allow_nan=False)


def test_group_rounds_each_block_to_two_decimals_as_the_released_code():
    counts = np.diag([1, 2, 1, 1]) + np.array([[0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]])
    session = evaluate(counts, base_classes=3, way=1)
    assert session["base"]["group"] == pytest.approx((33.33 + 66.67 + 33.33) / 3, abs=1e-12)
    assert session["base"]["class"] == pytest.approx(100 * (1 / 3 + 2 / 3 + 1 / 3) / 3, abs=1e-12)


@pytest.mark.parametrize("base_hits", [0, 5])
def test_hacc_is_zero_when_no_new_image_is_right(base_hits):
    counts = np.array([[base_hits, 5 - base_hits], [5, 0]])
    session = evaluate(counts, base_classes=1, way=1)
    assert session["hacc"] == {"group": 0.0, "class": 0.0, "sample": 0.0}
    assert session["fpr"] == 100.0


def test_base_session_has_no_new_quantities():
    session = evaluate(np.diag([4, 4, 4]), base_classes=3, way=2)
    assert session["accuracy"] == session["base_accuracy"] == 100.0
    assert session["new_accuracy"] is session["fnr"] is session["fpr"] is session["hacc"]["group"] is None
    assert session["per_task"] == [100.0]


def test_class_without_test_images_is_left_out_of_the_means():
    session = evaluate([[4, 0, 0], [0, 0, 0], [1, 0, 1]], base_classes=2, way=1)
    assert session["per_class"] == [100.0, None, 50.0]
    assert session["base"] == {"group": 100.0, "class": 100.0, "sample": 100.0}


def test_top5_counts_a_hit_anywhere_and_shrinks_to_the_seen_classes():
    topk = np.array([[1, 2, 3, 4, 0], [5, 4, 3, 2, 1]])
    session = evaluate_session([0, 0], topk, base_classes=3, seen=6, way=1)
    assert (session["accuracy"], session["top5"]) == (0.0, 50.0)
    few = evaluate_session([0, 1, 2], [[1, 0, 2]] * 3, base_classes=2, seen=3, way=1)
    assert few["top5"] == 100.0
    with pytest.raises(ValueError, match="columns"):
        evaluate_session([0], [[0, 1]], base_classes=3, seen=6, way=1)


def test_bad_labels_are_refused():
    with pytest.raises(ValueError, match="labels must lie in 0..1"):
        confusion([2], [0], 2)
    with pytest.raises(ValueError, match="predictions"):
        confusion([0], [-1], 2)
    with pytest.raises(ValueError, match="no test image"):
        evaluate_session([], np.zeros((0, 5)), 1, 2, 1)
    with pytest.raises(ValueError, match="base_classes"):
        evaluate_session([0], [[0]], 3, 1, 1)


def test_task_bounds_of_the_benchmarks():
    assert task_bounds(60, 100, 5)[:2] == [(0, 60), (60, 65)] and len(task_bounds(60, 100, 5)) == 9
    assert len(task_bounds(100, 200, 10)) == 11
    assert task_bounds(7, 12, 3) == [(0, 7), (7, 10), (10, 12)]


def test_summary_of_three_sessions_by_hand():
    rows = [[90.0], [80.0, 60.0], [84.0, 50.0, 70.0]]
    sessions = [
        {
            "accuracy": accuracy,
            "per_task": row,
            **dict.fromkeys(("top5", "base_accuracy", "new_accuracy", "base", "new", "hacc", "fnr", "fpr"), index),
        }
        for index, (accuracy, row) in enumerate(zip([90.0, 78.0, 75.0], rows, strict=True))
    ]
    summary = summarise(sessions)
    assert summary["A_avg"] == pytest.approx(81.0)
    assert (summary["A_0"], summary["A_final"], summary["PD"]) == (90.0, 75.0, 15.0)
    assert summary["forgetting"] == pytest.approx(((90 - 84) + (60 - 50)) / 2)  # the last task cannot be forgotten yet
    assert summary["accuracy_matrix"] == rows and summary["fpr"] == 2
    assert summarise(sessions[:1])["forgetting"] is None


@st.composite
def predicted_sessions(draw):
    base = draw(st.integers(1, 6))
    way = draw(st.integers(1, 4))
    seen = base + draw(st.integers(0, 7))
    n = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = rng.integers(0, seen, n)
    topk = np.array([rng.permutation(seen)[:5] for _ in range(n)])
    sure = rng.random(n) < draw(st.floats(0, 1))
    topk[sure] = ranked(labels[sure], seen) if sure.any() else topk[sure]
    return labels, topk, base, seen, way


@settings(max_examples=150, deadline=None)
@given(predicted_sessions())
def test_properties(case):
    labels, topk, base, seen, way = case
    session = evaluate_session(labels, topk, base, seen, way)

    # against the loop each number abbreviates
    right = [int(p[0]) == int(y) for y, p in zip(labels, topk, strict=True)]
    assert session["accuracy"] == pytest.approx(100 * sum(right) / len(right))
    for c in range(seen):
        mine = [r for r, y in zip(right, labels, strict=True) if y == c]
        expected = 100 * sum(mine) / len(mine) if mine else None
        assert session["per_class"][c] == (None if expected is None else pytest.approx(expected))
    old = [(y, p[0]) for y, p in zip(labels, topk, strict=True) if y < base]
    if old and seen > base:
        assert session["fnr"] == pytest.approx(100 * sum(p >= base for _, p in old) / len(old))

    # invariants
    assert session["accuracy"] <= session["top5"] + 1e-9
    numbers = [session["accuracy"], session["top5"], session["fnr"], session["fpr"], *session["per_class"]]
    numbers += [*session["per_task"], *session["hacc"].values()]
    assert all(value is None or (0 <= value <= 100 and math.isfinite(value)) for value in numbers)
    for how in Averaging:
        base_accuracy, new_accuracy, hacc = (session[key][how.value] for key in ("base", "new", "hacc"))
        if hacc is not None:
            assert min(base_accuracy, new_accuracy) - 1e-9 <= hacc <= (base_accuracy + new_accuracy) / 2 + 1e-9
    # one more right answer never misleads the base/new split: a correct image is neither FN nor FP
    if session["fpr"] is not None and session["new_accuracy"] is not None:
        assert session["fpr"] + session["new_accuracy"] <= 100 + 1e-9

    order = np.random.default_rng(0).permutation(len(labels))
    assert evaluate_session(labels[order], topk[order], base, seen, way) == session
    assert confusion(labels, topk[:, 0], seen).sum() == len(labels)


@given(st.floats(0, 100), st.floats(0, 100))
def test_harmonic_is_symmetric_and_bounded(a, b):
    assert harmonic(a, b) == harmonic(b, a)
    assert harmonic(a, b) <= min(100.0, 2 * min(a, b)) + 1e-9
    assert harmonic(a, None) is None
