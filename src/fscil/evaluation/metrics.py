"""The metrics of FSCIL as pure functions on label arrays: percent, plain floats, None where a quantity is undefined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np


class Averaging(str, Enum):
    """How base and new accuracy are averaged before the harmonic mean."""

    GROUP = "group"  # mean over blocks of `way` classes, each rounded to 2 decimals: the released code, hence the paper
    CLASS = "class"  # mean over classes
    SAMPLE = "sample"  # all images pooled


def harmonic(base: float | None, new: float | None) -> float | None:
    """HAcc = 2 A_o A_n / (A_o + A_n); 0 when both are 0, None when either is undefined (no new classes yet)."""
    if base is None or new is None:
        return None
    return 2 * base * new / (base + new) if base + new > 0 else 0.0


def confusion(labels: Sequence[int] | np.ndarray, predictions: Sequence[int] | np.ndarray, classes: int) -> np.ndarray:
    """Counts (classes, classes): rows are true labels, columns predictions.

    >>> confusion([0, 0, 1], [0, 1, 1], 2).tolist()
    [[1, 1], [0, 1]]
    """
    labels, predictions = np.asarray(labels, dtype=np.int64), np.asarray(predictions, dtype=np.int64)
    for name, values in (("labels", labels), ("predictions", predictions)):
        if values.size and not (0 <= values.min() and values.max() < classes):
            raise ValueError(f"{name} must lie in 0..{classes - 1}, got {values.min()}..{values.max()}")
    return np.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)


def task_bounds(base_classes: int, seen: int, way: int) -> list[tuple[int, int]]:
    """Half-open class ranges of the tasks: the base task whole, then blocks of `way` (the last one may be shorter).

    >>> task_bounds(60, 70, 5)
    [(0, 60), (60, 65), (65, 70)]
    """
    return [(0, base_classes)] + _blocks(base_classes, seen, way)


def _blocks(start: int, stop: int, way: int) -> list[tuple[int, int]]:
    return [(low, min(low + way, stop)) for low in range(start, stop, way)]


def _percent(hits: float, total: float) -> float | None:
    return float(100.0 * hits / total) if total else None


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None


def evaluate_session(
    labels: Sequence[int] | np.ndarray,
    topk: Sequence[Sequence[int]] | np.ndarray,
    base_classes: int,
    seen: int,
    way: int,
) -> dict[str, Any]:
    """All metrics of one session from true labels (n,) and predictions (n, k), best first, k = min(5, seen) or more.

    Labels number classes by arrival: base classes are 0..base_classes-1. New-class quantities are None in the base
    session, and so is the accuracy of a class without test images.

    >>> session = evaluate_session([0, 1, 2], [[0, 1, 2], [1, 0, 2], [0, 2, 1]], base_classes=2, seen=3, way=1)
    >>> round(session["accuracy"], 1), session["base_accuracy"], session["new_accuracy"], session["hacc"]["group"]
    (66.7, 100.0, 0.0, 0.0)
    """
    labels = np.asarray(labels, dtype=np.int64)
    topk = np.asarray(topk, dtype=np.int64)
    if labels.ndim != 1 or topk.ndim != 2 or len(topk) != len(labels):
        raise ValueError(f"labels must be (n,) and topk (n, k), got {labels.shape} and {topk.shape}")
    if not len(labels):
        raise ValueError("there is no test image to evaluate on")
    if not 0 < base_classes <= seen or way < 1:
        raise ValueError(f"need 0 < base_classes <= seen and way >= 1, got {base_classes}, {seen}, {way}")
    if topk.shape[1] < min(5, seen):
        raise ValueError(f"topk needs min(5, seen) = {min(5, seen)} columns, got {topk.shape[1]}")

    counts = confusion(labels, topk[:, 0], seen)
    hits, images = np.diag(counts), counts.sum(axis=1)

    def accuracy(low: int, high: int) -> float | None:
        return _percent(hits[low:high].sum(), images[low:high].sum())

    def averaged(low: int, high: int) -> dict[str, float | None]:
        groups = [accuracy(*block) for block in _blocks(low, high, way)]
        return {
            Averaging.GROUP.value: _mean([None if a is None else round(a, 2) for a in groups]),
            Averaging.CLASS.value: _mean([accuracy(c, c + 1) for c in range(low, high)]),
            Averaging.SAMPLE.value: accuracy(low, high),
        }

    base, new = averaged(0, base_classes), averaged(base_classes, seen)
    # FNR: base images predicted as any new class; FPR: new images predicted as any base class (the class is irrelevant)
    false_negatives, base_images = counts[:base_classes, base_classes:].sum(), images[:base_classes].sum()
    false_positives, new_images = counts[base_classes:, :base_classes].sum(), images[base_classes:].sum()
    return {
        "seen": seen,
        "images": len(labels),
        "accuracy": accuracy(0, seen),
        "top5": _percent((topk[:, : min(5, seen)] == labels[:, None]).any(axis=1).sum(), len(labels)),
        "base_accuracy": base[Averaging.SAMPLE.value],
        "new_accuracy": new[Averaging.SAMPLE.value],
        "base": base,
        "new": new,
        "hacc": {how.value: harmonic(base[how.value], new[how.value]) for how in Averaging},
        "fnr": _percent(false_negatives, base_images) if seen > base_classes else None,
        "fpr": _percent(false_positives, new_images),
        "per_class": [accuracy(c, c + 1) for c in range(seen)],
        "per_task": [accuracy(*bounds) for bounds in task_bounds(base_classes, seen, way)],
    }


def summarise(sessions: Sequence[dict]) -> dict:
    """What the sessions of one run come to: A_t, A_avg, A_final, PD, forgetting and the last session's breakdown.

    Forgetting is the mean, over all tasks but the last, of the best accuracy a task ever had before the last session
    minus its accuracy after it; negative when tasks improved. None for a single session.
    """
    if not sessions:
        raise ValueError("summarise needs at least one session")
    accuracies = [session["accuracy"] for session in sessions]
    matrix = [session["per_task"] for session in sessions]
    last = sessions[-1]
    lost = []
    for task, final in enumerate(matrix[-1][: len(sessions) - 1]):
        before = [row[task] for row in matrix[task:-1] if row[task] is not None]
        lost.append(max(before) - final if before and final is not None else None)
    return {
        "accuracies": accuracies,
        "A_0": accuracies[0],
        "A_final": accuracies[-1],
        "A_avg": _mean(accuracies),
        "PD": accuracies[0] - accuracies[-1],
        "forgetting": _mean(lost),
        "accuracy_matrix": matrix,
        **{key: last[key] for key in ("top5", "base_accuracy", "new_accuracy", "base", "new", "hacc", "fnr", "fpr")},
    }
