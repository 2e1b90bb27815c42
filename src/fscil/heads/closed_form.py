"""The closed form: linear discriminant analysis with a correction for classes known from few images.

    Σ = (1 − α) S + α (tr S / d) I,   S the pooled within-class covariance of the base task
    score_c(x) = xᵀ Σ⁻¹ μ_c − ½ μ_cᵀ Σ⁻¹ μ_c + γ ½ tr(Σ⁻¹ S) / n_c

Nothing is trained, and a later image changes one mean and one count: adding and forgetting are exact.

With `trained` T, two questions are asked apart. Whether a picture shows a base class or a new one is for these scores
to say. Which of the base classes is for those to say as well that were trained for it, the heads of the base task with
logits r:

    base scores become  max_b s_b + (f − max_b f_b),   f = T log softmax(s_base) + log softmax(r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.heads.base import Head, Lesson, Linear, LinearScores
from fscil.heads.remembered import Remembered
from fscil.maths.discriminant import discriminant, pooled_covariance
from fscil.runtime import Runtime
from fscil.strict import NotNegative, require


@dataclass(frozen=True, kw_only=True)
class ClosedFormOptions:
    shrinkage: float = 0.3  # α
    correction: float = 1.0  # γ, a factor on the sample-size term
    views: int = 0  # augmented views per shot
    views_share: float = 0.5  # of the views in the mean of a shot; the rest is the plain feature
    features: Literal["raw", "unit"] = "raw"  # unit: L2-normalised before everything
    trained: NotNegative | None = None  # T: the heads of the base task rank the base classes too; None: they do not

    def __post_init__(self) -> None:
        require(0 <= self.shrinkage <= 1, "shrinkage", self.shrinkage, "between 0 and 1")
        require(0 <= self.correction <= 100, "correction", self.correction, "between 0 and 100; 1 is the formula")
        require(self.views >= 0, "views", self.views, "at least 0")
        require(0 <= self.views_share <= 1, "views_share", self.views_share, "between 0 and 1")


class ClosedForm(Head):
    """A shrunken linear discriminant, corrected for the error of few-shot means."""

    Options = ClosedFormOptions
    after_base = frozenset({"shrinkage", "correction", "views", "views_share", "trained"})
    prototypes: Tensor
    pooled: Tensor
    trained: Tensor | None

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        self.register_buffer("prototypes", torch.zeros(0, dim, **self.place))  # means (C, d)
        self.register_buffer("pooled", torch.zeros(dim, dim, **self.place))  # S
        self.register_buffer("trained", None)  # weights of the heads of the base task, where they are known (C0, d)
        self._discriminant = Remembered()

    def describe(self, lesson: Lesson) -> None:
        features = self.space(lesson.features)
        self.prototypes = lesson.means(features)
        self.pooled = pooled_covariance(features, lesson.labels, self.prototypes)
        self.trained = lesson.trained_weights

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        features = self.space(lesson.features)
        count = self.options.views
        if count:
            views = lesson.views(torch.arange(count)).view(count, len(features), -1)
            share = self.options.views_share
            features = (1 - share) * features + share * self.space(views).mean(0)
        self.prototypes = self.running(self.prototypes, lesson.means(features), before)

    def drop(self, label: int, keep: Tensor) -> None:
        self.prototypes = self.prototypes[keep]
        if self.trained is not None and label < len(self.trained):
            self.trained = self.trained[keep[: len(self.trained)]]

    def scores(self, features: Tensor) -> Tensor:
        o = self.options
        weights, biases = self._discriminant(self.prototypes, self.counts, self.pooled, o.shrinkage, o.correction)
        scores = self.space(features) @ weights.T + biases
        judges = self.judges
        if judges is None:
            return scores
        return with_ranked_base(scores, features.to(judges.dtype) @ judges.T, o.trained)

    def linear(self) -> Linear | None:
        return self.as_linear() if self.judges is None else None

    def scorer(self) -> nn.Module:
        linear = LinearScores(self.as_linear())
        judges = self.judges
        return linear if judges is None else RankedScores(linear, judges.double().cpu(), float(self.options.trained))

    @property
    def judges(self) -> Tensor | None:
        """Weights of the heads of the base task, where these rank the base classes too."""
        known = self.options.trained is not None and self.trained is not None and len(self.trained) > 0
        return self.trained if known else None

    def as_linear(self) -> Linear:
        """The discriminant alone, in float64."""
        o = self.options
        pooled, means = self.pooled.double().cpu(), self.prototypes.double().cpu()
        weights, biases = discriminant(means, self.counts.cpu(), pooled, o.shrinkage, o.correction)
        return Linear(weights, biases, unit=o.features == "unit")

    def without(self, rest: Lesson, features: Tensor, labels: Tensor) -> ClosedForm:
        head = self.copy()
        head.counts = (self.counts - torch.bincount(labels, minlength=self.seen)).clamp(min=1)
        sums = (self.prototypes * self.counts[:, None]).index_add(0, labels, -self.space(features))
        head.prototypes = sums / head.counts[:, None]
        inside = self.space(rest.features)
        head.pooled = pooled_covariance(inside, rest.labels, rest.means(inside))
        return head

    @classmethod
    def views_per_shot(cls, options: Any, shots: int) -> int:
        return int(options.views)

    def space(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) if self.options.features == "unit" else features


class RankedScores(nn.Module):
    """The discriminant's scores with the base classes ranked by the trained heads too, for exports."""

    trained: Tensor

    def __init__(self, linear: LinearScores, trained: Tensor, weight: float):
        super().__init__()
        self.linear, self.weight = linear, weight
        self.register_buffer("trained", trained)

    def forward(self, features: Tensor) -> Tensor:
        return with_ranked_base(self.linear(features), features @ self.trained.T, self.weight)


def with_ranked_base(scores: Tensor, logits: Tensor, weight: float) -> Tensor:
    """Scores (n, C), those of the first C0 classes ranked by the trained heads' logits (n, C0) too."""
    count = logits.shape[1]
    return torch.cat([rank_base(scores[:, :count], logits, weight), scores[:, count:]], 1)


def rank_base(scores: Tensor, logits: Tensor, weight: float) -> Tensor:
    """Scores (n, C0) of the base classes, ranked by both judges; the best one keeps what decides against new classes.

    >>> rank_base(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 5.0]]), 0.5)
    tensor([[-2.5000,  2.0000]])
    """
    both = weight * scores.log_softmax(1) + logits.log_softmax(1)
    return scores.amax(1, keepdim=True) + both - both.amax(1, keepdim=True)
