"""A model that is trained once on the classes at hand and taught new ones from a few pictures each, for months.

The methods do the learning; `knowledge.py` adds class names, a calibrated confidence and the answer "unknown"; this
file reads pictures, plans, and keeps versions that can be undone and saved. `estimator.py` adds scikit-learn's manners;
the commands do without them, because scikit-learn takes most of a second to import.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fscil import recipes, registry
from fscil.backbones.loading import make_backbone
from fscil.backbones.vit import Backbone
from fscil.config import TransformConfig
from fscil.data import cache_dir
from fscil.data.pictures import (
    AT_ONCE,
    Label,
    Pictures,
    batches,
    label_name,
    listed,
    name_of,
    pair,
    read_pictures,
    refuse,
    repeated,
)
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform, make_transform
from fscil.display import LiveDisplay
from fscil.errors import UserError, nearest
from fscil.methods.base import Method
from fscil.runtime import Runtime
from fscil.strict import build
from fscil.teachable.calibration import remembered_features
from fscil.teachable.folder import BACKBONE, Head, ModelFolder, Version
from fscil.teachable.knowledge import Knowledge
from fscil.teachable.planning import choose_held_out, fit_frozen, make_plan

STORED_SHORT_SIDE = 256  # pixels that pictures are reduced to before anything else
CPU_BATCH = 32  # pictures per forward pass on a CPU: larger batches leave its caches
KEPT_PARAMETERS = ("held_out", "false_rejection", "unknown", "skip_bad", "thumbnails")


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


class Teachable:
    """Everything `fscil.FewShotClassifier` does; see there for the parameters."""

    def __init__(
        self,
        method: str = "smp",
        backbone: str | Backbone = registry.PAPER_BACKBONE,
        *,
        weights: str | os.PathLike | None = None,
        calibration: str = "auto",
        train: str = "auto",
        options: Mapping[str, Any] | None = None,
        transform: Mapping[str, Any] | None = None,
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
        self.calibration = calibration
        self.train = train
        self.options = options
        self.transform = transform
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
    def fit(self, X: Any, y: Any = None) -> Teachable:
        """Learns the base classes."""
        self._check_parameters()
        self._versions, self._head, self.folder_ = [], None, None
        X, labels = pair(X, y)
        self._start_runtime()
        backbone = self._make_backbone(self.backbone, self.weights)
        transform = self._make_transform(backbone)
        pictures, labels = self._read(X, labels, transform)
        names = sorted(set(labels))
        if len(names) < 2:
            raise UserError(f'fit needs pictures of at least two classes; all are of "{names[0]}".')
        counts = Counter(labels)
        on_gpu = self.runtime_.device.type == "cuda"
        plan = make_plan(
            self.method, len(names), len(labels), self.train, self.calibration, self.options, on_gpu=on_gpu
        )
        self.config_ = {
            "method": plan.method,
            "options": dict(plan.options),
            "backbone": self._describe_backbone(backbone),
            "transform": asdict(transform),
            "trained": plan.trains,
            "seed": self.seed,
            "parameters": {key: getattr(self, key) for key in KEPT_PARAMETERS},
        }
        self.backbone_, self.transform_ = backbone, transform
        method = self._new_method()
        place = {name: number for number, name in enumerate(names)}
        number = torch.tensor([place[label] for label in labels])
        everything = Pixels(pictures.store, transform, self.seed, pictures.kept, self.runtime_.device)
        held = choose_held_out(number, self.held_out if plan.trains else 0.0, self.runtime_)
        training = (~held).nonzero().squeeze(1)
        task = Task(0, tuple(range(len(names))), everything.select(training), number[training])
        if plan.options.get("calibration") == "closed_form" and len(training) == len(names):
            raise UserError(
                "the closed form needs two pictures of some class to learn from: it goes by how pictures of one class "
                "differ. Add some, or pass --calibration prototypes (calibration='prototypes')."
            )
        self.plan_ = plan.said(len(names), len(training), int(held.sum()))
        (self._note if plan.too_small else self._display.line)(self.plan_)
        with remembered_features(method):
            if plan.trains:
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
        self._check_fitted()
        X, labels = pair(X, y)
        knowledge, names = self.knowledge_, self.knowledge_.names
        if names and type(names[0]) is not type(labels[0]):
            labels = [label_name(str(label)) if isinstance(names[0], str) else label for label in labels]
            if type(names[0]) is not type(labels[0]):
                raise UserError(f'label "{labels[0]}" is text, but the classes of this model are numbers.')
        counts = Counter(labels)
        known = [label for label in counts if label in names]
        if known and not add:
            has = knowledge.classes[names.index(known[0])]["pictures"]
            raise UserError(
                f'class "{known[0]}" is known already, from {has} pictures. To add these {counts[known[0]]} to it, '
                "pass --add (add=True); for another class, choose another name."
            )
        if known and not knowledge.method.can_refine:
            raise UserError(f"method {self.config_['method']} cannot add pictures to a known class; use smp.")
        pictures, labels = self._read(X, labels, self.transform_, knowledge.pictures_by_fingerprint())
        if not labels:
            raise UserError("all of these pictures are known already; there is nothing to learn.")
        for label, count in Counter(labels).items():
            if count == 1 and label not in names:
                self._note(f'"{label}" is learned from one picture; five or more of different scenes are far better')
        fresh = list(dict.fromkeys(label for label in labels if label not in names))
        order = names + fresh
        number = torch.tensor([order.index(label) for label in labels])
        with self._transaction():
            new = tuple(range(len(names), len(order)))
            pixels = Pixels(pictures.store, self.transform_, self.seed, pictures.kept, self.runtime_.device)
            task = Task(int(knowledge.method.tasks_seen), new, pixels, number)
            with remembered_features(knowledge.method):
                knowledge.method.learn(task)
                knowledge.describe_taught(task)
                knowledge.keep_thumbnails(task, self.thumbnails, self._lesson())
            gained, now = Counter(labels), timestamp()
            knowledge.count(pictures.fingerprints, number, fresh, False, now)
            self._finish("learn", {str(label): gained[label] for label in gained}, now)
        return self

    def forget(self, label: Label) -> Teachable:
        """Removes one class. `undo` brings it back."""
        self._check_fitted()
        number = self.knowledge_.number(label)
        if len(self.knowledge_.classes) == 1:
            raise UserError(f'"{label}" is the only class left; a model needs one.')
        with self._transaction():
            gone = self.knowledge_.forget(number)
            self._finish("forget", {str(gone["name"]): gone["pictures"]}, timestamp())
        return self

    def undo(self, steps: int = 1) -> Teachable:
        """Takes back the last `steps` changes, forgetting included."""
        self._check_fitted()
        possible = len(self._versions) - 1
        if not 1 <= steps <= possible:
            raise UserError(f"cannot undo {steps} changes: {possible} were made since the base classes were learned.")
        self._versions = self._versions[: len(self._versions) - steps]
        self._restore()
        return self

    def drop_history(self) -> Teachable:
        """Forgets how the model came to be: what was forgotten or undone is gone for good from the next `save` on."""
        self._check_fitted()
        record = self._current().record
        known = {str(info["name"]): info["pictures"] for info in self.knowledge_.classes}
        event = {**record["event"], "action": "drop history", "classes": known}
        self.knowledge_.drop_forgotten()
        tensors = {name: tensor.clone() for name, tensor in self.knowledge_.tensors().items()}
        self._versions = [Version({**record, "event": event}, tensors)]  # written anew: no older file is needed
        return self

    # ---- answers ----------------------------------------------------------------------------------------------------
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
        self._check_fitted()
        X, bad = listed(X), {}
        parts = [self._no_answers()]
        for pictures, *part in self._batches(X):
            parts.append(part)
            bad |= pictures.bad
        if bad:
            refuse(X, bad)
        probabilities, rejected, scores = (torch.cat(column).numpy() for column in zip(*parts))
        return probabilities, rejected, scores

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy of `predict`."""
        X, labels = pair(X, y)
        right = self.predict(X) == np.array(labels)
        return float(np.average(right, weights=sample_weight))

    def recognise(self, X: Any, top: int = 5) -> list[Recognition]:
        """Label, confidence and best classes of each picture; unreadable ones say so instead of stopping the others."""
        self._check_fitted()
        X, names = listed(X), self.knowledge_.names
        found: dict[int, Recognition] = {}
        for pictures, probabilities, rejected, _ in self._batches(X):
            best = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
            for position, values, indices, unknown in zip(
                pictures.kept, best.values.tolist(), best.indices.tolist(), rejected.tolist()
            ):
                ranked = [(names[index], value) for index, value in zip(indices, values)]
                found[position] = Recognition(None if unknown else ranked[0][0], values[0], unknown, ranked)
            for position, reason in pictures.bad.items():
                found[position] = Recognition(None, 0.0, False, [], reason)
        return [found[position] for position in range(len(X))]

    def embed(self, X: Any) -> np.ndarray:
        """Features (n, d) of pictures under the trained backbone."""
        self._check_fitted()
        method = self.knowledge_.method
        if not method.features_fixed:
            raise UserError(f"method {self.config_['method']} has no features that stay as they are.")
        X = listed(X)
        decoded = (read_pictures(X[at : at + AT_ONCE], self.short_side_) for at in range(0, len(X), AT_ONCE))
        return torch.cat([method.features(self._pixels(part)).cpu() for part in decoded]).numpy()

    def nearest_thumbnails(self, X: Any, count: int = 3) -> list[list[tuple[Label, float, np.ndarray]]]:
        """(class, cosine, small copy uint8) of the kept pictures most like each picture; empty if none were kept."""
        self._check_fitted()
        if not self.knowledge_.thumbnails:
            return [[] for _ in listed(X)]
        return self.knowledge_.nearest_thumbnails(torch.from_numpy(self.embed(X)), count)

    # ---- files ------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike, embed: bool = False) -> Path:
        """Writes the model into a folder, or what is new in it into the folder it came from. Whole, or not at all.

        The backbone is referred to by name and hash; `embed` puts its weights into the folder as well.
        """
        self._check_fitted()
        folder = ModelFolder(path)
        with folder.lock():
            same = self.folder_ is not None and folder.path.resolve() == self.folder_.path.resolve()
            versions, config = self._versions, self.config_
            if not same and self._head is not None:  # a copy: every version comes along
                versions = self.folder_.copies(self._head, versions)
            weights = None
            if embed and not config["backbone"]["embedded"]:
                weights = self.backbone_.in_float32().vit.state_dict()
                config = {**config, "backbone": {**config["backbone"], "embedded": True, "weights": None}}
            elif not same and config["backbone"]["embedded"]:
                weights = self.backbone_.in_float32().vit.state_dict()
            self._head = folder.write(config, versions, weights, self._head if same else None)
            self._versions, self.config_, self.folder_ = versions, config, folder
        for version in self._versions[:-1]:
            version.tensors = {}  # on disk; read again if an undo asks for them
        return folder.path

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
            clf._check_parameters()
            clf.transform_ = build(Transform, config["transform"], "transform.")
        except (KeyError, TypeError) as error:
            raise UserError(f'"{folder.path / "model.json"}" is not the head of a model (lacks {error}).') from error
        if backbone is None and weights is None and chosen["embedded"]:
            weights = folder.checked(head, BACKBONE)
        elif weights is None and chosen["weights"] and Path(chosen["weights"]).is_file():
            weights = chosen["weights"]
        clf._start_runtime()
        clf.backbone_ = clf._make_backbone(backbone or chosen["name"], weights, chosen["image_size"])
        if clf.backbone_.hash != chosen["hash"]:
            raise UserError(
                f'the weights of backbone "{chosen["name"]}" here have hash {clf.backbone_.hash}, the model was fitted '
                f"on {chosen['hash']}; pass the same file with --weights."
            )
        clf.config_, clf.folder_ = config, folder
        clf._adopt(head, tensors)
        return clf

    def refresh(self) -> Teachable:
        """Takes over what another process has taught the saved model since; cheap when nothing changed."""
        self._check_fitted()
        if self.folder_ is None:
            raise UserError("this model was not saved yet; there is nothing to refresh it from.")
        if [id(version) for version in self._versions] != [id(version) for version in self._head.versions]:
            raise UserError("this model has changes that were not saved; save or undo them first.")
        if self.folder_.read().revision != self._head.revision:
            self._adopt(*self.folder_.open())
        return self

    @contextlib.contextmanager
    def editing(self) -> Iterator[Teachable]:
        """Changes a saved model together with its folder: others wait, and a failure leaves both as they were.

        >>> with clf.editing(): clf.learn(pictures, names)  # doctest: +SKIP
        """
        if self.folder_ is None:
            raise UserError("save the model first; editing keeps a folder up to date.")
        with self.folder_.lock():
            self.refresh()
            try:
                yield self
                self.save(self.folder_.path)
            except BaseException:
                self._adopt(*self.folder_.open())
                raise

    @property
    def classes_(self) -> np.ndarray:
        self._check_fitted()
        return np.array(self.knowledge_.names)

    @property
    def history_(self) -> list[dict[str, Any]]:
        self._check_fitted()
        return [version.record["event"] for version in self._versions]

    @property
    def class_info_(self) -> list[dict[str, Any]]:
        """Name, number of pictures, whether it is a base class, and since when it is known, of each class."""
        self._check_fitted()
        return [dict(info) for info in self.knowledge_.classes]

    @property
    def calibration_(self) -> dict[str, Any]:
        self._check_fitted()
        return dict(self.knowledge_.calibration)

    @property
    def size_(self) -> int:
        """Bytes of the saved model."""
        return self._head.bytes if getattr(self, "_head", None) is not None else 0

    @property
    def short_side_(self) -> int:
        """Pixels that the shorter side of a picture is reduced to before anything else."""
        return _short_side(self.transform_)

    def __sklearn_is_fitted__(self) -> bool:
        return bool(getattr(self, "_versions", None))

    # ---- parts of fit -----------------------------------------------------------------------------------------------
    def _check_parameters(self) -> None:
        registry.method_entry(self.method)
        for name, choices in (
            ("calibration", ("auto", "mpcc", "prototypes", "closed_form")),
            ("train", ("auto", "always", "never")),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f'{name} "{value}" is not one of {", ".join(choices)}.{nearest(value, choices)}')
        for name, most in (("held_out", 0.5), ("false_rejection", 1.0)):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < most):
                raise UserError(f"{name} is {value}; it must be at least 0 and below {most}.")
        if not (isinstance(self.thumbnails, int) and self.thumbnails >= 0):
            raise UserError(f"thumbnails is {self.thumbnails}; it must be a number of pictures per class, 0 for none.")

    def _start_runtime(self) -> None:
        self._display = LiveDisplay(quiet=not self.verbose)
        # compilation would start anew for every number of pictures taught
        self.runtime_ = Runtime.make(self.device, self.precision, self.seed, compile="off", display=self._display)
        if self.runtime_.device.type == "cpu":
            self.runtime_.batch_size_eval = CPU_BATCH

    def _make_backbone(self, chosen: str | Backbone, weights: Any = None, image_size: int | None = None) -> Backbone:
        if isinstance(chosen, Backbone):
            return chosen.prepare(self.runtime_)
        size = image_size or (self.transform or {}).get("size")
        try:
            backbone = make_backbone(chosen, weights, size)
        except FileNotFoundError as error:  # a backbone of the package whose weights are not there
            raise UserError(
                f'the weights of backbone "{chosen}" are missing ({error}); pass --weights FILE.'
            ) from error
        return backbone.prepare(self.runtime_)

    def _describe_backbone(self, backbone: Backbone) -> dict[str, Any]:
        return {
            "name": backbone.name,
            "hash": backbone.hash,
            "image_size": backbone.image_size,
            "weights": str(Path(self.weights).expanduser().resolve()) if self.weights is not None else None,
            "embedded": False,
        }

    def _make_transform(self, backbone: Backbone) -> Transform:
        usual = recipes.load("glyphs/smp").values["transform"] if backbone.name.startswith("glyph_vit") else {}
        return make_transform(build(TransformConfig, {**usual, **(self.transform or {})}, "transform."), backbone)

    def _new_method(self) -> Method:
        cls = registry.method_class(self.config_["method"])
        return cls(self.backbone_, build(cls.Options, self.config_["options"], "options."), self.runtime_)

    # ---- parts of predict -------------------------------------------------------------------------------------------
    def _batches(self, X: Sequence[Any]) -> Iterator[tuple[Pictures, Tensor, Tensor, Tensor]]:
        """Pictures a few at a time, with their probabilities, whether they are unknown, and how well they fit."""
        self._check_fitted()
        knowledge = self.knowledge_
        parts = batches(X, self.short_side_)
        for part in self.runtime_.track(parts, "recognising", -(-len(X) // AT_ONCE)):
            if not len(part):
                yield part, *self._no_answers()
                continue
            logits, scores = knowledge.judge(self._pixels(part))
            probabilities = (logits / knowledge.calibration["temperature"]).softmax(1)
            yield part, probabilities, knowledge.is_unknown(scores), scores

    def _no_answers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, whether unknown, and scores, of no pictures."""
        return torch.zeros(0, len(self.knowledge_.classes)), torch.zeros(0, dtype=torch.bool), torch.zeros(0)

    def _pixels(self, pictures: Pictures) -> Pixels:
        return Pixels(pictures.store, self.transform_, self.seed, device=self.runtime_.device)

    # ---- small parts ------------------------------------------------------------------------------------------------
    def _read(
        self, X: Sequence[Any], labels: list[Label], transform: Transform, known: Mapping[int, set[Label]] | None = None
    ) -> tuple[Pictures, list[Label]]:
        """Decoded pictures and their labels, each picture of a class once; `kept` then counts rows of the store."""
        pictures = read_pictures(X, _short_side(transform), self.skip_bad, cache_dir() / "pixels")
        if pictures.bad:
            named = ", ".join(name_of(X[position], position) for position in list(pictures.bad)[:5])
            self._note(f"{len(pictures.bad)} of {len(X)} pictures cannot be read and are left out: {named}")
        labels = [labels[position] for position in pictures.kept]
        if not labels:
            raise UserError("none of the pictures can be read.")
        keep, notes = repeated(pictures.fingerprints, labels, dict(known or {}))
        for note in notes:
            self._note(note)
        return replace(pictures, kept=keep, fingerprints=pictures.fingerprints[keep]), [labels[at] for at in keep]

    def _note(self, text: str) -> None:
        warnings.warn(text, Notice, stacklevel=4)

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("this model is not fitted yet; call fit, or open one with load.")

    # ---- versions ---------------------------------------------------------------------------------------------------
    def _current(self) -> Version:
        return self._versions[-1]

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
            self._note(f"method {self.config_['method']} keeps {stored} of the pictures in the model ({size} bytes)")
        record = {"event": event, **knowledge.record()}
        older = self._current().tensors if self._versions else {}
        tensors = {}
        for name, tensor in knowledge.tensors().items():
            before = older.get(name)
            same = before is not None and before.dtype == tensor.dtype and torch.equal(before, tensor)
            tensors[name] = before if same else tensor.clone()
        self._versions = [*self._versions, Version(record, tensors)]

    def _adopt(self, head: Head, tensors: dict[str, Tensor]) -> None:
        """Takes over the versions of a folder."""
        head.current.tensors = tensors
        self._head, self._versions = head, list(head.versions)
        self._restore()

    def _restore(self) -> None:
        """Makes the last version the present state."""
        version = self._current()
        if set(version.files) - set(version.tensors):
            version.tensors = self.folder_.load(self._head, version)
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
            self._versions = self._versions[:count]
            self._restore()
            raise


def timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _short_side(transform: Transform) -> int:
    return max(STORED_SHORT_SIDE, transform.resize)
