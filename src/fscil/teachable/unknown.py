"""Pictures of no known class: scores that tell them apart, and where to draw the line.

Every score here is higher for pictures of known classes. The default is a likelihood ratio: how much better the best
known class explains a feature than "any picture at all" does, both Gaussian. For the latter there are two candidates
with a weight w between them:

    w = 1   N(μ₀, Σ₀) of all base features: the relative Mahalanobis distance (Ren et al., arXiv 2106.09022)
    w = 0   N(0, Σ) around the origin: the largest logit of the discriminant, which also sees how long a feature is

Either the best class counts alone or all of them, softened by a temperature (as in the energy score). Both choices go
by how well base classes that are left out are told apart (`choose_score`), but only where nothing was trained: training
has told those classes apart already, and what suits them does not suit strangers. After it, one score is taken for all
data (`after_training`). With the closed form's sample-size correction, a class known from five pictures is rejected
about as often as one known from five hundred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.evaluation.openset import auroc
from fscil.heads.remembered import Remembered
from fscil.maths.discriminant import pooled_covariance, shrink
from fscil.maths.leave_one_out import left_out_densities
from fscil.maths.margins import cosine
from fscil.maths.prototypes import class_means

DEFAULT_SHRINKAGE = 0.3  # as the closed form's
DEFAULT_BACKGROUND = 1.0  # where there are too few classes to choose: it does not depend on where the origin is
BACKGROUNDS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHOICE_CLASSES = 8  # from so many base classes on the background is chosen
CHOICE_ROUNDS = 5
TRAINED_SHRINKAGE = 0.7  # after training: docs/tutorial.md has what it was chosen on


@dataclass
class KnownSpace:
    """What features of known classes look like: means and counts, covariance within classes and of all pictures."""

    means: Tensor  # (C, d)
    counts: Tensor  # (C,)
    within: Tensor  # (d, d), pooled
    centre: Tensor  # (d,), of all base pictures
    total: Tensor  # (d, d), of all base pictures
    shrinkage: float = DEFAULT_SHRINKAGE
    background: float = DEFAULT_BACKGROUND  # w
    softness: float = 0.0  # temperature over the classes; 0: the best one alone
    base: tuple[int, int] = (0, 0)  # pictures, and their classes, that the covariances are made of; (0, 0): not known
    _discriminant: Remembered = field(default_factory=Remembered, init=False, repr=False, compare=False)

    TENSORS: ClassVar[tuple[str, ...]] = ("means", "counts", "within", "centre", "total")
    NUMBERS: ClassVar[tuple[str, ...]] = ("shrinkage", "background", "softness")

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, classes: int, shrinkage: float | None = None) -> KnownSpace:
        """From base features; `shrinkage` None takes the larger of the default and what so few pictures call for."""
        means, counts = class_means(features, labels, classes), torch.bincount(labels, minlength=classes)
        within = pooled_covariance(features, labels, means)
        centre = features.mean(0)
        total = (features - centre).T @ (features - centre) / max(1, len(features) - 1)
        if shrinkage is None:
            shrinkage = max(DEFAULT_SHRINKAGE, oas_shrinkage(within, len(features) - classes))
        return cls(means, counts, within, centre, total, shrinkage, base=(len(features), classes))

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for a file."""
        tensors: dict[str, Tensor] = {key: getattr(self, key) for key in self.TENSORS}
        numbers = {key: torch.tensor([getattr(self, key)], dtype=torch.float64) for key in self.NUMBERS}
        return tensors | numbers | {"base": torch.tensor(self.base)}

    @classmethod
    def restored(cls, state: Mapping[str, Tensor]) -> KnownSpace:
        """What `state` was made of."""
        means, counts, within, centre, total = (state[key] for key in cls.TENSORS)
        numbers = {key: float(state[key]) for key in cls.NUMBERS}
        # models from before `base` have their present counts alone
        pictures, classes = state["base"].tolist() if "base" in state else (0, 0)
        return cls(means, counts, within, centre, total, **numbers, base=(int(pictures), int(classes)))

    @property
    def has_spread(self) -> bool:
        """Whether any class had two different pictures, without which distances have no scale."""
        return bool(self.within.trace() > 0)

    def add(self, features: Tensor, labels: Tensor, classes: int) -> None:
        """More pictures, of new classes or known ones: means and counts run on; the covariances stay the base's."""
        gained = torch.bincount(labels, minlength=classes)
        self.counts = F.pad(self.counts, (0, classes - len(self.counts))) + gained
        some = gained.nonzero().squeeze(1)  # classes that these pictures show
        means = torch.cat([self.means, self.means.new_zeros(classes - len(self.means), self.means.shape[1])])
        share = (gained[some] / self.counts[some]).to(means.dtype)[:, None]
        means[some] += (class_means(features, labels, classes)[some] - means[some]) * share
        self.means = means

    def forget(self, label: int) -> None:
        keep = torch.arange(len(self.means), device=self.means.device) != label
        self.means, self.counts = self.means[keep], self.counts[keep]

    def scores(self, features: Tensor, relative: bool = True) -> Tensor:
        """(n, C): log-density of each class, minus (`relative`) the weighted one of the background:

        −½ (x−μ_c)ᵀΣ⁻¹(x−μ_c) + ½ tr(Σ⁻¹S)/n_c  [ + w ½ (x−μ₀)ᵀΣ₀⁻¹(x−μ₀) + (1−w) ½ xᵀΣ⁻¹x ]
        """
        classes, around, total = self.terms(features)
        if relative:
            classes = classes + (self.background * total + (1 - self.background) * around)[:, None]
        return classes.float()

    def fit(self, features: Tensor) -> Tensor:
        """How well each feature fits the known classes (n,): the score that is compared with a threshold."""
        return self.over_classes(self.scores(features))

    def over_classes(self, scores: Tensor) -> Tensor:
        """max_c s_c, or τ log Σ_c exp(s_c / τ); NaN where any class is."""
        return self.softness * (scores / self.softness).logsumexp(1) if self.softness else scores.amax(1)

    def terms(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-densities of the classes (n, C), and those of the two backgrounds, negated (n,), all up to constants."""
        wide = torch.float64 if features.device.type != "mps" else torch.float32
        x, within, total = (tensor.to(wide) for tensor in (features, self.within, self.total))
        weights, biases = self._discriminant(self.means, self.counts, self.within, self.shrinkage, dtype=wide)
        around = 0.5 * _square(x, shrink(within, self.shrinkage))
        background = 0.5 * _square(x - self.centre.to(wide), shrink(total, self.shrinkage))
        return x @ weights.T + biases - around[:, None], around, background

    def whitened(self, features: Tensor) -> tuple[Tensor, float]:
        """(features whose distances are those of Mahalanobis, usual distance of two of one class: √(2 tr Σ⁻¹S))."""
        wide = torch.float64 if features.device.type != "mps" else torch.float32
        within = self.within.to(wide)
        sigma = shrink(within, self.shrinkage)
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(sigma), features.to(wide).T, upper=False).T
        return white, math.sqrt(2 * float(torch.linalg.solve(sigma, within).trace()))

    def left_out_scores(self, features: Tensor, labels: Tensor, relative: bool = True) -> Tensor:
        """`scores` of taught pictures, each as if its own class had been learned without it; NaN if nothing is left."""
        result, counts = self.scores(features, relative), self.counts[labels]
        without = (self.means[labels] * counts[:, None] - features) / (counts - 1).clamp(min=1)[:, None]
        # one class per picture: the rest of the picture's own class; only the diagonal is wanted
        others = replace(self, means=without, counts=(counts - 1).clamp(min=1)).scores(features, relative).diagonal()
        # nothing is left of a class of one picture
        result[torch.arange(len(labels)), labels] = torch.where(counts > 1, others, torch.full_like(others, torch.nan))
        return result

    def left_out_base_scores(self, features: Tensor, labels: Tensor, relative: bool = True) -> Tensor:
        """The same for base pictures, which are part of the covariances and of the background too."""
        pictures, classes_then = self.base
        nowhere = torch.zeros_like(self.means[:1])  # −½ xᵀΣ⁻¹x is the density of a class at the origin, known for sure
        means, counts = torch.cat([self.means, nowhere]), torch.cat([self.counts.double(), torch.full((1,), torch.inf)])
        own = (means, counts.to(means.device), self.within, self.shrinkage)
        classes = left_out_densities(features, labels, *own, degrees=pictures - classes_then)
        classes, around = classes[:, :-1], -classes[:, -1]
        if not relative:
            return classes.float()
        everything = (self.centre[None], self.counts.new_tensor([pictures]), self.total, self.shrinkage)  # as one class
        one = torch.zeros_like(labels)
        total = -left_out_densities(features, one, *everything, gamma=0.0, degrees=pictures - 1).squeeze(1)
        return (classes + (self.background * total + (1 - self.background) * around)[:, None]).float()


def after_training(space: KnownSpace, tests: Tensor, test_labels: Tensor) -> KnownSpace:
    """The same space with the score that is taken where features were trained on the base classes: the softened logits
    of a strongly shrunken discriminant. The temperature is the one that suits the posterior of `tests`, pictures that
    were not trained on."""
    space = replace(space, shrinkage=max(TRAINED_SHRINKAGE, space.shrinkage), background=0.0)
    return replace(space, softness=fit_temperature(space.terms(tests)[0], test_labels)) if len(tests) else space


def choose_score(
    features: Tensor, labels: Tensor, tests: Tensor, test_labels: Tensor, shrinkage: float, generator: torch.Generator
) -> tuple[float, float]:
    """(background, softness) with which left-out base classes are told apart best: mean AUROC over a few draws of them.

    A quarter of the classes plays unknown; `tests` are pictures that the features were not fitted to. The softness, if
    any, is the temperature that suits the known classes' posterior.
    """
    classes = int(labels.max()) + 1
    quality = torch.zeros(2, len(BACKGROUNDS), dtype=torch.float64)
    temperatures = []
    for _ in range(CHOICE_ROUNDS if classes >= CHOICE_CLASSES and len(tests) else 0):
        order = torch.randperm(classes, generator=generator).to(labels.device)
        known = classes - classes // 4
        place = torch.argsort(order)  # class -> its number in this round; those from `known` on play unknown
        own, truth = place[labels], place[test_labels]
        inside = truth < known
        if not bool(inside.any()) or bool(inside.all()):
            continue
        space = KnownSpace.of(features[own < known], own[own < known], known, shrinkage)
        densities, around, total = space.terms(tests)
        temperatures.append(fit_temperature(densities[inside], truth[inside]))
        for row, softness in enumerate((0.0, temperatures[-1])):
            level = replace(space, softness=softness).over_classes(densities)
            for column, weight in enumerate(BACKGROUNDS):
                score = level + weight * total + (1 - weight) * around
                quality[row, column] += auroc(score[inside], score[~inside])
    if not temperatures:
        return DEFAULT_BACKGROUND, 0.0
    row, column = divmod(int(quality.argmax()), len(BACKGROUNDS))
    return BACKGROUNDS[column], row * sum(temperatures) / len(temperatures)


def _square(x: Tensor, covariance: Tensor) -> Tensor:
    """xᵀ Σ⁻¹ x of each row."""
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), x.T, upper=False).square().sum(0)


def oas_shrinkage(covariance: Tensor, degrees: int) -> float:
    """How far to shrink a covariance of so few degrees of freedom (oracle approximating shrinkage, Chen et al.)."""
    if degrees < 1:
        return 1.0
    dim = covariance.shape[0]
    wide = covariance.double() if covariance.device.type != "mps" else covariance
    trace, square = float(wide.trace()), float((wide * wide).sum())
    numerator = (1 - 2 / dim) * square + trace**2
    denominator = (degrees + 1 - 2 / dim) * (square - trace**2 / dim)
    return 1.0 if denominator <= 0 else min(1.0, numerator / denominator)


# ---- scores of a classifier, for comparison and for methods without fixed features ----------------------------------


def max_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return (logits / temperature).softmax(1).amax(1)


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log Σ exp of the logits (Liu et al. 2020)."""
    return (logits / temperature).logsumexp(1)


def max_logit(logits: Tensor) -> Tensor:
    return logits.amax(1)


def max_cosine(features: Tensor, means: Tensor) -> Tensor:
    return cosine(features, means).amax(1)


# ---- calibration ----------------------------------------------------------------------------------------------------


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T whose softmax(logits / T) gives held-out labels the best log-likelihood: golden-section search on log T.

    Of n pictures an error rate of zero means one of about 1/(n + 2) (Laplace's rule), so that much of each label goes
    to the other classes, and a model that makes no mistake on few pictures is not called certain.
    """
    doubt, finite = 1 / (len(labels) + 2), logits.isfinite()

    def loss(log_temperature: float) -> float:
        chances = (logits.double() / math.exp(log_temperature)).log_softmax(1)
        spread = chances.where(finite, 0).sum(1) / finite.sum(1)  # a class left out of this fold has −∞
        return float(-((1 - doubt) * chances.gather(1, labels[:, None]).squeeze(1) + doubt * spread).mean())

    low, high, ratio = math.log(1e-3), math.log(1e3), (math.sqrt(5) - 1) / 2
    inner, outer = high - ratio * (high - low), low + ratio * (high - low)
    at_inner, at_outer = loss(inner), loss(outer)
    for _ in range(48):  # to a relative width of 1e-9
        if at_inner < at_outer:
            high, outer, at_outer = outer, inner, at_inner
            inner = high - ratio * (high - low)
            at_inner = loss(inner)
        else:
            low, inner, at_inner = inner, outer, at_outer
            outer = low + ratio * (high - low)
            at_outer = loss(outer)
    return math.exp((low + high) / 2)


def rejection_threshold(scores: Tensor, rate: float) -> float | None:
    """The score below which a picture is unknown, so that a known one is rejected with probability at most `rate`.

    The ⌊rate (n + 1)⌋-th smallest of n held-out scores (conformal: the promise holds for any n); None when n is too
    small to promise anything, and nothing is rejected.
    """
    scores = scores[~scores.isnan()]
    position = math.floor(rate * (len(scores) + 1) + 1e-9)
    limit = float(scores.sort().values[position - 1]) if position >= 1 else None
    return limit if limit is not None and math.isfinite(limit) else None
