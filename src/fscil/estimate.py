"""How long a run will take and how much memory it needs, told before it starts.

On a CPU a few images are augmented and passed through the backbone for real. On a GPU, where the first passes would
mostly measure compilation, the speed of a large matrix product is measured and the passes are counted in FLOPs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from fscil.display import duration, size

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.config import RunConfig
    from fscil.data.stream import Stream
    from fscil.runtime import Runtime

TRAINING = 2.3  # a training pass in forward passes: the backward pass through frozen weights costs about one more
GPU_EFFICIENCY = 0.35  # share of the matrix-product speed that a whole ViT reaches
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
    """The cost of a whole run, from the options that decide it."""
    options = config.options
    sets = 2 if options.get("adapters") == "two" else 1
    base, shots = len(stream.tasks[0].images), sum(len(task.images) for task in stream.tasks[1:])
    passes = base * sets * options.get("epochs", 20) * TRAINING + base + len(stream.test)
    if sets == 2 and options.get("merge") == "fisher":
        passes += base * sets * TRAINING
    if options.get("calibration") == "mpcc" and shots:
        per_class = config.data.shots or 5
        fresh = math.ceil(options.get("features_per_class", 256) / per_class) * options.get("calibration_epochs", 5)
        passes += shots * (options.get("views") or fresh)  # given views are made once, else anew each epoch
    on_cpu = runtime.device.type == "cpu"
    speed = _timed_speed(stream, backbone, runtime) if on_cpu else _counted_speed(backbone, runtime)
    # Several processes share the passes.
    seconds = passes / speed / runtime.processes
    batch = min(runtime.micro_batch or options.get("batch_size", 48), base)
    tokens = backbone.vit.patch_embed.num_patches + backbone.prefix_tokens
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


def _counted_speed(backbone: Backbone, runtime: Runtime) -> float:
    tokens = backbone.vit.patch_embed.num_patches + backbone.prefix_tokens
    weights = sum(parameter.numel() for parameter in backbone.vit.blocks.parameters())
    per_image = 2 * weights * tokens + 4 * backbone.depth * tokens**2 * backbone.dim
    matrix = torch.zeros(4096, 4096, device=runtime.device, dtype=runtime.dtype)
    best = math.inf
    for _ in range(4):
        runtime.synchronize()
        began = time.perf_counter()
        matrix @ matrix
        runtime.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * 4096**3 / best * GPU_EFFICIENCY / per_image
