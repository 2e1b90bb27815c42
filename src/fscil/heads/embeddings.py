"""The embedding set that MPCC calibrates the classifier on (Eq. 16-17; methods.md 4.5, steps 3-5): real features of the
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

EPOCH_SET_BYTES = 2**31  # above this an epoch's embedding set is drawn mini-batch by mini-batch
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
    for step, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        chosen = order[start:stop]
        if whole is not None:
            yield whole[0][chosen], whole[1][chosen]
        else:
            yield _draw_batch(known, chosen, old, real, o, runtime, (session, epoch, step))


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


def _draw_batch(
    known: KnownClasses,
    chosen: Tensor,
    old: Tensor,
    real: Features,
    o: MPCCOptions,
    runtime: Runtime,
    key: tuple[int, int, int],
) -> Features:
    """The same features, drawn for one mini-batch only; ‖z‖ does not depend on the class, so the filter pools over the
    batch."""
    per_class = o.features_per_class
    synthetic = chosen[chosen < len(old) * per_class]
    rest = chosen[chosen >= len(old) * per_class] - len(old) * per_class
    classes = old[synthetic // per_class]
    shape = ((1 + o.density_filter) * len(classes), known.prototypes.shape[1])
    z = densest_half(runtime.randn(shape, "mpcc", "z", *key, dtype=known.prototypes.dtype), len(classes))
    means = known.prototypes[classes]
    second = known.has_second_centre(classes, o.second_centre) & (synthetic % per_class >= per_class // 2)
    means[second] = known.second_centres(classes[second], o.second_centre)
    x = means + known.roots.apply(known.donor[classes], z[:, None]).squeeze(1)
    return torch.cat([x, real[0][rest]]), torch.cat([classes, real[1][rest]])
