"""A model that is trained once on the classes at hand and taught new ones from a few pictures each, for months.

The methods do the learning; `knowledge.py` adds class names, a calibrated confidence and the answer "unknown",
`recognition.py` and `answering.py` answer, `versions.py` keeps what can be undone and saved; this file reads pictures,
plans and teaches. `estimator.py` adds scikit-learn's manners; the commands do without them, because scikit-learn takes
most of a second to import.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from fscil.backbones.vit import Backbone
from fscil.data.picture_files import Label
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.files import check_finite
from fscil.methods.base import Method
from fscil.methods.making import make_method
from fscil.strict import build
from fscil.teachable.answering import Answering
from fscil.teachable.expense import choose_plan, keeping
from fscil.teachable.folder import BACKBONE, MAY_LACK, ModelFolder, check_undo
from fscil.teachable.health import note_lesson
from fscil.teachable.knowledge import Knowledge
from fscil.teachable.lessons import fitting_labels, labelled, read_lesson, remarks
from fscil.teachable.names import check_class_names
from fscil.teachable.planning import choose_held_out, fit_frozen
from fscil.teachable.recognition import Notice
from fscil.teachable.starting import (
    check_options,
    check_parameters,
    describe_backbone,
    fitted_head,
    open_backbone,
    preprocessing_of,
    reopen_backbone,
    short_side,
    start_runtime,
    transform_for,
    usual_backbone,
)
from fscil.teachable.versions import Versions
from fscil.teachable.weights import check_named_weights, find_weights

KEPT_PARAMETERS = ("held_out", "false_rejection", "unknown", "skip_bad", "thumbnails")


class Teachable(Answering):
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
    def fit(self, X: Any, y: Any = None, *, progress: str | os.PathLike | None = None) -> Self:
        """Learns the base classes. Training keeps its progress in the folder `progress`, if one is given: the same call
        goes on where it was stopped."""
        check_parameters(self)
        self._versions = Versions()
        check_options(self.method, self.options)
        source, (X, labels) = X if y is None else None, labelled(X, y)
        self._note_remarks(source)
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
        with keeping(progress, self.runtime_, self.config_, pictures.fingerprints, labels), method.remembering():
            if plan.trains or plan.head:
                method.fit_base(task)
            else:
                fit_frozen(method, task, "shrinkage" not in (self.options or {}))
                self.config_["options"]["shrinkage"] = method.options.shrinkage
            kept = everything.select(held.nonzero().squeeze(1))
            knowledge = self.knowledge_ = Knowledge.of_base(method, plan.trains, task, kept, number[held])
            knowledge.keep_thumbnails(task, self.thumbnails)
            features = method.features(task.images) if method.features_fixed else None
        now = timestamp()
        knowledge.count(pictures.fingerprints, number, names, True, now)
        self._finish("fit", {str(label): counts[label] for label in names}, now)
        note_lesson(self, features, task.labels, [pictures.names[at] for at in training.tolist()])
        return self

    def learn(self, X: Any, y: Any = None, add: bool = False) -> Self:
        """Learns new classes from a few pictures each; with `add`, pictures of known classes are added to theirs."""
        self.check_fitted()
        source, (X, labels) = X if y is None else None, labelled(X, y)
        self._note_remarks(source)
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
                knowledge.keep_thumbnails(task, self.thumbnails)
                features = knowledge.method.features(pixels) if knowledge.method.features_fixed else None
            gained, now = Counter(labels), timestamp()
            knowledge.count(pictures.fingerprints, number, fresh, False, now)
            self._finish("learn", {str(label): gained[label] for label in gained}, now)
        note_lesson(self, features, number, pictures.names)
        return self

    def forget(self, label: Label) -> Self:
        """Removes one class. `undo` brings it back."""
        self.check_fitted()
        number = self.knowledge_.number(label)
        if len(self.knowledge_.classes) == 1:
            raise UserError(f'"{label}" is the only class left; a model needs one.')
        with self._transaction():
            gone = self.knowledge_.forget(number)
            self._finish("forget", {str(gone["name"]): gone["pictures"]}, timestamp())
        return self

    def undo(self, steps: int = 1) -> Self:
        """Takes back the last `steps` changes, forgetting included."""
        self.check_fitted()
        check_undo(self._versions.items, steps)
        self._versions.cut(len(self._versions) - steps)
        self._restore()
        return self

    def drop_history(self) -> Self:
        """Forgets how the model came to be: what was forgotten or undone is gone for good from the next `save` on."""
        self.check_fitted()
        record = self._versions.current.record
        known = {str(info["name"]): info["pictures"] for info in self.knowledge_.classes}
        event = {**record["event"], "action": "drop history", "classes": known}
        self.knowledge_.drop_forgotten()
        self._versions.start_anew({**record, "event": event}, self.knowledge_.tensors())
        return self

    # ---- files ------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike, embed: bool = False) -> Path:
        """Writes the model into a folder, or what is new in it into the folder it came from. Whole, or not at all.

        The backbone is referred to by name and hash; `embed` puts its weights into the folder as well.
        """
        self.check_fitted()
        self.config_, written = self._versions.write(
            path, self.config_, embed, lambda: self.backbone_.in_float32().vit.state_dict()
        )
        return written

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
    ) -> Self:
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
                head=fitted_head(config),
                train="always" if config["trained"] else "never",
                options=dict(config["options"]),
                **{key: parameters[key] for key in KEPT_PARAMETERS},
                device=device,
                precision=precision,
                seed=config["seed"],
                verbose=verbose,
            )
            check_parameters(clf)
            clf.transform_ = build(Transform, config["transform"], "transform.")
            clf.preprocessing = preprocessing_of(clf.transform_)
        except (KeyError, TypeError) as error:
            raise UserError(f'"{folder.path / "model.json"}" is not the head of a model (lacks {error}).') from error
        clf.runtime_ = start_runtime(device, precision, clf.seed, verbose)
        if backbone is not None:
            clf.backbone_ = backbone.prepare(clf.runtime_)
        else:
            found = find_weights(folder, head, weights)
            if weights is None and chosen["embedded"]:
                folder.checked(head, BACKBONE)
            elif weights is None and found is not None:
                check_named_weights(found, chosen.get("weights_sha256"))
            clf.backbone_ = reopen_backbone(chosen, found, clf.runtime_)
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

    def refresh(self) -> Self:
        """Takes over what another process has taught the saved model since; cheap when nothing changed."""
        self.check_fitted()
        if self._versions.refresh():
            self._restore()
        return self

    @contextlib.contextmanager
    def editing(self) -> Iterator[Self]:
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

    # ---- small parts ------------------------------------------------------------------------------------------------
    def _new_method(self) -> Method:
        chosen = self.config_
        return make_method(chosen["method"], chosen["options"], self.backbone_, self.runtime_, chosen.get("head"))

    def note(self, text: str) -> None:
        """Says something worth knowing, here as a warning; whoever hosts a model may put it elsewhere."""
        warnings.warn(text, Notice, stacklevel=4)

    def _note_remarks(self, source: Any) -> None:
        if isinstance(source, (str, os.PathLike)):
            for said in remarks(source):
                self.note(said)

    # ---- versions ---------------------------------------------------------------------------------------------------
    def _finish(self, action: str, classes: dict[str, int], when: str) -> None:
        """Calibrates and makes the present state a version."""
        knowledge = self.knowledge_
        check_finite(knowledge.tensors(), "nothing was learned from these pictures", MAY_LACK)
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
