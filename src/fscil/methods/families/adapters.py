"""What the methods share that train one K/V LoRA set on the base task, freeze it, and keep a mean feature per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fscil.backbones.lora import LoRA, empty_lora, initial_lora
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.maths.prototypes import class_means
from fscil.methods.base import Method
from fscil.methods.families.adapter_sets import initial_rows
from fscil.methods.training import Schedule
from fscil.runtime import Runtime
from fscil.strict import NotNegative, Share


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The base recipe of the comparators on a ViT: that of the SMP baseline, our choice."""

    rank: int = 10  # of the LoRA factors
    lora_init: Literal["sparse", "zeros"] = "sparse"  # of B
    epochs: int = 20
    batch_size: int = 48  # 24 on ImageNet-R and CUB200
    lr: float = 0.01
    momentum: Share = 0.9
    nesterov: bool = False  # the CNN originals use it
    weight_decay: NotNegative = 5e-4  # 5e-3 on ImageNet-R and CUB200

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            self.epochs, self.batch_size, self.lr, self.weight_decay, momentum=self.momentum, nesterov=self.nesterov
        )


class AdapterMethod(Method):
    """One frozen LoRA set after the base task, and a prototype (mean feature, plain images) for every class."""

    Options = AdapterOptions
    features_fixed = True
    prototypes: Tensor  # (seen, d) raw means
    base_count: Tensor

    def __init__(self, backbone: Backbone, options: Any, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        depth, dim = backbone.depth, backbone.dim
        self.place = runtime.place
        self.wide = self.place["dtype"]
        self.lora = empty_lora(depth, dim, **self.place)
        self.register_buffer("prototypes", torch.zeros(0, dim, **self.place))
        self.register_buffer("base_count", torch.zeros((), dtype=torch.int64))

    @property
    def base_classes(self) -> int:
        return int(self.base_count)

    def fresh_adapters(self, classes: int) -> tuple[LoRA, nn.Parameter]:
        """A LoRA set and the rows of a cosine head, at the values every method of the library starts from."""
        o, runtime = self.options, self.runtime
        lora = initial_lora(
            self.backbone.depth, self.backbone.dim, o.rank, 1, runtime.generator("lora"), o.lora_init, self.wide
        )
        return lora.to(runtime.device), nn.Parameter(initial_rows(classes, self.backbone.dim, runtime).to(self.wide))

    def freeze(self, lora: LoRA, task: Task) -> tuple[Tensor, Tensor]:
        """Ends the base training: keeps the adapters and describes the base classes with them."""
        self.lora = lora.select(0)
        self.base_count = torch.tensor(len(task.classes))
        return self.take_in(task)

    def take_in(self, task: Task) -> tuple[Tensor, Tensor]:
        """Adds a task's images to the prototypes of their classes; returns their features (n, d) and labels (n,)."""
        before = self.class_counts
        self.count_classes(task)
        features, labels = self.features(task.images), task.labels.to(self.runtime.device)
        self.prototypes = merged_means(self.prototypes, before, features, labels, self.seen)
        return features, labels

    def features(self, images: Pixels) -> Tensor:
        return self.extract(images, self.embed)

    def embed(self, images: Tensor) -> Tensor:
        return self.backbone(images, self.lora)[0]

    @property
    def plain_adapters(self) -> LoRA:
        return self.lora

    def trainable_parameters(self) -> int:
        """LoRA factors and the head of the base classes."""
        dim = self.backbone.dim
        return self.backbone.depth * 2 * 2 * dim * self.options.rank + self.base_classes * dim


def merged_means(means: Tensor, counts: Tensor, features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Class means (classes, d) after more images arrived; a class without new images keeps its row bit for bit.

    >>> merged_means(torch.tensor([[1.0]]), torch.tensor([3]), torch.tensor([[5.0], [7.0]]), torch.tensor([0, 1]), 2)
    tensor([[2.],
            [7.]])
    """
    gained = torch.bincount(labels, minlength=classes)
    total = gained.clone()
    total[: len(counts)] += counts
    old = torch.cat([means, means.new_zeros(classes - len(means), means.shape[1])])
    share = (gained / total.clamp(min=1)).to(old.dtype)[:, None]
    return old + (class_means(features, labels, classes).to(old.dtype) - old) * share
