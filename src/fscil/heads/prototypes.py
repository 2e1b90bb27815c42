"""Prototypes: the mean feature of each class, compared by cosine (paper Eq. 12 and 17; the head of SimpleCIL, of the
baseline and of most comparators).

    score_c(x) = s cos(x, P_c),   P_c the mean over the images of class c
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.heads.base import Head, Lesson, Linear
from fscil.maths.margins import cosine
from fscil.runtime import Runtime
from fscil.strict import Positive

PROTOTYPE_VIEW = 999  # the number of the view that prototypes average with prototype_views=train


@dataclass(frozen=True, kw_only=True)
class PrototypeOptions:
    """Where the paper leaves a choice open, the default is the released code's."""

    scale: Positive = 16.0  # s: shapes the softmax of the scores, not their order
    rows: Literal["unit", "raw"] = "unit"  # norm of prototypes used as classifier rows
    prototype_views: Literal["test", "train"] = "test"  # transform of the images that prototypes average


class Prototypes(Head):
    """Class means as the rows of a cosine classifier."""

    Options: type = PrototypeOptions
    after_base = frozenset({"scale"})
    prototypes: Tensor
    rows: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        self.register_buffer("prototypes", torch.zeros(0, dim, **self.place))  # P, raw means (C, d)
        self.register_buffer("rows", torch.zeros(0, dim, **self.place))  # the classifier (C, d)

    def describe(self, lesson: Lesson) -> None:
        self.prototypes = lesson.means(self.averaged(lesson))
        self.rows = self.as_rows(self.prototypes)

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        self.prototypes = self.running(self.prototypes, lesson.means(self.averaged(lesson)), before)
        touched = torch.unique(lesson.labels)
        rows = torch.cat([self.rows, torch.zeros_like(self.prototypes[len(self.rows) :])])
        rows[touched] = self.as_rows(self.prototypes[touched])
        self.rows = rows

    def drop(self, label: int, keep: Tensor) -> None:
        self.prototypes, self.rows = self.prototypes[keep], self.rows[keep]

    def scores(self, features: Tensor) -> Tensor:
        scores: Tensor = self.options.scale * cosine(features, self.rows)
        return scores

    def linear(self) -> Linear:
        rows = self.options.scale * F.normalize(self.rows.double().cpu(), dim=1)
        return Linear(rows, rows.new_zeros(len(rows)), unit=True)

    def without(self, rest: Lesson, features: Tensor, labels: Tensor) -> Prototypes:
        """Means without these images; what calibration moved the rows by is added again."""
        head = self.copy()
        moved = self.rows - self.as_rows(self.prototypes)
        head.counts = (self.counts - torch.bincount(labels, minlength=self.seen)).clamp(min=1)
        sums = (self.prototypes * self.counts[:, None]).index_add(0, labels, -features)
        head.prototypes = sums / head.counts[:, None]
        head.rows = self.as_rows(head.prototypes) + moved
        return head

    def as_rows(self, prototypes: Tensor) -> Tensor:
        return F.normalize(prototypes, dim=1) if self.options.rows == "unit" else prototypes.clone()

    def averaged(self, lesson: Lesson) -> Tensor:
        """The features (n, d) that prototypes are means of."""
        if self.options.prototype_views == "test":
            return lesson.features
        return lesson.views(torch.tensor([PROTOTYPE_VIEW]))
