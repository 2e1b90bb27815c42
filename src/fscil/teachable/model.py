"""A model that is trained once on the classes at hand and taught new ones from a few pictures each, for months.

The methods do the learning; `knowledge.py` adds class names, a calibrated confidence and the answer "unknown",
`recognition.py` answers, `versions.py` keeps what can be undone and saved; this file reads pictures, plans and teaches.
`estimator.py` adds scikit-learn's manners; the commands do without them, because scikit-learn takes most of a second to
import.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fscil.backbones.vit import Backbone
from fscil.data.pictures import Label
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.methods.base import Method
from fscil.methods.making import make_method
from fscil.strict import build
from fscil.teachable.expense import choose_plan, keeping
from fscil.teachable.folder import BACKBONE, ModelFolder
from fscil.teachable.knowledge import Knowledge
from fscil.teachable.lessons import fitting_labels, labelled, left_out, pictures_of, read_lesson
from fscil.teachable.names import check_class_names
from fscil.teachable.planning import choose_held_out, fit_frozen
from fscil.teachable.recognition import Alike, Notice, Recogniser, Recognition
from fscil.teachable.starting import (
    check_options,
    check_parameters,
    describe_backbone,
    open_backbone,
    reopen_backbone,
    short_side,
    start_runtime,
    transform_for,
    usual_backbone,
)
from fscil.teachable.versions import Versions
from fscil.teachable.weights import find_weights

KEPT_PARAMETERS = ("held_out", "false_rejection", "unknown", "skip_bad", "thumbnails")


class Teachable:
    """Everything `fscil.FewShotClassifier` does; see there for the parameters."""

    def __init__(
        self,
        method: str = "smp",
        backbone: str | Backbone = "auto",
        *,
        weights: str | os.PathLike | None = None,
        head: str | Mapping[str, Any] = "auto",
        train: str = "auto",
        options: Mapping[str, Any] | None = None,
        preprocessing: Mapping[str, Any] | None = None,
        held_out: float = 0.1,
        false_rejection: float = 0.05,
        unknown: str | None = None,
        skip_bad: bool = False,
        thumbnails: int = 0,
        device: str = "auto",
        precision: str = "auto",
        seed: int = 2023,
        verbose: bool = False,
    ):
        self.method = method
        self.backbone = backbone
        self.weights = weights
        self.head = head
        self.train = train
        self.options = options
        self.preprocessing = preprocessing
        self.held_out = held_out
        self.false_rejection = false_rejection
        self.unknown = unknown
        self.skip_bad = skip_bad
        self.thumbnails = thumbnails
        self.device = device
        self.precision = precision
        self.seed = seed
        self.verbose = verbose

    # ---- learning -------------------------------------------------------------------------------------------------
    def fit(self, X: Any, y: Any = None, *, progress: str | os.PathLike | None = None) -> Teachable:
        """Learns the base classes. Training keeps its progress in the folder `progress`, if one is given: the same call
        goes on where it was stopped."""
        check_parameters(self)
        self._versions = Versions()
        check_options(self.method, self.options)
        source, (X, labels) = X if y is None else None, labelled(X, y)
        self._note_left_out(source)
        for text in check_class_names(labels):
            self.note(text)
        self.runtime_ = start_runtime(self.device, self.precision, self.seed, self.verbose)
        chosen = usual_backbone(self.runtime_) if self.backbone == "auto" else self.backbone
        backbone = open_backbone(chosen, self.weights, (self.preprocessing or {}).get("size"), self.runtime_)
        transform = transform_for(backbone, self.preprocessing)
        pictures, labels = read_lesson(X, labels, short_side(transform), self.skip_bad, self.note)
        names = sorted(set(labels))
        if len(names) < 2:
            raise UserError(f'fit needs pictures of at least two classes; there is 1 class, "{names[0]}".')
        counts = Counter(labels)
        everything = Pixels(pictures.store, transform, self.seed, pictures.kept, self.runtime_.device)
        plan, cost = choose_plan(self, everything, len(names), backbone, self.runtime_)
        self.config_ = {
            "method": plan.method,
            "options": dict(plan.options),
            "backbone": describe_backbone(backbone, self.weights),
            "transform": asdict(transform),
            "trained": plan.trains,
            "seed": self.seed,
            "parameters": {key: getattr(self, key) for key in KEPT_PARAMETERS},
        }
        if plan.head:
            self.config_["head"] = plan.head
        self.backbone_, self.transform_ = backbone, transform
        method = self._new_method()
        place = {name: number for number, name in enumerate(names)}
        number = torch.tensor([place[label] for label in labels])
        held = choose_held_out(number, self.held_out if plan.trains else 0.0, self.runtime_)
        training = (~held).nonzero().squeeze(1)
        task = Task(0, tuple(range(len(names))), everything.select(training), number[training])
        if plan.options.get("calibration") == "closed_form" and len(training) == len(names):
            raise UserError(
                "the closed form needs two pictures of some class to learn from: it goes by how pictures of one class "
                "differ. Add some, or pass --head prototypes (head='prototypes')."
            )
        self.plan_ = plan.said(len(names), len(training), int(held.sum()))
        (self.note if plan.untrained else self.runtime_.display.line)(self.plan_)
        if cost is not None:
            self.runtime_.display.line(str(cost))
        with keeping(progress, self.runtime_, self.config_, pictures.fingerprints), method.remembering():
            if plan.trains or plan.head:
                method.fit_base(task)
            else:
                fit_frozen(method, task, "shrinkage" not in (self.options or {}))
                self.config_["options"]["shrinkage"] = method.options.shrinkage
            kept = everything.select(held.nonzero().squeeze(1))
            knowledge = self.knowledge_ = Knowledge.of_base(method, plan.trains, task, kept, number[held])
            knowledge.keep_thumbnails(task, self.thumbnails, self._lesson())
        now = timestamp()
        knowledge.count(pictures.fingerprints, number, names, True, now)
        self._finish("fit", {str(label): counts[label] for label in names}, now)
        return self

    def learn(self, X: Any, y: Any = None, add: bool = False) -> Teachable:
        """Learns new classes from a few pictures each; with `add`, pictures of known classes are added to theirs."""
        self.check_fitted()
        source, (X, labels) = X if y is None else None, labelled(X, y)
        self._note_left_out(source)
        knowledge, names = self.knowledge_, self.knowledge_.names
        labels = fitting_labels(labels, knowledge, add, self.note)
        if set(labels) & set(names) and not knowledge.method.can_refine:
            raise UserError(f"method {self.config_['method']} cannot add pictures to a known class; use smp.")
        known = knowledge.pictures_by_fingerprint()
        pictures, labels = read_lesson(X, labels, self.short_side_, self.skip_bad, self.note, known)
        if not labels:
            raise UserError("all of these pictures are known already; there is nothing to learn.")
        for label, count in Counter(labels).items():
            if count == 1 and label not in names:
                self.note(f'"{label}" is learned from one picture; five or more of different scenes are far better')
        fresh = list(dict.fromkeys(label for label in labels if label not in names))
        order = names + fresh
        number = torch.tensor([order.index(label) for label in labels])
        with self._transaction():
            new = tuple(range(len(names), len(order)))
            pixels = Pixels(pictures.store, self.transform_, self.seed, pictures.kept, self.runtime_.device)
            task = Task(int(knowledge.method.tasks_seen), new, pixels, number)
            with knowledge.method.remembering():
                knowledge.method.learn(task)
                knowledge.describe_taught(task)
                knowledge.keep_thumbnails(task, self.thumbnails, self._lesson())
            gained, now = Counter(labels), timestamp()
            knowledge.count(pictures.fingerprints, number, fresh, False, now)
            self._finish("learn", {str(label): gained[label] for label in gained}, now)
        return self

    def forget(self, label: Label) -> Teachable:
        """Removes one class. `undo` brings it back."""
        self.check_fitted()
        number = self.knowledge_.number(label)
        if len(self.knowledge_.classes) == 1:
            raise UserError(f'"{label}" is the only class left; a model needs one.')
        with self._transaction():
            gone = self.knowledge_.forget(number)
            self._finish("forget", {str(gone["name"]): gone["pictures"]}, timestamp())
        return self

    def undo(self, steps: int = 1) -> Teachable:
        """Takes back the last `steps` changes, forgetting included."""
        self.check_fitted()
        possible = len(self._versions) - 1
        if not 1 <= steps <= possible:
            raise UserError(f"cannot undo {steps} changes: {possible} were made since the base classes were learned.")
        self._versions.cut(len(self._versions) - steps)
        self._restore()
        return self

    def drop_history(self) -> Teachable:
        """Forgets how the model came to be: what was forgotten or undone is gone for good from the next `save` on."""
        self.check_fitted()
        record = self._versions.current.record
        known = {str(info["name"]): info["pictures"] for info in self.knowledge_.classes}
        event = {**record["event"], "action": "drop history", "classes": known}
        self.knowledge_.drop_forgotten()
        self._versions.start_anew({**record, "event": event}, self.knowledge_.tensors())
        return self

    # ---- answers ----------------------------------------------------------------------------------------------------
    def recogniser(self) -> Recogniser:
        """What answers, on the present state of the model."""
        self.check_fitted()
        return Recogniser(self.knowledge_, self.transform_, self.short_side_, self.runtime_, self.seed)

    def predict(self, X: Any) -> np.ndarray:
        """Class names; with the parameter `unknown`, that answer for pictures of no known class."""
        probabilities, rejected, _ = self.answers(X)
        names = self.classes_[probabilities.argmax(1)]
        return names if self.unknown is None else np.where(rejected, np.array(self.unknown), names.astype(str))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Calibrated probabilities (n, classes), columns as in `classes_`."""
        return self.answers(X)[0]

    def is_unknown(self, X: Any) -> np.ndarray:
        """Whether each picture is of no known class."""
        return self.answers(X)[1]

    def unknown_scores(self, X: Any) -> np.ndarray:
        """How well each picture fits the known classes; below `calibration_["threshold"]` it is unknown."""
        return self.answers(X)[2]

    def answers(self, X: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(probabilities, whether unknown, score of fit) of all pictures in one pass; unreadable ones are an error."""
        _, answers = self.recogniser().readable(pictures_of(X))
        return answers.probabilities.numpy(), answers.unknown.numpy(), answers.scores.numpy()

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy of `predict`."""
        X, labels = labelled(X, y)
        right = self.predict(X) == np.array(labels)
        return float(np.average(right, weights=sample_weight))

    def recognise(self, X: Any, top: int = 5, alike: int = 0) -> list[Recognition]:
        """Label, confidence and best classes of each picture; unreadable ones say so instead of stopping the others.

        With `alike`, so many kept pictures most like each come along, if small copies are kept.
        """
        return self.recogniser().recognise(pictures_of(X), top, alike)

    def recognise_decoded(self, arrays: Sequence[np.ndarray], top: int = 5, alike: int = 0) -> list[Recognition]:
        """`recognise` for pictures uint8 (height, width, 3) that are upright and reduced to `short_side_` already."""
        recogniser = self.recogniser()
        return recogniser.described(recogniser.answers(ImageStore.from_list(arrays), alike), top)

    def embed(self, X: Any) -> np.ndarray:
        """Features (n, d) of pictures under the trained backbone."""
        recogniser = self.recogniser()
        if not self.knowledge_.method.features_fixed:
            raise UserError(f"method {self.config_['method']} has no features that stay as they are.")
        return recogniser.features(pictures_of(X)).numpy()

    def nearest_thumbnails(self, X: Any, count: int = 3) -> list[list[Alike]]:
        """(class, cosine, small copy uint8) of the kept pictures most like each picture; empty if none were kept."""
        self.check_fitted()
        if not self.knowledge_.thumbnails:
            return [[] for _ in pictures_of(X)]
        return self.knowledge_.nearest_thumbnails(torch.from_numpy(self.embed(X)), count)

    # ---- files ------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike, embed: bool = False) -> Path:
        """Writes the model into a folder, or what is new in it into the folder it came from. Whole, or not at all.

        The backbone is referred to by name and hash; `embed` puts its weights into the folder as well.
        """
        self.check_fitted()
        self.config_ = self._versions.write(
            path, self.config_, embed, lambda: self.backbone_.in_float32().vit.state_dict()
        )
        return self.folder_.path

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        *,
        device: str = "auto",
        precision: str = "auto",
        weights: str | os.PathLike | None = None,
        backbone: Backbone | None = None,
        verbose: bool = False,
    ) -> Teachable:
        """Opens a saved model, on any device. Every file's hash is checked; nothing in it is executed.

        `backbone` is one that is open already, on this device: several readers of one model share its weights.
        """
        folder = ModelFolder(path)
        head, tensors = folder.open()
        config = head.config
        try:
            chosen, parameters = dict(config["backbone"]), dict(config["parameters"])
            clf = cls(
                method=config["method"],
                backbone=chosen["name"],
                weights=weights,
                options=dict(config["options"]),
                **{key: parameters[key] for key in KEPT_PARAMETERS},
                device=device,
                precision=precision,
                seed=config["seed"],
                verbose=verbose,
            )
            check_parameters(clf)
            clf.transform_ = build(Transform, config["transform"], "transform.")
        except (KeyError, TypeError) as error:
            raise UserError(f'"{folder.path / "model.json"}" is not the head of a model (lacks {error}).') from error
        clf.runtime_ = start_runtime(device, precision, clf.seed, verbose)
        if backbone is not None:
            clf.backbone_ = backbone.prepare(clf.runtime_)
        else:
            if weights is None and chosen["embedded"]:
                folder.checked(head, BACKBONE)
            clf.backbone_ = reopen_backbone(chosen, find_weights(folder, head, weights), clf.runtime_)
        if clf.backbone_.hash != chosen["hash"]:
            once = f', from "{chosen["weights"]}"' if chosen["weights"] else ""
            raise UserError(
                f'the weights of backbone "{chosen["name"]}" here have hash {clf.backbone_.hash}, the model was fitted '
                f"on {chosen['hash']}{once}; pass the same file with --weights."
            )
        clf.config_, clf._versions = config, Versions()
        clf._versions.adopt(folder, head, tensors)
        clf._restore()
        return clf

    def refresh(self) -> Teachable:
        """Takes over what another process has taught the saved model since; cheap when nothing changed."""
        self.check_fitted()
        if self._versions.refresh():
            self._restore()
        return self

    @contextlib.contextmanager
    def editing(self) -> Iterator[Teachable]:
        """Changes a saved model together with its folder: others wait, and a failure leaves both as they were.

        >>> with clf.editing(): clf.learn(pictures, names)  # doctest: +SKIP
        """
        self.check_fitted()
        if self.folder_ is None:
            raise UserError("save the model first; editing keeps a folder up to date.")
        with self.folder_.lock():
            self.refresh()
            try:
                yield self
                self.save(self.folder_.path)
            except BaseException:
                self._versions.adopt(self.folder_, *self.folder_.open())
                self._restore()
                raise

    @property
    def classes_(self) -> np.ndarray:
        self.check_fitted()
        return np.array(self.knowledge_.names)

    @property
    def history_(self) -> list[dict[str, Any]]:
        self.check_fitted()
        return self._versions.events

    @property
    def folder_(self) -> ModelFolder | None:
        """The folder it was saved to or loaded from."""
        return self._versions.folder

    @property
    def class_info_(self) -> list[dict[str, Any]]:
        """Name, number of pictures, whether it is a base class, and since when it is known, of each class."""
        self.check_fitted()
        return [dict(info) for info in self.knowledge_.classes]

    @property
    def calibration_(self) -> dict[str, Any]:
        self.check_fitted()
        return dict(self.knowledge_.calibration)

    @property
    def size_(self) -> int:
        """Bytes of the saved model."""
        head = self._versions.head
        return head.bytes if head is not None else 0

    @property
    def short_side_(self) -> int:
        """Pixels that the shorter side of a picture is reduced to before anything else."""
        return short_side(self.transform_)

    def __sklearn_is_fitted__(self) -> bool:
        return bool(getattr(self, "_versions", None))

    # ---- small parts ------------------------------------------------------------------------------------------------
    def _new_method(self) -> Method:
        chosen = self.config_
        return make_method(chosen["method"], chosen["options"], self.backbone_, self.runtime_, chosen.get("head"))

    def note(self, text: str) -> None:
        """Says something worth knowing, here as a warning; whoever hosts a model may put it elsewhere."""
        warnings.warn(text, Notice, stacklevel=4)

    def _note_left_out(self, source: Any) -> None:
        if isinstance(source, (str, os.PathLike)) and (said := left_out(source)):
            self.note(said)

    def check_fitted(self) -> None:
        """Raises scikit-learn's NotFittedError before `fit` or `load`."""
        if not self.__sklearn_is_fitted__():
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("this model is not fitted yet; call fit, or open one with load.")

    # ---- versions ---------------------------------------------------------------------------------------------------
    def _lesson(self) -> str:
        """The name that the present lesson's thumbnails are kept under."""
        return f"{len(self._versions) + 1:04d}"

    def _finish(self, action: str, classes: dict[str, int], when: str) -> None:
        """Calibrates and makes the present state a version."""
        knowledge = self.knowledge_
        knowledge.calibrate(self.false_rejection)
        reported = ("held_out_accuracy", "held_out_rejection", "taught_rejection")
        event = {
            "action": action,
            "when": when,
            "classes": classes,
            "known": len(knowledge.classes),
            **{key: knowledge.calibration[key] for key in reported},
        }
        stored, size = knowledge.stored_pictures
        if size and action in ("fit", "learn"):
            self.note(f"method {self.config_['method']} keeps {stored} of the pictures in the model ({size} bytes)")
        self._versions.add({"event": event, **knowledge.record()}, knowledge.tensors())

    def _restore(self) -> None:
        """Makes the last version the present state."""
        version = self._versions.load_current()
        method, trained = self._new_method(), self.config_["trained"]
        try:
            self.knowledge_ = Knowledge.restored(method, trained, version.tensors, version.record)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise UserError(f"the saved state does not fit method {self.config_['method']}: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """A change that fails leaves the model as it was."""
        count = len(self._versions)
        try:
            yield
        except BaseException:
            self._versions.cut(count)
            self._restore()
            raise


def timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
