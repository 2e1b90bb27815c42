"""The base tasks of several seeds as one, so that what they train passes through the backbone together.

Seeds differ in the order of the images and in how each is augmented. A place in the order stands for one image of every
seed, so a batch of n places is G·n images, seed after seed, and their labels (G, n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fscil.data.stream import Task

Order = Callable[[int], Tensor]  # positions of an epoch's images, one after the other


class SideBySide:
    """Images of several tasks of one length, each in its own order."""

    def __init__(self, tasks: Sequence[Task], orders: Sequence[Order], device: torch.device):
        self.images, self.orders = [task.images for task in tasks], orders
        self._labels = [task.labels.to(device) for task in tasks]
        self._positions: tuple[int, Tensor] | None = None  # of one epoch, (G, N)

    def __len__(self) -> int:
        return len(self.images[0])

    @property
    def index_device(self) -> torch.device:
        return self.images[0].index_device

    def order(self, epoch: int) -> Tensor:
        """All places as they come: what they stand for is shuffled already."""
        return torch.arange(len(self))

    def augmented(self, places: Tensor, epoch: int) -> Tensor:
        """(G·n, 3, s, s)."""
        batches = [
            images.augmented(own, epoch) for images, own in zip(self.images, self._at(places, epoch), strict=True)
        ]
        return torch.cat(batches) if len(batches) > 1 else batches[0]

    def labels(self, places: Tensor, epoch: int) -> Tensor:
        """(G, n)."""
        pairs = zip(self._labels, self._at(places, epoch), strict=True)
        return torch.stack([labels[own.to(labels.device)] for labels, own in pairs])

    def _at(self, places: Tensor, epoch: int) -> Tensor:
        """Positions (G, n) of the images that these places stand for."""
        if self._positions is None or self._positions[0] != epoch:
            self._positions = epoch, torch.stack([order(epoch) for order in self.orders]).to(self.index_device)
        return self._positions[1][:, places]
