"""The contract every method meets, and the helpers they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone
from fscil.data.pixels import Pixels
from fscil.data.stream import Task
from fscil.errors import UserError
from fscil.heads.base import NoOptions
from fscil.methods.families.spaces import UnitSpaces
from fscil.methods.sizes import TRAINING, Sizes
from fscil.runtime import Runtime

if TYPE_CHECKING:
    from fscil.methods.families.adapter_sets import AdapterPlan


class Method(nn.Module):
    """A learner of a base task and then of few-shot tasks, one after the other.

    Labels number classes by order of arrival. `features_fixed` promises that the backbone does not change after the
    base task; then `features` and `logits_from` exist and the protocol computes test features once. Everything learned
    is in parameters and buffers, so `state` is complete.

    >>> import numpy as np, fscil
    >>> from fscil.data.pixels import ImageStore, Pixels
    >>> from fscil.data.transforms import Transform
    >>> from fscil.registry import method_class
    >>> from fscil.runtime import Runtime
    >>> pictures = np.random.default_rng(0).integers(0, 256, (4, 48, 48, 3), np.uint8)
    >>> images = Pixels(ImageStore.from_array(pictures), Transform(size=48, resize=48), seed=0)
    >>> cls = method_class("simplecil")
    >>> method = cls(fscil.make_backbone("glyph_vit_a"), cls.Options(), Runtime())
    >>> method.fit_base(fscil.Task(0, (0, 1), images, torch.tensor([0, 0, 1, 1])))
    >>> method.logits(images).argmax(1)
    tensor([0, 0, 1, 1])
    """

    Options: type[Any] = NoOptions
    features_fixed = False
    can_refine = False  # `learn` takes further images of known classes too, and `forget` exists
    after_base: frozenset[str] = (
        frozenset()
    )  # options without effect on the base task: runs that differ in these share a base model
    class_counts: Tensor  # (seen,) images of each class
    tasks_seen: Tensor

    def __init__(self, backbone: Backbone, options: Any, runtime: Runtime):
        super().__init__()
        self.backbone, self.options, self.runtime = backbone, options, runtime
        self.register_buffer("class_counts", torch.zeros(0, dtype=torch.int64, device=runtime.device))
        self.register_buffer("tasks_seen", torch.zeros((), dtype=torch.int64))
        self._diagnostics: dict[str, Any] = {}

    @property
    def seen(self) -> int:
        """Number of classes known."""
        return len(self.class_counts)

    @classmethod
    def adapter_plan(cls, options: Any) -> AdapterPlan | None:
        """The adapter sets that `fit_base` trains by `AdapterPlan.train`, if it does: runs may share a pass."""
        return None

    @classmethod
    def dim_of(cls, backbone: Backbone, options: Any) -> int:
        """Numbers in a feature."""
        return backbone.dim

    @property
    def feature_dim(self) -> int:
        return self.dim_of(self.backbone, self.options)

    @classmethod
    def passes(cls, options: Any, sizes: Sizes) -> float:
        """Images that a whole run sends through the backbone, in forward passes; a training pass counts as `TRAINING`.

        This is for a method that trains `options.epochs` epochs, if it has such an option, on the base images, looks at
        every task's images once more, and tests once where features are fixed and after every task where not.
        """
        trained = sizes.base * getattr(options, "epochs", 0) * TRAINING
        return trained + sum(sizes.images) + (sizes.tests[-1] if cls.features_fixed else sum(sizes.tests))

    def fit_base(self, task: Task) -> None:
        raise NotImplementedError

    def learn(self, task: Task) -> None:
        raise NotImplementedError

    def forget(self, label: int) -> None:
        """Removes a class; the labels above it move down by one."""
        raise UserError(f"method {type(self).__name__} cannot forget a class; use smp or closed_form, or fit again.")

    def logits(self, images: Pixels) -> Tensor:
        """Scores (n, seen classes) of images."""
        return self.logits_from(self.features(images))

    def features(self, images: Pixels) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no fixed features")

    def logits_from(self, features: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no fixed features")

    def embed(self, images: Tensor) -> Tensor:
        """Features (b, d) of image tensors, for views that heads ask for."""
        raise UserError(f"{type(self).__name__} gives no features of augmented views; choose a head without views.")

    @property
    def plain_adapters(self) -> LoRA | None:
        """The adapters under which one pass of the backbone gives the features; None where there are none such."""
        return None

    @property
    def unit_spaces(self) -> UnitSpaces | None:
        """The spaces that are the features, where these are directions under one or more adapter sets."""
        return None

    def view_features(self, images: Pixels, positions: Tensor, keys: Tensor) -> Tensor:
        """Features of augmented views: of the images at `positions`, each with its augmentation key."""
        size = self.runtime.batch_size_eval
        with torch.no_grad():
            parts = [
                self.embed(images.augmented(p, k)) for p, k in zip(positions.split(size), keys.split(size), strict=True)
            ]
        return torch.cat(parts)

    def remembering(self) -> AbstractContextManager[None]:
        """Within the block, features of the same images may be computed once."""
        return nullcontext()

    def diagnostics(self) -> dict[str, Any]:
        """JSON-able facts about the last task, for the run's log."""
        return self._diagnostics

    def restore_diagnostics(self, diagnostics: Mapping[str, Any]) -> None:
        """Takes back what `diagnostics` said when a state was stored, which is no part of the state."""
        self._diagnostics = dict(diagnostics)

    def trainable_parameters(self) -> int:
        """Numbers trained in the base task; methods override it with what they train."""
        return sum(p.numel() for name, p in self.named_parameters() if not name.startswith("backbone."))

    def stored_images(self) -> tuple[int, int]:
        """Images kept for replay and their bytes; none, for all but the exemplar methods."""
        return 0, 0

    # ---- state ----
    def base_options(self) -> dict[str, Any]:
        """The options that the base task depends on: runs that agree in these can share a base model."""
        return {name: value for name, value in asdict(self.options).items() if name not in self.after_base}

    def state(self) -> dict[str, Tensor]:
        """Everything learned: all parameters and buffers but the frozen backbone's."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor.detach() for name, tensor in named if not name.startswith("backbone.")}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restores `state()`; tensors may have other sizes than the fresh module's."""
        modules = dict(self.named_modules())
        for name, tensor in state.items():
            path, _, attribute = name.rpartition(".")
            module = modules.get(path)
            known = {**module._parameters, **module._buffers} if module is not None else {}
            if module is None or attribute not in known:
                raise UserError(f'state has "{name}", which {type(self).__name__} does not know')
            fresh = known[attribute]
            if fresh is not None and fresh.is_floating_point() != tensor.is_floating_point():
                raise UserError(f'state has {tensor.dtype} in "{name}", where {fresh.dtype} belongs')
            if (old := module._parameters.get(attribute)) is not None:
                module._parameters[attribute] = nn.Parameter(
                    tensor.to(self.runtime.device), requires_grad=old.requires_grad
                )
            else:
                module._buffers[attribute] = tensor if name == "tasks_seen" else tensor.to(self.runtime.device)

    def count_classes(self, task: Task) -> None:
        """Adds the images of a task to the counts of its classes."""
        labels = task.labels.to(self.class_counts.device)
        counts = torch.bincount(labels, minlength=max(self.seen, int(labels.max()) + 1))
        counts[: self.seen] += self.class_counts
        self.class_counts = counts
        self.tasks_seen = self.tasks_seen + 1

    # ---- shared passes ----
    def extract(
        self, images: Pixels, function: Callable[..., Tensor], description: str = "features", *aligned: Tensor
    ) -> Tensor:
        """Rows of `function(plain images, *their rows of aligned)`, in order, shared out over the processes."""
        runtime, size = self.runtime, self.runtime.batch_size_eval
        mine = torch.tensor(list(runtime.share(len(images))) or [0], dtype=torch.int64)
        short = -len(mine) % size if runtime.compile and len(mine) > size else 0  # one batch shape, compiled once
        padded = torch.cat([mine, mine[:1].expand(short)]).to(images.index_device)
        with torch.no_grad():
            parts = [
                function(images.plain(p), *(rows[p.to(rows.device)] for rows in aligned))
                for p in runtime.track(padded.split(size), description)
            ]
        return runtime.gather_rows(torch.cat(parts)[: len(runtime.share(len(images)))], len(images))
