"""Held-out predictions for calibration without a held-out set."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fscil.heads.base import Lesson
from fscil.methods.represented import Represented
from fscil.teachable.unknown import KnownSpace

FOLDS = 5
CELLS_AT_MOST = 2**24  # scores of held-out pictures, one for every class, that a calibration goes by


def every(pictures: int, classes: int) -> int:
    """The step in which held-out pictures are taken to calibrate by: 1, all of them, until classes are very many.

    >>> every(4000, 100), every(4000, 100_000)
    (1, 24)
    """
    return max(1, -(-pictures * classes // CELLS_AT_MOST))


def cross_validated(
    method: Represented, known: KnownSpace | None, features: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, scores, labels) of base pictures, each by a classifier made without its fifth of them.

    For heads on a frozen backbone: making one again is a matter of means and covariances. Classes taught since the base
    stay as they are. A picture whose whole class is in its fold is left out. Of very many, some (`every`) are judged;
    the others are learned from all the time.
    """
    place, seen, counts = method.runtime.device, method.seen, method.class_counts
    features, labels = features.to(place), labels.to(place)
    judged = torch.arange(0, len(labels), every(len(labels), seen))
    order = torch.randperm(len(judged), generator=method.runtime.generator("folds"))
    fold = torch.empty(len(judged), dtype=torch.int64)
    fold[order] = torch.arange(len(judged)) % FOLDS
    logits, scores = torch.zeros(len(judged), seen, device=place), torch.zeros(len(judged), device=place)
    usable = torch.zeros(len(judged), dtype=torch.bool, device=place)
    for rows in ((fold == number) for number in range(min(FOLDS, len(judged)))):
        out = torch.zeros(len(labels), dtype=torch.bool).index_fill(0, judged[rows], True).to(place)
        rows = rows.to(place)
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
        logits[rows] = found.masked_fill(left == 0, -torch.inf)
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
            scores[rows] = space.over_classes(fits)
        usable[rows] = left[labels[out]] > 0
    return logits[usable].cpu(), scores[usable].cpu(), labels[judged.to(place)][usable].cpu()


def _no_views(numbers: Tensor, positions: Tensor | None = None) -> Tensor:
    raise RuntimeError("the base task is described without augmented views")
