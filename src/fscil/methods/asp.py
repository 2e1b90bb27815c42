"""ASP: attention-aware self-adaptive prompts (Liu et al., "Few-Shot Class Incremental Learning with Attention-Aware
Self-Adaptive Prompt", ECCV 2024; docs/methods/asp.md).

    Every block sees n/2 task-invariant tokens (TIP, learned) and n/2 task-specific ones (TSP), appended in front of it
    and dropped after it.
    TSP = α · average + (1 − α) · (μ(z) + σ(z) ε),   z = [TIP's first token, prompt-free feature],
    ε ~ N(0, 1) in training and 0 otherwise
    base loss = CE(s cos) + 0.1 · distance to the class's anchor image + 0.001 · KL(N(μ, σ²) ‖ N(0, 1))
    Later tasks move the average a little towards their shots and add prototypes; nothing is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.prompts import draw_uniform, run_deep
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels, keyed_uniform
from fscil.data.stream import Task
from fscil.errors import UserError
from fscil.maths.margins import cosine
from fscil.maths.prompting import anchor_distance, kl_to_standard_normal
from fscil.maths.prototypes import class_means
from fscil.methods.base import Method
from fscil.methods.families.prompts import FrozenFeatures, updated_means
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Batch, Schedule, train
from fscil.runtime import Runtime, keyed_seed
from fscil.strict import Natural, NotNegative, Share

STD_SHIFT = 5.0  # σ = softplus(map − 5): almost no noise at the start


@dataclass(frozen=True, kw_only=True)
class ASPOptions:
    """The values released for CIFAR100."""

    tokens: int = 6  # n, prompt tokens per block, half invariant and half specific; 20 for ImageNet-R
    hidden: Natural = 256  # width between the two linear maps of the prompt encoder
    average_weight: Share = 0.8  # α, share of the average prompt in the specific one
    average_momentum: Share = 0.99  # of the average at a new task (EMA)
    perturbation: NotNegative = 1.0  # standard deviation of ε in training; 0: no noise
    anchor_weight: NotNegative = 0.1  # 0: no anchors
    kl_weight: NotNegative = 0.001  # 0: no KL term
    epochs: int = 20
    batch_size: int = 48
    lr: float = 0.01
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4  # 5e-3 for ImageNet-R and CUB200

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.tokens % 2:
            raise UserError(f"tokens is {self.tokens}; it must be even: half invariant and half task-specific")


class ASP(Method):
    """Deep prompts that adapt to the image, with class means as classifier."""

    Options = ASPOptions
    average: Tensor  # (blocks, n/2, d) Avg_TSP
    means: Tensor  # (seen, d) class means: the classifier

    def __init__(self, backbone: Backbone, options: ASPOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        half, dim = options.tokens // 2, backbone.dim
        place = runtime.place
        self.invariant = nn.Parameter(torch.zeros(backbone.depth, half, dim, **place))  # TIP
        sizes = [2 * dim, options.hidden, half * dim]
        self.mean_map = nn.Sequential(*(make_linear(sizes[i : i + 2], runtime, "asp mean", i) for i in (0, 1)))
        self.std_map = nn.Sequential(*(make_linear(sizes[i : i + 2], runtime, "asp std", i) for i in (0, 1)))
        self.rows = nn.Parameter(torch.zeros(0, dim, **place))  # cosine head of the base task's training
        self.scale = nn.Parameter(torch.ones((), **place))
        self.register_buffer("average", torch.zeros(backbone.depth, half, dim, **place))
        self.register_buffer("means", torch.zeros(0, dim, **place))
        self.encoder_features = FrozenFeatures(self)

    # ---- prompts -----------------------------------------------------------------------------------------------------
    def _prompt_inputs(self, encoded: Tensor) -> Tensor:
        """z: first invariant token of a block (detached) beside the prompt-free feature: (B, d) -> (B, blocks, 2d)."""
        tip = self.invariant.detach()[:, 0].expand(len(encoded), -1, -1)
        return torch.cat([tip, encoded.to(tip.dtype)[:, None].expand(tip.shape)], -1)

    def _prompts(self, own: Tensor) -> Tensor:
        """All prompt tokens (B, blocks, n, d) from image-specific ones (B, blocks, n/2 · d)."""
        alpha = self.options.average_weight
        specific = alpha * self.average + (1 - alpha) * own.unflatten(-1, (-1, self.backbone.dim))
        return torch.cat([self.invariant.expand(specific.shape), specific], 2)

    def _average_prompt(self, encoded: Tensor) -> Tensor:
        """Mean over images of their noise-free specific prompts; μ is affine, so it is μ of the mean feature."""
        with torch.no_grad():
            return self.mean_map(self._prompt_inputs(encoded.mean(0, keepdim=True)))[0].view_as(self.average)

    def embed(self, images: Tensor, encoded: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Features (b, d) of image tensors, whose prompt-free features may be known."""
        encoded = self.backbone(images) if encoded is None else encoded
        return self._encode(self.backbone.embed(images), encoded, noise)[0]

    def _encode(self, tokens: Tensor, encoded: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Feature, μ and σ (B, blocks, n/2 · d); without noise there is no σ."""
        inputs = self._prompt_inputs(encoded)
        own = mean = self.mean_map(inputs)
        std = None
        if noise is not None:
            std = F.softplus(self.std_map(inputs) - STD_SHIFT)
            own = mean + std * noise
        return run_deep(self.backbone, tokens, self._prompts(own)), mean, std

    # ---- base task ---------------------------------------------------------------------------------------------------
    def fit_base(self, task: Task) -> None:
        o, runtime, dim = self.options, self.runtime, self.backbone.dim
        self.count_classes(task)
        self.rows = nn.Parameter(draw_uniform((self.seen, dim), 1 / math.sqrt(dim), runtime, "head"))
        encoded = self.encoder_features(task.images)
        anchors = torch.zeros(self.seen, dtype=torch.int64, device=task.images.index_device)  # an image of each class

        def begin_epoch(epoch: int) -> None:
            self.average.copy_(self._average_prompt(encoded))
            if o.anchor_weight:
                anchors.copy_(self.find_anchors(task, encoded))

        def extras(positions: Tensor, epoch: int, step: int) -> dict[str, Tensor]:
            drawn = {"noise": self._noise("image", epoch, positions)}
            if o.anchor_weight:
                drawn["anchors"] = self._anchor_features(task, encoded, anchors, positions, epoch, step)
            return drawn

        def loss(batch: Batch) -> Tensor:
            return self.loss(batch.images, batch.labels, batch.extras["noise"], batch.extras.get("anchors"))

        schedule = Schedule(o.epochs, o.batch_size, o.lr, o.weight_decay, momentum=o.momentum)
        trained = [parameter for name, parameter in self.named_parameters() if not name.startswith("backbone.")]
        final = train("asp", task.images, task.labels, trained, loss, schedule, runtime, begin_epoch, extras, passes=3)
        self._diagnostics = {"loss": final, "scale": float(self.scale.detach())}
        self.average.copy_(self._average_prompt(encoded))
        self._add_prototypes(task, self.class_counts[:0])

    def loss(self, images: Tensor, labels: Tensor, noise: Tensor, anchors: Tensor | None) -> Tensor:
        """Classification, distance to the anchors' features, KL of the prompt distribution over (image, block) rows."""
        o, tokens = self.options, self.backbone.embed(images)
        with torch.no_grad():
            encoded = self.backbone.pool(self.backbone.blocks(tokens, pooled=True))
        features, mean, std = self._encode(tokens, encoded, noise)
        total = F.cross_entropy(self.scale * cosine(features, self.rows), labels)
        if anchors is not None:
            total = total + o.anchor_weight * anchor_distance(features, anchors)
        if o.kl_weight and std is not None:
            total = total + o.kl_weight * kl_to_standard_normal(mean, std)
        return total

    def find_anchors(self, task: Task, encoded: Tensor) -> Tensor:
        """Position of each class's image whose feature has the highest cosine with the class mean (ties: first)."""
        features = self.extract(task.images, self.embed, "anchors", encoded)
        labels = task.labels.to(features.device)
        similarity = F.cosine_similarity(features, class_means(features, labels, self.seen)[labels], dim=1).cpu()
        order = similarity.argsort(stable=True, descending=True)
        first = torch.full((self.seen,), -1, dtype=torch.int64)
        first[task.labels.cpu()[order.flip(0)]] = order.flip(0)
        return first

    def _anchor_features(
        self, task: Task, encoded: Tensor, anchors: Tensor, positions: Tensor, epoch: int, step: int
    ) -> Tensor:
        """Features (b, d) of the anchor of each image's class; no gradient flows through them.

        Each class passes once; where blocks are compiled, once per image of it, so that all steps have one shape.
        """
        classes, place = task.labels.to(positions.device)[positions], torch.arange(len(positions))
        if not self.runtime.compile:
            classes, place = torch.unique(classes, return_inverse=True)
        chosen = anchors[classes]
        with torch.no_grad():
            noise = self._noise(f"anchor {step}", epoch, classes)
            features = self.embed(task.images.plain(chosen), encoded[chosen.to(encoded.device)], noise)
        return features[place.to(features.device)]

    def _noise(self, kind: str, epoch: int, keys: Tensor) -> Tensor:
        """ε (b, blocks, n/2 · d) by Box and Muller, keyed one by one: it does not depend on how a batch is split."""
        seed = keyed_seed(self.runtime.seed, "asp", kind)
        radius, angle = keyed_uniform(seed, epoch, keys, 2 * self.average.numel()).chunk(2, 1)
        normal = (-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)
        return self.options.perturbation * normal.to(self.average).view(len(keys), self.backbone.depth, -1)

    # ---- later tasks and scores --------------------------------------------------------------------------------------
    def learn(self, task: Task) -> None:
        """Moves the average prompt towards the shots, then averages their features into prototypes."""
        before = self.class_counts
        self.count_classes(task)
        fresh = self._average_prompt(self.encoder_features(task.images))
        self.average.lerp_(fresh, 1 - self.options.average_momentum)
        self._diagnostics = {"average_prompt_norm": float(self.average.norm())}
        self._add_prototypes(task, before)

    def _add_prototypes(self, task: Task, before: Tensor) -> None:
        features = self.features(task.images)
        self.means = updated_means(self.means, before, features, task.labels, self.class_counts)

    @classmethod
    def passes(cls, options: ASPOptions, sizes: Sizes) -> float:
        o = options
        epoch = sizes.base * (1 + TRAINING)  # prompt-free, and prompted
        if o.anchor_weight:  # finding them, and passing those of each batch
            epoch += sizes.base * (1 + min(1, sizes.classes[0] / o.batch_size))
        encoded = sum(sizes.images) + sizes.tests[-1]  # prompt-free features of plain images, once
        return encoded + o.epochs * epoch + sum(sizes.images) + sum(sizes.tests)

    def features(self, images: Pixels) -> Tensor:
        return self.extract(images, self.embed, "features", self.encoder_features(images))

    def logits_from(self, features: Tensor) -> Tensor:
        return self.scale.detach() * cosine(features, self.means)


def make_linear(sizes: list[int], runtime: Runtime, *key: str | int) -> nn.Linear:
    """A linear map with torch's initial distribution, U(±1/√fan_in), drawn from the runtime's generator."""
    bound = 1 / math.sqrt(sizes[0])
    layer = torch.nn.utils.skip_init(nn.Linear, *sizes)
    layer.weight = nn.Parameter(draw_uniform((sizes[1], sizes[0]), bound, runtime, *key, "weight"))
    layer.bias = nn.Parameter(draw_uniform((sizes[1],), bound, runtime, *key, "bias"))
    return layer
