"""Pictures that look wrong: of another class than they were given as, of none, or the same one twice.

Every picture is judged as if its class had been learned without it, which costs nothing (`maths/leave_one_out.py`), by
the Gaussians that unknown pictures are told by. So all heads are reviewed alike, and no picture vouches for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fscil.data.picture_files import Label
from fscil.errors import UserError
from fscil.teachable.calibration import every
from fscil.teachable.unknown import KnownSpace, fit_temperature

if TYPE_CHECKING:
    from fscil.teachable.knowledge import Knowledge
    from fscil.teachable.model import Teachable

FAR_OUT = 5.0  # modified z-score below which a picture is odd; 3.5 is usual for one, and here are hundreds
TWIN = 0.02  # squared distance of two pictures, by what it is on average within a class, below which they are twins
AT_A_TIME = 1024  # rows whose distances to all others are held at once


class Looks(NamedTuple):
    """What n pictures look like without themselves."""

    own: Tensor  # probability of the class each was given as; NaN: nothing is left of it
    best: Tensor  # the likeliest class
    share: Tensor  # its probability
    unknown: Tensor  # bool: would be called unknown
    odd: Tensor  # bool: fits the known classes far worse than other pictures do


@dataclass(frozen=True)
class Finding:
    """One picture that looks wrong."""

    position: int
    kind: Literal["other class", "odd", "twin"]
    doubt: float  # that it is of the class it was given as, 0 to 1
    looks_like: int | None = None  # the class that it looks like instead
    share: float = 0.0  # probability of that class
    twin: int | None = None  # the picture that is nearly the same


def look(knowledge: Knowledge, features: Tensor, labels: Tensor, seen: Tensor) -> Looks:
    """Judges pictures (n, d) given as classes (n,); those `seen` (n,) were learned from and are left out.

    Labels from the number of known classes on are of new classes, which are learned here from these pictures alone.
    """
    space, device = space_of(knowledge), features.device
    labels, seen = labels.to(device), seen.to(device).clone()
    known = len(knowledge.classes)
    if bool((labels >= known).any()):
        space, fresh = replace(space), labels >= known
        space.add(features[fresh], labels[fresh], int(labels.max()) + 1)
        seen |= fresh
    densities, fits = _judged(knowledge, space, features, labels, seen)
    held = {key: value.to(device) for key, value in knowledge.held.items()}
    kept = held["labels"] >= 0
    if bool(kept.any()):
        step = every(int(kept.sum()), known)
        truth, references = held["labels"][kept][::step], held["features"][kept][::step]
        learned = torch.full_like(truth, not knowledge.trained, dtype=torch.bool)  # or else held out of learning
        reference = _judged(knowledge, space, references, truth, learned)
    else:
        reference, truth = (densities, fits), labels
    usable = ~reference[0].isnan().any(1)
    temperature = fit_temperature(reference[0][usable].cpu(), truth[usable].cpu()) if bool(usable.any()) else 1.0
    normal = reference[1][usable] if int(usable.sum()) >= len(fits) else fits[~fits.isnan()]  # whichever are more
    middle = normal.median() if len(normal) else torch.tensor(0.0)
    spread = 1.4826 * (normal - middle).abs().median() if len(normal) else torch.tensor(torch.inf)
    chances = (densities / temperature).where(~densities.isnan(), -torch.inf).softmax(1)
    own = chances.gather(1, labels[:, None]).squeeze(1)
    alone = densities.gather(1, labels[:, None]).squeeze(1).isnan()
    share, best = chances.max(1)
    unknown = knowledge.is_unknown(fits) & ~alone
    odd = (fits < middle - FAR_OUT * spread) & ~alone & unknown
    own = torch.where(alone, torch.nan, own)
    return Looks(*(tensor.cpu() for tensor in (own, best, share, unknown, odd)))


def findings(looks: Looks, labels: Tensor, pairs: Sequence[tuple[int, int]] = ()) -> list[Finding]:
    """The pictures that look wrong, worst first; `pairs` are twins, of which the second is named."""
    found = []
    rows = zip(labels.tolist(), looks.own.tolist(), looks.best.tolist(), looks.share.tolist(), looks.odd.tolist())
    for position, (label, own, best, share, odd) in enumerate(rows):
        if own != own:  # the only picture of its class
            continue
        if odd:
            found.append(Finding(position, "odd", max(1 - own, 0.5)))
        elif best != label:
            found.append(Finding(position, "other class", 1 - own, best, share))
    wrong = {finding.position for finding in found}
    for first, second in pairs:
        if second not in wrong:
            torn = labels[first] != labels[second]
            found.append(
                Finding(second, "twin", 1.0 if torn else 0.0, int(labels[first]) if torn else None, 0.0, first)
            )
    return sorted(found, key=lambda finding: -finding.doubt)


def twins(space: KnownSpace, features: Tensor) -> list[tuple[int, int]]:
    """(first, later) pairs of pictures that are nearly the same, each later one once.

    Two pictures of one class are 2 tr(Σ⁻¹S) apart on average, in squared Mahalanobis distance; twins are `TWIN` of it.
    """
    white, usual = space.whitened(features)
    limit = TWIN * usual**2
    pairs: dict[int, int] = {}
    for start in range(0, len(white), AT_A_TIME):
        near = torch.cdist(white[start : start + AT_A_TIME], white).square() < limit
        for row, column in near.nonzero().tolist():
            if start + row < column:
                pairs.setdefault(column, start + row)
    return [(first, later) for later, first in sorted(pairs.items())]


def review(clf: Teachable, pictures: Sequence[Any], labels: Sequence[Label]) -> tuple[list[Finding], list[Label]]:
    """(pictures of a labelled set that look wrong, worst first; names of all classes in it).

    Pictures that the model was taught are left out of their class; others are judged by what it knows, and classes it
    does not know by their own pictures.
    """
    from fscil.data.pictures import batches

    knowledge, recogniser = clf.knowledge_, clf.recogniser()
    space = space_of(knowledge)
    names = [*knowledge.names, *dict.fromkeys(label for label in labels if label not in knowledge.names)]
    place = {name: number for number, name in enumerate(names)}
    number = torch.tensor([place[label] for label in labels])
    known, parts, seen, kept = knowledge.pictures_by_fingerprint(), [], [], []
    for part in clf.runtime_.track(batches(pictures, clf.short_side_), "looking"):
        if len(part):
            with torch.no_grad():
                parts.append(knowledge.method.features(recogniser.pixels(part.store)))
        seen += [labels[at] in known.get(mark, ()) for at, mark in zip(part.kept, part.fingerprints.tolist())]
        kept += part.kept
        for position, reason in part.bad.items():
            clf.note(f"left out: {pictures[position]} ({reason})")
    if not parts:
        raise UserError("none of the pictures can be read.")
    features, own = torch.cat(parts), number[kept]
    looks = look(knowledge, features, own, torch.tensor(seen))
    found = findings(looks, own, twins(space, features))
    back = [
        replace(finding, position=kept[finding.position], twin=None if finding.twin is None else kept[finding.twin])
        for finding in found
    ]
    return back, names


def space_of(knowledge: Knowledge) -> KnownSpace:
    """What pictures are judged by one by one."""
    if knowledge.space is None:
        raise UserError(
            "this model cannot judge pictures one by one: its features move, or no class had two different pictures. "
            "Fit one with smp or closed_form, and two or more pictures per class."
        )
    return knowledge.space


def _judged(
    knowledge: Knowledge, space: KnownSpace, features: Tensor, labels: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-densities of the classes (n, C), fit (n,)): left out where `seen`, and then NaN if nothing is left."""
    base = torch.tensor([info["base"] for info in knowledge.classes], device=features.device)
    base = torch.nn.functional.pad(base, (0, len(space.means) - len(base)))
    densities = torch.zeros(len(features), len(space.means), dtype=torch.float64, device=features.device)
    fits = torch.zeros(len(features), device=features.device)
    for rows, left_out in (
        (seen & base[labels], space.left_out_base_scores),  # exact unless base classes gained pictures since
        (seen & ~base[labels], space.left_out_scores),
    ):
        if bool(rows.any()):
            densities[rows] = left_out(features[rows], labels[rows], relative=False).to(densities)
            fits[rows] = space.over_classes(left_out(features[rows], labels[rows], relative=True))
    if bool((~seen).any()):
        densities[~seen] = space.scores(features[~seen], relative=False).to(densities)
        fits[~seen] = space.fit(features[~seen])
    return densities, fits
