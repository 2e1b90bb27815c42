"""The embedding set that MPCC calibrates the classifier on (paper Eq. 16-17): real features of the
classes just learned, Gaussian features of all others, in shuffled mini-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fscil.maths.gaussians import Roots, densest_half
from fscil.runtime import Runtime

if TYPE_CHECKING:
    from fscil.heads.mpcc import MPCCOptions

EPOCH_SET_BYTES = 2**31  # above this an epoch's embedding set is drawn part by part
PART_BYTES = 2**29  # of mini-batches that are drawn together: every root is read once a part
Features = tuple[Tensor, Tensor]  # (n, d) and their labels (n,)


@dataclass(frozen=True)
class KnownClasses:
    """What is left of the classes' images: Gaussians. `current` are the classes that real features stand for."""

    prototypes: Tensor  # P (C, d)
    trained_rows: Tensor  # Clf^d of the base classes (C0, d): their second centres
    donor: Tensor  # (C,) base class whose covariance each class uses
    roots: Roots  # of the base classes' covariances
    current: Tensor

    @property
    def others(self) -> Tensor:
        """Numbers of the classes that are drawn."""
        drawn = torch.ones(len(self.prototypes), dtype=torch.bool, device=self.prototypes.device)
        drawn[self.current] = False
        return drawn.nonzero().squeeze(1)

    def has_second_centre(self, classes: Tensor, form: str) -> Tensor:
        return (classes < len(self.trained_rows)) & (form != "off")

    def second_centres(self, classes: Tensor, form: str) -> Tensor:
        centres = self.trained_rows[classes]
        if form == "rescaled":
            centres = F.normalize(centres, dim=1) * self.prototypes[classes].norm(dim=1, keepdim=True)
        return centres


def embedding_batches(
    known: KnownClasses, real: Features, o: MPCCOptions, runtime: Runtime, session: int, epoch: int
) -> Iterator[Features]:
    """Shuffled mini-batches of one epoch: 256 Gaussian features of each other class, and the real ones."""
    old, (seen, dim) = known.others, known.prototypes.shape
    per_class = o.features_per_class
    synthetic = len(old) * per_class
    order = torch.randperm(synthetic + len(real[1]), generator=runtime.generator("mpcc", "order", session, epoch))
    order = order.to(old.device)
    steps = max(1, seen * per_class // o.batch_size)
    edges = [i * o.batch_size for i in range(steps)] + [len(order)]  # the last batch takes the remainder
    whole = None
    if synthetic * dim * 4 <= EPOCH_SET_BYTES:
        shape = (len(old), (1 + o.density_filter) * per_class, dim)
        z = runtime.randn(shape, "mpcc", "z", session, epoch, dtype=known.prototypes.dtype)
        gaussian = gaussian_features(known, old, z, o).flatten(0, 1)
        whole = torch.cat([gaussian, real[0]]), torch.cat([old.repeat_interleave(per_class), real[1]])
    at_once = 1 if whole is not None else max(1, PART_BYTES // (o.batch_size * dim * 4))
    for first in range(0, steps, at_once):
        last = min(first + at_once, steps)
        batches = [order[edges[step] : edges[step + 1]] for step in range(first, last)]
        if whole is not None:
            yield whole[0][batches[0]], whole[1][batches[0]]
        else:
            keys = [(session, epoch, step) for step in range(first, last)]
            yield from _draw_batches(known, batches, old, real, o, runtime, keys)


def gaussian_features(known: KnownClasses, classes: Tensor, z: Tensor, o: MPCCOptions) -> Tensor:
    """256 features of each class from draws z (C, 256 or 512, d): base classes half around P, half around Clf^d."""
    half = o.features_per_class // 2
    centred = known.has_second_centre(classes, o.second_centre)
    if o.density_filter:  # the groups around either centre are filtered apart
        around_prototype, around_row = z.chunk(2, 1)
        rest = o.features_per_class - half
        halves = torch.cat([densest_half(around_prototype, half), densest_half(around_row, rest)], 1)
        z = torch.where(centred.view(-1, 1, 1), halves, densest_half(z, o.features_per_class))
    noise = known.roots.apply(known.donor[classes], z)
    means = known.prototypes[classes][:, None].repeat(1, o.features_per_class, 1)
    means[centred, half:] = known.second_centres(classes[centred], o.second_centre)[:, None]
    return means + noise


def _draw_batches(
    known: KnownClasses,
    batches: list[Tensor],
    old: Tensor,
    real: Features,
    o: MPCCOptions,
    runtime: Runtime,
    keys: list[tuple[int, int, int]],
) -> Iterator[Features]:
    """The same features, drawn for some mini-batches only, each with draws of its own key; ‖z‖ does not depend on the
    class, so the filter pools over a batch."""
    per_class, dim = o.features_per_class, known.prototypes.shape[1]
    chosen, sizes = torch.cat(batches), [len(batch) for batch in batches]
    drawn = chosen < len(old) * per_class
    synthetic, rest = chosen[drawn], chosen[~drawn] - len(old) * per_class
    counts = [int(count) for count in torch.stack([part.sum() for part in drawn.split(sizes)]).tolist()]
    z = torch.cat([_draws(count, dim, o, runtime, key, known.prototypes.dtype) for count, key in zip(counts, keys)])
    classes = old[synthetic // per_class]
    means = known.prototypes[classes]
    second = known.has_second_centre(classes, o.second_centre) & (synthetic % per_class >= per_class // 2)
    means[second] = known.second_centres(classes[second], o.second_centre)
    x = means.add_(known.roots.apply_each(known.donor[classes], z))
    rests = [size - count for size, count in zip(sizes, counts)]
    parts = zip(x.split(counts), classes.split(counts), real[0][rest].split(rests), real[1][rest].split(rests))
    for own, labels, real_x, real_y in parts:
        yield torch.cat([own, real_x]), torch.cat([labels, real_y])


def _draws(
    count: int, dim: int, o: MPCCOptions, runtime: Runtime, key: tuple[int, int, int], dtype: torch.dtype
) -> Tensor:
    """Standard normal draws (count, d) of a mini-batch, the denser half of twice as many where they are filtered."""
    return densest_half(runtime.randn(((1 + o.density_filter) * count, dim), "mpcc", "z", *key, dtype=dtype), count)
