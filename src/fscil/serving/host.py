"""One process that hosts one saved model for many people; the web page and the server go through it.

Two models share one backbone: one answers, one is taught. A lesson opens the folder anew, teaches that copy and writes
it; only then does the copy take the place of the one that answers. So recognising never waits for a lesson, a lesson
that fails leaves memory and disk as they were, and other processes may teach the same folder.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fscil.data.decode import in_order
from fscil.data.pictures import decode
from fscil.errors import UserError
from fscil.serving.decoding import TOO_NARROW, Decoders
from fscil.teachable.folder import HEAD, ModelFolder
from fscil.teachable.health import model_notes
from fscil.teachable.model import Teachable, timestamp
from fscil.teachable.names import check_class_name, check_class_names
from fscil.teachable.recognition import Recognition
from fscil.teachable.suggesting import Suggestion, suggest_decoded

AT_A_TIME = 2  # pictures of one request that are decoded at once: requests take turns
LOOK_EVERY = 1.0  # seconds between looks at whether another process has changed the folder

Picture = bytes | str | os.PathLike | Image.Image | np.ndarray
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What strangers may send. Formats are those of `fscil.data.decode`, known by content, not by name."""

    file_bytes: int = 20_000_000
    pixels: int = 60_000_000  # width x height, read from the header before anything is decoded
    aspect: float = 5.0  # longer by shorter side: pictures are padded to one another's size, strips would fill memory
    pictures: int = 64  # per request or lesson
    request_bytes: int = 100_000_000  # per request, all pictures together


class ModelUnavailable(UserError):
    """The model's folder is gone or damaged: nothing that whoever sent a lesson could mend, or need know more of."""


class ChangedMeanwhile(UserError):
    """The model is not any more what somebody saw who asked for a change."""


class _Model(Teachable):
    """A model that keeps its notices for the person whose lesson caused them; warnings would go to everybody."""

    def __init__(self, **parameters: Any):
        super().__init__(**parameters)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class _Answering:
    """A model nobody teaches any more, with the lock that lets one thread at a time use it."""

    def __init__(self, model: _Model):
        self.model, self.lock = model, threading.Lock()


