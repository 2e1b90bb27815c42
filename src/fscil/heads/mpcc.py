"""MPCC: margin-penalty classifier calibration (the paper's Eq. 14-18; docs/heads/mpcc.md), SMP's head.

Base task      prototypes, and the covariance of every base class (Eq. 13).
Few-shot task  new rows = prototypes of the shots; each new class borrows the covariance of the base class nearest to
               it (Eq. 15); then all rows are trained under the margin on real features of the new classes and Gaussian
               features of all others (`embeddings.py` draws them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fscil.errors import UserError
from fscil.heads.base import Lesson
from fscil.heads.descent import Descent
from fscil.heads.embeddings import KnownClasses, embedding_batches
from fscil.heads.prototypes import PrototypeOptions, Prototypes
from fscil.maths.gaussians import Roots, class_roots, covariance_roots
from fscil.maths.margins import cosine_schedule, margin_loss, rotation
from fscil.maths.prototypes import combine_moments, nearest_rows
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Share, require

ROOT_PARTS = ("packed", "basis", "spread", "floor")


@dataclass(frozen=True, kw_only=True)
class MPCCOptions(PrototypeOptions):
    """Hyper-parameters of the calibration. Where the paper leaves a choice open, the default is the released code's."""

    margin: float = 0.2
    epochs: int = 5
    lr: float = 1e-3
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    batch_size: int = 256
    features_per_class: Natural = 256
    real_features: Literal["ceil", "exact"] = "ceil"  # ceil(256/K)·K real features per new class, or cut to 256
    views: int | None = None  # augmented passes per shot, made once for all epochs; None: fresh ones each epoch
    density_filter: bool = True  # keep the denser half of a double draw
    second_centre: Literal["raw", "rescaled", "off"] = "raw"  # trained rows as further Gaussian centres
    borrow_from: Literal["base", "all"] = "base"  # whose covariance a new class borrows
    initial_classifier: Literal["prototypes", "trained"] = "prototypes"  # base rows at the first few-shot task
    covariance: Literal["unbiased", "biased"] = "unbiased"  # divide by N − 1 or by N
    covariance_eps: NotNegative = 1e-3  # added to the diagonal, times ten until Cholesky succeeds
    covariance_form: Literal["auto", "full", "low_rank"] = "auto"  # the smaller exact square root, or the one named

    def __post_init__(self) -> None:
        require(self.views is None or self.views > 0, "views", self.views, "at least 1, or null for fresh ones")


