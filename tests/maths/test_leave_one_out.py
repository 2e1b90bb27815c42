"""Leaving a picture out by formula is learning without it."""

import pytest
import torch

from fscil.maths.discriminant import discriminant, pooled_covariance, shrink
from fscil.maths.leave_one_out import left_out_densities
from fscil.maths.prototypes import class_means

ALPHA = 0.3


def clouds(counts=(9, 5, 2, 7), dim=6):
    generator = torch.Generator().manual_seed(0)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    centres = 2 * torch.randn(len(counts), dim, generator=generator, dtype=torch.float64)
    stretch = torch.linspace(0.3, 2, dim, dtype=torch.float64)
    noise = torch.randn(len(labels), dim, generator=generator, dtype=torch.float64) * stretch
    return centres[labels] + noise, labels


def densities(x, means, counts, covariance):
    """−½ Mahalanobis² with the sample-size term, from the discriminant that the heads use."""
    weights, biases = discriminant(means, counts, covariance, ALPHA)
    sigma = shrink(covariance, ALPHA)
    return weights @ x + biases - 0.5 * x @ torch.linalg.solve(sigma, x)


@pytest.mark.parametrize("part_of_covariance", [True, False])
def test_the_formula_is_learning_again_without_the_picture(part_of_covariance):
    features, labels = clouds()
    means, counts = class_means(features, labels, 4), torch.bincount(labels)
    covariance = pooled_covariance(features, labels, means)
    degrees = len(labels) - 4 if part_of_covariance else None
    got = left_out_densities(features, labels, means, counts, covariance, ALPHA, degrees=degrees)
    for row in range(len(labels)):
        rest = torch.arange(len(labels)) != row
        less, fewer = class_means(features[rest], labels[rest], 4), torch.bincount(labels[rest], minlength=4)
        shared = pooled_covariance(features[rest], labels[rest], less) if part_of_covariance else covariance
        torch.testing.assert_close(got[row], densities(features[row], less, fewer, shared))


def test_nothing_is_left_of_a_class_of_one_picture():
    features, labels = clouds((4, 1, 3))
    means, counts = class_means(features, labels, 3), torch.bincount(labels)
    got = left_out_densities(
        features, labels, means, counts, pooled_covariance(features, labels, means), ALPHA, degrees=5
    )
    assert got[4].isnan().tolist() == [False, True, False]
    assert not got[[0, 1, 2, 3, 5, 6, 7]].isnan().any()
