"""A world small enough for tests: a two-block ViT, classes of coloured noise, every method with options cut down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fscil import registry
from fscil.backbones.loading import GLYPH_VITS
from fscil.backbones.vit import Backbone
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform
from fscil.methods.base import Method
from fscil.runtime import Keeper, Runtime, Shelf

SIZE, CLASSES, IMAGES = 16, 10, 8
BASE = 6

# Set on every method whose Options have the field.
SMALL: dict[str, Any] = {
    "epochs": 2, "learn_epochs": 2, "boosting_epochs": 2, "compression_epochs": 2, "episode_epochs": 2,
    "batch_size": 16, "rank": 2, "per_class": 4, "episodes": 2, "way": 3, "queries": 2, "virtual_classes": 4,
    "mapped_dim": 8, "features_per_class": 8, "calibration_batch": 16, "calibration_epochs": 2, "views": 2,
}  # fmt: skip


def make_vit(seed: int = 0, strong: bool = False, **changes: Any) -> VisionTransformer:
    """timm's ViT in a small size. timm starts it so weak that features hardly depend on the image; not so `strong`.

    The weights are the same whatever was drawn before: tests run in any order.
    """
    shape = dict(img_size=SIZE, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0) | changes
    with torch.random.fork_rng():
        vit = VisionTransformer(**shape)
        torch.manual_seed(seed)  # none of timm's own draws remains: they differ from version to version
        for name, weight in vit.named_parameters():
            if weight.ndim > 1:
                fan_in = weight[0].numel()
                std = fan_in**-0.5 if strong or name == "patch_embed.proj.weight" else 0.02
                torch.nn.init.normal_(weight, std=std)
            elif name == "patch_embed.proj.bias":
                torch.nn.init.zeros_(weight)
    return vit


def make_backbone(seed: int = 0, **changes: Any) -> Backbone:
    return Backbone(make_vit(seed, strong=True, **changes), "tiny")


def save_weights(path: Path) -> Path:
    """Random weights of the package's small ViT, strong enough that features of different pictures differ."""
    vit = make_vit(seed=2, **GLYPH_VITS["glyph_vit_a"])
    with torch.no_grad():
        for block in vit.blocks:
            block.mlp.fc1.weight.mul_(3)
            block.attn.qkv.weight.mul_(3)
    save_file(vit.state_dict(), path)
    return path


def make_images(seed: int = 0) -> tuple[Pixels, Tensor]:
    """80 images of ten classes, each a colour pattern with noise, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 256, (CLASSES, 2, 2, 3), generator=generator).float()
    patterns = patterns.repeat_interleave(SIZE // 2, 1).repeat_interleave(SIZE // 2, 2).repeat_interleave(IMAGES, 0)
    images = patterns + 20 * torch.randn(patterns.shape, generator=generator)
    store = ImageStore.from_array(images.clamp(0, 255).to(torch.uint8))
    transform = Transform(size=SIZE, resize=SIZE, scale=(0.6, 1.0), flip=0.0)
    return Pixels(store, transform, seed=3), torch.arange(CLASSES).repeat_interleave(IMAGES)


def make_task(index: int, classes: Sequence[int], shots: int, order: Sequence[int] | None = None) -> Task:
    """The first `shots` images of some classes. `order[label]` is the class in the world that a label stands for."""
    images, world = make_images()
    order = list(range(CLASSES)) if order is None else list(order)
    positions = torch.cat([(world == order[label]).nonzero().squeeze(1)[:shots] for label in classes])
    labels = torch.tensor(list(classes)).repeat_interleave(shots)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(index))  # classes interleaved
    return Task(index, tuple(classes), images.select(positions[mixed]), labels[mixed])


def base_task(order: Sequence[int] | None = None) -> Task:
    return make_task(0, range(BASE), 6, order)


def few_shot_tasks(order: Sequence[int] | None = None) -> list[Task]:
    """Three classes of three shots, then a single class of one shot."""
    return [make_task(1, range(6, 9), 3, order), make_task(2, [9], 1, order)]


def make_method(
    name: str, options: dict[str, Any] | None = None, backbone: Backbone | None = None, **runtime: Any
) -> Method:
    """A method of the registry with small options."""
    cls, entry = registry.method_class(name), registry.method_entry(name)
    known = {field.name for field in dataclasses.fields(cls.Options)}
    small = {key: value for key, value in SMALL.items() if key in known}
    chosen = {**small, **entry.options, **(options or {})}
    place = Runtime(**runtime)
    return cls(backbone or make_backbone().prepare(place), cls.Options(**chosen), place)


def copy_state(method: Method) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in method.state().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that are not bit for bit the same."""
    return {n for n in one.keys() | other.keys() if n not in one or n not in other or not torch.equal(one[n], other[n])}


class Interrupted(Exception):
    pass


class MemoryKeeper(Keeper):
    """Keeps progress in memory, and stops the run after a given number of saves."""

    def __init__(self, kept: dict[str, dict[str, Tensor]] | None = None, stop_after: int | None = None):
        self.kept, self.stop_after, self.saves = {} if kept is None else kept, stop_after, 0

    def load(self, stage: str) -> dict[str, Tensor] | None:
        return self.kept.get(stage)

    def save(self, stage: str, tensors: dict[str, Tensor]) -> None:
        self.kept[stage] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.saves += 1
        if self.saves == self.stop_after:
            raise Interrupted


class MemoryShelf(Shelf):
    def __init__(self):
        self.parts: dict[str, dict[str, Tensor]] = {}

    def get(self, key: dict[str, Any]) -> dict[str, Tensor] | None:
        return self.parts.get(repr(sorted(key.items())))

    def put(self, key: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.parts[repr(sorted(key.items()))] = {name: tensor.clone() for name, tensor in tensors.items()}
