"""The image pipeline follows what was chosen and, where nothing was, the backbone."""

import pytest

from fscil.config import TransformConfig
from fscil.data.transforms import make_transform
from fscil.errors import UserError
from tiny_world import make_backbone


@pytest.mark.parametrize(
    ("normalize", "mean", "std"),
    [("auto", 0.2, 0.3), ("none", 0.0, 1.0), ("half", 0.5, 0.5), ("imagenet", 0.485, 0.229)],
)
def test_normalisation_follows_the_choice(normalize, mean, std):
    backbone = make_backbone()
    backbone.mean, backbone.std = (0.2,) * 3, (0.3,) * 3
    transform = make_transform(TransformConfig(normalize=normalize), backbone)
    assert (transform.mean[0], transform.std[0]) == (mean, std)
    assert (transform.size, transform.resize) == (16, 18)  # the backbone's size, and 16 x 256/224


def test_a_resize_below_the_crop_is_refused():
    with pytest.raises(UserError, match="transform.resize is 8"):
        make_transform(TransformConfig(resize=8), make_backbone())
