"""Scores for unknown pictures and where the line is drawn, against library functions and hand-made cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS

from fscil.maths.discriminant import discriminant
from fscil.teachable.unknown import (
    DEFAULT_BACKGROUND,
    KnownSpace,
    after_training,
    choose_score,
    fit_temperature,
    oas_shrinkage,
    rejection_threshold,
)


def clouds(classes=4, per_class=30, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    centres = 3 * torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.5, 2, dim, dtype=torch.float64)
    return centres[labels] + scale * torch.randn(len(labels), dim, generator=generator, dtype=torch.float64), labels


def test_class_scores_are_differences_of_gaussian_log_densities():
    features, labels = clouds()
    space = replace(KnownSpace.of(features, labels, 4, shrinkage=0.2), background=0.75)
    counts = torch.full((4,), 30)

    def mahalanobis(x, mean, covariance):
        covariance = 0.8 * covariance + 0.2 * covariance.trace() / 6 * torch.eye(6, dtype=torch.float64)
        return float((x - mean) @ torch.linalg.inv(covariance) @ (x - mean)), covariance

    within = sum(torch.cov(features[labels == c].T) * 29 for c in range(4)) / (120 - 4)
    total = torch.cov(features.T)
    x = features[[3]] + 1
    for label in range(4):
        distance, shrunk = mahalanobis(x[0], features[labels == label].mean(0), within)
        background, _ = mahalanobis(x[0], features.mean(0), total)
        correction = 0.5 * float((torch.linalg.inv(shrunk) @ within).trace()) / int(counts[label])
        length, _ = mahalanobis(x[0], torch.zeros(6, dtype=torch.float64), within)
        expected = -0.5 * distance + correction + 0.75 * 0.5 * background + 0.25 * 0.5 * length
        assert float(space.scores(x)[0, label]) == pytest.approx(expected, rel=1e-5)


def test_without_the_centred_background_the_score_is_the_logit():
    features, labels = clouds()
    space = replace(KnownSpace.of(features, labels, 4), background=0.0)
    weights, biases = discriminant(space.means, space.counts, space.within, space.shrinkage)
    torch.testing.assert_close(space.scores(features), (features @ weights.T + biases).float(), rtol=1e-4, atol=1e-4)


def test_the_background_is_chosen_by_what_tells_left_out_classes_apart():
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(16, 12, generator=generator), dim=1)
    labels = torch.arange(16).repeat_interleave(40)
    tests, test_labels = torch.arange(640) % 4 == 0, labels
    noise = torch.randn(640, 12, generator=generator)

    def chosen(features):
        parts = features[~tests], test_labels[~tests], features[tests], test_labels[tests]
        return choose_score(*parts, 0.3, torch.Generator().manual_seed(1))

    # classes that differ in every direction: being far from the centre is what known classes have in common
    background, softness = chosen(4 * directions[labels] + 0.5 * noise + 20)
    assert background == 1.0 and softness >= 0
    few = labels < 4
    given = noise[few], labels[few], noise[few], labels[few]
    assert choose_score(*given, 0.3, generator) == (DEFAULT_BACKGROUND, 0.0)


def test_softness_lies_between_the_best_class_and_all_of_them():
    features, labels = clouds()
    space = KnownSpace.of(features, labels, 4)
    scores = space.scores(features)
    torch.testing.assert_close(space.fit(features), scores.max(1).values)
    soft = replace(space, softness=2.0).fit(features)
    torch.testing.assert_close(soft, 2 * torch.log(torch.exp(scores / 2).sum(1)), rtol=1e-4, atol=1e-4)


def test_means_run_on_exactly_and_classes_can_be_forgotten():
    features, labels = clouds(classes=5)
    base = labels < 3
    space = KnownSpace.of(features[base], labels[base], 3)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)) + 90
    for part in (order[:7], order[7:]):
        space.add(features[part], labels[part], 5)
    torch.testing.assert_close(space.means[4], features[labels == 4].mean(0))
    assert space.counts.tolist() == [30] * 5
    space.forget(0)
    torch.testing.assert_close(space.means[3], features[labels == 4].mean(0))


def test_left_out_scores_equal_a_space_that_never_saw_the_picture():
    features, labels = clouds()
    space = KnownSpace.of(features, labels, 4)
    shots, taught = features[:3] + 2, torch.full((3,), 4)
    space.add(shots, taught, 5)
    got = space.left_out_scores(shots, taught)
    for row in range(3):
        without = KnownSpace.of(features, labels, 4)
        others = [i for i in range(3) if i != row]
        without.add(shots[others], taught[others], 5)
        torch.testing.assert_close(got[row], without.scores(shots[[row]])[0], rtol=1e-4, atol=1e-4)


def test_base_pictures_left_out_are_left_out_of_covariances_and_background_too():
    features, labels = clouds()
    space = replace(KnownSpace.of(features, labels, 4, 0.3), background=0.4)
    got = space.left_out_base_scores(features, labels)
    for row in range(0, len(labels), 7):
        rest = torch.arange(len(labels)) != row
        without = replace(KnownSpace.of(features[rest], labels[rest], 4, 0.3), background=0.4)
        torch.testing.assert_close(got[row], without.scores(features[[row]])[0], rtol=1e-4, atol=1e-3)


def test_pictures_are_left_out_of_what_forgotten_classes_were_part_of_as_well():
    """The covariances stay those of all base classes: a picture weighs in them what it weighed when they were made."""
    features, labels = clouds()
    space = replace(KnownSpace.of(features, labels, 4, 0.3), background=0.4)
    for _ in range(3):
        space.forget(0)
    space = KnownSpace.restored(space.state())
    own = labels == 3
    got = space.left_out_base_scores(features[own], torch.zeros(30, dtype=torch.int64))
    for row in range(0, 30, 7):
        rest = torch.arange(len(labels)) != 90 + row
        without = replace(KnownSpace.of(features[rest], labels[rest], 4, 0.3), background=0.4)
        expected = without.scores(features[[90 + row]])[0, 3:]
        torch.testing.assert_close(got[row], expected, rtol=1e-4, atol=1e-3)


def test_after_training_the_score_is_not_chosen_by_classes_that_were_trained_on():
    features, labels = clouds(classes=12)
    space = after_training(KnownSpace.of(features[::2], labels[::2], 12), features[1::2], labels[1::2])
    assert (space.shrinkage, space.background) == (0.7, 0.0)
    densities = space.scores(features[1::2], relative=False).double()
    chances = (densities / space.softness).softmax(1).gather(1, labels[1::2, None])
    for other in (0.3 * space.softness, 3 * space.softness):  # the temperature suits the posterior
        assert chances.log().mean() > (densities / other).softmax(1).gather(1, labels[1::2, None]).log().mean()
    nothing = after_training(KnownSpace.of(features, labels, 12, 0.9), features[:0], labels[:0])
    assert (nothing.shrinkage, nothing.softness) == (0.9, 0.0)


def test_a_class_of_one_picture_has_no_left_out_score():
    features, labels = clouds()
    space = KnownSpace.of(features, labels, 4)
    space.add(features[:1] + 2, torch.tensor([4]), 5)
    assert torch.isnan(space.left_out_scores(features[:1] + 2, torch.tensor([4]))[0, 4])


def test_oas_agrees_with_scikit_learn_and_shrinks_more_for_fewer_pictures():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(12, 20)) * np.linspace(0.2, 3, 20)
    covariance = torch.tensor((x.T @ x) / 12)
    assert oas_shrinkage(covariance, 12) == pytest.approx(OAS(assume_centered=True).fit(x).shrinkage_, rel=0.05)
    assert oas_shrinkage(covariance, 5) > oas_shrinkage(covariance, 500)
    assert oas_shrinkage(covariance, 0) == 1.0


def test_temperature_is_a_minimum_of_the_smoothed_log_loss():
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(true.softmax(1), 1, generator=generator).squeeze(1)
    logits = true * 4
    temperature = torch.tensor(fit_temperature(logits, labels), dtype=torch.float64, requires_grad=True)
    assert float(temperature.detach()) == pytest.approx(4, rel=0.1)
    torch.nn.functional.cross_entropy(logits / temperature, labels, label_smoothing=1 / 4002).backward()
    assert abs(float(temperature.grad)) < 1e-6


def test_no_mistake_on_few_pictures_is_not_certainty():
    logits, labels = 50 * torch.eye(4).repeat(5, 1), torch.arange(4).repeat(5)
    confidence = (logits / fit_temperature(logits, labels)).softmax(1).amax(1)
    assert 0.9 < float(confidence.mean()) < 0.99
    logits[:, 3] = -torch.inf  # a class that this part of a cross-validation does not know
    assert 0 < fit_temperature(logits[labels < 3], labels[labels < 3]) < 100


def test_threshold_keeps_its_promise_on_fresh_pictures():
    generator = torch.Generator().manual_seed(0)
    rejected = []
    for _ in range(400):
        held, fresh = torch.randn(2, 60, generator=generator)
        rejected.append((fresh < rejection_threshold(held, 0.05)).double().mean())
    assert float(torch.stack(rejected).mean()) <= 0.05 + 0.005
    assert rejection_threshold(torch.randn(10), 0.05) is None  # ten pictures cannot promise one in twenty
    assert rejection_threshold(torch.tensor([3.0, 1.0, 2.0]), 0.5) == 2.0
