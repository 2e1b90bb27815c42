"""`FewShotClassifier`: the teachable model with scikit-learn's manners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sklearn.base import BaseEstimator, ClassifierMixin

from fscil.teachable.model import Teachable
from fscil.teachable.recognition import Notice, Recognition

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["FewShotClassifier", "Notice", "Recognition"]


class FewShotClassifier(Teachable, ClassifierMixin, BaseEstimator):
    """Few-shot class-incremental classifier on a frozen, pretrained Vision Transformer.

    Pictures may be paths, Pillow images, arrays, tensors, a `torch.utils.data.Dataset`, or a folder of class folders.

    Parameters
    ----------
    method : str
        See `fscil list methods`. The two exemplar methods (icarl, foster) store pictures; no other one does.
    backbone : str or Backbone
        A plain ViT of timm as "arch.tag", or one that ships with the package ("glyph_vit_a").
    weights : path, optional
        Local safetensors file of the backbone.
    head : str or dict
        What makes a classifier of the features: a name of `fscil list heads`, or {"name": …, and its options}. "auto"
        is MPCC if `fit` trains smp on a GPU, the closed form, which needs no training, on a CPU or without training,
        and the method's own for other methods.
    train : {"auto", "always", "never"}
        Whether `fit` trains; "auto" does from 10 classes and 20 pictures per class on. Otherwise the backbone stays as
        it is, and the classifier is that of `head`, whatever the method.
    options : dict, optional
        Options of the method, such as {"epochs": 5}.
    transform : dict, optional
        Keys of `fscil.config.TransformConfig`, such as {"flip": 0.0}.
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

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.string, tags.no_validation = False, True, True
        return tags
