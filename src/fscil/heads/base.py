"""The contract every head meets: what turns features that stay fixed after the base task into a classifier.

A head never sees pixels, a backbone or a method. It gets `Lesson`s: the features of a task's images, their labels, and
a function that gives features of further augmented views of them.

    describe(lesson)   the base task: means, covariances, whatever the head goes by
    learn(lesson)      new classes, or further images of known ones
    forget(label)      as if the class had never been learned
    scores(features)   (n, classes)

Everything learned is in buffers, so `state` is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.errors import UserError
from fscil.maths.prototypes import class_means
from fscil.runtime import Place, Runtime


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of something that has none."""


class Views(Protocol):
    """Features of augmented views of a lesson's images: view `numbers[i]` of the image at `positions[i]`; without
    positions, every numbered view of every image, view by view."""

    def __call__(self, numbers: Tensor, positions: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Lesson:
    """What a head is given to learn from."""

    features: Tensor  # (n, d) of the images as they are
    labels: Tensor  # (n,), numbered by order of arrival
    classes: int  # known with this lesson
    views: Views
    number: int = 0  # of the task, 0 for the base: keys the randomness of this lesson
    trained_rows: Tensor | None = None  # (base classes, d) of the cosine head that trained the features, if one did
    trained_weights: Tensor | None = None  # (base classes, d): features @ its transpose are that head's logits

    @property
    def counts(self) -> Tensor:
        """Images of each class in this lesson: (classes,)."""
        return torch.bincount(self.labels, minlength=self.classes)

    def means(self, features: Tensor | None = None) -> Tensor:
        """Mean feature of each class, zeros for those without images here: (classes, d)."""
        return class_means(self.features if features is None else features, self.labels, self.classes)


class Linear(NamedTuple):
    """Scores as a linear layer  x Wᵀ + b,  on features or (`unit`) on their directions."""

    weights: Tensor
    biases: Tensor
    unit: bool


class LinearScores(nn.Module):
    """`Linear` as a module: features (n, d) in float64 -> scores (n, classes).

    >>> LinearScores(Linear(torch.eye(2), torch.zeros(2), unit=True))(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    weights: Tensor
    biases: Tensor

    def __init__(self, linear: Linear):
        super().__init__()
        self.register_buffer("weights", linear.weights)
        self.register_buffer("biases", linear.biases)
        self.unit = linear.unit

    def forward(self, features: Tensor) -> Tensor:
        directions = F.normalize(features, dim=1) if self.unit else features
        return directions @ self.weights.T + self.biases


class Head(nn.Module):
    """A classifier on features (n, `dim`) that stay fixed.

    `counts` has the images seen of each class. Classes are numbered by order of arrival.

    >>> from fscil.heads.prototypes import Prototypes
    >>> from fscil.runtime import Runtime
    >>> features, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 1, 1])
    >>> head = Prototypes(2, Prototypes.Options(), Runtime())
    >>> head.fit(Lesson(features, labels, classes=2, views=lambda numbers, positions=None: features))
    >>> head.counts, head.scores(torch.tensor([[0.1, 0.9]])).argmax()
    (tensor([1, 2]), tensor(1))
    """

    Options: type[Any] = NoOptions
    after_base: frozenset[str] = frozenset()  # options that `describe` does not look at
    exact = True  # adding and forgetting give what learning everything at once, or never, would have given
    counts: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__()
        self.dim, self.options, self.runtime = dim, options, runtime
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64, device=runtime.device))
        self.diagnostics: dict[str, Any] = {}  # JSON-able facts about the last lesson

    @property
    def seen(self) -> int:
        """Number of classes known."""
        return len(self.counts)

    @property
    def place(self) -> Place:
        """Device and type of what is learned."""
        return self.runtime.place

    # ---- what a head gives -------------------------------------------------------------------------------------------
    def describe(self, lesson: Lesson) -> None:
        """Learns the base classes. `counts` is set already."""
        raise NotImplementedError

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        """Learns the classes of a lesson, new or known. `counts` is set already, `before` has those before it, zeros
        for new classes."""
        raise NotImplementedError

    def drop(self, label: int, keep: Tensor) -> None:
        """Removes what is known of a class; `keep` marks the other ones."""
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, classes): higher is likelier; a softmax of them is a posterior up to a temperature."""
        raise NotImplementedError

    def linear(self) -> Linear | None:
        """The scores as a linear layer, for exports; None where they are not linear."""
        return None

    def scorer(self) -> nn.Module | None:
        """The scores as a module of matrix products in float64, for exports; None where they are no such thing."""
        linear = self.linear()
        return LinearScores(linear) if linear is not None else None

    @classmethod
    def views_per_shot(cls, options: Any, shots: int) -> int:
        """Augmented views that a lesson asks for, per image of a class with so many: what teaching costs."""
        return 0

    # ---- the same for all --------------------------------------------------------------------------------------------
    def fit(self, lesson: Lesson) -> None:
        """Starts anew with the base task."""
        self.counts, self.diagnostics = lesson.counts, {}
        with self._sound(lesson.features):
            self.describe(lesson)

    def teach(self, lesson: Lesson) -> None:
        """Takes in a later task."""
        before = torch.cat([self.counts, self.counts.new_zeros(lesson.classes - self.seen)])
        self.counts, self.diagnostics = before + lesson.counts, {}
        with self._sound(lesson.features):
            self.learn(lesson, before)

    @contextlib.contextmanager
    def _sound(self, features: Tensor) -> Iterator[None]:
        """What is learned inside is made of numbers, or a UserError says that these features do not allow for it."""
        if bad := int((~torch.isfinite(features).all(1)).sum()):
            raise UserError(
                f"the features of {bad} images are no numbers (NaN or infinity): training diverged. Take a lower "
                "learning rate (--set options.lr=…) or --precision fp32."
            )
        try:
            yield
            learned = all(bool(torch.isfinite(tensor).all()) for tensor in self.state().values())
        except torch.linalg.LinAlgError:  # a covariance without an inverse
            learned = False
        if not learned:
            raise self.unusable()

    def unusable(self) -> UserError:
        """What to say of features that no numbers can be made of."""
        return UserError(
            f'head "{type(self).__name__}" can make nothing of these features: images of a class that do not differ at '
            "all, or features so long or short that float32 does not hold their squares. Add different images, use "
            '--precision fp32, or choose the head "prototypes".'
        )

    def forget(self, label: int) -> None:
        """Removes a class; the labels above it move down by one."""
        keep = torch.arange(self.seen, device=self.counts.device) != label
        self.drop(label, keep)
        self.counts = self.counts[keep]

    def without(self, rest: Lesson, features: Tensor, labels: Tensor) -> Head:
        """This head as if the base images with these features had not been seen; `rest` are the other base images.

        Here: described anew from the rest, which knows nothing of classes taught since. Heads that can do better do.
        """
        head = self.twin()
        head.fit(rest)
        return head

    def twin(self) -> Self:
        """A fresh head of this kind."""
        return type(self)(self.dim, self.options, self.runtime)

    def copy(self) -> Self:
        """A head that knows the same."""
        head = self.twin()
        head.load_state(self.state())
        head.counts = self.counts
        return head

    def running(self, old: Tensor, means: Tensor, before: Tensor) -> Tensor:
        """Means (classes, d) of all images so far, from the old ones and those of the images that came since."""
        result = torch.cat([old, torch.zeros_like(means[len(old) :])])
        some = (self.counts > before).nonzero().squeeze(1)  # classes that this lesson has images of
        gained, counts = (number[some].to(old.dtype)[:, None] for number in (self.counts - before, self.counts))
        result[some] += (means[some] - result[some]) * gained / counts
        return result

    def base_options(self) -> dict[str, Any]:
        """The options that the base task depends on."""
        return {name: value for name, value in asdict(self.options).items() if name not in self.after_base}

    def state(self) -> dict[str, Tensor]:
        """Everything learned but the counts, which the method keeps."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if name != "counts"}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state()`; tensors may have other sizes than a fresh head's."""
        for name, tensor in state.items():
            if name not in self._buffers:
                raise UserError(f'state has "{name}", which {type(self).__name__} does not know')
            setattr(self, name, tensor.to(self.runtime.device))


def check_spread(lesson: Lesson, name: str) -> None:
    """Refuses base classes of one image each to heads that go by how images of one class differ."""
    if not bool((lesson.counts > 1).any()):
        raise UserError(
            f'head "{name}" goes by how images of one class differ, and every base class has one image; add some, '
            'or choose the head "prototypes".'
        )
