"""Whole runs on a tiny ViT with a method that can be stopped anywhere (fixture `probe` of tests/experiments)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fscil.backbones.vit import Backbone
from fscil.config import RunConfig, TransformConfig, complete
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.stream import Stream, Task
from fscil.data.transforms import Transform
from fscil.evaluation.hashes import RunHashes
from fscil.experiments import run as protocol
from fscil.files import load_tensors, read_json, write_json
from fscil.methods.base import Method

BASE, WAY, TASKS = 4, 2, 2


class Stop(Exception):
    """Stands for whatever ends a process in the middle."""


@dataclass(frozen=True)
class ProbeOptions:
    epochs: int = 3
    lr: float = 0.1


class Probe(Method):
    """A linear map on frozen features, trained by plain gradient steps; classes are prototypes in its space."""

    Options = ProbeOptions
    features_fixed = True
    stop_at: tuple[int, int] | None = None  # (task, epoch) after which to fail
    feature_calls: list[int] = []

    def __init__(self, backbone, options, runtime):
        super().__init__(backbone, options, runtime)
        self.map = nn.Parameter(torch.eye(backbone.dim))
        self.register_buffer("rows", torch.zeros(0, backbone.dim))

    def raw(self, images):
        return self.extract(images, self.backbone)

    def features(self, images):
        type(self).feature_calls.append(len(images))
        return (self.raw(images) @ self.map.T).detach()

    def logits_from(self, features):
        return nn.functional.normalize(features, dim=1) @ nn.functional.normalize(self.rows, dim=1).T

    def fit_base(self, task):
        head = torch.zeros(len(task.classes), self.backbone.dim)
        kept = self.runtime.keeper.load("map")
        first = 0
        if kept is not None:
            self.map.data, head, first = kept["map"], kept["head"], int(kept["epoch"])
        for epoch in range(first, self.options.epochs):
            order = torch.randperm(len(task.images), generator=self.runtime.generator("order", epoch))
            x, y = self.backbone(task.images.augmented(order, epoch)), task.labels[order]
            head.requires_grad_(True)
            loss = nn.functional.cross_entropy(x @ self.map.T @ head.T, y)
            gradients = torch.autograd.grad(loss, [self.map, head])
            self.map.data -= self.options.lr * gradients[0]
            head = (head - self.options.lr * gradients[1]).detach()
            self.runtime.keeper.save("map", {"map": self.map.data, "head": head, "epoch": torch.tensor(epoch + 1)})
            if self.stop_at == (0, epoch):
                raise Stop
        self.learn(task)

    def learn(self, task):
        features = (self.raw(task.images) @ self.map.T).detach()
        self.rows = torch.cat([self.rows, torch.stack([features[task.labels == c].mean(0) for c in task.classes])])
        self.count_classes(task)
        self._diagnostics = {"norm": float(self.rows.norm()), "loss": float("nan")}
        if task.index > 0 and self.stop_at == (task.index, 0):
            raise Stop


class Thawed(Probe):
    """The same without the promise of fixed features."""

    features_fixed = False

    def logits(self, images):
        return self.logits_from((self.raw(images) @ self.map.T).detach())


def tiny_backbone():
    torch.manual_seed(0)
    return Backbone(
        VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0), "tiny"
    )


def tiny_stream(seed=0):
    """Classes are colours under noise: 6 training and 4 test images of each base class, 2 shots of each new one."""
    rng = np.random.default_rng(seed)
    colours = np.random.default_rng(1).integers(40, 215, (BASE + WAY * TASKS, 3))

    def pixels(labels):
        images = colours[labels][:, None, None] + rng.normal(0, 25, (len(labels), 16, 16, 3))
        store = ImageStore.from_array(images.clip(0, 255).astype(np.uint8))
        return Pixels(store, Transform(16, (0.5, 1.0), resize=16), seed)

    def task(index, classes, each):
        labels = np.repeat(classes, each)
        return Task(index, tuple(int(c) for c in classes), pixels(labels), torch.from_numpy(labels))

    starts = [BASE + WAY * t for t in range(TASKS)]
    tasks = [task(0, np.arange(BASE), 6), *(task(t + 1, np.arange(s, s + WAY), 2) for t, s in enumerate(starts))]
    test_labels = np.repeat(np.arange(BASE + WAY * TASKS), 4)
    shots = {t: {str(c): [0, 1] for c in tasks[t].classes} for t in range(1, TASKS + 1)}
    names = [f"class {c}" for c in range(BASE + WAY * TASKS)]
    return Stream(
        "tiny", names, tasks, pixels(test_labels), torch.from_numpy(test_labels), BASE, WAY, f"hash{seed}", shots
    )


def tiny_config(method="probe", **options) -> RunConfig:
    config = complete({"method": method, "dataset": "glyphs", "backbone": "tiny", "options": options})
    return replace(config, transform=TransformConfig(size=16, resize=16))


def run(folder, config=None, stream=None, **rest):
    config = config or tiny_config()
    return protocol.run(config, folder, stream=stream or tiny_stream(), backbone=tiny_backbone(), **rest)


def numbers(results):
    """What must not depend on interruptions: everything but time and memory."""
    costs = ("seconds", "learning_seconds", "evaluation_seconds", "peak_memory")
    return [{k: v for k, v in session.items() if k not in costs} for session in results.sessions], results.confusion


def state(folder):
    return load_tensors(folder / "checkpoints" / f"session_{TASKS}.safetensors")[0]


def stopped(folder, monkeypatch, at=(1, 0)):
    monkeypatch.setattr(Probe, "stop_at", at)
    with pytest.raises(Stop):
        run(folder)
    monkeypatch.setattr(Probe, "stop_at", None)


def rehash(folder):
    """Make the list of hashes agree with what is there now, as if the run had written it."""
    hashes = RunHashes(folder, read_json(folder / "hashes.json")["files"])
    for name in list(hashes.files):
        hashes.add(folder / name)
    hashes.write()


def unhash(folder):
    """Turn a run into one from before there were hashes."""
    (folder / "hashes.json").unlink()
    shots = read_json(folder / "shots.json")
    del shots["hashes"]
    write_json(folder / "shots.json", shots)
