"""TEEN: training-free prototype calibration (Wang et al., "Few-Shot Class-Incremental Learning via Training-Free
Prototype Calibration", NeurIPS 2023; docs/methods/teen.md).

Base task      LoRA set and cosine head at a fixed temperature (at 16 those of `single_m0`, which the shelf may hold),
               then base prototypes.
Few-shot task  new prototypes, pulled towards the base prototypes they resemble (Eq. 5-7); base rows stay; no training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.maths.margins import cosine
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec
from fscil.methods.families.adapters import AdapterMethod, AdapterOptions
from fscil.runtime import Runtime
from fscil.strict import NotNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class TEENOptions(AdapterOptions):
    """Hyper-parameters of TEEN."""

    scale: Positive = 16.0  # temperature of the base loss: 16 CIFAR, 32 CUB and mini
    learnable_scale: bool = False  # True, from scale 1: the baseline's adapters
    tau: NotNegative = 16.0  # sharpness of the weights over base classes
    alpha: Share = 0.5  # share of the base side: 0.5 CUB and ImageNet-R, 0.1 CIFAR


class TEEN(AdapterMethod):
    """Prototypes; those of new classes calibrated by similar base prototypes."""

    Options = TEENOptions
    rows: Tensor  # (seen, d) the classifier

    def __init__(self, backbone: Backbone, options: TEENOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.register_buffer("rows", torch.zeros(0, backbone.dim, **self.place))

    @classmethod
    def adapter_plan(cls, options: TEENOptions) -> AdapterPlan:
        o = options
        return AdapterPlan((AdapterSpec(0.0, o.scale, o.learnable_scale),), o.rank, o.lora_init, o.schedule)

    def fit_base(self, task: Task) -> None:
        streams = self.adapter_plan(self.options).train(self.backbone, task, self.runtime)
        self.freeze(streams.lora, task)
        self.rows = self.prototypes.clone()

    def learn(self, task: Task) -> None:
        self.take_in(task)
        base, new = self.prototypes.split([self.base_classes, self.seen - self.base_classes])
        self.rows = torch.cat([base, calibrate(new, base, self.options.tau, self.options.alpha)])

    def logits_from(self, features: Tensor) -> Tensor:
        return 16 * cosine(features, self.rows)  # the factor only shapes the softmax of the scores

    def trainable_parameters(self) -> int:
        return super().trainable_parameters() + int(self.options.learnable_scale)


def calibrate(new: Tensor, base: Tensor, tau: float, alpha: float) -> Tensor:
    """(1 − α) ĉ + α δ with δ the unit vector along Σ_j softmax_j(τ ⟨ĉ, b̂_j⟩) b̂_j: (n, d), (base, d) -> (n, d)."""
    new, base = F.normalize(new, dim=1), F.normalize(base, dim=1)
    shift = F.normalize(torch.softmax(tau * new @ base.T, 1) @ base, dim=1)
    return (1 - alpha) * new + alpha * shift
