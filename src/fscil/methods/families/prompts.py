"""What L2P, DualPrompt and CODA-Prompt share: a frozen ViT, prompts chosen by a query, and a linear head or class
means.

Every task trains the prompts and the head with cross-entropy over that task's classes alone. The + forms (`prototypes`)
do so in the base task only; their classifier rows are class means, and nothing is trained afterwards.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.prompts import draw_uniform
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.maths.margins import cosine
from fscil.maths.prompting import masked_cross_entropy
from fscil.maths.prototypes import class_means
from fscil.methods.base import Method
from fscil.methods.sizes import TRAINING, Sizes
from fscil.methods.training import Batch, Schedule, train
from fscil.runtime import Runtime
from fscil.strict import Positive

PROTOTYPE_SCALE = 16.0  # of the cosine logits, as in the other prototype methods; the arg max does not depend on it
AFTER_BASE = ("prototypes", "few_shot_epochs", "vote_at_test")  # options that do not change the base model


@dataclass(frozen=True, kw_only=True)
class PromptedOptions:
    """Training of the prompt methods: Adam, re-made in every task."""

    prototypes: bool = False  # the + form: class means and cosine, nothing trained after the base task
    epochs: int = 20
    few_shot_epochs: int | None = None  # of each later task; None: as many as in the base task
    batch_size: int = 48
    lr: float = 1e-3
    decay: Literal["constant", "cosine", "coda"] = "constant"  # coda: lr · cos(99 π e / (200 (E − 1)))
    clip: Positive | None = None  # largest gradient norm


class FrozenFeatures:
    """Features of plain images under the prompt-free backbone, computed once per image however views overlap.

    The test view grows from task to task, so rows are kept by image number in the store, for the stores used last.
    """

    def __init__(self, method: Method, stores: int = 2):
        self.method, self.stores = method, stores
        self._kept: OrderedDict[tuple[str, str], tuple[Tensor, Tensor]] = OrderedDict()

    def __call__(self, images: Pixels) -> Tensor:
        """Rows (n, d) of the images of a view."""
        key, backbone = (images.store.fingerprint, repr(images.transform)), self.method.backbone
        kept = self._kept.pop(key, None)
        known = torch.zeros(len(images.store), dtype=torch.bool) if kept is None else kept[1]
        missing = (~known[images.indices]).nonzero().squeeze(1)
        if kept is not None and not len(missing):
            rows = kept[0]
        else:
            fresh = self.method.extract(images.select(missing), backbone, "prompt-free features")
            rows = fresh.new_zeros(len(images.store), fresh.shape[1]) if kept is None else kept[0]
            rows[images.indices[missing].to(rows.device)] = fresh
            known[images.indices[missing]] = True
        self._kept[key] = (rows, known)
        while len(self._kept) > self.stores:
            self._kept.popitem(last=False)
        return rows[images.indices.to(rows.device)]


class Prompted(Method):
    """Base of the prompt methods; a subclass holds prompts and says how a query turns tokens into a feature."""

    Options = PromptedOptions
    means: Tensor  # (seen, d) class means, of the + forms

    def __init__(self, backbone: Backbone, options: PromptedOptions, runtime: Runtime):
        super().__init__(backbone, options, runtime)
        self.features_fixed = options.prototypes
        self.query_features = FrozenFeatures(self)
        rows = torch.zeros(0, backbone.dim, **runtime.place)
        self.head_rows, self.head_bias = nn.Parameter(rows), nn.Parameter(rows[:, 0].clone())
        self.register_buffer("means", rows.clone())

    # ---- what a subclass gives ----
    def open_task(self, task: int) -> None:
        """Makes the prompts of a task ready before it is trained."""

    def encode(self, tokens: Tensor, query: Tensor, task: int | None) -> tuple[Tensor, Tensor | float]:
        """Feature (B, d) of embedded images, and what is added to the loss; `task` is None when testing."""
        raise NotImplementedError

    # ---- learning ----
    def fit_base(self, task: Task) -> None:
        self.count_classes(task)
        self._grow_head()
        self.open_task(0)
        key = self._shelf_key(task)
        with self.runtime.shelf.reserve([key]):
            kept = self.runtime.shelf.get(key)
            if kept is None:
                self._train(task, self.options.epochs)
                self.runtime.shelf.put(key, {name: p.detach() for name, p in self._own_parameters()})
            else:
                self.load_state(kept)
        if self.options.prototypes:
            self._average(task, self.class_counts[:0])

    def learn(self, task: Task) -> None:
        before = self.class_counts
        self.count_classes(task)
        if self.options.prototypes:
            self._average(task, before)
        else:
            self._grow_head()
            self.open_task(self.task)
            epochs = self.options.few_shot_epochs
            self._train(task, self.options.epochs if epochs is None else epochs)

    @property
    def task(self) -> int:
        """Number of the task learned last (0: the base task)."""
        return int(self.tasks_seen) - 1

    def _train(self, task: Task, epochs: int) -> None:
        o, number = self.options, self.task
        current = torch.zeros(self.seen, dtype=torch.bool, device=self.runtime.device)
        current[task.labels.to(current.device)] = True
        parameters = [parameter for _, parameter in self._own_parameters()]
        schedule = Schedule(epochs, o.batch_size, o.lr, optimiser="adam", decay=o.decay, clip=o.clip)

        def loss(batch: Batch) -> Tensor:
            return self.loss(batch.images, batch.labels, current, number)

        stage = f"{type(self).__name__.lower()} task {number}"
        final = train(stage, task.images, task.labels, parameters, loss, schedule, self.runtime, passes=2)
        self._diagnostics = {"loss": final}

    def loss(self, images: Tensor, labels: Tensor, current: Tensor, task: int) -> Tensor:
        """Cross-entropy over the task's classes, plus the method's terms; queries see the same augmented images."""
        tokens = self.backbone.embed(images)
        with torch.no_grad():
            query = self.backbone.pool(self.backbone.blocks(tokens, pooled=True))
        features, extra = self.encode(tokens, query, task)
        return masked_cross_entropy(F.linear(features, self.head_rows, self.head_bias), labels, current) + extra

    def _grow_head(self) -> None:
        """Rows U(−1/√d, 1/√d) and zero biases for classes that are new; those of known classes stay."""
        known, dim = self.head_rows.shape
        fresh = draw_uniform((self.seen - known, dim), 1 / math.sqrt(dim), self.runtime, "head", known)
        self.head_rows = nn.Parameter(torch.cat([self.head_rows.detach(), fresh]))
        self.head_bias = nn.Parameter(torch.cat([self.head_bias.detach(), fresh.new_zeros(len(fresh))]))

    def _average(self, task: Task, before: Tensor) -> None:
        features = self.features(task.images)
        self.means = updated_means(self.means, before, features, task.labels, self.class_counts)

    def _own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.named_parameters() if not name.startswith("backbone.")]

    def _shelf_key(self, task: Task) -> dict[str, Any]:
        return {
            "part": f"{type(self).__name__} base model",
            "backbone": self.backbone.hash,
            "images": task.images.fingerprint,
            "labels": hashlib.sha256(task.labels.cpu().numpy().tobytes()).hexdigest()[:16],
            "options": {name: value for name, value in asdict(self.options).items() if name not in AFTER_BASE},
            "seed": self.runtime.seed,
            "precision": str(self.runtime.dtype),
        }

    @classmethod
    def passes(cls, options: PromptedOptions, sizes: Sizes) -> float:
        o, step, queries = options, 1 + TRAINING, sizes.tests[-1]  # a step passes the query and the prompted image
        trained = sizes.base * o.epochs * step
        if o.prototypes:
            return trained + 2 * sum(sizes.images) + queries + sizes.tests[-1]
        few_shot_epochs = o.epochs if o.few_shot_epochs is None else o.few_shot_epochs
        return trained + sum(sizes.later) * few_shot_epochs * step + queries + sum(sizes.tests)

    # ---- features and scores ----
    def features(self, images: Pixels) -> Tensor:
        return self.extract(images, self.embed, "features", self.query_features(images))

    def embed(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Features (b, d) of image tensors, whose queries may be known."""
        query = self.backbone(images) if query is None else query
        return self.encode(self.backbone.embed(images), query, None)[0]

    def logits_from(self, features: Tensor) -> Tensor:
        if self.options.prototypes:
            return PROTOTYPE_SCALE * cosine(features, self.means)
        return F.linear(features, self.head_rows, self.head_bias)


def updated_means(means: Tensor, before: Tensor, features: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Running class means (C, d) after further images; `before` and `counts` are the images per class, old and new."""
    fresh = class_means(features, labels.to(features.device), len(counts))
    old = torch.cat([means, torch.zeros_like(fresh[len(means) :])])
    gained = torch.cat([counts[: len(before)] - before, counts[len(before) :]])
    return old + (fresh - old) * (gained / counts.clamp(min=1))[:, None].to(fresh.dtype)
