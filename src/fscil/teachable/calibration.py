"""Held-out predictions for calibration without a held-out set."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fscil.heads.base import Lesson
from fscil.methods.represented import Represented
from fscil.teachable.unknown import KnownSpace

FOLDS = 5


def cross_validated(
    method: Represented, known: KnownSpace | None, features: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, scores, labels) of base pictures, each by a classifier made without its fifth of them.

    For heads on a frozen backbone: making one again is a matter of means and covariances. Classes taught since the base
    stay as they are. A picture whose whole class is in its fold is left out.
    """
    place, seen, counts = method.runtime.device, method.seen, method.class_counts
    features, labels = features.to(place), labels.to(place)
    order = torch.randperm(len(labels), generator=method.runtime.generator("folds"))
    fold = torch.empty(len(labels), dtype=torch.int64)
    fold[order] = torch.arange(len(labels)) % FOLDS
    logits, scores = torch.zeros(len(labels), seen, device=place), torch.zeros(len(labels), device=place)
    usable = torch.zeros(len(labels), dtype=torch.bool, device=place)
    for out in ((fold == number).to(place) for number in range(min(FOLDS, len(labels)))):
        left = counts - torch.bincount(labels[out], minlength=seen)
        present, own = torch.unique(labels[~out], return_inverse=True)
        inner = KnownSpace.of(features[~out], own, len(present), known.shrinkage if known else None)
        if known is not None and not inner.has_spread:
            continue
        rest = Lesson(features[~out], own, len(present), _no_views)
        head = method.head.without(rest, features[out], labels[out])
        with torch.no_grad():
            found = head.scores(features[out])
        if head.seen < seen:  # it knows the base classes of the rest alone
            found = torch.full((len(found), seen), -torch.inf, device=place).index_copy(1, present, found.float())
        logits[out] = found.masked_fill(left == 0, -torch.inf)
        if known is not None:
            sums = (known.means * known.counts[:, None]).index_add(0, labels[out], -features[out])
            means = sums / left.clamp(min=1)[:, None]
            space = replace(
                inner,
                means=means,
                counts=left.clamp(min=1),
                background=known.background,
                softness=known.softness,
            )
            fits = space.scores(features[out]).masked_fill(left == 0, -torch.inf)
            scores[out] = space.over_classes(fits)
        usable[out] = left[labels[out]] > 0
    return logits[usable].cpu(), scores[usable].cpu(), labels[usable].cpu()


def _no_views(numbers: Tensor, positions: Tensor | None = None) -> Tensor:
    raise RuntimeError("the base task is described without augmented views")
