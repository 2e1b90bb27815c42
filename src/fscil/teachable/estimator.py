"""`FewShotClassifier`: the teachable model with scikit-learn's manners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin

from fscil.data.picture_files import label_name
from fscil.errors import UserError
from fscil.teachable.lessons import labelled
from fscil.teachable.model import Teachable
from fscil.teachable.packing import pack, unpack
from fscil.teachable.recognition import Notice, Recognition

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["FewShotClassifier", "Notice", "Recognition"]


class FewShotClassifier(Teachable, ClassifierMixin, TransformerMixin, BaseEstimator):
    """Few-shot class-incremental classifier on a frozen, pretrained Vision Transformer.

    Pictures may be paths, Pillow images, arrays, tensors, a `torch.utils.data.Dataset`, or a folder of class folders.

    Parameters
    ----------
    method : str
        See `fscil list methods`. The two exemplar methods (icarl, foster) store pictures; no other one does.
    backbone : str or Backbone
        A plain ViT of timm as "arch.tag", or one that ships with the package ("glyph_vit_a"). "auto": the paper's
        ViT-B/16 on a GPU, DeiT-Tiny on a CPU, which needs a fifteenth of the time.
    weights : path, optional
        Local safetensors file of the backbone.
    head : str or dict
        What makes a classifier of the features: a name of `fscil list heads`, or {"name": …, and its options}. "auto"
        is MPCC if `fit` trains smp on a GPU, the closed form, which needs no training, on a CPU or without training,
        and the method's own for other methods.
    train : {"auto", "always", "never"}
        Whether `fit` trains; "auto" does on a GPU, from 10 classes and 20 pictures per class on, if memory suffices.
        Otherwise the backbone stays as it is, and the classifier is that of `head`, whatever the method.
    options : dict, optional
        Options of the method, such as {"epochs": 5}.
    preprocessing : dict, optional
        How pictures are cut: keys of `fscil.config.TransformConfig`, such as {"flip": 0.0}.
    held_out : float
        Share of the base pictures kept out of training to calibrate confidence and "unknown".
    false_rejection : float
        Rate at which pictures of base classes may be called unknown.
    unknown : str, optional
        What `predict` answers for a picture of no known class; None: the nearest class.
    skip_bad : bool
        Leave out pictures that cannot be read.
    thumbnails : int
        So many pictures of each class and lesson are kept as small copies, for `nearest_thumbnails`; 0: none.

    Attributes
    ----------
    classes_ : ndarray
        Class names in order of arrival; the columns of `predict_proba`.
    history_ : list of dict
        What was taught when, with the accuracy and rejection rates after it.
    calibration_ : dict
        Temperature, threshold, and the rates they were set at.
    knowledge_ : fscil.teachable.knowledge.Knowledge
        All that was learned: the method with its state, classes, and what unknown pictures are told by.
    backbone_, transform_, config_
        The backbone in use, how pictures are cut for it, and what the saved model's `config` says.

    Examples
    --------
    >>> clf = FewShotClassifier("closed_form", "glyph_vit_a")  # doctest: +SKIP
    >>> clf.fit("photos/base").learn("photos/new").predict(["some.jpg"])  # doctest: +SKIP
    array(['heron'], dtype='<U5')
    """

    def __new__(cls, *args: Any, **chosen: Any) -> Self:
        if "transform" in chosen:
            raise UserError("transform=… is called preprocessing=… now; transform(X) gives features.")
        return super().__new__(cls)

    def partial_fit(self, X: Any, y: Any = None, classes: Sequence[Any] | None = None) -> Self:
        """Learns what is new: the base classes in the first call, then more classes, or more pictures of known ones.

        New classes may come in any call, so `classes` need not be told; if it is, labels outside it are refused.
        """
        X, labels = labelled(X, y)
        strange = [] if classes is None else sorted({str(label) for label in labels} - {*map(_name, classes)})
        if strange:
            raise UserError(f'y has the class "{strange[0]}", which is not in classes.')
        return self.learn(X, labels, add=True) if self.__sklearn_is_fitted__() else self.fit(X, labels)

    def transform(self, X: Any) -> np.ndarray:
        """Features (n, d) of pictures, for whatever comes next in a pipeline."""
        return self.embed(X)

    # A model travels as a packed model folder, never as pickled objects: `pickle` and joblib see bytes alone.
    def __getstate__(self) -> bytes:
        return pack(self)

    def __setstate__(self, packed: bytes) -> None:
        unpack(self, packed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        unpack(twin, pack(self), getattr(self, "backbone_", None))
        return twin

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.string, tags.no_validation = False, True, True
        tags.transformer_tags.preserves_dtype = []  # features are float32, whatever pictures are made of
        return tags


def _name(label: Any) -> str:
    return str(label_name(label))
