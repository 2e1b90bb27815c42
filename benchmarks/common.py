"""Shared by the benchmarks: made-up images, timing and the line that names hardware and versions."""

from __future__ import annotations

import platform
import resource
import time

import numpy as np
import torch

from fscil.data.datasets import Dataset
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.stream import Task
from fscil.data.transforms import Transform


def made_up_task(
    classes: int, per_class: int, side: int = 32, device: str = "cuda", seed: int = 0, size: int = 224
) -> Task:
    """Random images of the given size; neither speed nor memory depends on what they show."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (classes * per_class, side, side, 3), dtype=np.uint8)
    store = ImageStore.from_array(images).to(device)
    pixels = Pixels(store, Transform(size=size, resize=256 * size // 224), seed=seed, device=device)
    return Task(0, tuple(range(classes)), pixels, torch.arange(classes).repeat_interleave(per_class))


def labelled_pictures(
    dataset: Dataset, split: str, classes: range, count: int | None
) -> tuple[list[np.ndarray], list[str]]:
    """The first `count` pictures of each class of a split, and the names of their classes."""
    manifest = dataset.manifest
    store, kept = dataset.store([at for c in classes for at in manifest.positions(split)[c][:count]])
    names = [manifest.class_names[manifest.entries[at].label] for at in kept]
    return [store.image(number).numpy() for number in range(len(store))], names


def environment() -> str:
    """Hardware and versions, for the results page."""
    place = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    return f"{place}; torch {torch.__version__}; Python {platform.python_version()}"


def seconds(function, *arguments) -> float:
    """Wall-clock seconds of a call, synchronised with the device."""
    synchronize()
    start = time.perf_counter()
    function(*arguments)
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cpu_seconds(function, *arguments) -> float:
    """Seconds of this process on the CPU, all threads together: what other work on the machine changes least."""
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def peak_gb() -> float:
    """Peak memory of tensors on the GPU; without one, of this whole process since it started."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
