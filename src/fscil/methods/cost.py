"""How long work on a backbone will take and how much memory it needs, told before it starts.

On a CPU a few images are augmented and passed through the backbone for real. On a GPU, where the first passes would
mostly measure compilation, operations and bytes of a pass are counted, and the device's speed at either is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from fscil.text import duration, size

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.data.pixels import Pixels
    from fscil.runtime import Runtime

# What a pass costs a GPU, fitted to an H200 (ViT-B/16, two sets: 91 µs an image; DeiT-Tiny, one: 38, seven: 20).
GPU_EFFICIENCY = 0.85  # share of the matrix-product speed that products in a ViT reach
TRAFFIC = 30  # reads and writes per token, channel and block outside the products
BLOCK_SECONDS = 80e-6  # of a block's kernels, however small they are
ACTIVATIONS = 20  # numbers kept per token, channel and block for the backward pass
LONG = 60  # seconds of training from which a faster way is worth a word


@dataclass(frozen=True)
class Estimate:
    seconds: float
    memory: float  # bytes, on the device that computes
    available: float  # bytes free there
    passes: float  # images through the backbone, in forward passes
    speed: float  # forward passes per second
    device: str
    advice: str = "try --set runtime.micro_batch=8 or --set runtime.checkpointing=true"  # where memory is short
    hint: str = ""  # what would be faster

    @property
    def fits(self) -> bool:
        return self.memory <= self.available

    def __str__(self) -> str:
        text = f"estimate: about {duration(self.seconds)} and {size(self.memory)} on {self.device}"
        text += f" ({self.passes:,.0f} image passes at {self.speed:,.0f} per second)"
        if not self.fits:
            return f"{text}; only {size(self.available)} are free: {self.advice}"
        return f"{text}; {self.hint}" if self.hint else text


def estimate_passes(
    passes: float, images: Pixels, sets: int, batch: int, classes: int, backbone: Backbone, runtime: Runtime
) -> Estimate:
    """The cost of so many forward passes, with `sets` adapter sets side by side on batches of the base images.

    `batch` 0: nothing is trained, and no activations are kept.
    """
    on_cpu = runtime.device.type == "cpu"
    at_once = sets * (batch or runtime.batch_size_eval)
    speed = _timed_speed(images, backbone, runtime) if on_cpu else _counted_speed(backbone, runtime, at_once)
    # Several processes share the passes.
    seconds = passes / speed / runtime.processes
    vit: Any = backbone.vit
    tokens = vit.patch_embed.num_patches + backbone.prefix_tokens
    depth = 2 if runtime.checkpointing else backbone.depth
    bytes_each = torch.finfo(runtime.dtype).bits // 8
    needed = sets * batch * tokens * backbone.dim * depth * ACTIVATIONS * bytes_each
    needed += classes * backbone.dim**2 * 4  # class covariances
    if on_cpu:
        held = psutil.Process().memory_info().rss
        available = psutil.virtual_memory().available + held
    elif runtime.device.type == "cuda":
        held = torch.cuda.memory_allocated(runtime.device)
        available = torch.cuda.mem_get_info(runtime.device)[0] + held
    else:
        held, available = 0, psutil.virtual_memory().available
    slow = on_cpu and batch and runtime.dtype == torch.float32 and seconds >= LONG
    hint = "this CPU trains about three times as fast with --precision bf16" if slow and cpu_has_bf16() else ""
    return Estimate(seconds, held + needed, available, passes, speed, str(runtime.device), hint=hint)


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bf16 (AVX512-BF16 or AMX); others are slower with it than with float32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # torch has no public name for them
    return any(getattr(torch.cpu, check, bool)() for check in checks)


def _timed_speed(images: Pixels, backbone: Backbone, runtime: Runtime) -> float:
    """Images per second, augmentation included; the better of two tries, as the first one warms caches."""
    count = min(16, len(images))
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
