"""CHORD: feature spaces of opposite margins side by side, under one corrected discriminant (docs/methods/chord.md).

Base task      two K/V LoRA sets trained side by side in one pass: one with a negative cosine margin, which leaves
               room between and inside classes and so transfers to new ones, one with a positive margin, which tells
               the base classes apart; and the frozen backbone, which knows what neither was trained for.
               feature(x) = [û(f_n(x)); 0.75 û(f_p(x)); û(f_0(x))],  û: unit length. Nothing is merged.
Few-shot task  the closed form of heads/closed_form.py on that feature: means of the shots, one pooled, strongly
               shrunken covariance, a correction for the error of a few-shot mean. It decides between base and new; the
               heads that trained the sets help it to rank the base classes. Nothing is trained.

SMP merges its two sets into one and gives up part of what either knows; here they are kept, and the discriminant weighs
their directions by how much each varies within classes. Within the base classes, that is, on which the set of positive
margin was drawn tight: new classes scatter 1.3 to 1.6 times as much there, and as much as base classes in the other
two spaces (validation streams). So its space is given less weight than it would take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.backbones.lora import LoRA, empty_lora
from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.errors import UserError
from fscil.heads.base import Head
from fscil.heads.closed_form import ClosedForm, ClosedFormOptions
from fscil.maths.merging import merge_factors
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec
from fscil.methods.families.adapters import AdapterOptions
from fscil.methods.families.spaces import UnitSpaces
from fscil.methods.represented import Represented
from fscil.methods.sizes import TRAINING, Sizes
from fscil.runtime import Runtime
from fscil.strict import NotNegative, Positive, Share, Whole


@dataclass(frozen=True, kw_only=True)
class ChordOptions(AdapterOptions):
    """Chosen on the validation streams of CIFAR100 and CUB200 together (docs/methods/chord.md)."""

    lr: float = 0.03  # three times that of SMP
    margins: tuple[float, ...] = (-0.1, 0.2)  # of the adapter sets
    tight: Positive = 0.75  # weight of the spaces whose margin is positive; that of the others is 1
    scale: Positive = 16.0  # of the base loss
    frozen: bool = True  # the pretrained features as a further space
    form: Literal["spaces", "merged"] = "spaces"  # merged: the sets averaged into one, a single pass and space
    # the head (heads/closed_form.py)
    shrinkage: Share = 0.5
    correction: NotNegative = 0.9
    views: Whole = 0
    views_share: Share = 0.3
    trained: NotNegative | None = 0.3  # T: how much the discriminant counts beside the trained heads among base classes

    earlier: ClassVar[dict[str, Any]] = {"tight": 1.0}  # what runs did before spaces had weights

    def __post_init__(self) -> None:
        if not self.margins:
            raise UserError("margins is empty; name at least one, as in [-0.1, 0.2]")


class Chord(Represented):
    """Spaces of opposite margins and the frozen one, kept side by side."""

    Options = ChordOptions
    after_base = frozenset({"shrinkage", "correction", "views", "views_share", "trained"})
    base_count: Tensor

    def __init__(self, backbone: Backbone, options: ChordOptions, runtime: Runtime, head: Head | None = None):
        super().__init__(backbone, options, runtime, head)
        self.lora = empty_lora(backbone.depth, backbone.dim, **self.head.place)
        self.register_buffer("base_count", torch.zeros((), dtype=torch.int64))
        self._rows: Tensor | None = None  # of the heads that trained the sets (S, C0, d), until the base is described

    @classmethod
    def weights(cls, options: ChordOptions) -> list[float]:
        """Of the spaces: those of the sets, then the frozen one."""
        if options.form == "merged":
            return [1.0]
        return [options.tight if margin > 0 else 1.0 for margin in options.margins] + [1.0] * options.frozen

    @classmethod
    def dim_of(cls, backbone: Backbone, options: Any) -> int:
        return len(cls.weights(options)) * backbone.dim

    @classmethod
    def adapter_plan(cls, options: ChordOptions) -> AdapterPlan:
        specs = tuple(AdapterSpec(margin, options.scale) for margin in options.margins)
        return AdapterPlan(specs, options.rank, options.lora_init, options.schedule)

    @classmethod
    def passes(cls, options: ChordOptions, sizes: Sizes) -> float:
        trained = sizes.base * len(options.margins) * options.epochs * TRAINING
        plain = sum(sizes.images) + sizes.tests[-1] + sum(sizes.later) * options.views
        return trained + plain * len(cls.weights(options))

    def represent(self, task: Task) -> None:
        trained = self.adapter_plan(self.options).train(self.backbone, task, self.runtime)
        merged = self.options.form == "merged"
        self.lora = self._merged(trained.lora) if merged else self._with_frozen(trained.lora)
        self._rows = trained.rows
        self.base_count = torch.tensor(len(task.classes))

    def _with_frozen(self, trained: LoRA) -> LoRA:
        """The sets, and one of zeros: the frozen backbone as a further stream of the same pass."""
        if not self.options.frozen:
            return trained
        A, B = (torch.cat([part, torch.zeros_like(part[:, :1])], 1) for part in (trained.A, trained.B))
        return LoRA(A, B).requires_grad_(False)

    def _merged(self, trained: LoRA) -> LoRA:
        weights = torch.full(trained.A.shape[:3], 1 / trained.sets, device=trained.A.device, dtype=torch.float64)
        return LoRA(*merge_factors(trained.A, trained.B, weights)).requires_grad_(False)

    def own_head(self) -> ClosedForm:
        o = self.options
        chosen = ClosedFormOptions(
            shrinkage=o.shrinkage,
            correction=o.correction,
            views=o.views,
            views_share=o.views_share,
            trained=o.trained,
        )
        return ClosedForm(self.feature_dim, chosen, self.runtime)

    @property
    def base_weights(self) -> Tensor | None:
        """Σ_k s cos(f_k, w_k), the summed logits of the heads, as weights on the features of all spaces."""
        if self._rows is None or self.tasks_seen > 1:
            return None
        rows = self.options.scale * F.normalize(self._rows, dim=2)  # (S, C0, d)
        if self.options.form == "merged":
            return rows.sum(0)
        of_sets = rows.new_tensor(self.weights(self.options)[: len(rows)])
        spaces = (rows / of_sets[:, None, None]).transpose(0, 1).flatten(1)
        return F.pad(spaces, (0, self.feature_dim - spaces.shape[1]))  # nothing was trained on the frozen space

    def embed(self, images: Tensor) -> Tensor:
        return self.unit_spaces(self.backbone, images)

    def feature_source(self) -> object:
        return self.lora

    @property
    def unit_spaces(self) -> UnitSpaces:
        return UnitSpaces(self.lora, self.weights(self.options))

    def trainable_parameters(self) -> int:
        """LoRA factors of every set and the heads of the base classes."""
        dim = self.backbone.dim
        each = self.backbone.depth * 4 * dim * self.options.rank + int(self.base_count) * dim
        return len(self.options.margins) * each
