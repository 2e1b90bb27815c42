"""Figures of merit for unknown pictures and for confidence, against scikit-learn and hand-made cases."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from fscil.evaluation.openset import auroc, calibration_error, fpr_at_tpr


def test_auroc_and_fpr_agree_with_scikit_learn_with_ties():
    generator = np.random.default_rng(0)
    known, unknown = generator.integers(2, 12, 200) / 2, generator.integers(0, 10, 150) / 2
    truth, scores = np.r_[np.ones(200), np.zeros(150)], np.r_[known, unknown]
    assert auroc(torch.tensor(known), torch.tensor(unknown)) == pytest.approx(100 * roc_auc_score(truth, scores))
    false_rate, true_rate, _ = roc_curve(truth, scores, drop_intermediate=False)
    expected = 100 * false_rate[np.argmax(true_rate >= 0.95)]
    assert fpr_at_tpr(torch.tensor(known), torch.tensor(unknown)) == pytest.approx(expected)


def test_calibration_error_of_hand_made_cases():
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert calibration_error(sure, torch.tensor([0, 0])) == 0
    assert calibration_error(sure, torch.tensor([0, 1])) == pytest.approx(50)
    assert calibration_error(torch.tensor([[0.6, 0.4]] * 10), torch.tensor([0] * 6 + [1] * 4)) == pytest.approx(
        0, abs=1e-4
    )
