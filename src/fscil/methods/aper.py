"""APER: frozen and adapted features side by side, prototypes on both (Zhou et al., "Revisiting Class-Incremental
Learning with Pre-Trained Models: Generalizability and Adaptivity Are All You Need", IJCV 2024).

    feature(x) = [f_0(x); f_a(x)],  f_0 the pretrained backbone, f_a the one adapted on the base task; then any head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fscil.backbones.lora import empty_lora
from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.heads.base import Head
from fscil.heads.prototypes import PrototypeOptions, Prototypes
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec
from fscil.methods.families.adapters import AdapterOptions
from fscil.methods.represented import Represented
from fscil.runtime import Runtime
from fscil.strict import Positive


@dataclass(frozen=True, kw_only=True)
class APEROptions(AdapterOptions):
    """The library's LoRA baseline adapts the backbone, where the release has AdaptFormer, SSF or VPT."""

    scale: Positive = 1.0  # of the base loss, as the baseline's
    learnable_scale: bool = True


class APER(Represented):
    """[frozen; adapted] features under prototypes."""

    Options = APEROptions
    base_count: Tensor

    def __init__(self, backbone: Backbone, options: APEROptions, runtime: Runtime, head: Head | None = None):
        super().__init__(backbone, options, runtime, head)
        self.lora = empty_lora(backbone.depth, backbone.dim, **self.head.place)
        self.register_buffer("base_count", torch.zeros((), dtype=torch.int64))

    @classmethod
    def dim_of(cls, backbone: Backbone, options: Any) -> int:
        return 2 * backbone.dim

    @classmethod
    def adapter_plan(cls, options: APEROptions) -> AdapterPlan:
        o = options
        return AdapterPlan((AdapterSpec(0.0, o.scale, o.learnable_scale),), o.rank, o.lora_init, o.schedule)

    def represent(self, task: Task) -> None:
        self.lora = self.adapter_plan(self.options).train(self.backbone, task, self.runtime).lora.select(0)
        self.base_count = torch.tensor(len(task.classes))

    def own_head(self) -> Prototypes:
        return Prototypes(self.feature_dim, PrototypeOptions(), self.runtime)

    def feature_source(self) -> object:
        return self.lora

    def embed(self, images: Tensor) -> Tensor:
        return torch.cat([self.backbone(images), self.backbone(images, self.lora)[0]], 1)

    def trainable_parameters(self) -> int:
        """LoRA factors, the head of the base classes and its scale."""
        dim = self.backbone.dim
        return self.backbone.depth * 4 * dim * self.options.rank + int(self.base_count) * dim + 1
