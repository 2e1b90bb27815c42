"""How long a run will take and how much memory it needs, told before it starts.

On a CPU a few images are augmented and passed through the backbone for real. On a GPU, where the first passes would
mostly measure compilation, operations and bytes of a pass are counted, and the device's speed at either is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from fscil import registry
from fscil.methods.sizes import Sizes
from fscil.strict import build
from fscil.text import duration, size

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.config import RunConfig
    from fscil.data.stream import Stream
    from fscil.runtime import Runtime

# What a pass costs a GPU, fitted to an H200 (ViT-B/16, two sets: 91 µs an image; DeiT-Tiny, one: 38, seven: 20).
GPU_EFFICIENCY = 0.85  # share of the matrix-product speed that products in a ViT reach
TRAFFIC = 30  # reads and writes per token, channel and block outside the products
BLOCK_SECONDS = 80e-6  # of a block's kernels, however small they are
ACTIVATIONS = 20  # numbers kept per token, channel and block for the backward pass


@dataclass(frozen=True)
class Estimate:
    seconds: float
    memory: float  # bytes, on the device that computes
    available: float  # bytes free there
    passes: float  # images through the backbone, in forward passes
    speed: float  # forward passes per second
    device: str

    def __str__(self) -> str:
        text = f"estimate: about {duration(self.seconds)} and {size(self.memory)} on {self.device}"
        text += f" ({self.passes:,.0f} image passes at {self.speed:,.0f} per second)"
        if self.memory > self.available:
            text += (
                f"; only {size(self.available)} are free: try --set runtime.micro_batch=8 "
                "or --set runtime.checkpointing=true"
            )
        return text


def estimate(config: RunConfig, stream: Stream, backbone: Backbone, runtime: Runtime) -> Estimate:
    """The cost of a whole run, as its method counts it."""
    cls = registry.method_class(config.method)
    options: Any = build(cls.Options, config.options, "options.")
    passes, plan = count_passes(config, stream), cls.adapter_plan(options)
    sets = 1 if plan is None else len(plan.specs)  # adapter sets that pass side by side
    on_cpu = runtime.device.type == "cpu"
    batch = min(runtime.micro_batch or getattr(options, "batch_size", 48), len(stream.tasks[0].images))
    speed = _timed_speed(stream, backbone, runtime) if on_cpu else _counted_speed(backbone, runtime, sets * batch)
    # Several processes share the passes.
    seconds = passes / speed / runtime.processes
    vit: Any = backbone.vit
    tokens = vit.patch_embed.num_patches + backbone.prefix_tokens
    depth = 2 if runtime.checkpointing else backbone.depth
    bytes_each = torch.finfo(runtime.dtype).bits // 8
    needed = sets * batch * tokens * backbone.dim * depth * ACTIVATIONS * bytes_each
    needed += stream.base_classes * backbone.dim**2 * 4  # class covariances
    if on_cpu:
        held = psutil.Process().memory_info().rss
        available = psutil.virtual_memory().available + held
    elif runtime.device.type == "cuda":
        held = torch.cuda.memory_allocated(runtime.device)
        available = torch.cuda.mem_get_info(runtime.device)[0] + held
    else:
        held, available = 0, psutil.virtual_memory().available
    return Estimate(seconds, held + needed, available, passes, speed, str(runtime.device))


def count_passes(config: RunConfig, stream: Stream) -> float:
    """Images that a whole run sends through the backbone, in forward passes, as its method and a chosen head count."""
    cls, sizes = registry.method_class(config.method), Sizes.of(stream)
    return cls.passes(build(cls.Options, config.options, "options."), sizes) + _head_passes(config.head, sizes)


def _head_passes(head: Mapping[str, Any], sizes: Sizes) -> float:
    """Augmented views that a chosen head asks for."""
    if not head:
        return 0
    cls = registry.head_class(head["name"])
    options: Any = build(cls.Options, {key: value for key, value in head.items() if key != "name"}, "head.")
    tasks = zip(sizes.later, sizes.classes[1:], strict=True)
    return sum(images * cls.views_per_shot(options, max(1, images // classes)) for images, classes in tasks)


def _timed_speed(stream: Stream, backbone: Backbone, runtime: Runtime) -> float:
    """Images per second, augmentation included; the better of two tries, as the first one warms caches."""
    count = min(16, len(stream.tasks[0].images))
    images = stream.tasks[0].images
    best = math.inf
    for attempt in range(2):
        began = time.perf_counter()
        with torch.no_grad():
            backbone(images.augmented(torch.arange(count), attempt).to(runtime.device))
        best = min(best, time.perf_counter() - began)
    return count / best


def _counted_speed(backbone: Backbone, runtime: Runtime, batch: int) -> float:
    """Images per second from the operations and bytes of a pass and the device's speed at either."""
    vit: Any = backbone.vit
    tokens = vit.patch_embed.num_patches + backbone.prefix_tokens
    weights = sum(parameter.numel() for parameter in vit.blocks.parameters())
    operations = 2 * weights * tokens + 4 * backbone.depth * tokens**2 * backbone.dim
    numbers = TRAFFIC * tokens * backbone.dim * backbone.depth
    matrix, long = (torch.zeros(*s, device=runtime.device, dtype=runtime.dtype) for s in ((4096, 4096), (2**26,)))
    product = _best_seconds(lambda: matrix @ matrix, runtime) / (2 * 4096**3) / GPU_EFFICIENCY  # per operation
    move = _best_seconds(long.clone, runtime) / (2 * len(long))  # per number read or written
    return 1 / (operations * product + numbers * move + backbone.depth * BLOCK_SECONDS / batch)


def _best_seconds(function: Callable[[], object], runtime: Runtime) -> float:
    best = math.inf
    for _ in range(4):
        runtime.synchronize()
        began = time.perf_counter()
        function()
        runtime.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
