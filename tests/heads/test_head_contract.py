"""What every head of the registry promises, on features drawn from known Gaussians."""

from __future__ import annotations

import pytest
import torch

from fscil import registry
from fscil.heads.base import Lesson
from fscil.methods.making import make_method
from fscil.runtime import Runtime
from head_world import BASE, CLASSES, base_lesson, held_out, lesson, small_head, trained_head
from head_world import SMALL as SMALL_HEADS
from tiny_world import SMALL, base_task, copy_state, differing, few_shot_tasks, make_backbone, make_images

every_head = pytest.mark.parametrize("name", list(registry.HEADS))
exact_heads = pytest.mark.parametrize("name", [name for name in registry.HEADS if registry.head_class(name).exact])
FIXED = ("frozen", "baseline", "teen", "clom", "l2p_plus")  # one method of each kind that keeps its features


def small(name: str) -> dict[str, object]:
    """A head with the tiny world's options."""
    fields = registry.head_class(name).Options.__dataclass_fields__
    return {"name": name, **{key: value for key, value in {**SMALL, **SMALL_HEADS}.items() if key in fields}}


@every_head
def test_it_recognises_what_it_was_taught(name):
    head = trained_head(name)
    assert head.seen == CLASSES and head.counts.tolist() == [30] * BASE + [5] * (CLASSES - BASE)
    x, y = held_out()
    scores = head.scores(x)
    assert scores.shape == (len(x), CLASSES) and scores.isfinite().all()
    right = scores.argmax(1) == y
    assert right[y < BASE].double().mean() > 0.8 and right[y >= BASE].double().mean() > 0.5  # chance is 1/10


@every_head
def test_state_round_trips(name):
    head = trained_head(name)
    again = head.twin()
    again.load_state({key: tensor.clone() for key, tensor in head.state().items()})
    again.counts = head.counts
    x, _ = held_out()
    assert torch.equal(head.scores(x), again.scores(x))
    for one in (head, again):  # and it learns on in the same way
        one.teach(lesson([CLASSES], 5, number=3))
    assert not differing(head.state(), again.state())


@exact_heads
def test_forgetting_a_class_is_exact(name):
    """As if the class had never come."""
    whole, never = trained_head(name), trained_head(name, taught=range(BASE, CLASSES - 1))
    whole.forget(CLASSES - 1)
    x, _ = held_out()
    assert whole.seen == never.seen == CLASSES - 1
    torch.testing.assert_close(whole.scores(x), never.scores(x), rtol=1e-4, atol=1e-4)


@exact_heads
def test_adding_images_to_a_known_class_equals_having_had_them(name):
    once, twice = trained_head(name, taught=[]), trained_head(name, taught=[])
    both = lesson([BASE], 10, number=1)
    once.teach(both)
    for part in (slice(0, 4), slice(4, 10)):
        twice.teach(Lesson(both.features[part], both.labels[part], BASE + 1, both.views, 1))
    x, _ = held_out()
    torch.testing.assert_close(once.scores(x), twice.scores(x), rtol=1e-3, atol=1e-3)


@every_head
def test_linear_form_gives_the_scores(name):
    head = trained_head(name)
    linear = head.linear()
    if linear is None:
        return
    x, _ = held_out()
    space = torch.nn.functional.normalize(x, dim=1) if linear.unit else x
    found = space.double() @ linear.weights.T.double() + linear.biases.double()
    torch.testing.assert_close(found, head.scores(x).double(), rtol=1e-3, atol=1e-3)


@every_head
def test_options_after_the_base_task_do_not_change_it(name):
    cls = registry.head_class(name)
    fields = cls.Options.__dataclass_fields__
    assert cls.after_base <= set(fields), cls.after_base - set(fields)
    changed = {}
    for key in cls.after_base:
        default = fields[key].default
        if isinstance(default, bool):
            changed[key] = not default
        elif isinstance(default, (int, float)):
            changed[key] = default + 1 if isinstance(default, int) else default * 0.9
    plain, other = (small_head(name, **options) for options in ({}, changed))
    for head in (plain, other):
        head.fit(base_lesson())
    assert not differing(plain.state(), other.state())


@every_head
def test_without_some_base_images_is_a_head_that_never_saw_them(name):
    """Against a head described from the rest alone."""
    base = base_lesson()
    head = small_head(name)
    head.fit(base)
    out = torch.arange(len(base.labels)) % 5 == 0
    rest = Lesson(base.features[~out], base.labels[~out], BASE, base.views)
    fresh = small_head(name)
    fresh.fit(rest)
    less = head.without(rest, base.features[out], base.labels[out])
    x, y = held_out()
    torch.testing.assert_close(less.scores(x), fresh.scores(x), rtol=1e-3, atol=1e-3)
    assert torch.equal(head.scores(x), head.scores(x)) and head.counts.tolist() == [30] * BASE  # itself unchanged


@pytest.mark.parametrize("method", FIXED)
@every_head
def test_on_any_method_with_fixed_features(name, method):
    runtime = Runtime()
    options = {
        key: value for key, value in SMALL.items() if key in registry.method_class(method).Options.__dataclass_fields__
    }
    options = {**options, **registry.method_entry(method).options}

    def make():
        return make_method(method, options, make_backbone().prepare(runtime), runtime, small(name))

    learner = make()
    learner.fit_base(base_task())
    images, _ = make_images()
    features = learner.features(images)
    first, second = few_shot_tasks()
    learner.learn(first)
    again = make()
    again.load_state(copy_state(learner))
    for one in (learner, again):
        one.learn(second)
    assert not differing(learner.state(), again.state())
    assert torch.equal(learner.features(images), features)
    assert torch.equal(learner.logits_from(features), learner.logits(images))
    assert learner.logits(images).shape == (len(images), learner.seen) and learner.seen == 10
    learner.forget(9)
    assert learner.logits(images).shape == (len(images), 9)
