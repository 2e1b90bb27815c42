"""What there is to say after a lesson: whether it failed, which pictures look wrong, and what to do about it.

`model_notes` goes by what is written in a model's head and needs no torch; `note_lesson` judges a lesson's pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fscil.text import count, percent

if TYPE_CHECKING:
    from torch import Tensor

    from fscil.teachable.knowledge import Knowledge
    from fscil.teachable.model import Teachable
    from fscil.teachable.review import Looks

ENOUGH = 10  # held-out pictures from which on their accuracy says something
FALL = 0.1  # of the accuracy on base pictures in one lesson that is worth a word
SWALLOWED = 0.2  # share of a class's pictures that a new class may take before it is said
SURE = 0.8  # probability of another class from which on a picture is named
NAMED = 3  # pictures, or classes, that are named of each kind
WHY_UNKNOWN = "They hardly look alike to this backbone; add more pictures, of scenes like those to be recognised"
WHY_ALIKE = "Add pictures of both, or make them one class"


def model_notes(calibration: Mapping[str, Any], classes: int, backbone: str) -> list[str]:
    """What is wrong with a model as a whole, and what to do.

    >>> model_notes({"held_out": 40, "held_out_accuracy": 0.3}, 4, "glyph_vit_a")[0][:75]
    'only 30 % of 40 held-out pictures are recognised: the backbone glyph_vit_a '
    """
    right, held = calibration.get("held_out_accuracy"), calibration.get("held_out", 0)
    if (
        right is None or held < ENOUGH or right >= 0.5 + 0.5 / max(classes, 1)
    ):  # halfway from chance to perfect, and less
        return []
    if backbone.startswith("glyph_vit"):
        why = (
            f"the backbone {backbone} is made for drawn characters. For photos, fit again with another "
            "(fscil list backbones)"
        )
    else:
        why = (
            "the backbone hardly tells these classes apart. Give more pictures per class, or fit with a larger backbone"
        )
    return [f"only {percent(right, 0)} of {held} held-out pictures are recognised: {why}"]


def note_lesson(clf: Teachable, features: Tensor | None, labels: Tensor, names: Sequence[str]) -> None:
    """Says what there is to say about the lesson that was just learned: pictures with these features, and their names.

    `features` None: they move, and pictures cannot be judged one by one.
    """
    knowledge, history = clf.knowledge_, clf.history_
    if len(history) == 1:
        for text in model_notes(knowledge.calibration, len(knowledge.classes), clf.config_["backbone"]["name"]):
            clf.note(text)
    else:
        for text in _harm(knowledge, history):
            clf.note(text)
    if features is None or knowledge.space is None:
        return
    import torch

    from fscil.teachable.review import findings, look, twins

    looks = look(knowledge, features, labels, torch.ones(len(labels), dtype=torch.bool))
    failed = dict(_failed_classes(knowledge, looks, labels))
    for text in list(failed.values())[:NAMED]:
        clf.note(text)
    spoken: Counter[str] = Counter()
    for finding in findings(looks, labels, twins(knowledge.space, features)):
        label = int(labels[finding.position])
        if label in failed or (finding.kind == "other class" and finding.share < SURE):
            continue
        spoken[finding.kind] += 1
        if spoken[finding.kind] > NAMED:
            continue
        name, given = names[finding.position], knowledge.names[label]
        if finding.kind == "twin":
            clf.note(
                f'{name} and {names[finding.twin or 0]} of "{given}" are nearly the same picture; '
                "different scenes teach more"
            )
        else:
            other = None if finding.looks_like is None else knowledge.names[finding.looks_like]
            like = "none of the classes" if other is None else f'"{other}" ({percent(finding.share, 0)})'
            clf.note(f'{name}, given as "{given}", looks like {like}: check it')
    if more := sum(max(0, number - NAMED) for number in spoken.values()):
        clf.note(f"{count(more, 'more picture')} should be checked; fscil review lists them")


def _failed_classes(knowledge: Knowledge, looks: Looks, labels: Tensor) -> Iterator[tuple[int, str]]:
    """(class, what to say) of the classes of a lesson whose own pictures are not recognised when left out."""
    for label in dict.fromkeys(labels.tolist()):
        own = labels == label
        total, name = int(own.sum()), knowledge.names[label]
        if total < 2:
            continue
        unknown = int(looks.unknown[own].sum())
        others = Counter(looks.best[own & (looks.best != labels)].tolist())
        if 2 * unknown >= total:
            said = f"would be called unknown had they not been given. {WHY_UNKNOWN}"
            yield label, f'"{name}" was not learned: {unknown} of its {count(total, "picture")} {said}'
        elif others and 2 * sum(others.values()) > total:
            nearest, wrong = others.most_common(1)[0][0], sum(others.values())
            said = f'look like another, first of all like "{knowledge.names[nearest]}". {WHY_ALIKE}'
            yield label, f'"{name}" is hardly told from other classes: {wrong} of its {count(total, "picture")} {said}'


def _harm(knowledge: Knowledge, history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a lesson, and the classes that came with it, cost the base classes."""
    before, after = (event.get("held_out_accuracy") for event in history[-2:])
    if (
        before is not None
        and after is not None
        and before - after >= FALL
        and knowledge.calibration["held_out"] >= ENOUGH
    ):
        yield (
            f"with this lesson the accuracy on base pictures fell from {percent(before, 0)} to {percent(after, 0)}; "
            "undo takes it back"
        )
    if knowledge.judged is None:
        return
    answers, truth = knowledge.judged
    losses = []
    for label in range(history[-2]["known"], len(knowledge.classes)):
        for other in set(truth[answers == label].tolist()) - {label}:
            own = truth == other
            taken = int((answers[own] == label).sum())
            if taken >= 2 and taken >= SWALLOWED * int(own.sum()):
                losses.append((taken / int(own.sum()), label, other, taken, int(own.sum())))
    for _, label, other, taken, total in sorted(losses, reverse=True)[:NAMED]:
        yield (
            f'"{knowledge.names[label]}" now takes {taken} of {total} pictures of "{knowledge.names[other]}". Add '
            "pictures of both, or take it back (undo) and teach with clearer ones"
        )
