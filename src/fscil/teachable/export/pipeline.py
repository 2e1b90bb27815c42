"""The way of a picture through `predict`, from uint8 levels to the backbone's input, as one exportable module.

`predict` takes two steps, and an export that takes one is off by several per cent on a photo:

1. Pillow reduces a picture whose shorter side is above `short_side` to that side (data/decode.py). It computes with
   whole numbers: the filter's weights times 2²², and every result rounded to a level, after the rows and again after
   the columns. Whole numbers below 2⁵³ are exact in float64, in any order of summation, so this step is bitwise equal.
2. `Pixels.plain` resizes, cuts out the middle and normalises, in float32 (data/pixels.py).

Only the window of the reduced picture that the second step looks at is computed, so that shapes between the two are
fixed, whatever the size of the picture.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fscil.data.pixels import resampling_matrix
from fscil.data.transforms import Transform

ONE = 2.0**22  # a weight of one in Pillow's fixed-point arithmetic for 8-bit levels
RADIUS = 2.0  # of the bicubic filter, in pixels of whichever side is coarser


class Preparation(nn.Module):
    """uint8 (n, height, width, 3) of one size -> (n, 3, size, size), as `predict` makes it of the same picture."""

    mean: Tensor
    std: Tensor

    def __init__(self, transform: Transform, short_side: int):
        super().__init__()
        self.transform, self.short_side = transform, short_side
        for name, values in (("mean", transform.mean), ("std", transform.std)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1))
        # pixels of the reduced picture per pixel of the result, at most: the longer side rounds down, hence the factor
        most = short_side / transform.resize * (1 + 1 / transform.resize)
        self.window = math.ceil(transform.size * most + 2 * RADIUS * max(most, 1)) + 4

    def forward(self, pictures: Tensor) -> Tensor:
        levels = pictures.permute(0, 3, 1, 2)
        numbers = levels.shape[2], levels.shape[3]
        sides = [torch.arange(number, dtype=torch.float64)[-1:] + 1 for number in numbers]  # as tensors (1,)
        short = torch.minimum(*sides)
        (reduce_y, cut_y), (reduce_x, cut_x) = (self.matrices(s, short, n) for s, n in zip(sides, numbers))
        reduced = rounded(reduce_y @ rounded(levels.double() @ reduce_x.T)).float()
        result = (reduced @ cut_x.transpose(1, 2).unsqueeze(1)).clamp(0, 255)
        result = (cut_y.unsqueeze(1) @ result).clamp(0, 255)
        return (result / 255 - self.mean) / self.std

    def matrices(self, side: Tensor, short: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Of one axis: side -> window (window, number), of whole numbers, and window -> size (1, size, window)."""
        limit, resize, size = float(self.short_side), float(self.transform.resize), self.transform.size
        shorter = torch.minimum(short, torch.full_like(short, limit))
        reduced = torch.where(short > limit, scaled(side, short, limit), side)
        resized = scaled(reduced, shorter, resize)
        skip = torch.round((resized - size) / 2)
        scale = reduced / resized
        begin = (torch.floor(skip * scale - RADIUS * scale.clamp(min=1)) - 1).clamp(min=0)
        reducing = pillow_weights(side, reduced, number, begin, self.window)
        cutting = resampling_matrix(
            -begin.float(), reduced.float(), self.window, resized.float(), skip.float(), size, "bicubic"
        )
        return reducing, cutting


def scaled(side: Tensor, short: Tensor, target: float) -> Tensor:
    """A side of a picture whose shorter one becomes `target`; the longer one rounds down."""
    return torch.where(side == short, torch.full_like(side, target), torch.floor(target * side / short))


def pillow_weights(side: Tensor, reduced: Tensor, number: int, begin: Tensor, count: int) -> Tensor:
    """(count, number): 2²² times the bicubic weights of the pixels begin … begin + count of a side that is reduced.

    Rows beyond the reduced side mean nothing; whoever reads them gives them no weight.
    """
    scale = side / reduced
    centre = (torch.arange(count, dtype=torch.float64).view(-1, 1) + begin + 0.5) * scale
    pixel = torch.arange(number, dtype=torch.float64).view(1, -1)
    low = torch.floor(centre - RADIUS * scale + 0.5).clamp(min=0)
    high = torch.minimum(torch.floor(centre + RADIUS * scale + 0.5), side)
    distance = ((pixel - centre + 0.5) * (1 / scale)).abs()
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * -0.5
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))
    weights = weights * ((pixel >= low) & (pixel < high))
    total = weights.sum(1, keepdim=True)
    weights = weights / torch.where(total > 0, total, torch.ones_like(total)) * ONE
    return torch.where(weights < 0, torch.ceil(weights - 0.5), torch.floor(weights + 0.5))


def rounded(sums: Tensor) -> Tensor:
    """Whole levels of sums that were weighted by 2²², half rounded up, as Pillow's clip8."""
    return torch.floor((sums + ONE / 2) / ONE).clamp(0, 255)
