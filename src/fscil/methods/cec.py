"""CEC: continually evolved classifiers (Zhang et al., "Few-Shot Incremental Learning with Continually Evolved
Classifiers", CVPR 2021; docs/methods/cec.md).

Base task      stage 1: LoRA set and cosine head at a fixed scale (the plain adapters, shared by the shelf);
               stage 2: episodes that play an increment: some base classes, and rotated copies of them as new classes.
               A graph attention over all prototypes and one query adapts both; LoRA set and attention are trained.
Few-shot task  prototypes are appended; no training. Scores always go through the attention.

The original keeps the whole model in evaluation mode while stage 2 trains, so its dropouts never act; here are none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.maths.margins import cosine
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec
from fscil.methods.families.adapters import AdapterMethod, AdapterOptions
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Batch, Group, Schedule, train
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class CECOptions(AdapterOptions):
    """Hyper-parameters of CEC; stage 1 follows the baseline's recipe at a fixed scale, our choice."""

    scale: Positive = 16.0  # temperature of both stages
    attention: bool = True  # False: plain prototypes after stage 2
    pseudo_classes: bool = True  # rotated copies of the episode's classes as new ones
    episode_epochs: int = 100  # 0: no stage 2
    episodes: Natural = 50  # per epoch
    way: Natural = 15  # base classes per episode (all of them when there are fewer)
    shots: Natural = 1
    queries: Natural = 15  # per class; 10 on CUB
    encoder_lr: float = 2e-4  # of the LoRA set in stage 2, our choice; originally 2e-3 (CIFAR) or 2e-4 for the CNN
    attention_lr: float = 2e-4
    episode_weight_decay: NotNegative = 5e-4
    lr_step: Natural = 20  # epochs after which both rates are multiplied by lr_gamma
    lr_gamma: NotNegative = 0.5


