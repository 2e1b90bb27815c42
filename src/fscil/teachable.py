"""A model that is trained once on the classes at hand and taught new ones from a few pictures each, for months.

The methods do the learning; this file gives them class names, a calibrated confidence, the answer "unknown", and
versions that can be undone and saved. `fscil.estimator` adds scikit-learn's manners; the commands do without them,
because scikit-learn takes most of a second to import.
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
from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone, make_backbone
from fscil.calibration import cross_validated, remembered_features
from fscil.config import TransformConfig, build
from fscil.data import cache_dir
from fscil.data.pixels import Pixels, Transform
from fscil.data.stream import Task
from fscil.display import LiveDisplay
from fscil.errors import UserError, nearest
from fscil.evaluation.openset import KnownSpace, choose_score, fit_temperature, max_logit, rejection_threshold
from fscil.maths.margins import cosine
from fscil.methods.adapters import Streams
from fscil.methods.base import Method
from fscil.methods.smp import SMP
from fscil.model_folder import BACKBONE, Head, ModelFolder, Version
from fscil.pictures import Label, Pictures, batches, label_name, listed, name_of, pair, read_pictures, refuse, repeated
from fscil.protocol import make_transform
from fscil.runtime import Runtime

TRAIN_FROM_CLASSES = 10  # a base set below either of these is not trained on:
TRAIN_FROM_PICTURES = 20  # pictures per class on average
STORED_SHORT_SIDE = 256  # pixels that pictures are reduced to before anything else
HELD_OUT_AT_MOST = 4000  # held-out pictures whose features are kept for calibration
TEACHING_VIEWS = 4  # augmented views per picture when a class is taught by MPCC
CPU_BATCH = 32  # pictures per forward pass on a CPU: larger batches leave its caches


THUMBNAIL = 96  # pixels a side
THUMBNAIL_KEYS = ("pixels", "features", "labels")
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
        self._versions, self._head, self._folder = [], None, None
        X, labels = pair(X, y)
        self._start_runtime()
        backbone = self._make_backbone(self.backbone, self.weights)
        transform = self._make_transform(backbone)
        pictures, labels = self._read(X, labels, transform)
        names = sorted(set(labels))
        if len(names) < 2:
            raise UserError(f'fit needs pictures of at least two classes; all are of "{names[0]}".')
        counts = Counter(labels)
        small = len(names) < TRAIN_FROM_CLASSES or len(labels) / len(names) < TRAIN_FROM_PICTURES
        trains = self.train == "always" or (self.train == "auto" and not small)
        name, options = self._plan(trains, len(labels), len(names))
        self._config = {
            "method": name,
            "options": options,
            "backbone": self._describe_backbone(backbone),
            "transform": asdict(transform),
            "trained": trains,
            "seed": self.seed,
            "parameters": {key: getattr(self, key) for key in KEPT_PARAMETERS},
        }
        self._backbone, self._transform = backbone, transform
        self._method = self._new_method()
        place = {name: number for number, name in enumerate(names)}
        number = torch.tensor([place[label] for label in labels])
        everything = Pixels(pictures.store, transform, self.seed, pictures.kept, self._runtime.device)
        held = self._choose_held_out(number) if trains else torch.zeros(len(number), dtype=torch.bool)
        training = (~held).nonzero().squeeze(1)
        task = Task(0, tuple(range(len(names))), everything.select(training), number[training])
        if options.get("calibration") == "closed_form" and len(training) == len(names):
            raise UserError(
                "the closed form needs two pictures of some class to learn from: it goes by how pictures of one class "
                "differ. Add some, or pass --calibration prototypes (calibration='prototypes')."
            )
        self.plan_ = self._say_plan(trains, small, task, int(held.sum()))
        with remembered_features(self._method):
            if trains:
                self._method.fit_base(task)
            else:
                self._fit_frozen(task)
            self._known, self._held = self._describe(task, everything.select(held.nonzero().squeeze(1)), number[held])
            self._thumbnails: dict[str, dict[str, Tensor]] = {}
            self._keep_thumbnails(task)
        self._fingerprints = torch.stack([pictures.fingerprints, number], 1)
        self._taught = {"scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
        now = timestamp()
        self._classes = [{"name": label, "pictures": counts[label], "base": True, "since": now} for label in names]
        self._finish("fit", {str(label): counts[label] for label in names}, now)
        return self

    def learn(self, X: Any, y: Any = None, add: bool = False) -> Teachable:
        """Learns new classes from a few pictures each; with `add`, pictures of known classes are added to theirs."""
        self._check_fitted()
        X, labels = pair(X, y)
        names = self._names()
        if names and type(names[0]) is not type(labels[0]):
            labels = [label_name(str(label)) if isinstance(names[0], str) else label for label in labels]
            if type(names[0]) is not type(labels[0]):
                raise UserError(f'label "{labels[0]}" is text, but the classes of this model are numbers.')
        counts = Counter(labels)
        known = [label for label in counts if label in names]
        if known and not add:
            has = next(info["pictures"] for info in self._classes if info["name"] == known[0])
            raise UserError(
                f'class "{known[0]}" is known already, from {has} pictures. To add these {counts[known[0]]} to it, '
                "pass --add (add=True); for another class, choose another name."
            )
        if known and not self._method.can_refine:
            raise UserError(f"method {self._config['method']} cannot add pictures to a known class; use smp.")
        pictures, labels = self._read(X, labels, self._transform, self._known_fingerprints())
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
            pixels = Pixels(pictures.store, self._transform, self.seed, pictures.kept, self._runtime.device)
            task = Task(int(self._method.tasks_seen), new, pixels, number)
            with remembered_features(self._method):
                self._method.learn(task)
                self._describe_taught(task)
                self._keep_thumbnails(task)
            self._fingerprints = torch.cat([self._fingerprints, torch.stack([pictures.fingerprints, number], 1)])
            gained, now = Counter(labels), timestamp()
            self._classes = [
                {**info, "pictures": info["pictures"] + gained[info["name"]]} for info in self._classes
            ] + [{"name": label, "pictures": gained[label], "base": False, "since": now} for label in fresh]
            self._finish("learn", {str(label): gained[label] for label in gained}, now)
        return self

    def forget(self, label: Label) -> Teachable:
        """Removes one class. `undo` brings it back."""
        self._check_fitted()
        number = self._number(label)
        if len(self._classes) == 1:
            raise UserError(f'"{label}" is the only class left; a model needs one.')
        with self._transaction():
            self._method.forget(number)
            if self._known is not None:
                self._known.forget(number)
            kept = [lesson["labels"] for lesson in self._thumbnails.values()]
            for labels in (self._fingerprints[:, 1], self._held["labels"], self._taught["labels"], *kept):
                _drop_label(labels, number)
            self._fingerprints = self._fingerprints[self._fingerprints[:, 1] >= 0]
            keep = self._taught["labels"] >= 0
            self._taught = {key: value[keep] for key, value in self._taught.items()}
            gone = self._classes[number]
            self._classes = self._classes[:number] + self._classes[number + 1 :]
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
        known = {str(info["name"]): info["pictures"] for info in self._classes}
        event = {**record["event"], "action": "drop history", "classes": known}
        self._held = _without_forgotten(self._held)
        self._thumbnails = {name: _without_forgotten(lesson) for name, lesson in self._thumbnails.items()}
        tensors = {name: tensor.clone() for name, tensor in self._tensors().items()}
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
        parts = [(torch.zeros(0, len(self._classes)), torch.zeros(0, dtype=torch.bool), torch.zeros(0))]
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
        X = listed(X)
        found: dict[int, Recognition] = {}
        for pictures, probabilities, rejected, _ in self._batches(X):
            best = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
            for position, values, indices, unknown in zip(
                pictures.kept, best.values.tolist(), best.indices.tolist(), rejected.tolist()
            ):
                ranked = [(self._classes[index]["name"], value) for index, value in zip(indices, values)]
                found[position] = Recognition(None if unknown else ranked[0][0], values[0], unknown, ranked)
            for position, reason in pictures.bad.items():
                found[position] = Recognition(None, 0.0, False, [], reason)
        return [found[position] for position in range(len(X))]

    def embed(self, X: Any) -> np.ndarray:
        """Features (n, d) of pictures under the trained backbone."""
        self._check_fitted()
        if not self._method.features_fixed:
            raise UserError(f"method {self._config['method']} has no features that stay as they are.")
        parts = [self._method.features(self._pixels(part)).cpu() for part in self._decoded(listed(X))]
        return torch.cat(parts).numpy()

    def nearest_thumbnails(self, X: Any, count: int = 3) -> list[list[tuple[Label, float, np.ndarray]]]:
        """(class, cosine, small copy uint8) of the kept pictures most like each picture; empty if none were kept."""
        lessons = [lesson for lesson in self._thumbnails.values() if len(lesson["labels"])]
        if not lessons:
            return [[] for _ in listed(X)]
        pixels, features, labels = (torch.cat([lesson[key] for lesson in lessons]) for key in THUMBNAIL_KEYS)
        likeness = cosine(torch.from_numpy(self.embed(X)), features).masked_fill(labels < 0, -torch.inf)
        best = likeness.topk(min(count, int((labels >= 0).sum())), dim=1)
        return [
            [(self._classes[int(labels[at])]["name"], value, pixels[at].numpy()) for value, at in zip(values, places)]
            for values, places in zip(best.values.tolist(), best.indices.tolist())
        ]

    # ---- files ------------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike, embed: bool = False) -> Path:
        """Writes the model into a folder, or what is new in it into the folder it came from. Whole, or not at all.

        The backbone is referred to by name and hash; `embed` puts its weights into the folder as well.
        """
        self._check_fitted()
        folder = ModelFolder(path)
        with folder.lock():
            same = self._folder is not None and folder.path.resolve() == self._folder.path.resolve()
            versions, config = self._versions, self._config
            if not same and self._head is not None:  # a copy: every version comes along
                versions = self._folder.copies(self._head, versions)
            weights = None
            if embed and not config["backbone"]["embedded"]:
                weights = self._backbone.in_float32().vit.state_dict()
                config = {**config, "backbone": {**config["backbone"], "embedded": True, "weights": None}}
            elif not same and config["backbone"]["embedded"]:
                weights = self._backbone.in_float32().vit.state_dict()
            self._head = folder.write(config, versions, weights, self._head if same else None)
            self._versions, self._config, self._folder = versions, config, folder
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
            clf._transform = build(Transform, config["transform"], "transform.")
        except (KeyError, TypeError) as error:
            raise UserError(f'"{folder.path / "model.json"}" is not the head of a model (lacks {error}).') from error
        if backbone is None and weights is None and chosen["embedded"]:
            weights = folder.checked(head, BACKBONE)
        elif weights is None and chosen["weights"] and Path(chosen["weights"]).is_file():
            weights = chosen["weights"]
        clf._start_runtime()
        clf._backbone = clf._make_backbone(backbone or chosen["name"], weights, chosen["image_size"])
        if clf._backbone.hash != chosen["hash"]:
            raise UserError(
                f'the weights of backbone "{chosen["name"]}" here have hash {clf._backbone.hash}, the model was fitted '
                f"on {chosen['hash']}; pass the same file with --weights."
            )
        clf._config, clf._folder = config, folder
        clf._adopt(head, tensors)
        return clf

    def refresh(self) -> Teachable:
        """Takes over what another process has taught the saved model since; cheap when nothing changed."""
        self._check_fitted()
        if self._folder is None:
            raise UserError("this model was not saved yet; there is nothing to refresh it from.")
        if [id(version) for version in self._versions] != [id(version) for version in self._head.versions]:
            raise UserError("this model has changes that were not saved; save or undo them first.")
        if self._folder.read().revision != self._head.revision:
            self._adopt(*self._folder.open())
        return self

    @contextlib.contextmanager
    def editing(self) -> Iterator[Teachable]:
        """Changes a saved model together with its folder: others wait, and a failure leaves both as they were.

        >>> with clf.editing(): clf.learn(pictures, names)  # doctest: +SKIP
        """
        if self._folder is None:
            raise UserError("save the model first; editing keeps a folder up to date.")
        with self._folder.lock():
            self.refresh()
            try:
                yield self
                self.save(self._folder.path)
            except BaseException:
                self._adopt(*self._folder.open())
                raise

    @property
    def classes_(self) -> np.ndarray:
        self._check_fitted()
        return np.array(self._names())

    @property
    def history_(self) -> list[dict[str, Any]]:
        self._check_fitted()
        return [version.record["event"] for version in self._versions]

    @property
    def class_info_(self) -> list[dict[str, Any]]:
        """Name, number of pictures, whether it is a base class, and since when it is known, of each class."""
        self._check_fitted()
        return [dict(info) for info in self._classes]

    @property
    def calibration_(self) -> dict[str, Any]:
        self._check_fitted()
        return dict(self._calibration)

    @property
    def size_(self) -> int:
        """Bytes of the saved model."""
        return self._head.bytes if getattr(self, "_head", None) is not None else 0

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
        self._runtime = Runtime.make(self.device, self.precision, self.seed, compile="off", display=self._display)
        if self._runtime.device.type == "cpu":
            self._runtime.batch_size_eval = CPU_BATCH

    def _make_backbone(self, chosen: str | Backbone, weights: Any = None, image_size: int | None = None) -> Backbone:
        if isinstance(chosen, Backbone):
            return chosen.prepare(self._runtime)
        size = image_size or (self.transform or {}).get("size")
        try:
            backbone = make_backbone(chosen, weights, size)
        except FileNotFoundError as error:  # a backbone of the package whose weights are not there
            raise UserError(
                f'the weights of backbone "{chosen}" are missing ({error}); pass --weights FILE.'
            ) from error
        return backbone.prepare(self._runtime)

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

    def _plan(self, trains: bool, pictures: int, classes: int) -> tuple[str, dict[str, Any]]:
        """Method and complete options. Without training it is one of SMP's classifiers on the frozen backbone."""
        frozen = "smp" if self.calibration == "mpcc" else "closed_form"
        name = self.method if trains else frozen
        entry, options = registry.method_entry(name), dict(self.options or {})
        cls = registry.method_class(name)
        if not trains:
            kept = ("shrinkage", "correction", "views")
            chosen = {key: value for key, value in options.items() if key in kept}
            options = {"views": TEACHING_VIEWS, "second_centre": "off", **chosen}  # no trained rows to be centres
            if self.calibration != "auto":
                options["calibration"] = self.calibration
            elif pictures < 2 * classes:  # next to no spread within classes to be seen
                options["calibration"] = "prototypes"
        elif issubclass(cls, SMP) and name == "smp":
            on_gpu = self._runtime.device.type == "cuda"
            chosen = self.calibration if self.calibration != "auto" else "mpcc" if on_gpu else "closed_form"
            options = {"calibration": chosen, "views": TEACHING_VIEWS, **options}
        return name, asdict(build(cls.Options, {**entry.options, **options}, "options."))

    def _say_plan(self, trains: bool, small: bool, task: Task, held: int) -> str:
        size = f"{len(task.classes)} classes, {len(task.labels) + held} pictures"
        if trains:
            said = f"{size}: training {self._config['method']} on {len(task.labels)}, {held} kept for calibration"
        else:
            how = {
                "closed_form": "the closed form with a strongly shrunken covariance",
                "prototypes": "class prototypes",
                "mpcc": "class prototypes, calibrated when a class is taught",
            }
            said = (
                f"{size}: the backbone stays as it is, the classifier is {how[self._config['options']['calibration']]}"
            )
            if small and self.train == "auto":
                said += (
                    f" (training starts at {TRAIN_FROM_CLASSES} classes and {TRAIN_FROM_PICTURES} pictures per class)"
                )
                self._note(said)
                return said
        self._display.line(said)
        return said

    def _new_method(self) -> Method:
        cls = registry.method_class(self._config["method"])
        return cls(self._backbone, build(cls.Options, self._config["options"], "options."), self._runtime)

    def _choose_held_out(self, labels: Tensor) -> Tensor:
        """A stratified share of the pictures; every class keeps at least half of its own."""
        held = torch.zeros(len(labels), dtype=torch.bool)
        for label in torch.unique(labels).tolist():
            own = (labels == label).nonzero().squeeze(1)
            order = torch.randperm(len(own), generator=self._runtime.generator("held out", label))
            held[own[order[: min(round(self.held_out * len(own)), len(own) // 2)]]] = True
        return held

    def _fit_frozen(self, task: Task) -> None:
        """No adapters: statistics of the plain backbone's features alone."""
        method, place = self._method, dict(device=self._runtime.device)
        empty = LoRA(
            torch.zeros(self._backbone.depth, 1, 2, 0, self._backbone.dim, **place),
            torch.zeros(self._backbone.depth, 1, 2, self._backbone.dim, 0, **place),
        )
        rows = torch.zeros(1, len(task.classes), self._backbone.dim, **place)
        features = method.features(task.images)
        known = KnownSpace.of(features, task.labels.to(features.device), len(task.classes))
        if "shrinkage" not in (self.options or {}) and method.options.calibration == "closed_form":
            self._config["options"]["shrinkage"] = known.shrinkage
            method.options = replace(method.options, shrinkage=known.shrinkage)
        method.adopt(Streams(empty.requires_grad_(False), rows, torch.ones(1, **place)), task)

    def _describe(self, task: Task, held: Pixels, held_labels: Tensor) -> tuple[KnownSpace | None, dict[str, Tensor]]:
        """What unknown pictures are told apart by, and the held-out data that calibrates it."""
        method = self._method
        if not method.features_fixed:
            with torch.no_grad():
                logits = method.logits(held).float().cpu() if len(held) else torch.zeros(0, len(task.classes))
            return None, {"features": logits, "labels": held_labels}
        features, labels = method.features(task.images), task.labels.to(self._runtime.device)
        known = KnownSpace.of(features, labels, len(task.classes))
        draw = self._runtime.generator("background")
        if not self._config["trained"]:  # nothing was trained, so cross-validation can use every picture
            if not known.has_spread:
                return None, {"features": features.cpu(), "labels": task.labels.clone()}
            part = (torch.rand(len(labels), generator=draw) < 0.3).to(labels.device)
            if len(torch.unique(labels[~part])) == len(task.classes):
                split = features[~part], labels[~part], features[part], labels[part]
                known.background, known.softness = choose_score(*split, known.shrinkage, draw)
            return known, {"features": features.cpu(), "labels": task.labels.clone()}
        positions = torch.arange(len(held))
        if len(held) > HELD_OUT_AT_MOST:
            order = torch.randperm(len(held), generator=self._runtime.generator("held-out features"))
            positions = order[:HELD_OUT_AT_MOST].sort().values
        kept = method.features(held.select(positions)) if len(positions) else features[:0]
        kept_labels = held_labels[positions]
        if not known.has_spread:
            return None, {"features": kept.cpu(), "labels": kept_labels}
        split = features, labels, kept, kept_labels.to(labels.device)
        known.background, known.softness = choose_score(*split, known.shrinkage, draw)
        return known, {"features": kept.cpu(), "labels": kept_labels}

    def _describe_taught(self, task: Task) -> None:
        """Adds the task to the known space and notes how well each of its pictures fits when left out."""
        if self._known is None:
            return
        features, labels = self._method.features(task.images), task.labels.to(self._runtime.device)
        self._known.add(features, labels, self._method.seen)
        base = torch.tensor([info["base"] for info in self._classes] + [False] * len(task.classes))
        taught = ~base[task.labels]
        if bool(taught.any()):
            own = taught.to(features.device)
            scores = self._known.over_classes(self._known.left_out_scores(features[own], labels[own])).cpu()
            self._taught = {
                "scores": torch.cat([self._taught["scores"], scores]),
                "labels": torch.cat([self._taught["labels"], task.labels[taught]]),
            }

    def _keep_thumbnails(self, task: Task) -> None:
        """Small copies of the first pictures of each class in a lesson, if that was chosen; one entry per lesson."""
        if not self.thumbnails or not self._method.features_fixed:
            return
        labels = task.labels
        rank = torch.stack([(labels[:at] == label).sum() for at, label in enumerate(labels)])
        chosen = (rank < self.thumbnails).nonzero().squeeze(1)
        view = Pixels(task.images.store, Transform(THUMBNAIL, resize=THUMBNAIL), indices=task.images.indices[chosen])
        self._thumbnails = self._thumbnails | {
            f"{len(self._versions) + 1:04d}": {
                "pixels": (view.plain() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous(),
                "features": self._method.features(task.images)[chosen.to(self._runtime.device)].cpu(),
                "labels": labels[chosen].clone(),
            }
        }

    # ---- calibration ------------------------------------------------------------------------------------------------
    def _calibrate(self) -> dict[str, Any]:
        """Temperature and threshold from held-out base pictures, anew after every change, and how both do."""
        keep = self._held["labels"] >= 0
        labels, held = self._held["labels"][keep], self._held["features"][keep]
        if not self._method.features_fixed:
            if getattr(self, "_calibration", None) and self._versions:
                stale = dict.fromkeys(("held_out_accuracy", "held_out_rejection"))  # of features that have moved since
                return self._calibration | stale  # the base's temperature and threshold are the best known
            logits, scores = held, max_logit(held) if len(held) else torch.zeros(0)
        elif not len(held):
            logits, scores = torch.zeros(0, len(self._classes)), torch.zeros(0)
        elif self._config["trained"]:
            logits, scores = self._from_features(held.to(self._runtime.device))
        else:
            logits, scores, labels = cross_validated(self._method, self._known, held, labels)
        count = len(labels)
        temperature = fit_temperature(logits, labels) if count else 1.0
        rejects = count > 0 and (self._known is not None or not self._method.features_fixed)
        threshold = rejection_threshold(scores, self.false_rejection) if rejects else None
        taught = self._taught["scores"]
        return {
            "temperature": temperature,
            "threshold": threshold,
            "score": "likelihood_ratio" if self._known is not None else "max_logit",
            "false_rejection": self.false_rejection,
            "held_out": count,
            "held_out_accuracy": float((logits.argmax(1) == labels).double().mean()) if count else None,
            "held_out_rejection": float((scores < threshold).double().mean()) if threshold is not None else None,
            "taught_rejection": _rate(taught[~taught.isnan()], threshold),
        }

    # ---- parts of predict -------------------------------------------------------------------------------------------
    def _from_features(self, features: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logits = self._method.logits_from(features).float().cpu()
        return logits, self._known.fit(features).cpu() if self._known is not None else max_logit(logits)

    def _logits_and_scores(self, images: Pixels) -> tuple[Tensor, Tensor]:
        """Logits (n, classes), and how well each image fits the known classes (n,)."""
        with torch.no_grad():
            if self._method.features_fixed:
                return self._from_features(self._method.features(images))
            logits = self._method.logits(images).float().cpu()
        return logits, max_logit(logits)

    def _batches(self, X: Sequence[Any]) -> Iterator[tuple[Pictures, Tensor, Tensor, Tensor]]:
        """Pictures a few at a time, with their probabilities, whether they are unknown, and how well they fit."""
        self._check_fitted()
        temperature, threshold = self._calibration["temperature"], self._calibration["threshold"]
        parts = batches(X, self._short_side())
        for part in self._runtime.track(parts, "recognising", -(-len(X) // 128)):
            if not len(part):
                yield part, torch.zeros(0, len(self._classes)), torch.zeros(0, dtype=torch.bool), torch.zeros(0)
                continue
            logits, scores = self._logits_and_scores(self._pixels(part))
            rejected = scores < threshold if threshold is not None else torch.zeros(len(scores), dtype=torch.bool)
            yield part, (logits / temperature).softmax(1), rejected, scores

    def _decoded(self, X: Sequence[Any]) -> Iterator[Pictures]:
        self._check_fitted()
        for start in range(0, len(X), 128):
            yield read_pictures(X[start : start + 128], self._short_side())

    def _pixels(self, pictures: Pictures) -> Pixels:
        return Pixels(pictures.store, self._transform, self.seed, device=self._runtime.device)

    def _short_side(self) -> int:
        return max(STORED_SHORT_SIDE, self._transform.resize)

    # ---- small parts ------------------------------------------------------------------------------------------------
    def _read(
        self, X: Sequence[Any], labels: list[Label], transform: Transform, known: Mapping[int, set[Label]] | None = None
    ) -> tuple[Pictures, list[Label]]:
        """Decoded pictures and their labels, each picture of a class once; `kept` then counts rows of the store."""
        short_side = max(STORED_SHORT_SIDE, transform.resize)
        pictures = read_pictures(X, short_side, self.skip_bad, cache_dir() / "pixels")
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

    def _known_fingerprints(self) -> dict[int, set[Label]]:
        names, known = self._names(), {}
        for fingerprint, number in self._fingerprints.tolist():
            known.setdefault(fingerprint, set()).add(names[number])
        return known

    def _note(self, text: str) -> None:
        warnings.warn(text, Notice, stacklevel=4)

    def _names(self) -> list[Label]:
        return [info["name"] for info in self._classes]

    def _number(self, label: Label) -> int:
        names = self._names()
        name = label_name(label)
        if name not in names and str(name) in map(str, names):  # a number typed on the command line
            name = names[[str(known) for known in names].index(str(name))]
        if name not in names:
            raise UserError(f'there is no class "{label}".{nearest(label, map(str, names))}')
        return names.index(name)

    def _check_fitted(self) -> None:
        if not self.__sklearn_is_fitted__():
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("this model is not fitted yet; call fit, or open one with load.")

    # ---- versions ---------------------------------------------------------------------------------------------------
    def _current(self) -> Version:
        return self._versions[-1]

    def _finish(self, action: str, classes: dict[str, int], when: str) -> None:
        """Calibrates and makes the present state a version."""
        self._calibration = self._calibrate()
        event = {
            "action": action,
            "when": when,
            "classes": classes,
            "known": len(self._classes),
            **{key: self._calibration[key] for key in ("held_out_accuracy", "held_out_rejection", "taught_rejection")},
        }
        stored, size = self._method.stored_images()
        stored += sum(len(lesson["labels"]) for lesson in self._thumbnails.values())
        if size and action in ("fit", "learn"):
            self._note(f"method {self._config['method']} keeps {stored} of the pictures in the model ({size} bytes)")
        record = {
            "event": event,
            "classes": self._classes,
            "calibration": self._calibration,
            "stored_pictures": stored,
        }
        older = self._current().tensors if self._versions else {}
        tensors = {}
        for name, tensor in self._tensors().items():
            before = older.get(name)
            same = before is not None and before.dtype == tensor.dtype and torch.equal(before, tensor)
            tensors[name] = before if same else tensor.clone()
        self._versions = [*self._versions, Version(record, tensors)]

    def _tensors(self) -> dict[str, Tensor]:
        """Everything learned, on the CPU, under unique names."""
        tensors = {f"method.{name}": tensor for name, tensor in self._method.state().items()}
        if self._known is not None:
            tensors |= {f"known.{key}": value for key, value in vars(self._known).items() if isinstance(value, Tensor)}
            for key in KnownSpace.NUMBERS:
                tensors[f"known.{key}"] = torch.tensor([getattr(self._known, key)], dtype=torch.float64)
        tensors |= {f"held.{key}": value for key, value in self._held.items()}
        tensors |= {f"taught.{key}": value for key, value in self._taught.items()}
        for name, lesson in self._thumbnails.items():
            tensors |= {f"thumbnails.{name}.{key}": value for key, value in lesson.items()}
        tensors["fingerprints"] = self._fingerprints
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    def _adopt(self, head: Head, tensors: dict[str, Tensor]) -> None:
        """Takes over the versions of a folder."""
        head.current.tensors = tensors
        self._head, self._versions = head, list(head.versions)
        self._restore()

    def _restore(self) -> None:
        """Makes the last version the present state."""
        version = self._current()
        if set(version.files) - set(version.tensors):
            version.tensors = self._folder.load(self._head, version)
        groups: dict[str, dict[str, Tensor]] = {"method": {}, "known": {}, "held": {}, "taught": {}, "thumbnails": {}}
        try:
            for name, tensor in version.tensors.items():
                group, _, key = name.partition(".")
                if key:
                    groups[group][key] = tensor.clone()
            self._method = self._new_method()
            self._method.load_state(groups["method"])
            known = {key: value.to(self._runtime.device) for key, value in groups["known"].items()}
            if known:
                known |= {key: float(known[key]) for key in KnownSpace.NUMBERS}
            self._known = KnownSpace(**known) if known else None
            self._held, self._taught, self._thumbnails = groups["held"], groups["taught"], {}
            for name, tensor in groups["thumbnails"].items():
                lesson, _, key = name.partition(".")
                self._thumbnails.setdefault(lesson, {})[key] = tensor
            self._fingerprints = version.tensors["fingerprints"].clone()
            self._classes = [dict(info) for info in version.record["classes"]]
            self._calibration = dict(version.record["calibration"])
            if len(self._classes) != self._method.seen:
                raise ValueError(f"{len(self._classes)} class names for {self._method.seen} classes")
            if self._method.features_fixed:  # shapes that do not fit one another show here, not at the first picture
                self._from_features(torch.zeros(1, self._backbone.dim, device=self._runtime.device))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise UserError(f"the saved state does not fit method {self._config['method']}: {error}") from error

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


def _rate(scores: Tensor, threshold: float | None) -> float | None:
    return float((scores < threshold).double().mean()) if threshold is not None and len(scores) else None


def _without_forgotten(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    keep = rows["labels"] >= 0
    return {key: value[keep] for key, value in rows.items()}


def _drop_label(labels: Tensor, number: int) -> None:
    """In place: `number` becomes −1 and labels above it move down."""
    labels[labels == number] = -1
    labels[labels > number] -= 1
