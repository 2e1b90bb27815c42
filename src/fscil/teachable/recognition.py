"""Answers of a model: probabilities, "unknown" and the kept pictures most like each, in one pass per picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fscil.data.picture_files import Label
from fscil.data.pictures import AT_ONCE, batches, read_pictures, refuse
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.runtime import Runtime

if TYPE_CHECKING:
    import numpy as np

    from fscil.teachable.knowledge import Knowledge

Alike = tuple[Label, float, "np.ndarray"]  # class, cosine and small copy (uint8) of a kept picture


class Notice(UserWarning):
    """Something worth knowing about what was asked for; nothing failed."""


@dataclass(frozen=True)
class Recognition:
    """What one picture shows. `label` is None when it is unknown or could not be read (then `error` says why)."""

    label: Label | None
    confidence: float  # calibrated probability of the best class
    unknown: bool
    top: list[tuple[Label, float]]  # best classes with their probabilities
    error: str | None = None
    alike: Sequence[Alike] = field(default=(), compare=False, repr=False)  # kept pictures most like it, best first

    @classmethod
    def failed(cls, reason: str) -> Recognition:
        return cls(None, 0.0, False, [], reason)

    @property
    def shown(self) -> str:
        """The class, "unknown", or nothing for a picture that could not be read."""
        return "" if self.error else "unknown" if self.unknown else str(self.label)

    def entry(self, file: Path | str) -> dict[str, Any]:
        """The answer about one file as JSON has it."""
        return {
            "file": str(file),
            "label": None if self.error else self.shown,
            "confidence": round(self.confidence, 4),
            "unknown": self.unknown,
            "top": [{"label": label, "probability": round(value, 4)} for label, value in self.top],
            "error": self.error,
        }


class Answers(NamedTuple):
    """What a model says about n pictures."""

    probabilities: Tensor  # (n, classes), calibrated
    unknown: Tensor  # bool (n,): of no known class
    scores: Tensor  # (n,): how well each fits the known classes
    alike: list[list[Alike]]


class Recogniser:
    """Asks what a model knows about pictures. Cheap to make: it holds nothing of its own."""

    def __init__(self, knowledge: Knowledge, transform: Transform, short_side: int, runtime: Runtime, seed: int):
        self.knowledge, self.transform, self.short_side = knowledge, transform, short_side
        self.runtime, self.seed = runtime, seed

    def answers(self, store: ImageStore, alike: int = 0) -> Answers:
        """Of decoded pictures, with up to `alike` kept pictures for each: one pass through the backbone."""
        knowledge, count = self.knowledge, len(store)
        if not count:
            return Answers(torch.zeros(0, len(knowledge.classes)), torch.zeros(0, dtype=torch.bool), torch.zeros(0), [])
        pixels = self.pixels(store)
        nearest: list[list[Alike]] = [[] for _ in range(count)]
        if alike and knowledge.thumbnails:  # kept only where features stay fixed
            with torch.no_grad():
                features = knowledge.method.features(pixels)
            logits, scores = knowledge.judge_features(features)
            nearest = knowledge.nearest_thumbnails(features.cpu(), alike)
        else:
            logits, scores = knowledge.judge(pixels)
        probabilities = (logits / knowledge.calibration["temperature"]).softmax(1)
        if not probabilities.isfinite().all():
            raise UserError(
                "the model's answers are no numbers: a setting or a tensor of it is far out of range; take an earlier "
                "version of it (fscil undo), or fit it again."
            )
        return Answers(probabilities, knowledge.is_unknown(scores), scores, nearest)

    def batches(self, X: Sequence[Any], alike: int = 0) -> Iterator[tuple[list[int], dict[int, str], Answers]]:
        """A few pictures at a time: positions of those that could be read, why others could not, and the answers."""
        parts = batches(X, self.short_side)
        for part in self.runtime.track(parts, "recognising", -(-len(X) // AT_ONCE)):
            yield part.kept, part.bad, self.answers(part.store, alike)

    def readable(self, X: Sequence[Any], skip_bad: bool = False) -> tuple[list[int], Answers]:
        """Positions of the pictures that can be read, and the answers; any other is an error unless `skip_bad`."""
        kept: list[int] = []
        bad: dict[int, str] = {}
        parts = [self.answers(ImageStore.from_list([]))]
        for positions, unreadable, answers in self.batches(X):
            kept += positions
            bad |= unreadable
            parts.append(answers)
        if bad and not skip_bad:
            refuse(X, bad)
        probabilities, unknown, scores, alike = zip(*parts)
        return kept, Answers(torch.cat(probabilities), torch.cat(unknown), torch.cat(scores), sum(alike, []))

    def recognise(self, X: Sequence[Any], top: int = 5, alike: int = 0) -> list[Recognition]:
        """What each picture shows; unreadable ones say so instead of stopping the others."""
        found: dict[int, Recognition] = {}
        for positions, bad, answers in self.batches(X, alike):
            found |= dict(zip(positions, self.described(answers, top)))
            found |= {position: Recognition.failed(reason) for position, reason in bad.items()}
        return [found[position] for position in range(len(X))]

    def described(self, answers: Answers, top: int) -> list[Recognition]:
        """Answers in words, with the `top` best classes of each picture."""
        names = self.knowledge.names
        best = answers.probabilities.topk(min(top, len(names)), dim=1)
        rows = zip(best.values.tolist(), best.indices.tolist(), answers.unknown.tolist(), answers.alike)
        found = []
        for values, indices, unknown, alike in rows:
            ranked = [(names[index], value) for index, value in zip(indices, values)]
            found.append(Recognition(None if unknown else ranked[0][0], values[0], unknown, ranked, alike=alike))
        return found

    def features(self, X: Sequence[Any]) -> Tensor:
        """Features (n, d) of pictures under the trained backbone, on the CPU; for methods whose features stay fixed."""
        method = self.knowledge.method
        parts = (read_pictures(X[at : at + AT_ONCE], self.short_side) for at in range(0, len(X), AT_ONCE))
        none = torch.zeros(0, method.feature_dim)
        return torch.cat([none, *(method.features(self.pixels(part.store)).cpu() for part in parts)])

    def pixels(self, store: ImageStore) -> Pixels:
        return Pixels(store, self.transform, self.seed, device=self.runtime.device)
