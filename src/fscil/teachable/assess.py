"""How well a model does on labelled pictures: accuracy, calibration, and whether unknown ones are told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fscil.data.picture_files import label_name
from fscil.errors import UserError
from fscil.evaluation.openset import auroc, calibration_error, fpr_at_tpr

if TYPE_CHECKING:
    from fscil.teachable.model import Teachable


def assess(clf: Teachable, pictures: Sequence[Any], labels: Sequence[Any], skip_bad: bool = False) -> dict[str, Any]:
    """Accuracy, calibration and unknown detection on labelled pictures, as shares between 0 and 1.

    Pictures whose label names no known class count as unknown ones. Accuracies count the best class, whether or not
    the picture was also called unknown. `skip_bad` leaves out pictures that cannot be read.
    """
    names = [str(name) for name in clf.classes_]
    place = {name: number for number, name in enumerate(names)}
    number = np.array([place.get(str(label_name(label)), -1) for label in labels])
    _check_some_known(number, names)
    kept, answers = clf.recogniser().readable(pictures, skip_bad)
    number = number[kept]
    _check_some_known(number, names)
    known = number >= 0
    probabilities, rejected, scores = answers.probabilities.numpy(), answers.unknown.numpy(), answers.scores
    right = probabilities.argmax(1) == number
    base = np.array([info["base"] for info in clf.class_info_])
    from_base = known & base[number]
    taught = known & ~from_base
    of_class = {name: number == at for name, at in place.items() if (number == at).any()}
    both = bool(known.any() and (~known).any())
    fits = scores[torch.from_numpy(known)], scores[torch.from_numpy(~known)]
    error = calibration_error(answers.probabilities[torch.from_numpy(known)], torch.from_numpy(number[known]))
    return {
        "pictures": len(kept),
        "accuracy": _share(right, known),
        "base_accuracy": _share(right, from_base) if taught.any() else None,
        "taught_accuracy": _share(right, taught),
        "calibration_error": error / 100,
        "known_rejected": _share(rejected, known),
        "taught_rejected": _share(rejected, taught),
        "unknown_rejected": _share(rejected, ~known),
        "auroc": auroc(*fits) / 100 if both else None,
        "fpr_at_95": fpr_at_tpr(*fits) / 100 if both else None,
        "classes": {
            name: {"pictures": int(own.sum()), "accuracy": _share(right, own)} for name, own in of_class.items()
        },
        **_confusions(number[known], probabilities.argmax(1)[known], names),
    }


def _confusions(truth: np.ndarray, answers: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """`confusions`: what is taken for what, most often first; `matrix`: pictures of each class (rows) by answer."""
    matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(matrix, (truth, answers), 1)
    pairs = [(int(matrix[a, b]), a, b) for a, b in zip(*np.nonzero(matrix)) if a != b]
    worst = sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2]))
    return {
        "confusions": [
            {"class": names[a], "taken_for": names[b], "pictures": n, "share": n / int(matrix[a].sum())}
            for n, a, b in worst
        ],
        "matrix": {"classes": list(names), "counts": matrix.tolist()},
    }


def _check_some_known(number: np.ndarray, names: Sequence[str]) -> None:
    if not (number >= 0).any():
        raise UserError(f"no folder is named like a known class; the model knows: {', '.join(names[:10])}.")


def _share(values: np.ndarray, chosen: np.ndarray) -> float | None:
    return float(values[chosen].mean()) if chosen.any() else None
