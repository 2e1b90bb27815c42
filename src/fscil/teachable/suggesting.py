"""Which unlabelled pictures are worth a label, and why: unsure ones, groups like nothing known, no two alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fscil.data.picture_files import Label
from fscil.data.pictures import batches
from fscil.data.pixels import ImageStore
from fscil.errors import UserError
from fscil.maths.choosing import choose_diverse, groups_of, margin_worth, strangeness
from fscil.teachable.review import space_of
from fscil.text import percent

if TYPE_CHECKING:
    from fscil.teachable.knowledge import Knowledge
    from fscil.teachable.model import Teachable


@dataclass(frozen=True)
class Suggestion:
    """A picture worth a label. `group` numbers groups of strangers that look alike, from 1 on; None: in no group."""

    position: int
    label: Label  # the likeliest class
    confidence: float
    second: Label | None  # the next likeliest
    unknown: bool
    group: int | None = None
    group_size: int = 0

    @property
    def reason(self) -> str:
        """
        >>> Suggestion(0, "jay", 0.5, "owl", False).reason, Suggestion(0, "jay", 0.5, "owl", True, 1, 7).reason
        ('jay (50.0 %) or owl?', 'unknown, one of 7 that look alike (group 1)')
        """
        if self.group is not None:
            return f"unknown, one of {self.group_size} that look alike (group {self.group})"
        if self.unknown:
            return "unknown, like no other"
        return f"{self.label} ({percent(self.confidence)})" + (f" or {self.second}?" if self.second is not None else "")

    @property
    def folder(self) -> str:
        """Where it could be put to be labelled: strangers with their group, others under the best guess."""
        return f"new group {self.group}" if self.group is not None else "new" if self.unknown else f"maybe {self.label}"


def suggest_from(knowledge: Knowledge, features: Tensor, count: int) -> list[Suggestion]:
    """Of pictures with these features (n, d) those worth a label, best first."""
    space = space_of(knowledge)
    logits, fits = knowledge.judge_features(features)
    chances, unknown = (logits / knowledge.calibration["temperature"]).softmax(1), knowledge.is_unknown(fits)
    points, width = space.whitened(features)
    points = points.cpu()
    worth = margin_worth(chances) + strangeness(fits)
    groups, strangers = torch.full((len(features),), -1), unknown.nonzero().squeeze(1)
    groups[strangers] = groups_of(points[strangers], width)
    sizes = torch.bincount(groups[strangers], minlength=1)
    numbers: dict[int, int] = {}
    found = []
    for at in choose_diverse(worth, points, width, count):
        best = chances[at].topk(min(2, chances.shape[1]))
        names = [knowledge.names[number] for number in best.indices.tolist()]
        group, size = int(groups[at]), 0
        if group >= 0 and int(sizes[group]) > 1:
            size = int(sizes[group])
            numbers.setdefault(group, len(numbers) + 1)
        second = names[1] if len(names) > 1 else None
        found.append(
            Suggestion(at, names[0], float(best.values[0]), second, bool(unknown[at]), numbers.get(group), size)
        )
    return found


def suggest_decoded(clf: Teachable, arrays: Sequence[np.ndarray]) -> list[Suggestion]:
    """All of some pictures uint8 (height, width, 3), as `recognise_decoded` takes them, by their worth."""
    space_of(clf.knowledge_)
    pixels = clf.recogniser().pixels(ImageStore.from_list(arrays))
    with torch.no_grad():
        features = clf.knowledge_.method.features(pixels)
    return suggest_from(clf.knowledge_, features, len(arrays))


def suggest(clf: Teachable, pictures: Sequence[Any], count: int) -> list[Suggestion]:
    """Of unlabelled pictures those worth a label, best first, passing over what was taught before or cannot be read."""
    knowledge, recogniser = clf.knowledge_, clf.recogniser()
    space_of(knowledge)
    known, parts, kept = knowledge.pictures_by_fingerprint(), [], []
    for part in clf.runtime_.track(batches(pictures, clf.short_side_), "looking"):
        fresh = [row for row, mark in enumerate(part.fingerprints.tolist()) if mark not in known]
        if fresh:
            pixels = recogniser.pixels(part.store).select(torch.tensor(fresh))
            with torch.no_grad():
                parts.append(knowledge.method.features(pixels))
        kept += [part.kept[row] for row in fresh]
        for position, reason in part.bad.items():
            clf.note(f"left out: {pictures[position]} ({reason})")
    if not parts:
        raise UserError("all of these pictures are known already, or none can be read; there is nothing to suggest.")
    return [replace(item, position=kept[item.position]) for item in suggest_from(knowledge, torch.cat(parts), count)]
