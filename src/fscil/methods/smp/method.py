"""SMP: sculpting the margin penalty (the paper; methods.md 4). The baseline and every ablation are configurations of
this file.

Base task      two K/V LoRA sets trained side by side, set d with a cosine margin and set g without (Eq. 5-7);
               diagonal Fisher of each set's dense update (Eq. 8-9); merge, block by block (MIAM, Eq. 10-11);
               class prototypes and covariances on the merged, now frozen features (Eq. 12-13).
Few-shot task  new rows = prototypes of the shots; then the classifier is calibrated under the margin on real features
               of the new classes and Gaussian features of all others (MPCC, Eq. 14-18; `embeddings.py` draws them); or
               stays prototypes; or is the closed form of methods.md 13.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.errors import UserError
from fscil.heads.embeddings import KnownClasses, embedding_batches
from fscil.maths.discriminant import discriminant, pooled_covariance
from fscil.maths.gaussians import Roots, class_roots, covariance_roots
from fscil.maths.margins import cosine, cosine_schedule, margin_loss, rotation
from fscil.maths.merging import merge_factors, merge_weights
from fscil.maths.prototypes import class_means, combine_moments, nearest_rows
from fscil.methods.base import Method
from fscil.methods.families.adapter_sets import StreamPlan, Streams, StreamSpec, fisher_norms
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Schedule
from fscil.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class SMPOptions:
    """Hyper-parameters of SMP (methods.md 4.1) and its open choices (section 9, numbers in brackets)."""

    # base task
    adapters: Literal["two", "one"] = "two"  # two sets merged (MIAM), or a single set
    rank: int = 10
    scale: float = 16.0
    learnable_scale: bool = False  # the baseline's: learned from `scale` = 1 [9.17]
    margin: float = 0.2  # of set d (or of the only set)
    margin_g: float = 0.0  # of set g
    epochs: int = 20
    batch_size: int = 48
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    training: Literal["joint", "sequential"] = "joint"  # both sets in one pass or one after the other [9.3]
    lora_init: Literal["sparse", "zeros"] = "sparse"  # of B [9.4]
    merge: Literal["fisher", "average"] = "fisher"
    fisher: Literal["batch", "sample"] = "batch"  # squared batch-mean gradients, or the paper's per-sample form [9.6]
    fisher_head: Literal["own", "d"] = "own"  # head of set g's and d's loss in the Fisher pass [9.5]
    fisher_precision: Literal["auto", "fp32"] = "auto"  # of the passes; products and sums are always fp32 [9.27]
    # statistics
    prototype_views: Literal["test", "train"] = "test"  # transform of the images that prototypes average [9.13]
    rows: Literal["unit", "raw"] = "unit"  # norm of prototypes used as classifier rows [9.28]
    covariance: Literal["unbiased", "biased"] = "unbiased"  # divide by N − 1 or by N [9.9]
    covariance_eps: float = 1e-3  # added to the diagonal, times ten until Cholesky succeeds [9.9]
    covariance_form: Literal["auto", "full", "low_rank"] = "auto"  # the smaller exact square root, or the one named
    # few-shot tasks
    calibration: Literal["mpcc", "prototypes", "closed_form"] = "mpcc"
    calibration_epochs: int = 5  # [9.10]
    calibration_lr: float = 1e-3
    calibration_batch: int = 256
    calibration_scale: float = 16.0
    calibration_margin: float | None = None  # None: the margin of set d
    features_per_class: int = 256
    real_features: Literal["ceil", "exact"] = "ceil"  # ceil(256/K)·K real features per new class, or cut to 256 [9.11]
    views: int | None = None  # augmented passes per shot, made once for all epochs; None: fresh ones each epoch
    density_filter: bool = True  # keep the denser half of a double draw [9.12]
    second_centre: Literal["raw", "rescaled", "off"] = "raw"  # trained rows as further Gaussian centres [9.8]
    borrow_from: Literal["base", "all"] = "base"  # whose covariance a new class borrows [9.15]
    initial_classifier: Literal["prototypes", "trained"] = "prototypes"  # base rows at the first few-shot task [9.7]
    # closed form (methods.md 13)
    shrinkage: float = 0.3
    correction: float = 1.0
    closed_form_views: int = 0
    closed_form_features: Literal["raw", "unit"] = "raw"


class SMP(Method):
    """Margin-aware adapter merging and margin-penalty classifier calibration."""

    Options = SMPOptions
    features_fixed = True
    can_refine = True
    after_base = frozenset(
        "calibration_epochs calibration_lr calibration_batch calibration_scale calibration_margin features_per_class "
        "real_features views density_filter second_centre borrow_from initial_classifier shrinkage correction "
        "closed_form_views".split()
    )

    def __init__(self, backbone: Backbone, options: SMPOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        depth, dim = backbone.depth, backbone.dim
        wide = torch.float64 if runtime.dtype == torch.float64 else torch.float32
        place = dict(device=runtime.device, dtype=wide)
        self.lora = LoRA(
            torch.zeros(depth, 1, 2, 0, dim, **place), torch.zeros(depth, 1, 2, dim, 0, **place)
        ).requires_grad_(False)
        self.register_buffer("prototypes", torch.zeros(0, dim, **place))  # P, raw means (C, d)
        self.register_buffer("rows", torch.zeros(0, dim, **place))  # the classifier (C, d)
        self.register_buffer("trained_rows", torch.zeros(0, dim, **place))  # Clf^d of the base classes, raw
        none = torch.zeros(0, dtype=torch.int64, device=runtime.device)
        self.register_buffer("donor", none)  # class whose covariance each class uses
        self.register_buffer("pooled", None)  # within-class covariance, for the closed form (d, d)
        for part in ("packed", "basis", "spread", "floor"):
            self.register_buffer(f"roots_{part}", None)

    # ---- base task ---------------------------------------------------------------------------------------------------
    @classmethod
    def stream_plan(cls, options: SMPOptions) -> StreamPlan:
        o = options
        schedule = Schedule(o.epochs, o.batch_size, o.lr, o.weight_decay, momentum=o.momentum)
        g, d = (StreamSpec(margin, o.scale, o.learnable_scale) for margin in (o.margin_g, o.margin))
        return StreamPlan((d,) if o.adapters == "one" else (g, d), o.rank, o.lora_init, schedule)

    def fit_base(self, task: Task) -> None:
        joint = self.options.training == "joint"
        self.adopt(self.stream_plan(self.options).train(self.backbone, task, self.runtime, joint), task)

    def adopt(self, streams: Streams, task: Task) -> None:
        """Takes trained adapter sets (g, d or a single one), merges them, and computes the statistics of the base
        classes."""
        self._diagnostics = {}
        self.lora = self._merge(streams, task) if streams.lora.sets > 1 else streams.lora.select(0)
        self.trained_rows = streams.rows[-1].clone()
        self.count_classes(task)
        self._describe_base(task)

    def _merge(self, streams: Streams, task: Task) -> LoRA:
        """MIAM: Fisher norms -> merging weights -> one factored set of rank 2r (Eq. 8-11)."""
        o, runtime = self.options, self.runtime
        if o.merge == "average":
            norms = torch.ones(streams.lora.A.shape[:3], device=runtime.device, dtype=torch.float64)
        else:
            backbone = self.backbone.in_float32() if o.fisher_precision == "fp32" else self.backbone
            head = 1 if o.fisher_head == "d" else None
            norms = fisher_norms(backbone, streams, task, o.batch_size, o.fisher, runtime, head)
        weights = merge_weights(norms)
        self._diagnostics |= {
            "fisher_norms": norms.tolist(),
            "merge_weights": weights.tolist(),
            "merge_axes": ["block", "set (g, d)", "key, value"],
        }
        A, B = merge_factors(streams.lora.A, streams.lora.B, weights)
        return LoRA(A, B).requires_grad_(False)

    def _describe_base(self, task: Task) -> None:
        """Prototypes, covariances and the session-0 classifier (4.2, steps 5-6)."""
        o = self.options
        labels = task.labels.to(self.runtime.device)
        features = self.features(task.images)
        self.prototypes = class_means(self._prototype_features(task, features), labels, self.seen)
        self.rows = self._as_rows(self.prototypes)
        self.donor = torch.arange(self.seen, device=labels.device)
        if o.calibration == "mpcc":
            roots, eps = class_roots(
                features, labels, self.seen, o.covariance_eps, o.covariance == "unbiased", o.covariance_form
            )
            self._store_roots(roots)
            self.roots_floor = torch.tensor([eps**0.5], dtype=torch.float64)  # √ε, in either form of the roots
            norms = [float(t.norm(dim=1).mean()) for t in (self.prototypes, self.trained_rows)]
            self._diagnostics |= {"covariance_eps": eps, "prototype_norm": norms[0], "trained_row_norm": norms[1]}
        if o.calibration == "closed_form":
            self.pooled = pooled_covariance(
                self._closed_form_space(features), labels, self._closed_form_means(features, labels)
            )
            self.prototypes = self._closed_form_means(features, labels)

    # ---- features and scores -----------------------------------------------------------------------------------------
    def features(self, images: Pixels) -> Tensor:
        return self.extract(images, self.embed)

    def embed(self, images: Tensor) -> Tensor:
        """Features (b, d) of image tensors under the merged adapters."""
        return self.backbone(images, self.lora)[0]

    def logits_from(self, features: Tensor) -> Tensor:
        o = self.options
        if o.calibration == "closed_form":
            weights, biases = discriminant(self.prototypes, self.class_counts, self.pooled, o.shrinkage, o.correction)
            return self._closed_form_space(features) @ weights.T + biases
        return o.calibration_scale * cosine(features, self.rows)

    # ---- few-shot tasks ----------------------------------------------------------------------------------------------
    def learn(self, task: Task) -> None:
        """Adds the classes of a task; images of classes already known refine their prototypes (a running mean by
        count)."""
        known = self.seen
        before = torch.cat([self.class_counts, self.class_counts.new_zeros(max(0, int(task.labels.max()) + 1 - known))])
        self.count_classes(task)
        labels = task.labels.to(self.runtime.device)
        features = self.features(task.images)
        means = self._new_means(task, features, labels)
        old = torch.cat([self.prototypes, torch.zeros_like(means[known:])])
        if self.options.calibration == "mpcc":
            self._refine_covariances(features, labels, before)
        gained = (self.class_counts - before).to(old.dtype)[:, None]
        self.prototypes = old + (means - old) * gained / self.class_counts.to(old.dtype)[:, None]
        touched = torch.unique(labels)
        if known == len(self.trained_rows) and self.options.initial_classifier == "trained":
            self.rows = self.trained_rows.clone()  # Clf_pre at the first few-shot task [9.7]
        rows = torch.cat([self.rows, torch.zeros_like(means[known:])])
        rows[touched] = self._as_rows(self.prototypes[touched])
        self.rows = rows
        self._borrow(known)
        if self.options.calibration == "mpcc":
            self._calibrate(task, labels, touched)

    def _new_means(self, task: Task, features: Tensor, labels: Tensor) -> Tensor:
        """Mean feature of each class of the task; zeros for classes without images in it: (seen, d)."""
        o = self.options
        if o.calibration != "closed_form":
            return class_means(self._prototype_features(task, features), labels, self.seen)
        features = self._closed_form_space(features)
        if o.closed_form_views:  # the plain feature and the mean of a few augmented views, half and half
            views = self._view_features(task, torch.arange(o.closed_form_views)).view(
                o.closed_form_views, len(labels), -1
            )
            features = 0.5 * features + 0.5 * self._closed_form_space(views).mean(0)
        return class_means(features, labels, self.seen)

    def _borrow(self, known: int) -> None:
        """Each new class uses the covariance of the base class nearest in cosine (Eq. 15); base classes keep their
        own."""
        base = len(self.trained_rows)
        if base == 0:  # every base class was forgotten; only calibrations that borrow nothing come here
            self.donor = self.donor.new_zeros(self.seen)
            return
        choice = nearest_rows(self.prototypes[base:], self.prototypes[:base])
        if self.options.borrow_from == "all":  # from any class that came before, never from itself
            pairs = ((self.prototypes[c : c + 1], self.prototypes[: min(c, known)]) for c in range(base, self.seen))
            choice = torch.cat([choice[:0], *(nearest_rows(own, earlier) for own, earlier in pairs)])
        self.donor = torch.cat([torch.arange(base, device=choice.device), choice])
        while bool((self.donor >= base).any()):  # a donor that itself borrows passes on what it holds
            self.donor = self.donor[self.donor]

    def _refine_covariances(self, features: Tensor, labels: Tensor, before: Tensor) -> None:
        """More images of a base class also refine its covariance, by Chan's formula on counts `before` them."""
        unbiased, eps = self.options.covariance == "unbiased", float(self.roots_floor) ** 2
        for label in torch.unique(labels[labels < len(self.trained_rows)]):
            own, count = features[labels == label], int(before[label])
            centred = own - own.mean(0)
            eye = torch.eye(own.shape[1], device=own.device, dtype=own.dtype)
            scatter = (self.roots.covariance(label[None])[0] - eps * eye) * max(1, count - unbiased)
            total, _, scatter = combine_moments(
                count, self.prototypes[label], scatter, len(own), own.mean(0), centred.T @ centred
            )
            self._store_roots(covariance_roots(self.roots, int(label), scatter / max(1, total - unbiased), eps))

    def forget(self, label: int) -> None:
        """Removes a class; later labels move down by one, and classes that borrowed its covariance choose again."""
        base = len(self.trained_rows)
        if self.options.calibration == "mpcc" and label < base == 1:
            raise UserError("the last base class cannot be forgotten: every class taught since borrows its covariance.")
        keep = torch.arange(self.seen, device=self.rows.device) != label
        self.class_counts, self.prototypes, self.rows = (
            tensor[keep] for tensor in (self.class_counts, self.prototypes, self.rows)
        )
        if label < base:
            self.trained_rows = self.trained_rows[keep[:base]]
            for part in ("packed", "basis", "spread"):
                if (tensor := getattr(self, f"roots_{part}")) is not None:
                    setattr(self, f"roots_{part}", tensor[keep[:base]])
        self._borrow(self.seen)

    def _calibrate(self, task: Task, labels: Tensor, current: Tensor) -> None:
        """MPCC: trains all classifier rows under the margin on real and Gaussian features (Eq. 16-18; 4.5)."""
        o, session = self.options, int(self.tasks_seen) - 1
        margin = o.margin if o.calibration_margin is None else o.calibration_margin
        before = self.rows.clone()
        rows = nn.Parameter(self.rows.clone())
        optimiser = torch.optim.SGD([rows], lr=o.calibration_lr, momentum=o.momentum, weight_decay=o.weight_decay)
        cached = self._real_features(task, labels, 0) if o.views is not None else None
        known = self.known_classes(current)
        for epoch in self.runtime.track(range(o.calibration_epochs), f"calibration of task {session}"):
            optimiser.param_groups[0]["lr"] = cosine_schedule(o.calibration_lr, epoch, o.calibration_epochs)
            real = cached if cached is not None else self._real_features(task, labels, epoch)
            for x, y in embedding_batches(known, real, o, self.runtime, session, epoch):
                loss = margin_loss(x, rows, y, o.calibration_scale, margin)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
        self.rows = rows.detach()
        self._diagnostics = {"row_rotation_degrees": float(rotation(before, self.rows).mean())}

    def known_classes(self, current: Tensor) -> KnownClasses:
        """What Gaussian features are drawn from, while real ones stand for the classes `current`."""
        return KnownClasses(self.prototypes, self.trained_rows, self.donor, self.roots, current)

    def _real_features(self, task: Task, labels: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Augmented features of the shots: ceil(256/K) passes of a class with K images, pass by pass (9.11)."""
        o = self.options
        counts = torch.bincount(labels, minlength=self.seen)[labels].cpu()
        wanted = torch.ceil(o.features_per_class / counts).long()  # passes of each image
        passes = wanted if o.views is None else wanted.clamp(max=o.views)
        number, position = (
            ((torch.arange(int(passes.max()))[:, None] < passes).nonzero().T) if len(passes) else (passes, passes)
        )
        features, targets = (
            self._view_features(task, number + 1000 * epoch, position),
            labels[position.to(labels.device)],
        )
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

    def _view_features(self, task: Task, numbers: Tensor, positions: Tensor | None = None) -> Tensor:
        """Features of augmented views; a view's randomness is keyed by the task, the view's number and the image."""
        if positions is None:  # every view of every image, view by view
            numbers, positions = (
                numbers.repeat_interleave(len(task.labels)),
                torch.arange(len(task.labels)).repeat(len(numbers)),
            )
        keys = view_key(int(self.tasks_seen) - 1, numbers)
        size = self.runtime.batch_size_eval
        with torch.no_grad():
            parts = [
                self.embed(task.images.augmented(p, k))
                for p, k in zip(positions.split(size), keys.split(size), strict=True)
            ]
        return torch.cat(parts)

    # ---- small parts -------------------------------------------------------------------------------------------------
    def _as_rows(self, prototypes: Tensor) -> Tensor:
        return F.normalize(prototypes, dim=1) if self.options.rows == "unit" else prototypes.clone()

    def _prototype_features(self, task: Task, plain: Tensor) -> Tensor:
        if self.options.prototype_views == "test":
            return plain
        return self._view_features(task, torch.tensor([999]))

    def _closed_form_space(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1) if self.options.closed_form_features == "unit" else features

    def _closed_form_means(self, features: Tensor, labels: Tensor) -> Tensor:
        return class_means(self._closed_form_space(features), labels, self.seen)

    @property
    def roots(self) -> Roots:
        parts = {name: getattr(self, f"roots_{name}") for name in ("packed", "basis", "spread", "floor")}
        return Roots.from_tensors({name: tensor for name, tensor in parts.items() if tensor is not None})

    def _store_roots(self, roots: Roots) -> None:
        for name, tensor in roots.tensors().items():
            setattr(self, f"roots_{name}", tensor)

    @classmethod
    def passes(cls, options: SMPOptions, sizes: Sizes) -> float:
        o, sets = options, len(cls.stream_plan(options).specs)
        trained = o.epochs + (
            1 if sets > 1 and o.merge == "fisher" else 0
        )  # a Fisher pass costs what a training pass does
        total = sizes.base * sets * trained * TRAINING + sum(sizes.images) + sizes.tests[-1]
        for images, classes in zip(sizes.later, sizes.classes[1:], strict=True):
            if o.calibration == "mpcc":  # given views are made once, else anew each epoch
                fresh = math.ceil(o.features_per_class * classes / images)
                total += images * (fresh * o.calibration_epochs if o.views is None else min(o.views, fresh))
            elif o.calibration == "closed_form":
                total += images * o.closed_form_views
        return total

    def trainable_parameters(self) -> int:
        o, sets = self.options, 2 if self.options.adapters == "two" else 1
        classes = len(self.trained_rows)
        lora = self.backbone.depth * 2 * 2 * self.backbone.dim * o.rank
        return sets * (lora + classes * self.backbone.dim + int(o.learnable_scale))


def view_key(session: int, number: Tensor | int) -> Tensor | int:
    """Augmentation key of a view: distinct from every training epoch and from every other task's views."""
    return 1_000_000 * session + number + 1
