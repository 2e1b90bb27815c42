"""The two image pipelines of the field as numbers: how images are augmented, resized, cropped and normalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fscil.config import TransformConfig
from fscil.errors import UserError

Colour = tuple[float, float, float]
NORMALISATIONS: dict[str, tuple[Colour, Colour]] = {  # mean and standard deviation
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Transform:
    """Training: RandomResizedCrop(size, scale, ratio), bilinear, then flip. Test: Resize(resize, bicubic),
    CenterCrop(size). Both: normalise."""

    size: int = 224
    scale: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    resize: int = 256
    mean: Colour = (0.0, 0.0, 0.0)
    std: Colour = (1.0, 1.0, 1.0)


class Viewer(Protocol):
    """What a network, such as a Backbone, says of the images it was pretrained on."""

    mean: Colour
    std: Colour

    @property
    def image_size(self) -> int: ...


def make_transform(chosen: TransformConfig, viewer: Viewer) -> Transform:
    """The image pipeline: sizes default to the network's, `auto` normalisation is the one that suits it."""
    size = viewer.image_size
    if chosen.size not in (None, size):
        raise UserError(
            f"transform.size (the size of preprocessing) is {chosen.size}, but the backbone takes {size} pixels; leave "
            f"it out, or make the backbone for it: make_backbone(…, image_size={chosen.size})"
        )
    auto = chosen.normalize == "auto"
    mean, std = (viewer.mean, viewer.std) if auto else NORMALISATIONS[chosen.normalize]
    resize = chosen.resize or round(size * 256 / 224)
    if resize < size:
        raise UserError(f"transform.resize is {resize}, smaller than the {size} pixels that are cut out of it")
    return Transform(size, chosen.scale, chosen.ratio, chosen.flip, resize, mean, std)
