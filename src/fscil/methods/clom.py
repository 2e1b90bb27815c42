"""CLOM: margin-based learning in two spaces (Zou et al., "Margin-Based Few-Shot Class-Incremental Learning with
Class-Level Overfitting Mitigation", NeurIPS 2022; docs/methods/clom.md), on the LoRA baseline as the SMP paper
ported it.

Base task      LoRA set with two cosine heads: on the feature f with negative margins (which transfer), and on a mapped
               feature g = LeakyReLU(BatchNorm(f W)) with positive margins (which discriminate). The margin of a pair of
               classes grows with the similarity of their classifier rows.
Every task     prototypes in both spaces; the score of a class is the sum of its two logits. No training after the base.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.maths.margins import cosine, penalise
from fscil.methods.families.adapter_sets import PLAIN_STAGE
from fscil.methods.families.adapters import AdapterMethod, AdapterOptions, merged_means
from fscil.methods.training import Batch, train
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class CLOMOptions(AdapterOptions):
    """Hyper-parameters of CLOM; the margins on a ViT are our choice."""

    scale: Positive = 16.0  # T of both heads
    margin_average: float = -0.2  # a of the main head: margin of a pair of average similarity
    margin_upper: float = -0.5  # b: margin at similarity 1; CUB originally -0.25
    mapped_average: float = 0.1  # a of the mapped head; CUB originally 0.3
    mapped_upper: float = 0.2  # b; CUB originally 0.6
    mapped_weight: NotNegative = 1.0  # of the mapped head's loss; CUB originally 0.01
    mapped_dim: Natural = 512  # D: 512 in SMP's port; originally 256 CIFAR, 8192 CUB, 4096 mini
    class_relations: bool = True  # pairwise margins; False: m = a off the true class's cosine


class CLOM(AdapterMethod):
    """Prototypes in the feature space and in a mapped space, logits added."""

    Options = CLOMOptions
    running_mean: Tensor
    running_variance: Tensor
    mapped_prototypes: Tensor  # (seen, D) means of g

    def __init__(self, backbone: Backbone, options: CLOMOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        dim, width, place = backbone.dim, options.mapped_dim, self.place
        draws = torch.rand(dim, width, generator=runtime.generator("map"), dtype=torch.float64) * 2 - 1
        # torch's kaiming_uniform_ with a = √5 on a (d, D) tensor: its fan-in is D
        self.projection = nn.Parameter((draws / math.sqrt(width)).to(**place))
        self.gain, self.shift = nn.Parameter(torch.ones(width, **place)), nn.Parameter(torch.zeros(width, **place))
        self.register_buffer("running_mean", torch.zeros(width, **place))
        self.register_buffer("running_variance", torch.ones(width, **place))
        self.register_buffer("mapped_prototypes", torch.zeros(0, width, **place))

    def map(self, features: Tensor, training: bool = False) -> Tensor:
        """g = LeakyReLU_0.1(BatchNorm(f W)). A training batch of one image has no variance and uses the running one."""
        statistics = self.running_mean, self.running_variance, self.gain, self.shift
        normed = F.batch_norm(features @ self.projection, *statistics, training=training and len(features) > 1)
        return F.leaky_relu(normed, 0.1)

    def fit_base(self, task: Task) -> None:
        o, backbone, classes = self.options, self.backbone, len(task.classes)
        lora, rows = self.fresh_adapters(classes)
        draws = torch.rand(classes, o.mapped_dim, generator=self.runtime.generator("mapped head"), dtype=torch.float64)
        mapped_rows = nn.Parameter(((draws * 2 - 1) / math.sqrt(o.mapped_dim)).to(**self.place))
        margins, mapped_margins = (torch.zeros(classes, classes, **self.place) for _ in range(2))

        def begin_epoch(epoch: int) -> None:  # each head's own rows as they are now, detached
            margins.copy_(pair_margins(rows.detach(), o.margin_average, o.margin_upper))
            mapped_margins.copy_(pair_margins(mapped_rows.detach(), o.mapped_average, o.mapped_upper))

        def head_loss(x: Tensor, head: Tensor, pairwise: Tensor, average: float, labels: Tensor) -> Tensor:
            cosines = cosine(x, head)
            cosines = cosines + pairwise[labels] if o.class_relations else penalise(cosines, labels, average)
            return F.cross_entropy(o.scale * cosines, labels)

        def loss(batch: Batch) -> Tensor:
            features = backbone(batch.images, lora)[0]
            main = head_loss(features, rows, margins, o.margin_average, batch.labels)
            mapped = self.map(features, training=True)
            return main + o.mapped_weight * head_loss(
                mapped, mapped_rows, mapped_margins, o.mapped_average, batch.labels
            )

        trained = [lora.A, lora.B, rows, mapped_rows, self.projection, self.gain, self.shift]
        statistics = [self.running_mean, self.running_variance]
        train(
            PLAIN_STAGE, task.images, task.labels, trained, loss, o.schedule, self.runtime, begin_epoch,
            buffers=statistics,
        )  # fmt: skip
        for tensor in statistics:  # each process saw its own share of every batch
            tensor.copy_(self.runtime.sum_over_processes(tensor) / self.runtime.processes)
        self._add_mapped(*self.freeze(lora, task), self.class_counts[:0])

    def learn(self, task: Task) -> None:
        before = self.class_counts
        self._add_mapped(*self.take_in(task), before)

    @torch.no_grad()
    def _add_mapped(self, features: Tensor, labels: Tensor, before: Tensor) -> None:
        self.mapped_prototypes = merged_means(
            self.mapped_prototypes, before, self.map(features.to(self.wide)), labels, self.seen
        )

    @torch.no_grad()
    def logits_from(self, features: Tensor) -> Tensor:
        main, mapped = cosine(features, self.prototypes), cosine(self.map(features), self.mapped_prototypes)
        return self.options.scale * (main + mapped)

    def trainable_parameters(self) -> int:
        width = self.options.mapped_dim
        return super().trainable_parameters() + (self.backbone.dim + self.base_classes + 2) * width


def pair_margins(rows: Tensor, average: float, upper: float) -> Tensor:
    """margin(y, j) = a + (b − a) / (1 − r̄) · (R_yj − r̄), R the cosines of the rows and r̄ their mean off the
    diagonal.

    Added to the cosine of every class j ≠ y, so a positive margin makes the task harder; the diagonal is 0.
    """
    similarity = cosine(rows, rows)
    others = 1 - torch.eye(len(rows), device=rows.device, dtype=rows.dtype)
    mean = (similarity * others).sum() / others.sum().clamp(min=1)
    return (average + (upper - average) / (1 - mean) * (similarity - mean)) * others
