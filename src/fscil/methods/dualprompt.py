"""DualPrompt: a general prefix for all tasks and an expert prefix per task (Wang et al., "DualPrompt: Complementary
Prompting for Rehearsal-free Continual Learning", ECCV 2022; docs/methods/dualprompt.md), and DualP+, with class
means as classifier.

    attention(h_Q, [p_K; h_K], [p_V; h_V]):  p = G-prompt g in the first blocks, E-prompt e_t in the next ones
    loss = CE over the task's classes − λ cos(q, k_t);  at test time the E-prompt whose key is nearest to q
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fscil.backbones.prompts import as_prefix, blocks_present, draw_uniform, lookup
from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.maths.prompting import key_pull
from fscil.methods.families.prompts import Prompted, PromptedOptions
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class DualPromptOptions(PromptedOptions):
    """The values of the PyTorch port for CIFAR100, but as many epochs as the other prompt methods (the port has 5).

    Blocks that the backbone has not are left out.
    """

    general_length: Natural = 5
    general_blocks: tuple[int, ...] = (0, 1)
    expert_length: Natural = 5  # 20 for ImageNet-R
    expert_blocks: tuple[int, ...] = (2, 3, 4)
    expected_tasks: int = 10  # E-prompts in the pool, one per task; tasks beyond them train the nearest ones
    copy_previous: bool = True  # a task's E-prompt starts as the previous task's; keys do not
    pull: NotNegative = 1.0  # weight of the term that draws keys to queries (LAMDA-PILOT: 0.1)
    vote_in_training: bool = True  # beyond the pool: one E-prompt for the whole batch, the one chosen most often
    vote_at_test: bool = False  # the same at test time; predictions then depend on the batch
    batch_size: int = 24
    lr: float = 0.0028125  # 0.03 · 24 / 256
    clip: Positive | None = 1.0

    def __post_init__(self) -> None:
        if self.expected_tasks < 1:
            raise UserError(f"expected_tasks is {self.expected_tasks}; the pool needs at least one E-prompt")


class DualPrompt(Prompted):
    """General and expert prefix prompts."""

    Options = DualPromptOptions

    def __init__(self, backbone: Backbone, options: DualPromptOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        o, width = options, backbone.heads * backbone.head_dim
        self.general_blocks = blocks_present(o.general_blocks, backbone)
        self.expert_blocks = blocks_present(o.expert_blocks, backbone)
        general = (len(self.general_blocks), 2, o.general_length, width)  # axis 1: keys, values
        expert = (o.expected_tasks, len(self.expert_blocks), 2, o.expert_length, width)
        self.general = nn.Parameter(draw_uniform(general, 1.0, runtime, "dualprompt general"))
        self.expert = nn.Parameter(draw_uniform(expert, 1.0, runtime, "dualprompt expert"))
        self.keys = nn.Parameter(draw_uniform((o.expected_tasks, backbone.dim), 1.0, runtime, "dualprompt keys"))

    def open_task(self, task: int) -> None:
        if self.options.copy_previous and 0 < task < len(self.expert):
            with torch.no_grad():
                self.expert[task] = self.expert[task - 1]

    def choose(self, query: Tensor, task: int | None) -> Tensor:
        """E-prompt (B,) of each image: the task's own in training; by nearest key in testing or beyond the pool."""
        if task is not None and task < len(self.expert):
            return query.new_full((len(query),), task, dtype=torch.int64)
        vote = self.options.vote_at_test if task is None else self.options.vote_in_training
        return lookup(query, self.keys, 1, vote).squeeze(1)

    def encode(self, tokens: Tensor, query: Tensor, task: int | None) -> tuple[Tensor, Tensor | float]:
        chosen = self.choose(query, task)
        general = self.general[:, :, None].expand(-1, -1, len(query), -1, -1)  # (blocks, 2, B, length, d)
        expert = self.expert[chosen].permute(1, 2, 0, 3, 4)
        prompts = dict(zip(self.general_blocks + self.expert_blocks, [*general, *expert], strict=True))
        tokens = self.backbone.blocks(tokens, prefix=as_prefix(self.backbone, prompts), pooled=True)
        pull = 0.0 if task is None else -self.options.pull * key_pull(query, self.keys[chosen][:, None])
        return self.backbone.pool(tokens), pull
