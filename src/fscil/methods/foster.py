"""FOSTER: feature boosting and compression (Wang et al., "FOSTER: Feature Boosting and Compression for
Class-Incremental Learning", ECCV 2022; docs/methods/foster.md).

Base task      the whole ViT and a linear head, cross-entropy; exemplars by herding.
Few-shot task  boosting: a second ViT beside the first, which is frozen, and a joint head on both features; then
               compression: one ViT again, the student, distilled from the pair, its teacher, with balanced targets.
               The student goes into the next task.
Scores         the teacher's joint head, as the published code evaluates a task (or the student's head).

Stored images: this method keeps some, against the setting of the SMP paper; `stored_images` says how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.maths.distillation import distillation, effective_number_weights
from fscil.methods.families.exemplars import ExemplarMethod, ExemplarOptions, fresh_linear, frozen_copy
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Batch, Schedule, train
from fscil.runtime import Runtime
from fscil.strict import Between, NotNegative, Positive, Share

Decay = Annotated[float, Between(0, 1 - 1e-9)]  # 1 would weigh classes by 0 / 0
PRACTICALLY_INFINITE = 10**6  # images: 1 − β^n is 1 to the last bit


@dataclass(frozen=True, kw_only=True)
class FOSTEROptions(ExemplarOptions):
    """Hyper-parameters of FOSTER (PILOT's for ViTs)."""

    epochs: int = 20
    batch_size: int = 32
    lr: float = 1e-3
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    boosting_epochs: int = 20  # of a few-shot task, two ViTs; lr and weight decay as in the base task
    compression_epochs: int = 20  # two ViTs teach one; same lr, no weight decay
    temperature: Positive = 2.0  # of both distillations
    distillation: NotNegative = 1.0  # weight of the one in boosting (`lambda_okd`)
    boosting_beta: Decay = 0.96  # β₁ of the class weights in boosting
    compression_beta: Decay = 0.97  # β₂ of those in compression
    # What the class weights count: what the published code takes for images (the budget for every old class, and for
    # new ones a sum of indices, so large that it might as well be infinite), or the images there are.
    weight_counts: Literal["published", "images"] = "published"
    # Who answers after a task and herds its exemplars: the published code hands over to the student only when the next
    # task begins.
    evaluated: Literal["teacher", "student"] = "teacher"

    earlier: ClassVar[dict[str, Any]] = {"evaluated": "student"}  # what runs did before the option was there


class Teacher(nn.Module):
    """The pair of a few-shot task: the ViT before it, the one boosted beside it, and the head on both features."""

    def __init__(self, first: Backbone, second: Backbone, weight: nn.Parameter, bias: nn.Parameter):
        super().__init__()
        self.first, self.second, self.weight, self.bias = first, second, weight, bias  # weight (seen, 2d)


class FOSTER(ExemplarMethod):
    """Two backbones for the task learned last, one that goes on to the next."""

    Options = FOSTEROptions
    after_base = frozenset(
        "boosting_epochs compression_epochs temperature distillation boosting_beta compression_beta "
        "weight_counts evaluated".split()
    )

    def __init__(self, backbone: Backbone, options: FOSTEROptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.register_module("teacher", None)  # of the task learned last, where it is the one evaluated

    def fit_base(self, task: Task) -> None:
        o = self.options
        self.count_classes(task)
        self.grow_head()

        def loss(batch: Batch) -> Tensor:
            return F.cross_entropy(self.head(self.embed(batch.images)), batch.labels)

        trained = [*self.network.parameters(), self.head_weight, self.head_bias]
        schedule = self._schedule(o.epochs, o.weight_decay)
        value = train("FOSTER base", task.images, task.labels, trained, loss, schedule, self.runtime)
        self.remember(task.images, task.labels.to(self.runtime.device), task.labels.unique())
        self._diagnostics = {"loss": value, "training_images": len(task.images)}

    def learn(self, task: Task) -> None:
        o, known, session, dim = self.options, self.seen, int(self.tasks_seen), self.backbone.dim
        images, labels = self.memory.joined(task.images, task.labels)
        self.count_classes(task)
        counts = self._weight_counts(labels, known)
        old_weight, old_bias = self.head_weight.detach(), self.head_bias.detach()

        # boosting: old features are frozen; the joint head starts with the old rows on them
        weight, bias = fresh_linear(self.seen, 2 * dim, self.runtime, self.place, "joint head")
        auxiliary, auxiliary_bias = fresh_linear(self.seen, dim, self.runtime, self.place, "auxiliary head")
        with torch.no_grad():
            weight[:known, :dim], bias[:known] = old_weight, old_bias
        teacher = Teacher(frozen_copy(self.network), self.network.trainable_copy(), weight, bias)
        class_weights = effective_number_weights(counts, o.boosting_beta).to(**self.place)

        def boosting_loss(batch: Batch) -> Tensor:
            features = self.embed_pair(batch.images, teacher)
            (first, new), logits = features.chunk(2, 1), F.linear(features, weight, bias)
            value = F.cross_entropy(logits / class_weights, batch.labels)
            value = value + F.cross_entropy(F.linear(new, auxiliary, auxiliary_bias), batch.labels)
            old_logits = F.linear(first, old_weight, old_bias)
            return value + o.distillation * distillation(logits[:, :known], old_logits, o.temperature)

        trained = [*teacher.second.parameters(), weight, bias, auxiliary, auxiliary_bias]
        schedule = self._schedule(o.boosting_epochs, o.weight_decay)
        boosted = train(f"FOSTER boosting {session}", images, labels, trained, boosting_loss, schedule, self.runtime)
        teacher.requires_grad_(False)

        # compression: the student starts from the old backbone and the old rows
        self.grow_head()
        balance = effective_number_weights(counts, o.compression_beta).to(**self.place)

        def compression_loss(batch: Batch) -> Tensor:
            targets = F.linear(self.embed_pair(batch.images, teacher), weight, bias)
            return distillation(self.head(self.embed(batch.images)), targets, o.temperature, balance)

        trained = [*self.network.parameters(), self.head_weight, self.head_bias]
        schedule = self._schedule(o.compression_epochs, 0.0)
        stage = f"FOSTER compression {session}"
        compressed = train(stage, images, labels, trained, compression_loss, schedule, self.runtime)
        self.teacher = teacher if o.evaluated == "teacher" else None
        self.remember(images, labels, task.labels.unique(), self.embed_evaluated)
        self._diagnostics = {
            "boosting_loss": boosted,
            "compression_loss": compressed,
            "training_images": len(images),
            "class_weights": {"old": float(class_weights[:known].mean()), "new": float(class_weights[known:].mean())},
        }

    def _weight_counts(self, labels: Tensor, known: int) -> Tensor:
        counts = torch.bincount(labels, minlength=self.seen)  # exemplars of old classes, shots of new ones
        if self.options.weight_counts == "published":
            counts[:known], counts[known:] = self.options.budget(known), PRACTICALLY_INFINITE
        return counts

    # ---- features and scores -----------------------------------------------------------------------------------------
    def embed_pair(self, images: Tensor, teacher: Teacher) -> Tensor:
        """Features (n, 2d) of a teacher: the frozen ViT's beside the boosted one's."""
        return torch.cat([self.embed(images, teacher.first), self.embed(images, teacher.second)], 1)

    def embed_evaluated(self, images: Tensor) -> Tensor:
        """Features of the model that is evaluated: (n, 2d) of the teacher, or (n, d)."""
        return self.embed(images) if self.teacher is None else self.embed_pair(images, self.teacher)

    def logits(self, images: Pixels) -> Tensor:
        head = (self.head_weight, self.head_bias) if self.teacher is None else (self.teacher.weight, self.teacher.bias)
        return self.extract(images, lambda batch: F.linear(self.embed_evaluated(batch), *head))

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.teacher = None
        if any(name.startswith("teacher.") for name in state):
            empty = (nn.Parameter(torch.zeros(0, **self.place)) for _ in range(2))
            self.teacher = Teacher(frozen_copy(self.network), frozen_copy(self.network), *empty).requires_grad_(False)
        super().load_state(state)

    @classmethod
    def passes(cls, options: FOSTEROptions, sizes: Sizes) -> float:
        o, evaluated = options, 2 if options.evaluated == "teacher" else 1  # backbones that herd and answer
        boosting, compression = o.boosting_epochs * (TRAINING + 1), o.compression_epochs * (TRAINING + 2)
        base = sizes.base * (o.epochs * TRAINING + 1) + sizes.tests[0]
        later = sum(cls.training_images(o, sizes)) * (boosting + compression + evaluated)
        return base + later + evaluated * sum(sizes.tests[1:])

    def _schedule(self, epochs: int, weight_decay: float) -> Schedule:
        o = self.options
        return Schedule(epochs, o.batch_size, o.lr, weight_decay, momentum=o.momentum)
