"""CHORD against its parts: single sets trained apart, the frozen backbone, and the discriminant written out."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tiny_world import BASE, base_task, few_shot_tasks, make_backbone, make_images, make_method

DOUBLE = dict(dtype=torch.float64)


def test_its_features_are_those_of_sets_trained_apart_and_of_the_frozen_backbone_weighed():
    backbone = make_backbone().prepare(make_method("frozen", **DOUBLE).runtime)
    method = make_method("chord", **DOUBLE)
    method.fit_base(base_task())
    images, _ = make_images()
    blocks = method.features(images).split(backbone.dim, 1)
    assert len(blocks) == 3
    for block, margin, weight in zip(blocks, (-0.1, 0.2), (1.0, 0.75)):
        apart = make_method("single_m0", {"margin": margin, "lr": method.options.lr}, **DOUBLE)
        apart.fit_base(base_task())
        torch.testing.assert_close(block, weight * F.normalize(apart.features(images), dim=1), rtol=0, atol=1e-10)
    with torch.no_grad():
        frozen = backbone(images.plain().double())
    torch.testing.assert_close(blocks[2], F.normalize(frozen, dim=1), rtol=0, atol=1e-10)


def test_its_scores_are_the_corrected_discriminant():
    """score = x Σ⁻¹ μ − ½ μ Σ⁻¹ μ + γ ½ tr(Σ⁻¹ S)/n with means of plain features and views, class by class."""
    method = make_method(
        "chord", {"views": 2, "shrinkage": 0.4, "correction": 0.6, "views_share": 0.3, "trained": None}, **DOUBLE
    )
    base, (first, _) = base_task(), few_shot_tasks()
    method.fit_base(base)
    f, y = method.features(base.images), base.labels
    method.learn(first)
    means = [f[y == c].mean(0) for c in range(BASE)]
    plain = method.features(first.images)
    views = torch.stack([method.embed(first.images.augmented(range(9), 1_000_000 + view + 1)) for view in range(2)])
    shots = 0.7 * plain + 0.3 * views.mean(0)
    means += [shots[first.labels == c].mean(0) for c in range(BASE, BASE + 3)]
    within = sum(torch.outer(row - means[c], row - means[c]) for row, c in zip(f, y)) / (len(f) - BASE)
    sigma = 0.6 * within + 0.4 * within.trace() / len(within) * torch.eye(len(within))
    inverse = torch.linalg.inv(sigma)
    counts = [6] * BASE + [3] * 3
    x = method.features(make_images()[0])
    expected = [
        x @ inverse @ m - 0.5 * m @ inverse @ m + 0.6 * 0.5 * (inverse @ within).trace() / n
        for m, n in zip(means, counts)
    ]
    torch.testing.assert_close(method.logits_from(x), torch.stack(expected, 1), rtol=1e-6, atol=1e-6)


def test_the_one_pass_form_averages_the_sets():
    method = make_method("chord", {"form": "merged"}, **DOUBLE)
    method.fit_base(base_task())
    spaces = make_method("chord", {"frozen": False}, **DOUBLE)
    spaces.fit_base(base_task())
    average = spaces.lora.dense().mean(1, keepdim=True)
    torch.testing.assert_close(method.lora.dense(), average, rtol=0, atol=1e-12)
    assert method.unit_spaces.lora.sets == 1 and spaces.unit_spaces.lora.sets == 2
    assert method.unit_spaces.weights.tolist() == [1] and method.features(make_images()[0]).norm(dim=1).allclose(
        torch.ones(1, **DOUBLE)
    )
    assert method.feature_dim == 16 and spaces.feature_dim == 32


def test_the_trained_heads_help_to_rank_the_base_classes_and_nothing_else():
    """Which of base and new is best does not change; among base classes both judges are heard."""
    method, plain = (make_method("chord", {"trained": weight}, **DOUBLE) for weight in (0.3, None))
    for learner in (method, plain):
        learner.fit_base(base_task())
        learner.learn(few_shot_tasks()[0])
    images, _ = make_images()
    x = method.features(images)
    found, before = method.logits_from(x), plain.logits_from(x)
    assert torch.equal(found[:, BASE:], before[:, BASE:])
    torch.testing.assert_close(found[:, :BASE].amax(1), before[:, :BASE].amax(1))
    blocks, heads = x.split(16, 1), []
    for block, margin in zip(blocks, (-0.1, 0.2)):
        apart = make_method("single_m0", {"margin": margin, "lr": method.options.lr}, **DOUBLE)
        apart.fit_base(base_task())
        heads.append(16 * F.cosine_similarity(block[:, None], apart.trained_rows[None], dim=2))
    both = 0.3 * before[:, :BASE].log_softmax(1) + sum(heads).log_softmax(1)
    assert torch.equal(found[:, :BASE].argmax(1), both.argmax(1))
    gaps = both - both.amax(1, keepdim=True)
    torch.testing.assert_close(found[:, :BASE] - found[:, :BASE].amax(1, keepdim=True), gaps)
    method.forget(2)
    assert method.logits_from(x).shape == (len(x), BASE + 2)
    again = make_method("chord", {"trained": 0.3}, **DOUBLE)
    again.load_state({name: tensor.clone() for name, tensor in method.state().items()})
    assert torch.equal(again.logits_from(x), method.logits_from(x))
