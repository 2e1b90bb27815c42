"""What a fitted model answers about pictures, and what it knows; how it came to know it is in `model.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fscil.backbones.vit import Backbone
from fscil.data.pixels import ImageStore
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.runtime import Runtime
from fscil.teachable.folder import ModelFolder
from fscil.teachable.knowledge import Knowledge
from fscil.teachable.lessons import labelled, pictures_of
from fscil.teachable.recognition import Alike, Recogniser, Recognition
from fscil.teachable.starting import short_side
from fscil.teachable.versions import Versions


class Answering:
    """The answers of a fitted model. Nothing here changes it."""

    # parameters
    unknown: str | None
    seed: int
    # what `fit` and `load` set
    config_: dict[str, Any]
    runtime_: Runtime
    backbone_: Backbone
    transform_: Transform
    knowledge_: Knowledge
    _versions: Versions

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

    # ---- what is known ----------------------------------------------------------------------------------------------
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

    def check_fitted(self) -> None:
        """Raises scikit-learn's NotFittedError before `fit` or `load`."""
        if not self.__sklearn_is_fitted__():
            from sklearn.exceptions import NotFittedError

            raise NotFittedError("this model is not fitted yet; call fit, or open one with load.")
