"""Methods in two parts: a representation, trained on the base task and fixed afterwards, and a head on its features.

`Represented` is what SMP and the frozen backbone are; `Headed` puts any other method whose features stay fixed under a
head of choice (`fscil run --method clom --head closed_form`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.errors import UserError
from fscil.heads.base import Head, Lesson
from fscil.methods.base import Method
from fscil.methods.families.spaces import UnitSpaces
from fscil.runtime import Runtime

Numbers = TypeVar("Numbers", int, Tensor)

# What heads no longer keep, though runs and models written before heads were parts still have it.
NO_LONGER_KEPT = frozenset({"donor", "rows"})


class Represented(Method):
    """A fixed representation under a head. A subclass trains in `represent`, embeds, and says which head is its own.

    The head's tensors stand in `state` under their own names, beside the representation's.
    """

    features_fixed = True
    can_refine = True

    def __init__(self, backbone: Backbone, options: Any, runtime: Runtime, head: Head | None = None):
        super().__init__(backbone, options, runtime)
        self.chosen_head = head is not None  # rather than the method's own
        self.head = head if head is not None else self.own_head()
        self._remembered: list[tuple[Pixels, object, Tensor]] | None = None

    # ---- what a subclass gives ---------------------------------------------------------------------------------------
    def represent(self, task: Task) -> None:
        """Trains what gives the features."""
        raise NotImplementedError

    def own_head(self) -> Head:
        """The head that belongs to the method when none is chosen."""
        raise NotImplementedError

    @property
    def base_rows(self) -> Tensor | None:
        """Rows of the cosine head that trained the features, where one did."""
        return None

    @property
    def base_weights(self) -> Tensor | None:
        """Weights that give the logits of the heads that trained the features, where these are linear in them; asked
        for with the base task."""
        return None

    # ---- learning ----------------------------------------------------------------------------------------------------
    def fit_base(self, task: Task) -> None:
        self._diagnostics = {}
        self.represent(task)
        self.describe(task)

    def describe(self, task: Task) -> None:
        """Ends the base task: the head learns the base classes."""
        self.count_classes(task)
        self.head.fit(self.lesson(task))
        self._diagnostics |= self.head.diagnostics

    def learn(self, task: Task) -> None:
        """Adds the classes of a task; images of classes already known refine what is known of them."""
        self.count_classes(task)
        self.head.teach(self.lesson(task))
        if self.head.diagnostics:
            self._diagnostics = self.head.diagnostics

    def forget(self, label: int) -> None:
        self.head.forget(label)
        self.class_counts = self.head.counts

    def lesson(self, task: Task) -> Lesson:
        """A task as the head sees it."""
        number = int(self.tasks_seen) - 1

        def views(numbers: Tensor, positions: Tensor | None = None) -> Tensor:
            if positions is None:
                positions = torch.arange(len(task.labels)).repeat(len(numbers))
                numbers = numbers.repeat_interleave(len(task.labels))
            return self.view_features(task.images, positions, view_key(number, numbers))

        labels = task.labels.to(self.runtime.device)
        features = self.features(task.images)
        return Lesson(features, labels, self.seen, views, number, self.base_rows, self.base_weights)

    # ---- features and scores -----------------------------------------------------------------------------------------
    def features(self, images: Pixels) -> Tensor:
        if self._remembered is None:
            return self.compute_features(images)
        for pixels, source, features in self._remembered:
            if pixels is images and source is self.feature_source():
                return features
        self._remembered.append((images, self.feature_source(), self.compute_features(images)))
        return self._remembered[-1][2]

    def compute_features(self, images: Pixels) -> Tensor:
        return self.extract(images, self.embed)

    def feature_source(self) -> object:
        """What decides the features: as long as it is the same object, the same images have the same ones."""
        return None

    @contextlib.contextmanager
    def remembering(self) -> Iterator[None]:
        """Within the block, features of the same images are computed once."""
        self._remembered = []
        try:
            yield
        finally:
            self._remembered = None

    def logits_from(self, features: Tensor) -> Tensor:
        try:
            return self.head.scores(features)
        except torch.linalg.LinAlgError:  # of a covariance without an inverse
            raise self.head.unusable() from None

    # ---- state -------------------------------------------------------------------------------------------------------
    def base_options(self) -> dict[str, Any]:
        options = super().base_options()
        if self.chosen_head:
            kind = type(self.head)
            options["head"] = {"kind": f"{kind.__module__}:{kind.__qualname__}", **self.head.base_options()}
        return options

    def state(self) -> dict[str, Tensor]:
        own = {name: tensor for name, tensor in super().state().items() if not name.startswith("head.")}
        return own | self.head.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        of_head = set(self.head._buffers)
        own = {name: tensor for name, tensor in state.items() if name not in of_head | NO_LONGER_KEPT}
        super().load_state(own)
        self.head.load_state({name: tensor for name, tensor in state.items() if name in of_head})
        self.head.counts = self.class_counts


class Headed(Represented):
    """Another method's representation under a head: the method learns the base task and gives the features; its own
    classifier is not asked."""

    def __init__(self, inner: Method, head: Head):
        if not inner.features_fixed:
            raise UserError(
                f"a head needs features that stay as they are after the base task, and those of "
                f"{type(inner).__name__} move; see: fscil list heads"
            )
        super().__init__(inner.backbone, inner.options, inner.runtime, head)
        self.inner = inner

    @property
    def feature_dim(self) -> int:
        return self.inner.feature_dim

    def represent(self, task: Task) -> None:
        self.inner.fit_base(task)
        self._diagnostics = dict(self.inner.diagnostics())

    def compute_features(self, images: Pixels) -> Tensor:
        return self.inner.features(images)

    def embed(self, images: Tensor) -> Tensor:
        return self.inner.embed(images)

    @property
    def plain_adapters(self) -> LoRA | None:
        return self.inner.plain_adapters

    @property
    def unit_spaces(self) -> UnitSpaces | None:
        return self.inner.unit_spaces

    def trainable_parameters(self) -> int:
        return self.inner.trainable_parameters()

    def base_options(self) -> dict[str, Any]:
        kind = type(self.inner)
        return super().base_options() | {"inner": f"{kind.__module__}:{kind.__qualname__}"}

    def state(self) -> dict[str, Tensor]:
        own = {name: tensor for name, tensor in super().state().items() if not name.startswith("inner.")}
        return own | {f"inner.{name}": tensor for name, tensor in self.inner.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        inner = {name: tensor for name, tensor in state.items() if name.startswith("inner.")}
        super().load_state({name: tensor for name, tensor in state.items() if name not in inner})
        self.inner.load_state({name.removeprefix("inner."): tensor for name, tensor in inner.items()})


def view_key(session: int, number: Numbers) -> Numbers:
    """Augmentation key of a view: distinct from every training epoch and from every other task's views."""
    return 1_000_000 * session + number + 1
