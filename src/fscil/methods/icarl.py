"""iCaRL: incremental classifier and representation learning (Rebuffi et al., CVPR 2017; docs/methods/icarl.md).

Base task      the whole ViT and a linear head, cross-entropy; exemplars of every class by herding.
Few-shot task  the ViT and the grown head on the shots and all exemplars: cross-entropy over all classes seen, and
               distillation from the network before the task; then the memory is rebuilt.
Scores         nearest mean of exemplars, on unit features (or the linear head).

Stored images: this method keeps some, against the setting of the SMP paper; `stored_images` says how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.maths.distillation import distillation
from fscil.maths.margins import cosine
from fscil.maths.prototypes import class_means
from fscil.methods.families.exemplars import ExemplarMethod, ExemplarOptions, frozen_copy
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Batch, Schedule, train
from fscil.runtime import Runtime
from fscil.strict import NotNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class ICaRLOptions(ExemplarOptions):
    """Hyper-parameters of iCaRL (PILOT's for ViTs)."""

    epochs: int = 20
    batch_size: int = 128  # 32 on ImageNet-R
    lr: float = 1e-3
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    learn_epochs: int = 20  # of a few-shot task
    learn_lr: float = 1e-3
    learn_weight_decay: NotNegative = 2e-4
    milestones: tuple[int, ...] = (60, 120, 170)  # epochs at which the rate drops to a tenth; never reached in 20
    temperature: Positive = 2.0  # of the distillation
    distillation: NotNegative = 1.0  # its weight
    classifier: Literal["nearest_mean", "linear"] = "nearest_mean"  # which one is evaluated; both are learned


class ICaRL(ExemplarMethod):
    """Exemplars, distillation, nearest mean of exemplars."""

    Options = ICaRLOptions
    after_base = frozenset("learn_epochs learn_lr learn_weight_decay temperature distillation classifier".split())
    means: Tensor  # (seen, d) of exemplars, unit rows

    def __init__(self, backbone: Backbone, options: ICaRLOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.register_buffer("means", torch.zeros(0, backbone.dim, **self.place))

    def fit_base(self, task: Task) -> None:
        o = self.options
        self._train(task, "iCaRL base", o.epochs, o.lr, o.weight_decay)

    def learn(self, task: Task) -> None:
        o = self.options
        self._train(task, f"iCaRL task {int(self.tasks_seen)}", o.learn_epochs, o.learn_lr, o.learn_weight_decay)

    def _train(self, task: Task, stage: str, epochs: int, lr: float, weight_decay: float) -> None:
        o, known = self.options, self.seen
        teacher = frozen_copy(self.network) if known else None
        old_weight, old_bias = self.head_weight.detach(), self.head_bias.detach()
        images, labels = self.memory.joined(task.images, task.labels)
        self.count_classes(task)
        self.grow_head()

        def loss(batch: Batch) -> Tensor:
            logits = self.head(self.embed(batch.images))
            value = F.cross_entropy(logits, batch.labels)
            if teacher is not None and o.distillation:
                with torch.no_grad():
                    old_logits = F.linear(self.embed(batch.images, teacher), old_weight, old_bias)
                value = value + o.distillation * distillation(logits[:, :known], old_logits, o.temperature)
            return value

        schedule = Schedule(
            epochs, o.batch_size, lr, weight_decay, momentum=o.momentum, decay="step", milestones=o.milestones
        )
        trained = [*self.network.parameters(), self.head_weight, self.head_bias]
        value = train(stage, images, labels, trained, loss, schedule, self.runtime)
        self.means = F.normalize(class_means(*self.remember(images, labels, task.labels.unique()), self.seen), dim=1)
        self._diagnostics = {"loss": value, "training_images": len(images)}

    @classmethod
    def passes(cls, options: ICaRLOptions, sizes: Sizes) -> float:
        o, teacher = options, 1 if options.distillation else 0
        base = sizes.base * (o.epochs * TRAINING + 1)  # and herding
        later = sum(cls.training_images(o, sizes)) * (o.learn_epochs * (TRAINING + teacher) + 1)
        return base + later + sum(sizes.tests)

    def logits(self, images: Pixels) -> Tensor:
        if self.options.classifier == "linear":
            return self.extract(images, lambda batch: self.head(self.embed(batch)))
        return self.extract(images, lambda batch: cosine(self.embed(batch), self.means))
