"""CODA-Prompt: prefixes as weighted sums of components (Smith et al., "CODA-Prompt: COntinual Decomposed
Attention-based Prompting for Rehearsal-Free Continual Learning", CVPR 2023; docs/methods/coda.md), and CodaP+, with
class means as classifier.

    p = Σ_k cos(q ∘ A_k, K_k) P_k  in each of the first blocks, no softmax; half of p's rows are keys, half are values.
    Each task adds its share of the components, orthogonal to all earlier ones, which stay as they are.
    loss = CE over the task's classes (+ weight · mean((X Xᵀ − I)²) of P, K and A)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fscil.backbones.prompts import as_prefix, blocks_present, draw_normal
from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.maths.prompting import component_weights, gram_schmidt, orthogonality
from fscil.methods.families.prompts import Prompted, PromptedOptions
from fscil.runtime import Runtime
from fscil.strict import NotNegative


@dataclass(frozen=True, kw_only=True)
class CodaOptions(PromptedOptions):
    """The values of the released CIFAR100 script. Blocks that the backbone has not are left out."""

    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)
    components: int = 100  # of a block, over all tasks
    length: int = 8  # rows of a component: the first half keys, the second half values
    expected_tasks: int = 9  # each adds components // expected_tasks; tasks beyond them train the head alone
    freeze_earlier: bool = True  # components of earlier tasks are used but not trained
    orthogonality: NotNegative = 0.0  # weight of mean((X Xᵀ − I)²) over keys, attention and components
    batch_size: int = 128
    decay: Literal["constant", "cosine", "coda"] = "coda"

    def __post_init__(self) -> None:
        if not 1 <= self.expected_tasks <= self.components:
            raise UserError(f"expected_tasks is {self.expected_tasks}; choose 1 to {self.components} (components)")
        if self.length < 2 or self.length % 2:
            raise UserError(f"length is {self.length}; it must be even, half for keys and half for values")


class CodaPrompt(Prompted):
    """Prefix prompts as attention-weighted sums of components."""

    Options = CodaOptions

    def __init__(self, backbone: Backbone, options: CodaOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.prompt_blocks = blocks_present(options.blocks, backbone)
        blocks, dim, width = len(self.prompt_blocks), backbone.dim, backbone.heads * backbone.head_dim
        empty = self.head_rows.new_zeros
        self.components = nn.Parameter(empty(blocks, 0, options.length * width))  # P, flat
        self.keys = nn.Parameter(empty(blocks, 0, dim))  # K
        self.attention = nn.Parameter(empty(blocks, 0, dim))  # A

    def open_task(self, task: int) -> None:
        """Adds the task's share of components: unit, orthogonal to all before them in their block (Gram-Schmidt)."""
        o = self.options
        share = o.components // o.expected_tasks if task < o.expected_tasks else 0
        for name in ("components", "keys", "attention"):
            old = getattr(self, name).detach()
            shape = (len(old), share, old.shape[2])
            draws = draw_normal(shape, self.runtime, "coda", name, task)
            fresh = [gram_schmidt(earlier, drawn) for earlier, drawn in zip(old, draws, strict=True)]
            setattr(self, name, nn.Parameter(torch.cat([old, torch.stack(fresh)], 1) if fresh else old))

    def encode(self, tokens: Tensor, query: Tensor, task: int | None) -> tuple[Tensor, Tensor | float]:
        o = self.options
        parts: list[Tensor] = [self.components, self.keys, self.attention]
        if task is not None and o.freeze_earlier:
            earlier = min(task, o.expected_tasks) * (o.components // o.expected_tasks)
            parts = [torch.cat([part[:, :earlier].detach(), part[:, earlier:]], 1) for part in parts]
        components, keys, attention = parts
        prompts = component_weights(query, attention, keys) @ components  # (blocks, B, length · d)
        prompts = prompts.unflatten(-1, (2, o.length // 2, -1)).transpose(1, 2)  # (blocks, 2, B, length / 2, d)
        prefix = as_prefix(self.backbone, dict(zip(self.prompt_blocks, prompts, strict=True)))
        tokens = self.backbone.blocks(tokens, prefix=prefix, pooled=True)
        penalty = o.orthogonality * sum(map(orthogonality, parts)) if task is not None and o.orthogonality else 0.0
        return self.backbone.pool(tokens), penalty
