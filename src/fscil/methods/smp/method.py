"""SMP: sculpting the margin penalty (the paper; docs/methods/smp.md). The baseline and every ablation are
configurations of this file.

Base task      two K/V LoRA sets trained side by side, set d with a cosine margin and set g without (Eq. 5-7);
               diagonal Fisher of each set's dense update (Eq. 8-9); merge, block by block (MIAM, Eq. 10-11);
               class prototypes and covariances on the merged, now frozen features (Eq. 12-13).
Few-shot task  new rows = prototypes of the shots; then the classifier is calibrated under the margin on real features
               of the new classes and Gaussian features of all others (MPCC, Eq. 14-18: `heads/mpcc.py`); or stays
               prototypes; or is the closed form (`heads/closed_form.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fscil.backbones.lora import LoRA, empty_lora
from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.heads.base import Head
from fscil.heads.closed_form import ClosedForm, ClosedFormOptions
from fscil.heads.mpcc import MPCC, MPCCOptions
from fscil.heads.prototypes import PrototypeOptions, Prototypes
from fscil.maths.merging import merge_factors, merge_weights
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSets, AdapterSpec, fisher_norms
from fscil.methods.represented import Represented
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Schedule
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Positive, Share, Whole, require


@dataclass(frozen=True, kw_only=True)
class SMPOptions:
    """Hyper-parameters of SMP. Where the paper leaves a choice open, the default is the released code's."""

    # base task
    adapters: Literal["two", "one"] = "two"  # two sets merged (MIAM), or a single set
    rank: int = 10
    scale: Positive = 16.0
    learnable_scale: bool = False  # the baseline's: learned from `scale` = 1
    margin: float = 0.2  # of set d (or of the only set)
    margin_g: float = 0.0  # of set g
    epochs: int = 20
    batch_size: int = 48
    lr: float = 0.01
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    training: Literal["joint", "sequential"] = "joint"  # both sets in one pass or one after the other
    lora_init: Literal["sparse", "zeros"] = "sparse"  # of B
    merge: Literal["fisher", "average"] = "fisher"
    fisher: Literal["batch", "sample"] = "batch"  # squared batch-mean gradients, or the paper's per-sample form
    fisher_head: Literal["own", "d"] = "own"  # head of set g's and d's loss in the Fisher pass
    fisher_precision: Literal["auto", "fp32"] = "auto"  # of the passes; products and sums are always fp32
    # statistics
    prototype_views: Literal["test", "train"] = "test"  # transform of the images that prototypes average
    rows: Literal["unit", "raw"] = "unit"  # norm of prototypes used as classifier rows
    covariance: Literal["unbiased", "biased"] = "unbiased"  # divide by N − 1 or by N
    covariance_eps: NotNegative = 1e-3  # added to the diagonal, times ten until Cholesky succeeds
    covariance_form: Literal["auto", "full", "low_rank"] = "auto"  # the smaller exact square root, or the one named
    # few-shot tasks
    calibration: Literal["mpcc", "prototypes", "closed_form"] = "mpcc"
    calibration_epochs: int = 5
    calibration_lr: float = 1e-3
    calibration_batch: Natural = 256
    calibration_scale: Positive = 16.0
    calibration_margin: float | None = None  # None: the margin of set d
    features_per_class: Natural = 256
    real_features: Literal["ceil", "exact"] = "ceil"  # ceil(256/K)·K real features per new class, or cut to 256
    views: int | None = None  # augmented passes per shot, made once for all epochs; None: fresh ones each epoch
    density_filter: bool = True  # keep the denser half of a double draw
    second_centre: Literal["raw", "rescaled", "off"] = "raw"  # trained rows as further Gaussian centres
    borrow_from: Literal["base", "all"] = "base"  # whose covariance a new class borrows
    initial_classifier: Literal["prototypes", "trained"] = "prototypes"  # base rows at the first few-shot task
    # closed form (heads/closed_form.py)
    shrinkage: Share = 0.3
    correction: NotNegative = 1.0
    closed_form_views: Whole = 0
    closed_form_features: Literal["raw", "unit"] = "raw"

    def __post_init__(self) -> None:
        require(self.views is None or self.views > 0, "views", self.views, "at least 1, or null for fresh ones")


