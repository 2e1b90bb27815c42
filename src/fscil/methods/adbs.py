"""ADBS: adaptive decision boundaries (Li et al., "Adaptive Decision Boundary for Few-Shot Class-Incremental Learning",
AAAI 2025; docs/methods/adbs.md), on the LoRA baseline as the SMP paper ported it.

Base task      LoRA set, cosine head and one scale m_j per class: logit_j = s |m_j| cos(f, w_j), with the inter-class
               constraint; then the head becomes the prototypes and the scales stay.
Few-shot task  new rows are prototypes; only the new scales are trained, full batch, on views of the shots that are
               augmented and encoded anew in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.maths.margins import cosine
from fscil.methods.families.adapter_sets import PLAIN_STAGE
from fscil.methods.families.adapters import AdapterMethod, AdapterOptions
from fscil.methods.sizes import Sizes
from fscil.methods.training import Batch, train
from fscil.runtime import Runtime
from fscil.strict import NotNegative, Positive, Share, Whole


@dataclass(frozen=True, kw_only=True)
class ADBSOptions(AdapterOptions):
    """Hyper-parameters of ADBS, with the values of the SMP paper's port."""

    scale: Positive = 16.0  # T
    adaptive: bool = True  # learn the scales; False keeps all of them at 1
    alpha: NotNegative = 0.01  # weight of the inter-class constraint (`reg_alpha`); our choice on a ViT
    learn_steps: Whole = 20  # full-batch steps per few-shot task: 20 in SMP's port; 10 CIFAR, 1 CUB, 6 mini originally
    learn_lr: float = 0.01  # our choice on a ViT; originally 0.01 (CIFAR, CUB) or 0.1 (mini)
    learn_momentum: Share = 0.9
    learn_dampening: Share = 0.9
    learn_views: Literal["augmented", "plain"] = "augmented"  # of the shots: new ones each step, or the prototypes'

    earlier: ClassVar[dict[str, Any]] = {"learn_views": "plain"}  # what runs did before the option was there


class ADBS(AdapterMethod):
    """Prototypes whose logits are scaled by one learned number per class."""

    Options = ADBSOptions
    scales: Tensor  # (seen,) m

    def __init__(self, backbone: Backbone, options: ADBSOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.register_buffer("scales", torch.ones(0, **self.place))

    def fit_base(self, task: Task) -> None:
        o, backbone = self.options, self.backbone
        lora, rows = self.fresh_adapters(len(task.classes))
        scales = nn.Parameter(torch.ones(len(task.classes), **self.place), requires_grad=o.adaptive)

        def loss(batch: Batch) -> Tensor:
            return adaptive_loss(backbone(batch.images, lora)[0], rows, scales, batch.labels, o.scale, o.alpha)

        trained = [lora.A, lora.B, rows] + ([scales] if o.adaptive else [])
        train(PLAIN_STAGE, task.images, task.labels, trained, loss, o.schedule, self.runtime)
        self.freeze(lora, task)
        self.scales = scales.detach()
        self._describe()

    def learn(self, task: Task) -> None:
        known, o = len(self.scales), self.options
        features, labels = self.take_in(task)
        new = nn.Parameter(self.scales.mean().repeat(self.seen - known))  # starts at the mean of all earlier scales
        if o.adaptive and len(new):
            optimiser = torch.optim.SGD([new], o.learn_lr, o.learn_momentum, o.learn_dampening)
            for step in range(o.learn_steps):
                if o.learn_views == "augmented":
                    features = self._view_features(task, step)
                scales = torch.cat([self.scales, new])
                loss = adaptive_loss(features, self.prototypes, scales, labels, o.scale, o.alpha)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        self.scales = torch.cat([self.scales, new.detach()])
        self._describe()

    @torch.no_grad()
    def _view_features(self, task: Task, step: int) -> Tensor:
        """Features (n, d) of one augmented view of every shot, other views in every step and task."""
        key = 1_000_000 * (int(self.tasks_seen) - 1) + step
        parts = torch.arange(len(task.images)).split(self.runtime.batch_size_eval)
        return torch.cat([self.backbone(task.images.augmented(part, key), self.lora)[0] for part in parts])

    @classmethod
    def passes(cls, options: ADBSOptions, sizes: Sizes) -> float:
        steps = options.learn_steps if options.adaptive and options.learn_views == "augmented" else 0
        return super().passes(options, sizes) + steps * sum(sizes.later)

    def logits_from(self, features: Tensor) -> Tensor:
        return self.options.scale * self.scales.abs() * cosine(features, self.prototypes)

    def trainable_parameters(self) -> int:
        return super().trainable_parameters() + self.base_classes * int(self.options.adaptive)

    def _describe(self) -> None:
        base, new = self.scales[: self.base_classes], self.scales[self.base_classes :]
        self._diagnostics = {
            "scales": {"base": float(base.mean()), "new": float(new.mean()) if len(new) else None},
        }


def adaptive_loss(features: Tensor, rows: Tensor, scales: Tensor, labels: Tensor, scale: float, alpha: float) -> Tensor:
    """Cross-entropy of s |m_j| cos(f, w_j), plus α times the inter-class constraint."""
    value = F.cross_entropy(scale * scales.abs() * cosine(features, rows), labels)
    return value + alpha * inter_class_constraint(rows, scales) if alpha else value


def inter_class_constraint(rows: Tensor, scales: Tensor) -> Tensor:
    """mean_ij ReLU[(1 − ŵ_i·ŵ_j) − (m_i − m_j ŵ_i·ŵ_j)] over all ordered pairs; the diagonal is 0."""
    similarity = cosine(rows, rows)
    gap = (1 - similarity) - (scales[:, None] - scales * similarity)
    return (gap * (1 - torch.eye(len(rows), device=rows.device, dtype=rows.dtype))).relu().mean()
