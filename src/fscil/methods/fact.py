"""FACT: forward compatible training (Zhou et al., "Forward Compatible Few-Shot Class-Incremental Learning", CVPR 2022;
docs/methods/fact.md).

Base task      LoRA set and cosine head beside orthogonal rows of virtual classes. Besides the cross-entropy (L1):
               images are pulled to a virtual class when their own is masked (L2), and mixtures of two classes, mixed in
               the middle of the network, to a virtual class (L3) and, with that one masked, to a base class (L4).
               L1 and L2 see the virtual rows as they were drawn, L3 and L4 a copy that is trained.
Few-shot task  prototypes are appended; no training.
Scores         after the base task the nearest prototype; from the first few-shot task on η of a prediction through the
               trained virtual classes and 1 − η of the nearest prototype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.errors import UserError
from fscil.maths.margins import cosine
from fscil.methods.families.adapters import AdapterMethod, AdapterOptions
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Batch, train
from fscil.runtime import Runtime, keyed_seed
from fscil.strict import Natural, NotNegative, Positive, Share, Whole

MASKED = -1e9  # logit of a class that must not be chosen


@dataclass(frozen=True, kw_only=True)
class FACTOptions(AdapterOptions):
    """Hyper-parameters of FACT."""

    scale: Positive = 16.0  # temperature
    expected_classes: int | None = None  # all classes the stream will have; None: base classes + virtual_classes
    virtual_classes: int = 40  # rows reserved when expected_classes is not given
    tied: Natural = 3  # base classes that each virtual class is tied to
    # How L2 keeps to the virtual classes tied to an image's own: others are out, or, as released, their logits are
    # multiplied by 0, so that one of them is chosen where all tied ones are negative.
    mask: Literal["strict", "multiplied"] = "strict"
    virtual_rows: Literal["trained", "frozen"] = "trained"  # of L3, L4 and the scores: a trained copy, or L2's own
    gamma: NotNegative = 0.001  # weight of L2 + L3 + L4: 0.001 CIFAR, 0.01 CUB and mini
    terms: tuple[Literal["masked", "mixed_virtual", "mixed_base"], ...] = ("masked", "mixed_virtual", "mixed_base")
    first_epoch: Whole = 0  # epoch from which they count (`loss_iter`): 0 CIFAR and CUB, 150 of 1000 mini
    mixup: Positive = 0.5  # α of λ ~ Beta(α, α), one per batch; CUB 2.0
    mix_block: Whole | None = None  # tokens are mixed after this many blocks; None: half of them (R: 6 of 12)
    eta: Share = 0.1  # share of the prediction through the virtual classes
    top_virtual: Natural = 40  # virtual classes that count at inference
    similarity: Literal["released", "cosine"] = "released"  # prototypes scaled per feature (a quirk) or per class

    # what runs did before these options were there
    earlier: ClassVar[dict[str, Any]] = {"virtual_rows": "frozen", "mask": "strict"}


class FACT(AdapterMethod):
    """Prototypes, with room reserved for classes to come by virtual prototypes.

    The number of virtual classes is fixed in the base task. When more classes arrive than were expected their
    prototypes are appended all the same; the virtual ones stay what they are.
    """

    Options = FACTOptions
    virtual: Tensor  # (V, d) unit rows

    def __init__(self, backbone: Backbone, options: FACTOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.register_buffer("virtual", torch.zeros(0, backbone.dim, **self.place))

    def fit_base(self, task: Task) -> None:
        o, backbone, runtime, classes = self.options, self.backbone, self.runtime, len(task.classes)
        count = o.virtual_classes if o.expected_classes is None else o.expected_classes - classes
        if count < 1:
            raise UserError(
                f"FACT needs at least one virtual class: expected_classes is {o.expected_classes} and virtual_classes "
                f"{o.virtual_classes} for {classes} base classes; raise it or leave expected_classes out."
            )
        lora, _ = self.fresh_adapters(classes)
        orthogonal = torch.empty(classes + count, backbone.dim, dtype=torch.float64)
        nn.init.orthogonal_(orthogonal, generator=runtime.generator("virtual"))
        rows, drawn = nn.Parameter(orthogonal[:classes].to(**self.place)), orthogonal[classes:].to(**self.place)
        virtual = nn.Parameter(drawn.clone(), requires_grad=o.virtual_rows == "trained")
        tied = tie(classes, count, o.tied, runtime.generator("ties")).to(runtime.device)
        middle = backbone.depth // 2 if o.mix_block is None else o.mix_block
        gamma = torch.zeros((), **self.place)  # written in place: a captured step reads it

        def begin_epoch(epoch: int) -> None:
            gamma.fill_(o.gamma if epoch >= o.first_epoch else 0.0)

        def extras(positions: Tensor, epoch: int, step: int) -> dict[str, Tensor]:
            share = np.random.default_rng(keyed_seed(runtime.seed, "mixup", epoch, step)).beta(o.mixup, o.mixup)
            partner = torch.randperm(len(positions), generator=runtime.generator("partner", epoch, step))
            return {"partner": partner.to(runtime.device), "share": torch.tensor(share, **self.place)}

        def loss(batch: Batch) -> Tensor:
            partner, share = batch.extras["partner"], batch.extras["share"]
            tokens = backbone.blocks(backbone.embed(batch.images), stop=middle, lora=lora)
            mixed = torch.lerp(tokens.index_select(0, partner), tokens, share.to(tokens.dtype))
            # the plain and the mixed tokens share one pass through the upper blocks
            upper = backbone.blocks(torch.cat([tokens, mixed]), start=middle, lora=lora, pooled=True)
            plain_features, mixed_features = backbone.pool(upper).chunk(2)
            logits = o.scale * cosine(plain_features, torch.cat([rows, drawn]))
            mixed_logits = o.scale * cosine(mixed_features, torch.cat([rows, virtual]))
            differ = batch.labels != batch.labels[partner]
            first, rest = forward_terms(logits, mixed_logits, batch.labels, differ, tied, o.mask)
            return first + gamma * sum(rest[name] for name in o.terms)

        trained = [lora.A, lora.B, rows] + ([virtual] if virtual.requires_grad else [])
        train("FACT", task.images, task.labels, trained, loss, o.schedule, runtime, begin_epoch, extras)
        self.virtual = F.normalize(virtual.detach(), dim=1)
        self.freeze(lora, task)

    def learn(self, task: Task) -> None:
        self.take_in(task)

    def logits_from(self, features: Tensor) -> Tensor:
        """Logarithm of the mixed class probabilities."""
        near = torch.softmax(self.options.scale * cosine(features, self.prototypes), 1)
        through = torch.softmax(self._through_virtual(features), 1)
        eta = self.options.eta if int(self.tasks_seen) > 1 else 0.0  # the base task is scored by cosine alone
        return (eta * through + (1 - eta) * near).clamp(min=1e-30).log()

    def _through_virtual(self, features: Tensor) -> Tensor:
        """(cosines to the closest virtual classes) × (similarity of virtual classes and prototypes)."""
        axis = 0 if self.options.similarity == "released" else 1  # of the prototypes (seen, d)
        similarity = self.virtual @ F.normalize(self.prototypes, dim=axis).T
        close = cosine(features, self.virtual)
        best = close.topk(min(self.options.top_virtual, len(self.virtual)), 1)
        return torch.zeros_like(close).scatter(1, best.indices, best.values) @ similarity

    @classmethod
    def passes(cls, options: FACTOptions, sizes: Sizes) -> float:
        mixed = sizes.base * options.epochs * TRAINING / 2  # through the upper half of the blocks
        return super().passes(options, sizes) + mixed

    def trainable_parameters(self) -> int:
        return super().trainable_parameters() + self.virtual.numel() * (self.options.virtual_rows == "trained")


def tie(classes: int, virtual: int, tied: int, generator: torch.Generator) -> Tensor:
    """Which virtual classes go with a base class (classes, V): each is tied to `tied` random ones."""
    chosen = torch.rand(virtual, classes, generator=generator).argsort(1)[:, :tied]
    return torch.zeros(virtual, classes, dtype=torch.bool).scatter(1, chosen, True).T


def choose_virtual(logits: Tensor, tied: Tensor, mask: str) -> Tensor:
    """The virtual class (b,) an image is pulled to: of logits (b, V) the largest of those tied to its class (b, V).

    `strict` takes no other, and any where none is tied; `multiplied` takes an untied one, as 0, for better than a
    negative tied one.

    >>> logits, tied = torch.tensor([[3.0, -1.0, -2.0]]), torch.tensor([[False, True, True]])
    >>> choose_virtual(logits, tied, "strict"), choose_virtual(logits, tied, "multiplied")
    (tensor([1]), tensor([0]))
    """
    if mask == "multiplied":
        return (logits * tied).argmax(1)
    return logits.masked_fill(~tied & tied.any(1, keepdim=True), MASKED).argmax(1)


def forward_terms(
    logits: Tensor, mixed: Tensor, labels: Tensor, differ: Tensor, tied: Tensor, mask: str = "strict"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The cross-entropy over base classes, and the terms L2, L3, L4 (paper Eq. 5, 8), from logits (b, classes + V).

    `differ` marks mixtures of two different classes; only they count, each term being the mean over them.
    """
    classes, width = tied.shape[0], logits.shape[1]
    masked = logits.masked_fill(F.one_hot(labels, width).bool(), MASKED)
    virtual = choose_virtual(logits[:, classes:], tied[labels], mask) + classes
    mixed_virtual = mixed[:, classes:].argmax(1) + classes
    mixed_masked = mixed.masked_fill(F.one_hot(mixed_virtual, width).bool(), MASKED)
    weight = differ.to(logits.dtype) / differ.sum().clamp(min=1)
    terms = {
        "masked": F.cross_entropy(masked, virtual),
        "mixed_virtual": (F.cross_entropy(mixed, mixed_virtual, reduction="none") * weight).sum(),
        "mixed_base": (F.cross_entropy(mixed_masked, mixed[:, :classes].argmax(1), reduction="none") * weight).sum(),
    }
    return F.cross_entropy(logits[:, :classes], labels), terms