class MPCC(Prototypes):
    """Prototypes, then calibrated under a margin whenever classes arrive."""

    Options = MPCCOptions
    after_base = Prototypes.after_base | frozenset(
        "margin epochs lr momentum weight_decay batch_size features_per_class real_features views density_filter "
        "second_centre borrow_from initial_classifier".split()
    )
    exact = False  # rows are trained in the company of the classes known then
    donor: Tensor
    roots_floor: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        none = torch.zeros(0, dtype=torch.int64, device=runtime.device)
        self.register_buffer("donor", none)  # class whose covariance each class uses
        for part in ROOT_PARTS:
            self.register_buffer(f"roots_{part}", None)

    def describe(self, lesson: Lesson) -> None:
        super().describe(lesson)
        o = self.options
        self.donor = torch.arange(self.seen, device=self.counts.device)
        roots, eps = class_roots(
            lesson.features, lesson.labels, self.seen, o.covariance_eps, o.covariance == "unbiased", o.covariance_form
        )
        self._store(roots)
        self.roots_floor = torch.tensor([eps**0.5], dtype=torch.float64)  # √ε, in either form of the roots
        self.diagnostics = {"covariance_eps": eps, "prototype_norm": float(self.prototypes.norm(dim=1).mean())}
        if lesson.trained_rows is not None:
            self.diagnostics["trained_row_norm"] = float(lesson.trained_rows.norm(dim=1).mean())

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        known, trained = len(self.rows), lesson.trained_rows
        self._refine_covariances(lesson, before)
        if trained is not None and known == len(trained) and self.options.initial_classifier == "trained":
            self.rows = trained.clone()  # Clf_pre at the first few-shot task
        super().learn(lesson, before)
        self._borrow(known)
        self._calibrate(lesson)

    def drop(self, label: int, keep: Tensor) -> None:
        """Classes that borrowed the covariance of a forgotten one choose again."""
        base = len(self.roots)
        if label < base == 1:
            raise UserError("the last base class cannot be forgotten: every class taught since borrows its covariance.")
        super().drop(label, keep)
        if label < base:
            for part in ("packed", "basis", "spread"):
                if (tensor := getattr(self, f"roots_{part}")) is not None:
                    setattr(self, f"roots_{part}", tensor[keep[:base]])
        self._borrow(len(self.prototypes))

    @classmethod
    def views_per_shot(cls, options: Any, shots: int) -> int:
        fresh = math.ceil(options.features_per_class / shots) * options.epochs
        return int(options.views or fresh)

    # ---- covariances -------------------------------------------------------------------------------------------------
    @property
    def roots(self) -> Roots:
        """Square roots of the base classes' covariances."""
        parts = {name: getattr(self, f"roots_{name}") for name in ROOT_PARTS}
        return Roots.from_tensors({name: tensor for name, tensor in parts.items() if tensor is not None})

    def _store(self, roots: Roots) -> None:
        for name, tensor in roots.tensors().items():
            setattr(self, f"roots_{name}", tensor)

    def _refine_covariances(self, lesson: Lesson, before: Tensor) -> None:
        """More images of a base class also refine its covariance, by Chan's formula on counts `before` them."""
        unbiased, eps = self.options.covariance == "unbiased", float(self.roots_floor) ** 2
        for label in torch.unique(lesson.labels[lesson.labels < len(self.roots)]):
            own, count = lesson.features[lesson.labels == label], int(before[label])
            centred = own - own.mean(0)
            eye = torch.eye(own.shape[1], device=own.device, dtype=own.dtype)
            scatter = (self.roots.covariance(label[None])[0] - eps * eye) * max(1, count - unbiased)
            total, _, scatter = combine_moments(
                count, self.prototypes[label], scatter, len(own), own.mean(0), centred.T @ centred
            )
            self._store(covariance_roots(self.roots, int(label), scatter / max(1, total - unbiased), eps))

    def _borrow(self, known: int) -> None:
        """Each new class uses the covariance of the base class nearest in cosine (Eq. 15); base classes keep their
        own."""
        base, seen = len(self.roots), len(self.prototypes)
        choice = nearest_rows(self.prototypes[base:], self.prototypes[:base])
        if self.options.borrow_from == "all":  # from any class that came before, never from itself
            pairs = ((self.prototypes[c : c + 1], self.prototypes[: min(c, known)]) for c in range(base, seen))
            choice = torch.cat([choice[:0], *(nearest_rows(own, earlier) for own, earlier in pairs)])
        self.donor = torch.cat([torch.arange(base, device=choice.device), choice])
        while bool((self.donor >= base).any()):  # a donor that itself borrows passes on what it holds
            self.donor = self.donor[self.donor]

    # ---- calibration -------------------------------------------------------------------------------------------------
    def _calibrate(self, lesson: Lesson) -> None:
        """Trains all classifier rows under the margin on real and Gaussian features (Eq. 16-18)."""
        o = self.options
        before = self.rows.clone()
        rows = nn.Parameter(self.rows.clone())
        descent = Descent(
            rows, lambda x, y: margin_loss(x, rows, y, o.scale, o.margin), self.runtime, o.momentum, o.weight_decay
        )
        cached = self._real_features(lesson, 0) if o.views is not None else None
        known = self.known_classes(torch.unique(lesson.labels), lesson.trained_rows)
        for epoch in self.runtime.track(range(o.epochs), f"calibration of task {lesson.number}"):
            descent.rate(cosine_schedule(o.lr, epoch, o.epochs))
            real = cached if cached is not None else self._real_features(lesson, epoch)
            for x, y in embedding_batches(known, real, o, self.runtime, lesson.number, epoch):
                descent.step(x, y)
        self.rows = rows.detach()
        self.diagnostics = {"row_rotation_degrees": float(rotation(before, self.rows).mean())}

    def known_classes(self, current: Tensor, trained_rows: Tensor | None) -> KnownClasses:
        """What Gaussian features are drawn from, while real ones stand for the classes `current`."""
        trained_rows = self.prototypes[:0] if trained_rows is None else trained_rows
        return KnownClasses(self.prototypes, trained_rows, self.donor, self.roots, current)

    def _real_features(self, lesson: Lesson, epoch: int) -> tuple[Tensor, Tensor]:
        """Augmented features of the shots: ceil(256/K) passes of a class with K images, pass by pass (9.11)."""
        o, labels = self.options, lesson.labels
        counts = lesson.counts[labels].cpu()
        wanted = torch.ceil(o.features_per_class / counts).long()  # passes of each image
        passes = wanted if o.views is None else wanted.clamp(max=o.views)
        number, position = (
            ((torch.arange(int(passes.max()))[:, None] < passes).nonzero().T) if len(passes) else (passes, passes)
        )
        features = lesson.views(number + 1000 * epoch, position)
        targets = labels[position.to(labels.device)]
        if o.views is not None:  # repeat the cached views until each class has its share again
            repeat = torch.ceil(wanted / passes).long()[position].to(labels.device)
            features, targets = features.repeat_interleave(repeat, 0), targets.repeat_interleave(repeat, 0)
        if o.real_features == "exact" or o.views is not None:
            rank = torch.zeros_like(targets)
            for label in torch.unique(targets):
                mine = targets == label
                rank[mine] = torch.arange(int(mine.sum()), device=rank.device)
            limit = o.features_per_class if o.real_features == "exact" else int((wanted * counts).max())
            features, targets = features[rank < limit], targets[rank < limit]
        return features, targets