class Host:
    """A saved model that answers many people and learns from any of them.

    >>> host = Host("birds")  # doctest: +SKIP
    >>> host.learn("heron", [Path("heron1.jpg").read_bytes(), Path("heron2.jpg").read_bytes()])  # doctest: +SKIP
    >>> host.recognise([Path("some.jpg").read_bytes()])[0].label  # doctest: +SKIP
    'heron'
    """

    def __init__(
        self,
        path: str | os.PathLike,
        weights: str | os.PathLike | None = None,
        device: str = "auto",
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        decoders: Decoders | None = None,
    ):
        self.path, self.limits, self._device = Path(path).expanduser(), limits, device
        self._teaching = threading.Lock()  # one lesson at a time
        self._looking = threading.Lock()  # one thread at a time looks at the folder
        self._swapping = threading.Lock()  # held for a moment: which model answers
        self._decoding = decoders or Decoders()
        self._stamp, self._looked = self._folder_stamp(), time.monotonic()
        first = self._open(weights=weights)
        self._backbone = first.backbone_
        self._answering, self._revision = _Answering(first), 0

    def close(self) -> None:
        """Ends the processes that decode, whatever they are at; pictures are refused from then on."""
        self._decoding.close()

    # ---- answers ----------------------------------------------------------------------------------------------------
    def recognise(self, pictures: Sequence[Picture], top: int = 5, alike: int = 0) -> list[Recognition]:
        """What each picture shows; one that cannot be used carries `error` and does not stop the others.

        With `alike`, so many kept pictures most like each come along, if small copies are kept.
        """
        return self.recognise_decoded(self.decode(pictures), top, alike)

    def recognise_decoded(self, decoded: Sequence[np.ndarray | str], top: int = 5, alike: int = 0) -> list[Recognition]:
        """`recognise` for what `decode` gave: any number of pictures, so that requests can share a forward pass."""
        good = [item for item in decoded if not isinstance(item, str)]
        answering = self._current()
        with answering.lock:
            found = iter(answering.model.recognise_decoded(good, top, alike) if good else [])
        return [Recognition.failed(item) if isinstance(item, str) else next(found) for item in decoded]

    def decode(self, pictures: Sequence[Picture]) -> list[np.ndarray | str]:
        """Each picture as uint8 (height, width, 3), reduced to what the model looks at; or why it cannot be used."""
        if len(pictures) > self.limits.pictures:
            raise UserError(f"{len(pictures)} pictures are too many at once; send at most {self.limits.pictures}.")
        return list(in_order(self._decode, pictures, AT_A_TIME))

    def suggest(self, decoded: Sequence[np.ndarray]) -> list[Suggestion]:
        """Which of these pictures are worth a label, best first, all of them."""
        answering = self._current()
        with answering.lock:
            return suggest_decoded(answering.model, decoded)

    # ---- teaching ---------------------------------------------------------------------------------------------------
    def learn(self, name: str, pictures: Sequence[Picture], add: bool = False) -> dict[str, Any]:
        """Teaches one class; returns the event of the history, with what there is to say about it under `notes`."""
        return self.learn_many({name: list(pictures)}, add)

    def learn_many(self, lessons: Mapping[str, Sequence[Picture]], add: bool = False) -> dict[str, Any]:
        """Teaches several classes in one lesson."""
        known = {str(info["name"]): info["pictures"] for info in self.classes}
        check_class_names(lessons, known)
        pictures = [picture for group in lessons.values() for picture in group]
        labels = [check_class_name(name, known) for name, group in lessons.items() for _ in group]
        for name, group in lessons.items():
            if not len(group):
                raise UserError(f'there are no pictures of "{name}"; five of different scenes are a good start.')
        if not pictures:
            raise UserError("no pictures were given.")
        again = [label for label in dict.fromkeys(map(str, labels)) if label in known]
        if again and not add:
            raise UserError(
                f'class "{again[0]}" is known already, from {known[again[0]]} pictures. Add these to it, '
                "or choose another name."
            )
        decoded = self.decode(pictures)
        for position, (label, item) in enumerate(zip(labels, decoded)):
            if isinstance(item, str):
                raise UserError(f'picture {labels[: position + 1].count(label)} of "{label}" cannot be used: {item}.')

        def lesson(model: _Model) -> dict[str, Any]:
            model.learn(decoded, labels, add=add)
            return model.history_[-1]

        return self._teach(lesson)

    def forget(self, name: str) -> dict[str, Any]:
        """Removes a class; returns the event of the history."""

        def lesson(model: _Model) -> dict[str, Any]:
            model.forget(name)
            return model.history_[-1]

        return self._teach(lesson)

    def undo(self, steps: int = 1, seen: int | None = None) -> dict[str, Any]:
        """Takes back the last changes, which are under `undone`, latest first; with `seen`, the revision that somebody
        looked at, nothing that came after it."""

        def lesson(model: _Model) -> dict[str, Any]:
            # asked where no other change can come in between; the folder may be newer than what answers
            if seen is not None and (seen != self._revision or model.history_ != self._answering.model.history_):
                raise ChangedMeanwhile("somebody has changed the model meanwhile; please look again first.")
            before = model.history_
            model.undo(steps)
            undone = before[: -steps - 1 : -1]
            return {"action": "undo", "when": timestamp(), "undone": undone, "known": len(model.class_info_)}

        return self._teach(lesson)

    # ---- what is known ----------------------------------------------------------------------------------------------
    @property
    def classes(self) -> list[dict[str, Any]]:
        """name, pictures, base, since of each class."""
        return self._current().model.class_info_

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was taught when, the base classes first."""
        return self._current().model.history_

    @property
    def calibration(self) -> dict[str, Any]:
        return self._current().model.calibration_

    def thumbnails(self, most: int = 3) -> dict[str, list[np.ndarray]]:
        """Small copies of pictures of each class, where they are kept."""
        answering = self._current()
        with answering.lock:
            return answering.model.knowledge_.kept_pictures(most)

    @property
    def notes(self) -> list[str]:
        """What is wrong with the model as a whole."""
        model = self._current().model
        return model_notes(model.calibration_, len(model.class_info_), model.config_["backbone"]["name"])

    @property
    def revision(self) -> int:
        """Counts the changes seen since this process opened the model."""
        self._current()
        return self._revision

    def info(self) -> dict[str, Any]:
        """What the model is made of."""
        model = self._current().model
        config = model.config_
        return {
            "name": self.path.resolve().name,
            "method": config["method"],
            "trained": config["trained"],
            "backbone": config["backbone"]["name"],
            "device": str(model.runtime_.device),
            "bytes": model.size_,
            "classes": len(model.class_info_),
            "lessons": len(model.history_) - 1,
            "stored_pictures": model.knowledge_.stored_pictures[0],
            "revision": self._revision,
        }

    # ---- parts ------------------------------------------------------------------------------------------------------
    def _teach(self, lesson: Callable[[_Model], dict[str, Any]]) -> dict[str, Any]:
        """Runs a lesson on a fresh copy of what is on disk; when it is written, the copy is the one that answers."""
        with self._teaching:
            try:
                taught = self._open(backbone=self._backbone)
            except UserError as error:
                log.warning("the model cannot be opened to be changed: %s", error)
                raise ModelUnavailable(
                    "the model's folder cannot be read just now and nothing was changed; whoever runs this finds the "
                    "reason in its log."
                ) from error
            with ModelFolder(self.path).lock():  # also over the stamp, so that it is of what was written here
                with taught.editing():
                    event = lesson(taught)
                stamp = self._folder_stamp()
            with self._looking:
                self._answer_with(taught, stamp)
            return {**event, "notes": taught.notes}

    def _open(self, **backbone: Any) -> _Model:
        model = _Model.load(self.path, device=self._device, **backbone)
        model.runtime_.cuda_graphs = False  # capturing one fails when another thread uses the GPU meanwhile
        return model

    def _answer_with(self, model: _Model, stamp: tuple[int, ...] | None) -> None:
        with self._swapping:
            self._answering, self._stamp, self._looked = _Answering(model), stamp, time.monotonic()
            self._revision += 1

    def _current(self) -> _Answering:
        """The model that answers, after a look at the folder if the last one was a while ago."""
        if time.monotonic() - self._looked >= LOOK_EVERY and self._looking.acquire(blocking=False):
            try:
                self._looked = time.monotonic()
                stamp = self._folder_stamp()
                if stamp != self._stamp:
                    self._answer_with(self._open(backbone=self._backbone), stamp)
            except UserError as error:  # damaged or gone: what is in memory still answers
                log.warning("the model changed on disk but cannot be opened: %s", error)
            finally:
                self._looking.release()
        with self._swapping:
            return self._answering

    def _folder_stamp(self) -> tuple[int, ...] | None:
        """Changes whenever the head is replaced."""
        try:
            found = os.stat(self.path / HEAD)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _decode(self, picture: Picture) -> np.ndarray | str:
        """One picture; files and bytes, which may be anybody's, in a process of their own."""
        limits, short_side = self.limits, self._answering.model.short_side_
        try:
            if isinstance(picture, (bytes, str, os.PathLike)):
                size = len(picture) if isinstance(picture, bytes) else os.path.getsize(picture)
                if size > limits.file_bytes:
                    return f"{size / 1e6:.1f} MB are more than the {limits.file_bytes / 1e6:g} MB allowed"
                data = picture if isinstance(picture, bytes) else Path(picture).read_bytes()
                return self._decoding.decode(data, short_side, limits.pixels, limits.aspect)
            height, width = (picture.height, picture.width) if isinstance(picture, Image.Image) else _size(picture)
            if height * width > limits.pixels:
                return f"{width} x {height} pixels are more than the {limits.pixels} allowed"
            array = decode(picture, short_side)
        except UserError as error:
            return str(error).removeprefix("image: ").removesuffix(".")
        except Exception as error:  # a missing file, or a Pillow image that is loaded only now and turns out damaged
            return f"it cannot be read ({error or type(error).__name__})"
        height, width = array.shape[:2]
        return TOO_NARROW.format(limits.aspect) if max(height, width) > limits.aspect * min(height, width) else array


def _size(array: np.ndarray) -> tuple[int, int]:
    """Height and width, channels first or last."""
    sides = sorted(np.shape(array))[-2:]
    return (sides[0], sides[1]) if len(sides) == 2 else (0, 0)
