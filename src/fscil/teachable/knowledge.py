"""What a teachable model knows at one moment: what the method learned, names, a calibrated confidence, and "unknown".

Base pictures are described once, after the base task; every lesson adds to that, and `forget` takes a class out of all
of it. The whole of it is tensors and a JSON-able record, from which `Knowledge.restored` makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fscil.data.picture_files import Label
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform
from fscil.maths.margins import cosine
from fscil.methods.base import Method
from fscil.methods.represented import Represented
from fscil.teachable.calibration import cross_validated, every
from fscil.teachable.names import place_of
from fscil.teachable.unknown import (
    KnownSpace,
    after_training,
    choose_score,
    fit_temperature,
    max_logit,
    rejection_threshold,
)

HELD_OUT_AT_MOST = 4000  # held-out pictures whose features are kept for calibration
BACKGROUND_SHARE = 0.3  # of the pictures, to choose the score of fit on where none were held out
THUMBNAIL = 96  # pixels a side
THUMBNAIL_KEYS = ("pixels", "features", "labels")


@dataclass
class Knowledge:
    """A method that has learned some classes, and everything that is known about these beside it.

    Labels number the entries of `classes`; in `held` and `thumbnails` a forgotten class is −1.
    """

    method: Method
    trained: bool  # False: the backbone is as it came, and so no base picture had to be held out
    space: KnownSpace | None  # what unknown pictures are told by; None: by their largest logit, or not at all
    held: dict[str, Tensor]  # labels and features of base pictures (logits, where features move) that calibrate
    taught: dict[str, Tensor]  # labels of taught pictures, and scores: how well each fits when left out
    thumbnails: dict[str, dict[str, Tensor]]  # lesson -> pixels, features and labels
    fingerprints: Tensor  # (n, 2): a picture's fingerprint and its label
    classes: list[dict[str, Any]]  # name, pictures, base, since
    calibration: dict[str, Any]
    judged: tuple[Tensor, Tensor] | None = None  # answers to the pictures that calibrated last, and what they show

    # ---- learning ---------------------------------------------------------------------------------------------------
    @classmethod
    def of_base(cls, method: Method, trained: bool, task: Task, held: Pixels, held_labels: Tensor) -> Knowledge:
        """After the base task; names, fingerprints and calibration are still to come."""
        space, kept = _describe_base(method, trained, task, held, held_labels)
        none = torch.zeros(0, dtype=torch.int64)
        taught = {"scores": torch.zeros(0), "labels": none}
        return cls(method, trained, space, kept, taught, {}, torch.zeros(0, 2, dtype=torch.int64), [], {})

    def describe_taught(self, task: Task) -> None:
        """Adds a lesson to the known space and notes how well each of its pictures fits when left out."""
        if self.space is None:
            return
        features = self.method.features(task.images)
        labels = task.labels.to(features.device)
        self.space.add(features, labels, self.method.seen)
        base = torch.tensor([info["base"] for info in self.classes] + [False] * len(task.classes))
        taught = ~base[task.labels]
        if bool(taught.any()):
            own = taught.to(features.device)
            scores = self.space.over_classes(self.space.left_out_scores(features[own], labels[own])).cpu()
            self.taught = {
                "scores": torch.cat([self.taught["scores"], scores]),
                "labels": torch.cat([self.taught["labels"], task.labels[taught]]),
            }

    def keep_thumbnails(self, task: Task, per_class: int) -> None:
        """Small copies of the first pictures of each class in a lesson, if that was chosen."""
        if not per_class or not self.method.features_fixed:
            return
        labels = task.labels
        rank = torch.stack([(labels[:at] == label).sum() for at, label in enumerate(labels)])
        chosen = (rank < per_class).nonzero().squeeze(1)
        view = Pixels(task.images.store, Transform(THUMBNAIL, resize=THUMBNAIL), indices=task.images.indices[chosen])
        features = self.method.features(task.images)
        lesson = 1 + max(map(int, self.thumbnails), default=0)  # not the number of versions: history can be dropped
        self.thumbnails = self.thumbnails | {
            f"{lesson:04d}": {
                "pixels": (view.plain() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous(),
                "features": features[chosen.to(features.device)].cpu(),
                "labels": labels[chosen].clone(),
            }
        }

    def count(self, fingerprints: Tensor, labels: Tensor, fresh: list[Label], base: bool, now: str) -> None:
        """Notes the pictures of a lesson, and the classes that are new in it."""
        self.fingerprints = torch.cat([self.fingerprints, torch.stack([fingerprints, labels], 1)])
        known = self.classes + [{"name": name, "pictures": 0, "base": base, "since": now} for name in fresh]
        gained = torch.bincount(labels, minlength=len(known)).tolist()
        self.classes = [{**info, "pictures": info["pictures"] + more} for info, more in zip(known, gained, strict=True)]

    def forget(self, number: int) -> dict[str, Any]:
        """Takes a class out of everything and returns what was known about it."""
        self.method.forget(number)
        if self.space is not None:
            self.space.forget(number)
        kept = [lesson["labels"] for lesson in self.thumbnails.values()]
        for labels in (self.fingerprints[:, 1], self.held["labels"], self.taught["labels"], *kept):
            _drop_label(labels, number)
        self.fingerprints = self.fingerprints[self.fingerprints[:, 1] >= 0]
        self.taught = _without_forgotten(self.taught)
        gone = self.classes[number]
        self.classes = self.classes[:number] + self.classes[number + 1 :]
        return gone

    def drop_forgotten(self) -> None:
        """Removes what is still kept of pictures of forgotten classes, after which no `undo` can bring these back."""
        self.held = _without_forgotten(self.held)
        self.thumbnails = {name: _without_forgotten(lesson) for name, lesson in self.thumbnails.items()}

    def calibrate(self, false_rejection: float) -> None:
        """Temperature and threshold from held-out base pictures, anew after every change, and how both do."""
        keep = self.held["labels"] >= 0
        labels, held = self.held["labels"][keep], self.held["features"][keep]
        self.judged = None
        if not self.method.features_fixed:
            if self.calibration:  # the base's temperature and threshold are the best known
                stale = dict.fromkeys(("held_out_accuracy", "held_out_rejection"))  # of features that have moved since
                self.calibration = self.calibration | stale
                return
            logits, scores = held, max_logit(held) if len(held) else torch.zeros(0)
        elif not len(held):
            logits, scores = torch.zeros(0, len(self.classes)), torch.zeros(0)
        elif isinstance(self.method, Represented) and not self.trained:
            logits, scores, labels = cross_validated(self.method, self.space, held, labels)
        else:
            step = every(len(held), len(self.classes))
            logits, scores = self.judge_features(held[::step].to(self.method.runtime.device))
            labels = labels[::step]
        count, self.judged = len(labels), (logits.argmax(1), labels) if len(labels) else None
        rejects = count > 0 and (self.space is not None or not self.method.features_fixed)
        threshold = rejection_threshold(scores, false_rejection) if rejects else None
        if threshold is None:  # too few of the base pictures are left: what was known before some were forgotten
            threshold = self.calibration.get("threshold")
        taught = self.taught["scores"]
        self.calibration = {
            "temperature": fit_temperature(logits, labels) if count else self.calibration.get("temperature", 1.0),
            "threshold": threshold,
            "score": "likelihood_ratio" if self.space is not None else "max_logit",
            "false_rejection": false_rejection,
            "held_out": count,
            "held_out_accuracy": float((logits.argmax(1) == labels).double().mean()) if count else None,
            "held_out_rejection": _rate(scores, threshold),
            "taught_rejection": _rate(taught[~taught.isnan()], threshold),
        }

    # ---- answers ----------------------------------------------------------------------------------------------------
    def judge(self, images: Pixels) -> tuple[Tensor, Tensor]:
        """Logits (n, classes), and how well each image fits the known classes (n,)."""
        with torch.no_grad():
            if self.method.features_fixed:
                return self.judge_features(self.method.features(images))
            logits = self.method.logits(images).float().cpu()
        return logits, max_logit(logits)

    def judge_features(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """`judge` of images whose features (n, d) are known."""
        with torch.no_grad():
            logits = self.method.logits_from(features).float().cpu()
        return logits, self.space.fit(features).cpu() if self.space is not None else max_logit(logits)

    def is_unknown(self, scores: Tensor) -> Tensor:
        """Whether scores of fit (n,) are those of no known class; never, where there was nothing to set a limit by."""
        threshold = self.calibration["threshold"]
        return scores < threshold if threshold is not None else torch.zeros(len(scores), dtype=torch.bool)

    def nearest_thumbnails(self, features: Tensor, count: int) -> list[list[tuple[Label, float, Any]]]:
        """(class, cosine, small copy uint8) of the kept pictures most like each row of features (n, d)."""
        lessons = [lesson for lesson in self.thumbnails.values() if len(lesson["labels"])]
        if not lessons:
            return [[] for _ in features]
        pixels, kept, labels = (torch.cat([lesson[key] for lesson in lessons]) for key in THUMBNAIL_KEYS)
        likeness = cosine(features, kept).masked_fill(labels < 0, -torch.inf)
        best = likeness.topk(min(count, int((labels >= 0).sum())), dim=1)
        return [
            [(self.classes[int(labels[at])]["name"], value, pixels[at].numpy()) for value, at in zip(values, places)]
            for values, places in zip(best.values.tolist(), best.indices.tolist())
        ]

    def kept_pictures(self, most: int) -> dict[str, list[Any]]:
        """Up to `most` small copies (uint8) of each class, where they are kept."""
        found: dict[str, list[Any]] = {}
        for lesson in self.thumbnails.values():
            for label, pixels in zip(lesson["labels"].tolist(), lesson["pixels"]):
                if label >= 0 and len(own := found.setdefault(str(self.names[label]), [])) < most:
                    own.append(pixels.numpy())
        return found

    # ---- names ------------------------------------------------------------------------------------------------------
    @property
    def names(self) -> list[Label]:
        return [info["name"] for info in self.classes]

    def number(self, label: Label) -> int:
        """Where a class stands in `classes`; a number typed as text will do."""
        return place_of(label, self.names)

    def pictures_by_fingerprint(self) -> dict[int, set[Label]]:
        """The classes that each known picture was given as."""
        names = self.names
        known: dict[int, set[Label]] = {}
        for fingerprint, number in self.fingerprints.tolist():
            known.setdefault(fingerprint, set()).add(names[number])
        return known

    # ---- state ------------------------------------------------------------------------------------------------------
    @property
    def stored_pictures(self) -> tuple[int, int]:
        """Pictures kept in the model, thumbnails included, and the bytes of those the method itself keeps."""
        count, size = self.method.stored_images()
        return count + sum(len(lesson["labels"]) for lesson in self.thumbnails.values()), size

    def record(self) -> dict[str, Any]:
        """What of it is no tensor."""
        return {"classes": self.classes, "calibration": self.calibration, "stored_pictures": self.stored_pictures[0]}

    def tensors(self) -> dict[str, Tensor]:
        """Everything learned, on the CPU, under unique names."""
        tensors = {f"method.{name}": tensor for name, tensor in self.method.state().items()}
        if self.space is not None:
            tensors |= {f"known.{key}": value for key, value in self.space.state().items()}
        tensors |= {f"held.{key}": value for key, value in self.held.items()}
        tensors |= {f"taught.{key}": value for key, value in self.taught.items()}
        for name, lesson in self.thumbnails.items():
            tensors |= {f"thumbnails.{name}.{key}": value for key, value in lesson.items()}
        tensors["fingerprints"] = self.fingerprints
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    @classmethod
    def restored(
        cls, method: Method, trained: bool, tensors: Mapping[str, Tensor], record: Mapping[str, Any]
    ) -> Knowledge:
        """What `tensors` and `record` were made of, in a fresh method; an error of some kind if they do not fit it."""
        groups: dict[str, dict[str, Tensor]] = {name: {} for name in ("method", "known", "held", "taught")}
        thumbnails: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, key = name.partition(".")
            if group == "thumbnails":
                lesson, _, key = key.partition(".")
                thumbnails.setdefault(lesson, {})[key] = tensor.clone()
            elif key:
                groups[group][key] = tensor.clone()
        method.load_state(groups["method"])
        known = {key: value.to(method.runtime.device) for key, value in groups["known"].items()}
        space = KnownSpace.restored(known) if known else None
        if space is not None and space.base == (0, 0):
            left = [n for n, info in zip(space.counts.tolist(), record["classes"]) if info["base"]]
            space.base = sum(left), len(left)
        classes, calibration = [dict(info) for info in record["classes"]], dict(record["calibration"])
        parts = groups["held"], groups["taught"], thumbnails, tensors["fingerprints"].clone()
        knowledge = cls(method, trained, space, *parts, classes, calibration)
        if len(classes) != method.seen:
            raise ValueError(f"{len(classes)} class names for {method.seen} classes")
        _check_rows(
            "fingerprints", {"labels": knowledge.fingerprints[:, 1], "of": knowledge.fingerprints}, len(classes)
        )
        for name, rows in {"held": knowledge.held, "taught": knowledge.taught, **thumbnails}.items():
            _check_rows(name, rows, len(classes))
        if method.features_fixed:  # shapes that do not fit one another show here, not at the first picture
            knowledge.judge_features(torch.zeros(1, method.feature_dim, device=method.runtime.device))
        return knowledge


def _describe_base(
    method: Method, trained: bool, task: Task, held: Pixels, held_labels: Tensor
) -> tuple[KnownSpace | None, dict[str, Tensor]]:
    """What unknown pictures are told apart by, and the held-out data that calibrates it."""
    if not method.features_fixed:
        with torch.no_grad():
            logits = method.logits(held).float().cpu() if len(held) else torch.zeros(0, len(task.classes))
        return None, {"features": logits, "labels": held_labels}
    features = method.features(task.images)
    labels = task.labels.to(features.device)
    known = KnownSpace.of(features, labels, len(task.classes))
    if trained:
        positions = torch.arange(len(held))
        if len(held) > HELD_OUT_AT_MOST:
            order = torch.randperm(len(held), generator=method.runtime.generator("held-out features"))
            positions = order[:HELD_OUT_AT_MOST].sort().values
        kept = method.features(held.select(positions)) if len(positions) else features[:0]
        kept_labels = held_labels[positions]
        step = every(len(kept), len(task.classes))
        if known.has_spread:
            known = after_training(known, kept[::step], kept_labels.to(labels.device)[::step])
    else:  # nothing was trained, so cross-validation can use every picture
        kept, kept_labels = features, task.labels.clone()
        draw = method.runtime.generator("background")
        part = (torch.rand(len(labels), generator=draw) < BACKGROUND_SHARE).to(labels.device)
        step = every(int(part.sum()), len(task.classes))
        split = features[~part], labels[~part], features[part][::step], labels[part][::step]
        if known.has_spread and len(torch.unique(split[1])) == len(task.classes):
            known.background, known.softness = choose_score(*split, known.shrinkage, draw)
    return known if known.has_spread else None, {"features": kept.cpu(), "labels": kept_labels}


def _rate(scores: Tensor, threshold: float | None) -> float | None:
    return float((scores < threshold).double().mean()) if threshold is not None and len(scores) else None


def _check_rows(name: str, rows: Mapping[str, Tensor], classes: int) -> None:
    """Refuses rows that are not of one length, or whose labels number no class (−1: a forgotten one)."""
    labels = rows["labels"]
    if labels.dtype != torch.int64 or labels.ndim != 1 or {len(row) for row in rows.values()} != {len(labels)}:
        raise ValueError(f'"{name}" has labels {labels.dtype} {tuple(labels.shape)} and other rows')
    if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f'"{name}" has labels from {labels.min()} to {labels.max()} for {classes} classes')
    if rows.get("features", labels[:, None]).ndim != 2:
        raise ValueError(f'"{name}" has features {tuple(rows["features"].shape)}')


def _without_forgotten(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    keep = rows["labels"] >= 0
    return {key: value[keep] for key, value in rows.items()}


def _drop_label(labels: Tensor, number: int) -> None:
    """In place: `number` becomes −1 and labels above it move down."""
    labels[labels == number] = -1
    labels[labels > number] -= 1
