"""Features at the edge of what float32 holds: every head gives finite scores, or says in one line that it cannot."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fscil import registry
from fscil.errors import UserError
from fscil.heads.base import Lesson
from fscil.methods.represented import Headed
from head_world import small_head
from tiny_world import base_task, make_method

DIM = 8


def world(per_class: int, noise: float = 0.3, classes: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    means = 2 * torch.randn(classes, DIM, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    return means[labels] + noise * torch.randn(len(labels), DIM, generator=generator), labels


def worlds() -> Iterator[tuple[str, Tensor, Tensor]]:
    features, labels = world(5)
    yield "one image per class", *world(1)
    yield "the same image in every class", torch.ones(12, DIM), torch.arange(6).repeat_interleave(2)
    yield "identical images of a class", *world(4, noise=0.0)
    yield "nothing at all", torch.zeros(12, DIM), torch.arange(6).repeat_interleave(2)
    for scale in (1e-30, 1e-12, 1e12, 1e30):
        yield f"lengths of {scale:g}", scale * features, labels
    yield "one direction", features[:, :1] * torch.ones(1, DIM), labels
    yield "a covariance that is next to singular", features * torch.tensor([1.0] + [1e-10] * (DIM - 1)), labels
    yield "infinite", features / 0, labels


WORLDS = {name: (features, labels) for name, features, labels in worlds()}


def taught(head, features, labels):
    """Base classes, then the last two."""
    classes = int(labels.max()) + 1
    for number, chosen in enumerate((labels < classes - 2, labels >= classes - 2)):
        own = features[chosen]

        def views(numbers, positions=None, own=own):
            return own.repeat(len(numbers), 1) if positions is None else own[positions]

        lesson = Lesson(own, labels[chosen], classes - 2 * (1 - number), views, number)
        (head.teach if number else head.fit)(lesson)
    return head


@pytest.mark.parametrize("name", registry.HEADS)
@pytest.mark.parametrize("title", WORLDS)
def test_a_result_or_one_clear_line(name, title):
    features, labels = WORLDS[title]
    head = small_head(name, DIM)
    try:
        taught(head, features, labels)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert all(bool(torch.isfinite(tensor).all()) for tensor in head.state().values())
    try:
        scores = head.scores(features)
    except torch.linalg.LinAlgError:  # which methods put into the same line
        return
    assert scores.shape == (len(labels), int(labels.max()) + 1)
    if "e-30" not in title and "e+30" not in title:  # there NaN is left to whoever asks for scores
        assert bool(torch.isfinite(scores).all())


def test_a_method_says_it_in_the_same_line():
    method, task = make_method("frozen"), base_task()
    method = Headed(method, small_head("closed_form", method.feature_dim))
    first = torch.stack([(task.labels == label).nonzero()[0, 0] for label in task.classes])  # one image per class
    method.fit_base(replace(task, images=task.images.select(first), labels=task.labels[first]))
    with pytest.raises(UserError, match='"ClosedForm" can make nothing of these features'):
        method.logits(task.images)


@pytest.mark.parametrize("name", ["prototypes", "closed_form", "fecam"])
def test_a_thousand_classes(name):
    features, labels = world(2, classes=1000)
    head = taught(small_head(name, DIM), features, labels)
    right = head.scores(features).argmax(1) == labels
    assert right.float().mean() > 0.5  # chance is one in a thousand
