"""Herding, the exemplar memory, and what iCaRL and FOSTER share: a ViT that is trained whole, and a head that grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.data.pixels import ImageStore, Pixels
from fscil.methods.base import Method
from fscil.methods.sizes import Sizes
from fscil.runtime import Place, Runtime
from fscil.strict import Natural


def herding(features: Tensor, count: int) -> Tensor:
    """Order (min(count, n),) of rows of (n, d): each keeps the mean of those chosen so far closest to the mean of all.

    >>> herding(torch.tensor([[0.0], [4.0], [2.5]]), 5).tolist()
    [2, 0, 1]
    """
    target, total, order = features.mean(0), torch.zeros_like(features[0]), []
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    for number in range(1, min(count, len(features)) + 1):
        distance = (target - (total + features) / number).norm(dim=1).masked_fill(taken, math.inf)
        order.append(distance.argmin())
        taken[order[-1]] = True
        total = total + features[order[-1]]
    return torch.stack(order)


class Exemplars(nn.Module):
    """Images kept for replay, as uint8 in buffers: class by class in order of arrival, each class in herding order."""

    flat: Tensor  # uint8 pixels of all images
    sizes: Tensor  # (n, 2): height, width
    labels: Tensor  # (n,)

    def __init__(self, device: torch.device):
        super().__init__()
        self.register_buffer("flat", torch.zeros(0, dtype=torch.uint8, device=device))
        self.register_buffer("sizes", torch.zeros(0, 2, dtype=torch.int64, device=device))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        return self.flat.numel()

    def images(self) -> list[Tensor]:
        lengths = (self.sizes.prod(1) * 3).tolist()
        shapes = self.sizes.tolist()
        return [part.view(h, w, 3) for part, (h, w) in zip(self.flat.cpu().split(lengths), shapes)] if lengths else []

    def joined(self, images: Pixels, labels: Tensor) -> tuple[Pixels, Tensor]:
        """The exemplars followed by a task's images, as one training set."""
        labels = labels.to(self.labels.device)
        if not len(self):
            return images, labels
        store = ImageStore.from_list([*self.images(), *(images.raw(i) for i in range(len(images)))])
        pool = Pixels(store.to(images.device), images.transform, images.seed, device=images.device)
        return pool, torch.cat([self.labels, labels])

    def keep(self, images: Pixels, labels: Tensor, positions: Tensor) -> None:
        """Replaces what is stored by these images."""
        store = ImageStore.from_list([images.raw(i) for i in positions.tolist()])
        place = self.labels.device
        self.flat, self.sizes, self.labels = store.flat.to(place), store.sizes.to(place), labels[positions].to(place)


def choose_exemplars(features: Tensor, labels: Tensor, touched: Sequence[int], classes: int, per_class: int) -> Tensor:
    """Positions to keep, class by class: herded for classes with new images, else the first in the order they have."""
    positions = []
    for label in range(classes):
        own = (labels == label).nonzero().squeeze(1)
        positions.append(own[herding(features[own], per_class)] if label in touched else own[:per_class])
    return torch.cat(positions)


@dataclass(frozen=True, kw_only=True)
class ExemplarOptions:
    """How many images are stored."""

    memory: Literal["per_class", "total"] = "per_class"  # a number per class (our choice), or shared by all seen
    per_class: Natural = 20
    total: Natural = 2000

    def budget(self, seen: int) -> int:
        """Exemplars of one class when `seen` classes are known; never more than the class has images."""
        return self.per_class if self.memory == "per_class" else max(1, self.total // seen)


class ExemplarMethod(Method):
    """A fully trainable ViT with a linear head that grows, and a memory of exemplars."""

    def __init__(self, backbone: Backbone, options: Any, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.network = backbone.trainable_copy()
        self.place: Place = {"device": runtime.device, "dtype": self.network.dtype}
        self.head_weight = nn.Parameter(torch.zeros(0, backbone.dim, **self.place))
        self.head_bias = nn.Parameter(torch.zeros(0, **self.place))
        self.memory = Exemplars(runtime.device)

    def autocast(self) -> AbstractContextManager[None]:
        """bf16 products on fp32 weights where a run computes in bf16; no cached casts, as steps may be captured."""
        wanted = self.runtime.dtype == torch.bfloat16
        return torch.autocast(self.runtime.device.type, torch.bfloat16, enabled=wanted, cache_enabled=False)

    def embed(self, images: Tensor, network: Backbone | None = None) -> Tensor:
        with self.autocast():
            return (network or self.network)(images)

    def head(self, features: Tensor) -> Tensor:
        return F.linear(features, self.head_weight, self.head_bias)

    def grow_head(self) -> None:
        """Adds rows for the classes just counted; old rows are copied."""
        rows, bias = fresh_linear(self.seen, self.backbone.dim, self.runtime, self.place, "head")
        with torch.no_grad():
            rows[: len(self.head_bias)], bias[: len(self.head_bias)] = self.head_weight, self.head_bias
        self.head_weight, self.head_bias = rows, bias

    def remember(
        self, images: Pixels, labels: Tensor, touched: Tensor, embed: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Stores the exemplars among these images; returns their unit features (m, d) and labels (m,).

        They are herded on the features of `embed`, those of `network` unless given.
        """
        features = F.normalize(self.extract(images, embed or self.embed, "herding"), dim=1)
        budget = self.options.budget(self.seen)
        positions = choose_exemplars(features, labels, touched.tolist(), self.seen, budget)
        self.memory.keep(images, labels, positions)
        return features[positions], labels[positions]

    @classmethod
    def training_images(cls, options: Any, sizes: Sizes) -> list[int]:
        """Images on which each few-shot task is trained: its shots, and the exemplars of the classes before it."""
        counts = []
        for task, shots in enumerate(sizes.later, start=1):
            budget = options.budget(sizes.known[task - 1])
            before = zip(sizes.classes[:task], sizes.images[:task], strict=True)
            counts.append(shots + sum(min(new * budget, images) for new, images in before))
        return counts

    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in [*self.network.parameters(), self.head_weight, self.head_bias])

    def stored_images(self) -> tuple[int, int]:
        return len(self.memory), self.memory.nbytes


def fresh_linear(
    rows: int, columns: int, runtime: Runtime, place: Place, *key: str | int
) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a linear head: Kaiming-uniform for a linear unit, U(−√(3/d), √(3/d)), and zero."""
    draws = torch.rand(rows, columns, generator=runtime.generator(*key, rows), dtype=torch.float64) * 2 - 1
    weight = draws * math.sqrt(3 / columns)
    return nn.Parameter(weight.to(**place)), nn.Parameter(torch.zeros(rows, **place))


def frozen_copy(network: Backbone) -> Backbone:
    """The network as it is now, for a teacher."""
    return network.trainable_copy().requires_grad_(False)
