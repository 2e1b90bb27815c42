"""Where and how a run computes: device, precision, randomness, processes, and where its progress is kept.

One `Runtime` is passed to everything that computes. Nothing else names a device, seeds a generator or writes progress,
so a method reads the same on a laptop, on a GPU and on several processes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from fscil.errors import UserError, nearest

T = TypeVar("T")
PRECISIONS = ("auto", "fp32", "bf16", "fp64")
EVAL_BATCH = {"cuda": 256, "cpu": 32}  # images per pass outside training; on a CPU, more leave its caches


class Place(TypedDict):
    """Where tensors lie and of which type they are: `torch.zeros(3, **place)`."""

    device: torch.device
    dtype: torch.dtype


class Display:
    """What long work tells the person watching; this one says nothing (`fscil.display` has the talking one)."""

    def track(self, iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        yield from iterable

    def report(self, **fields: Any) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def log(self, text: str) -> None:
        pass


class Keeper:
    """Keeps the progress of a long training stage; this one keeps nothing (`experiments.keeper` has one that does)."""

    def load(self, stage: str) -> dict[str, Tensor] | None:
        return None

    def save(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        pass


class Shelf:
    """Content-addressed store of trained parts that several runs share; this one is always empty.

    with shelf.reserve([key]):  # no other process makes these parts meanwhile
        part = shelf.get(key)
        if part is None:
            shelf.put(key, part := train())
    """

    hits = 0  # parts found so far

    def reserve(self, keys: Sequence[dict[str, Any]]) -> AbstractContextManager[None]:
        return nullcontext()

    def get(self, key: dict[str, Any]) -> dict[str, Tensor] | None:
        return None

    def put(self, key: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        pass


@dataclass
class Runtime:
    """Device, precision, seed and services of one run.

    >>> runtime = Runtime(seed=1)
    >>> first, again = (torch.randperm(100, generator=runtime.generator("shuffle", 3)) for _ in range(2))
    >>> torch.equal(first, again)
    True
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32  # of the frozen backbone; factors, heads and statistics are never below float32
    seed: int = 2023
    compile: bool = False
    cuda_graphs: bool = False
    batch_size_eval: int = 128
    micro_batch: int | None = None  # images per forward in training; gradients accumulate to the full batch
    checkpointing: bool = False  # recompute activations block by block in the backward pass
    display: Display = field(default_factory=Display)
    keeper: Keeper = field(default_factory=Keeper)
    shelf: Shelf = field(default_factory=Shelf)
    accelerator: Any = None  # accelerate.Accelerator when the run spans several processes

    @classmethod
    def make(
        cls, device: str = "auto", precision: str = "auto", seed: int = 2023, compile: str = "auto", **rest: Any
    ) -> Runtime:
        """Resolves `auto`: the best device at hand; bf16 compute on GPUs that have it, fp32 elsewhere; compilation on
        CUDA only."""
        if precision not in PRECISIONS:
            raise UserError(
                f'runtime.precision is "{precision}"; choose one of {", ".join(PRECISIONS)}.'
                f"{nearest(precision, PRECISIONS)}"
            )
        accelerator = _join_processes(device)
        place = accelerator.device if accelerator else _resolve_device(device)
        bf16 = precision == "bf16" or (precision == "auto" and place.type == "cuda" and torch.cuda.is_bf16_supported())
        dtype = torch.bfloat16 if bf16 else torch.float64 if precision == "fp64" else torch.float32
        on_cuda = place.type == "cuda"
        rest.setdefault("batch_size_eval", EVAL_BATCH.get(place.type, cls.batch_size_eval))
        use_compile = on_cuda if compile == "auto" else compile in ("on", True, "true")
        return cls(
            device=place,
            dtype=dtype,
            seed=seed,
            compile=use_compile,
            cuda_graphs=on_cuda,
            accelerator=accelerator,
            **rest,
        )

    @property
    def place(self) -> Place:
        """Device and type of what is learned: float32, or float64 where everything is."""
        return {"device": self.device, "dtype": torch.float64 if self.dtype == torch.float64 else torch.float32}

    # ---- randomness: every draw is keyed, so results depend on neither order of execution nor number of processes ----
    def generator(self, *key: str | int, device: bool = False) -> torch.Generator:
        """A fresh generator for this key, on the CPU or (`device=True`) on the compute device."""
        place = self.device if device and self.device.type != "mps" else torch.device("cpu")
        return torch.Generator(device=place).manual_seed(keyed_seed(self.seed, *key))

    def randn(self, shape: tuple[int, ...], *key: str | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal draws for this key, on the compute device."""
        generator = self.generator(*key, device=True)
        return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).to(self.device)

    # ---- processes ----
    @property
    def rank(self) -> int:
        return self.accelerator.process_index if self.accelerator else 0

    @property
    def processes(self) -> int:
        return self.accelerator.num_processes if self.accelerator else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, reduction="sum") if self.processes > 1 else tensor

    def share(self, count: int) -> range:
        """The contiguous part of `range(count)` that this process works on."""
        edges = [count * r // self.processes for r in (self.rank, self.rank + 1)]
        return range(*edges)

    def gather_rows(self, rows: Tensor, count: int) -> Tensor:
        """Joins the rows that each process computed for its `share(count)`."""
        if self.processes == 1:
            return rows
        whole = rows.new_zeros((count, *rows.shape[1:]))
        whole[self.share(count).start : self.share(count).stop] = rows
        return self.sum_over_processes(whole)

    def wait(self) -> None:
        if self.processes > 1:
            self.accelerator.wait_for_everyone()

    # ---- display ----
    def track(self, iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        return self.display.track(iterable, description, total)

    def report(self, **fields: Any) -> None:
        self.display.report(**fields)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def keyed_seed(*key: str | int) -> int:
    """A 63-bit seed from any key, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f'--device (runtime.device) is "{name}"; choose auto, cpu, cuda, cuda:0 … or mps.') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f'--device (runtime.device) is "{name}" but torch sees no CUDA GPU; use --device cpu or install '
            "a CUDA build of torch."
        )
    return device


def _join_processes(device: str) -> Any:
    """An Accelerator when `accelerate launch` or torchrun started several processes, else None."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu" or not torch.cuda.is_available())


def start_ray(address: str | None) -> tuple[Any, bool]:
    """Ray, connected to a cluster or to one of this machine; and whether this call started it."""
    try:
        import ray
    except ImportError:
        raise UserError('--engine ray needs Ray; pip install "fscil[cluster]"') from None
    if ray.is_initialized():
        return ray, False
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    settings |= {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address, **settings)
    except ConnectionError as error:
        raise UserError(f'--address "{address}": no Ray cluster answers there ({error})') from error
    return ray, True


def why_ray_gave_up(ray: Any, error: Exception) -> str:
    """Ray's error, often a page long, in a few words."""
    kinds = ray.exceptions
    if isinstance(error, (kinds.OutOfMemoryError, kinds.WorkerCrashedError, kinds.RayActorError)):
        return "a worker was killed again and again (out of memory?)"
    return " ".join(str(error).split())[-300:]
