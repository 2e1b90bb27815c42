"""Feature spaces side by side: the directions of several adapter sets' features, each space with a weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone


class UnitSpaces(nn.Module):
    """x ↦ [w_1 û(f_1(x)); w_2 û(f_2(x)); …], û: unit length, f_k: the backbone under the k-th adapter set.

    >>> from fscil.backbones.lora import empty_lora
    >>> UnitSpaces(empty_lora(2, 16), [0.5]).weights
    tensor([0.5000])
    """

    weights: Tensor

    def __init__(self, lora: LoRA, weights: Sequence[float]):
        super().__init__()
        self.lora = lora
        self.register_buffer("weights", torch.tensor(weights, dtype=lora.A.dtype, device=lora.A.device))

    def forward(self, backbone: Backbone, images: Tensor) -> Tensor:
        """(b, spaces · d)."""
        spaces = F.normalize(backbone(images, self.lora), dim=2) * self.weights[:, None, None]
        return spaces.transpose(0, 1).flatten(1)
