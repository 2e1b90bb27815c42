"""L2P: a pool of prompts in front of the patches, chosen by key lookup (Wang et al., "Learning to Prompt for Continual
Learning", CVPR 2022; docs/methods/l2p.md), and L2P+, with class means as classifier.

    q = feature of the prompt-free ViT; the N keys nearest to q in cosine choose N prompts of length L
    sequence [CLS, N·L prompts, patches];  feature = mean of the N·L prompt outputs
    loss = CE over the task's classes − λ Σ cos(q, chosen keys)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fscil.backbones.prompts import draw_uniform, insert_prompts, lookup, prompt_output
from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.maths.prompting import key_pull
from fscil.methods.families.prompts import Prompted, PromptedOptions
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class L2POptions(PromptedOptions):
    """The values of the PyTorch ports; the JAX original has length 10, top 4 and pull 1."""

    pool_size: int = 10
    length: Natural = 5  # tokens of a prompt
    top: int = 5  # prompts per image
    pull: NotNegative = 0.1  # weight of the term that draws chosen keys to their queries
    vote_in_training: bool = True  # every image of a batch gets the prompts chosen most often in it
    vote_at_test: bool = False  # the same at test time; predictions then depend on the batch
    lr: float = 0.001875  # 0.03 · 16 / 256
    clip: Positive | None = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.top <= self.pool_size:
            raise UserError(f"top is {self.top}; choose between 1 and pool_size ({self.pool_size}) prompts per image")


class L2P(Prompted):
    """Input prompts from a pool."""

    Options = L2POptions

    def __init__(self, backbone: Backbone, options: L2POptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        o, dim = options, backbone.dim
        self.prompts = nn.Parameter(draw_uniform((o.pool_size, o.length, dim), 1.0, runtime, "l2p prompts"))
        self.keys = nn.Parameter(draw_uniform((o.pool_size, dim), 1.0, runtime, "l2p keys"))

    def encode(self, tokens: Tensor, query: Tensor, task: int | None) -> tuple[Tensor, Tensor | float]:
        o, training = self.options, task is not None
        chosen = lookup(query, self.keys, o.top, o.vote_in_training if training else o.vote_at_test)
        prompts = self.prompts[chosen].flatten(1, 2)  # (B, N·L, d)
        tokens = self.backbone.blocks(insert_prompts(self.backbone, tokens, prompts))
        feature = prompt_output(self.backbone, tokens, prompts.shape[1])
        return feature, -o.pull * key_pull(query, self.keys[chosen]) if training else 0.0
