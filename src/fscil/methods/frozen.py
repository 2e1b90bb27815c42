"""The frozen backbone: nothing is trained, a head does everything on the pretrained features.

With the head `prototypes` this is SimpleCIL (Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained
Models", IJCV 2024).
"""

from __future__ import annotations

from torch import Tensor

from fscil.backbones.lora import LoRA, empty_lora
from fscil.data.stream import Task
from fscil.heads.prototypes import PrototypeOptions, Prototypes
from fscil.methods.represented import Represented


class Frozen(Represented):
    """Features of the backbone as it is."""

    def represent(self, task: Task) -> None:
        """There is nothing to train."""

    def own_head(self) -> Prototypes:
        return Prototypes(self.feature_dim, PrototypeOptions(), self.runtime)

    def embed(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    @property
    def plain_adapters(self) -> LoRA:
        return empty_lora(self.backbone.depth, self.backbone.dim, **self.head.place)

    def trainable_parameters(self) -> int:
        return 0
