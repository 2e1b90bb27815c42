"""Held-out predictions for calibration without a held-out set, and features computed only once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fscil.data.pixels import Pixels
from fscil.methods.base import Method
from fscil.methods.smp.method import SMP
from fscil.teachable.unknown import KnownSpace

FOLDS = 5


def cross_validated(
    method: SMP, known: KnownSpace | None, features: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, scores, labels) of base pictures, each by a classifier made without its fifth of them.

    For classifiers on a frozen backbone: making one again is a matter of means, and what MPCC moved rows by is added
    again. Classes taught since the base stay as they are. A picture whose whole class is in its fold is left out.
    """
    place, seen = method.runtime.device, method.seen
    features, labels = features.to(place), labels.to(place)
    order = torch.randperm(len(labels), generator=method.runtime.generator("folds"))
    fold = torch.empty(len(labels), dtype=torch.int64)
    fold[order] = torch.arange(len(labels)) % FOLDS
    logits, scores = torch.zeros(len(labels), seen, device=place), torch.zeros(len(labels), device=place)
    usable = torch.zeros(len(labels), dtype=torch.bool, device=place)
    whole = dict(method.state())
    sums, counts = method.prototypes * method.class_counts[:, None], method.class_counts
    moved = method.rows - method._as_rows(method.prototypes)
    for out in ((fold == number).to(place) for number in range(min(FOLDS, len(labels)))):
        left = counts - torch.bincount(labels[out], minlength=seen)
        present, own = torch.unique(labels[~out], return_inverse=True)
        inner = KnownSpace.of(features[~out], own, len(present), known.shrinkage if known else None)
        if known is not None and not inner.has_spread:
            continue
        method.class_counts = left.clamp(min=1)
        method.prototypes = sums.index_add(0, labels[out], -features[out]) / method.class_counts[:, None]
        method.rows = method._as_rows(method.prototypes) + moved
        method.pooled = inner.within if method.pooled is not None else None
        with torch.no_grad():
            logits[out] = method.logits_from(features[out]).masked_fill(left == 0, -torch.inf)
        if known is not None:
            alike = dict(background=known.background, softness=known.softness)
            space = replace(inner, means=method.prototypes, counts=method.class_counts, **alike)
            fits = space.scores(features[out]).masked_fill(left == 0, -torch.inf)
            scores[out] = space.over_classes(fits)
        usable[out] = left[labels[out]] > 0
        method.load_state(whole)
    return logits[usable].cpu(), scores[usable].cpu(), labels[usable].cpu()


@contextlib.contextmanager
def remembered_features(method: Method) -> Iterator[None]:
    """Within the block, SMP's features of the same images under the same adapters are computed once."""
    if not isinstance(method, SMP):
        yield
        return
    compute, kept = method.features, []

    def features(images: Pixels) -> Tensor:
        lora = method.lora if method.lora.rank else None  # all adapters of rank zero are alike
        for pixels, adapters, result in kept:
            if pixels is images and adapters is lora:
                return result
        kept.append((images, lora, compute(images)))
        return kept[-1][2]

    method.features = features
    try:
        yield
    finally:
        del method.features
