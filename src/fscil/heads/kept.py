"""Heads that keep the features they have seen (n, d): what they need of them cannot be updated class by class in less.

Adding and forgetting are exact, because everything is worked out from what is kept. What is worked out is not part of
the state; a loaded head works it out again when it is first asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fscil.heads.base import Head, Lesson
from fscil.runtime import Runtime


class KeptFeatures(Head):
    """Features, labels, and how many classes came with the base task."""

    features: Tensor
    labels: Tensor
    base_count: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        self.register_buffer("features", torch.zeros(0, dim, **self.place))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64, device=runtime.device))
        self.register_buffer("base_count", torch.zeros((), dtype=torch.int64))
        self.solution: Any = None  # what `solve` gave for the present features

    def solve(self) -> Any:
        """What scores are computed with, from the features kept."""
        raise NotImplementedError

    @property
    def solved(self) -> Any:
        if self.solution is None:
            self.solution = self.solve()
        return self.solution

    @property
    def base_classes(self) -> int:
        return int(self.base_count)

    def describe(self, lesson: Lesson) -> None:
        self.features, self.labels = lesson.features.to(self.place["dtype"]), lesson.labels
        self.base_count = torch.tensor(lesson.classes)
        self.solution = None

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        self.features = torch.cat([self.features, lesson.features.to(self.place["dtype"])])
        self.labels = torch.cat([self.labels, lesson.labels])
        self.solution = None

    def drop(self, label: int, keep: Tensor) -> None:
        mine = self.labels != label
        self.features, labels = self.features[mine], self.labels[mine]
        self.labels = labels - (labels > label).long()
        self.base_count = self.base_count - int(label < self.base_classes)
        self.solution = None

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        self.base_count = self.base_count.cpu()
        self.solution = None