class CEC(AdapterMethod):
    """Prototypes and queries adapted to one another by graph attention."""

    Options = CECOptions

    def __init__(self, backbone: Backbone, options: CECOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.graph = GraphAttention(backbone.dim, runtime.generator("graph attention")).to(**self.place)

    @classmethod
    def adapter_plan(cls, options: CECOptions) -> AdapterPlan:
        return AdapterPlan((AdapterSpec(0.0, options.scale),), options.rank, options.lora_init, options.schedule)

    def fit_base(self, task: Task) -> None:
        o, runtime = self.options, self.runtime
        streams = self.adapter_plan(o).train(self.backbone, task, runtime)
        lora = LoRA(streams.lora.A.detach().clone(), streams.lora.B.detach().clone())
        episodes = Episodes(task, o, runtime)
        targets = torch.arange(episodes.classes, device=runtime.device).repeat(o.queries)

        def loss(batch: Batch) -> Tensor:
            features = self.backbone(batch.images, lora)[0].view(o.shots + o.queries, episodes.classes, -1)
            support, queries = features[: o.shots].mean(0), features[o.shots :].flatten(0, 1)
            return F.cross_entropy(self._scores(queries, support), targets)

        schedule = Schedule(
            o.episode_epochs, 1, o.attention_lr, o.episode_weight_decay, momentum=o.momentum, nesterov=True,
            decay="step", milestones=tuple(range(o.lr_step, o.episode_epochs, o.lr_step)), gamma=o.lr_gamma,
        )  # fmt: skip
        groups = [
            Group(list(lora.parameters()), o.encoder_lr / o.attention_lr),
            Group(list(self.graph.parameters())),
        ]
        numbers = torch.zeros(len(episodes), dtype=torch.int64)  # an episode brings its own labels
        train("episodes", episodes, numbers, groups, loss, schedule, runtime, passes=len(targets))
        self.freeze(lora, task)

    def learn(self, task: Task) -> None:
        self.take_in(task)

    @torch.no_grad()
    def logits_from(self, features: Tensor) -> Tensor:
        parts = [self._scores(part, self.prototypes) for part in features.split(self.runtime.batch_size_eval)]
        return torch.cat(parts) if parts else features.new_zeros(0, self.seen)

    def _scores(self, queries: Tensor, prototypes: Tensor) -> Tensor:
        if not self.options.attention:
            return self.options.scale * cosine(queries, prototypes)
        return self.options.scale * self.graph(prototypes, queries)

    @classmethod
    def passes(cls, options: CECOptions, sizes: Sizes) -> float:
        o, copies = options, 2 if options.pseudo_classes else 1
        episode = min(o.way, sizes.classes[0]) * copies * (o.shots + o.queries)
        return super().passes(o, sizes) + o.episode_epochs * o.episodes * episode * TRAINING

    def trainable_parameters(self) -> int:
        return super().trainable_parameters() + sum(p.numel() for p in self.graph.parameters())


class GraphAttention(nn.Module):
    """Single-head attention over [all prototypes, one query], with residual and LayerNorm (CEC Eq. 3-5).

    Cosines (n, c) of each updated query with the prototypes updated beside it. Prototypes see each other alike in every
    query's sequence, and attention and output map are linear in the values; so their part is computed once, and a
    query adds itself to prototype i with the weight w_i = σ(⟨q_i, k_query⟩ − logsumexp_j ⟨q_i, k_j⟩).
    """

    def __init__(self, dim: int, generator: torch.Generator):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(dim, dim, generator=generator) * math.sqrt(2 / (dim + dim))) for _ in range(3)
        )
        self.out = nn.Parameter(torch.randn(dim, dim, generator=generator) * math.sqrt(2 / (dim + dim)))  # Xavier
        self.bias = nn.Parameter((torch.rand(dim, generator=generator) * 2 - 1) / math.sqrt(dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, prototypes: Tensor, queries: Tensor) -> Tensor:
        root = math.sqrt(prototypes.shape[1])
        qp, kp, vp = (prototypes @ w.T for w in (self.query, self.key, self.value))
        qx, kx, vx = (queries @ w.T for w in (self.query, self.key, self.value))
        among = qp @ kp.T / root  # (c, c)
        share = torch.sigmoid(kx @ qp.T / root - among.logsumexp(1))[..., None]  # (n, c, 1)
        own = torch.softmax(among, 1) @ vp @ self.out.T  # (c, d)
        update = own + share * ((vx @ self.out.T)[:, None] - own)  # (n, c, d)
        nodes = self.norm(update + self.bias + prototypes)
        weights = torch.softmax(torch.cat([qx @ kp.T, (qx * kx).sum(1, keepdim=True)], 1) / root, 1)  # (n, c + 1)
        attended = weights[:, :-1] @ vp + weights[:, -1:] * vx
        centre = self.norm(attended @ self.out.T + self.bias + queries)
        return F.cosine_similarity(centre[:, None], nodes, dim=-1)


class Episodes:
    """Pseudo-incremental episodes in the place of images: item e gives the augmented images of episode e.

    Images lie as (shots + queries, classes), the rotated pseudo-classes after the classes they are made of.
    """

    def __init__(self, task: Task, options: CECOptions, runtime: Runtime):
        self.images: Pixels = task.images
        self.index_device = torch.device("cpu")
        self.options, self.runtime = options, runtime
        labels = task.labels.cpu()
        self.members = [(labels == label).nonzero().squeeze(1) for label in torch.unique(labels)]
        self.way = min(options.way, len(self.members))
        self.classes = self.way * (2 if options.pseudo_classes else 1)

    def __len__(self) -> int:
        return self.options.episodes

    def augmented(self, positions: Tensor, epoch: int) -> Tensor:
        """Images ((shots + queries) · classes, 3, s, s) of one episode; each class is rotated by one random angle."""
        number = int(positions)  # batches hold one episode each
        generator = self.runtime.generator("episode", epoch, number)
        each = self.options.shots + self.options.queries
        chosen = torch.randperm(len(self.members), generator=generator)[: self.way].tolist()
        drawn, views = [], []
        for label in chosen:
            own = self.members[label]
            order = torch.arange(each) % len(own)  # a class with too few images repeats them, augmented anew
            drawn.append(own[torch.randperm(len(own), generator=generator)][order])
            views.append((epoch * len(self) + number) + 1_000_000 * (torch.arange(each) // len(own)))
        images = self.images.augmented(torch.stack(drawn, 1).flatten(), torch.stack(views, 1).flatten())
        images = images.view(each, self.way, *images.shape[1:])
        if self.options.pseudo_classes:
            turns = torch.randint(1, 4, (self.way,), generator=generator).tolist()  # 90, 180 or 270 degrees
            turned = [torch.rot90(images[:, i], k, (-2, -1)) for i, k in enumerate(turns)]
            images = torch.cat([images, torch.stack(turned, 1)], 1)
        return images.flatten(0, 1)