class SMP(Represented):
    """Margin-aware adapter merging and margin-penalty classifier calibration."""

    Options = SMPOptions
    after_base = frozenset(
        "calibration_epochs calibration_lr calibration_batch calibration_scale calibration_margin features_per_class "
        "real_features views density_filter second_centre borrow_from initial_classifier shrinkage correction "
        "closed_form_views".split()
    )
    trained_rows: Tensor

    def __init__(self, backbone: Backbone, options: SMPOptions, runtime: Runtime, head: Head | None = None):
        super().__init__(backbone, options, runtime, head)
        self.lora = empty_lora(backbone.depth, backbone.dim, **self.head.place)
        rows = torch.zeros(0, backbone.dim, **self.head.place)
        self.register_buffer("trained_rows", rows)  # Clf^d of the base classes, raw

    # ---- base task ---------------------------------------------------------------------------------------------------
    @classmethod
    def adapter_plan(cls, options: SMPOptions) -> AdapterPlan:
        o = options
        schedule = Schedule(o.epochs, o.batch_size, o.lr, o.weight_decay, momentum=o.momentum)
        g, d = (AdapterSpec(margin, o.scale, o.learnable_scale) for margin in (o.margin_g, o.margin))
        return AdapterPlan((d,) if o.adapters == "one" else (g, d), o.rank, o.lora_init, schedule)

    def represent(self, task: Task) -> None:
        joint = self.options.training == "joint"
        self._take_over(self.adapter_plan(self.options).train(self.backbone, task, self.runtime, joint), task)

    def adopt(self, streams: AdapterSets, task: Task) -> None:
        """The base task with adapter sets that are trained already: g and d, or a single one."""
        self._diagnostics = {}
        self._take_over(streams, task)
        self.describe(task)

    def _take_over(self, streams: AdapterSets, task: Task) -> None:
        self.lora = self._merge(streams, task) if streams.lora.sets > 1 else streams.lora.select(0)
        self.trained_rows = streams.rows[-1].clone()

    def _merge(self, streams: AdapterSets, task: Task) -> LoRA:
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

    # ---- features and head -------------------------------------------------------------------------------------------
    def embed(self, images: Tensor) -> Tensor:
        """Features (b, d) of image tensors under the merged adapters."""
        return self.backbone(images, self.lora)[0]

    @property
    def plain_adapters(self) -> LoRA:
        return self.lora

    def feature_source(self) -> object:
        return self.lora if self.lora.rank else None  # all adapters of rank zero are alike

    @property
    def base_rows(self) -> Tensor:
        return self.trained_rows

    def own_head(self) -> Head:
        """MPCC, or what `calibration` names, with the options that are written down for it here."""
        o, dim = self.options, self.feature_dim
        if o.calibration == "closed_form":
            closed = ClosedFormOptions(
                shrinkage=o.shrinkage,
                correction=o.correction,
                views=o.closed_form_views,
                features=o.closed_form_features,
            )
            return ClosedForm(dim, closed, self.runtime)
        shared = dict(scale=o.calibration_scale, rows=o.rows, prototype_views=o.prototype_views)
        if o.calibration == "prototypes":
            return Prototypes(dim, PrototypeOptions(**shared), self.runtime)
        same = (
            "momentum weight_decay features_per_class real_features views density_filter second_centre borrow_from "
            "initial_classifier covariance covariance_eps covariance_form"
        )
        mpcc = MPCCOptions(
            margin=o.margin if o.calibration_margin is None else o.calibration_margin,
            epochs=o.calibration_epochs,
            lr=o.calibration_lr,
            batch_size=o.calibration_batch,
            **shared,
            **{name: getattr(o, name) for name in same.split()},
        )
        return MPCC(dim, mpcc, self.runtime)

    def forget(self, label: int) -> None:
        super().forget(label)
        if label < (base := len(self.trained_rows)):
            self.trained_rows = self.trained_rows[torch.arange(base, device=self.trained_rows.device) != label]

    @classmethod
    def passes(cls, options: SMPOptions, sizes: Sizes) -> float:
        o, sets = options, len(cls.adapter_plan(options).specs)
        trained = o.epochs + (sets > 1 and o.merge == "fisher")  # a Fisher pass costs what a training pass does
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
