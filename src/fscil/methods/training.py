"""The one training loop of the library: epochs over a task's augmented images, with resumption, micro-batches,
processes and CUDA graphs.

A method hands over its parameters and a function from a batch to the mean loss; everything random is keyed by (stage,
epoch, image), so a run that was stopped after any epoch and resumed ends with the same numbers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fscil.errors import UserError
from fscil.maths.margins import cosine_schedule
from fscil.runtime import Runtime
from fscil.text import duration

logger = logging.getLogger(__name__)

GRAPH_WARMUP = 3  # eager steps before a CUDA graph is captured
REPORT_EVERY = 20  # steps between two looks at the loss (each waits for the device)


@dataclass(frozen=True)
class Batch:
    """What a loss sees: images (b, 3, s, s), labels (b,), positions in the task (b,), and extras drawn for this
    step."""

    images: Tensor
    labels: Tensor
    positions: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """Optimiser and learning-rate schedule, constant within an epoch."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float = 0.0
    optimiser: str = "sgd"  # sgd | adam
    momentum: float = 0.9
    nesterov: bool = False
    decay: str = "cosine"  # cosine | constant | coda | step
    milestones: tuple[int, ...] = ()  # epochs at which `step` multiplies the rate by gamma
    gamma: float = 0.1
    clip: float | None = None  # largest gradient norm

    def rate(self, epoch: int) -> float:
        """Learning rate of an epoch."""
        if self.decay == "cosine":
            return cosine_schedule(self.lr, epoch, self.epochs)
        if self.decay == "coda":  # lr · cos(99 π e / (200 (E − 1)))
            return self.lr * math.cos(99 * math.pi * epoch / (200 * max(1, self.epochs - 1)))
        if self.decay == "step":
            return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)
        return self.lr


class Images(Protocol):
    """What is trained on: `fscil.data.pixels.Pixels`, or something in its place."""

    def __len__(self) -> int: ...

    @property
    def index_device(self) -> torch.device: ...

    def augmented(self, positions: Tensor, epoch: int) -> Tensor: ...


class Group(NamedTuple):
    """Parameters whose learning rate is the schedule's times a factor."""

    parameters: list[nn.Parameter]
    lr_factor: float = 1.0


def train(
    stage: str,
    images: Images,
    labels: Tensor,
    parameters: Sequence[nn.Parameter] | Sequence[Group],
    loss: Callable[[Batch], Tensor],
    schedule: Schedule,
    runtime: Runtime,
    begin_epoch: Callable[[int], None] | None = None,
    extras: Callable[[Tensor, int, int], dict[str, Tensor]] | None = None,
    buffers: Sequence[Tensor] = (),
    graph: bool = True,
    passes: int = 1,
    order: str | None = None,
) -> float:
    """Trains `parameters` on augmented batches and returns the mean loss of the last epoch.

    `parameters` may be groups with factors of their own. `extras(positions, epoch, step)` gives
    further tensors of a step. What `loss` reads besides its batch must be updated in place, because on a GPU the step
    is captured once as a CUDA graph. `passes` counts forward passes per image in the images/s shown. `order` keys the
    shuffling where stages of different names are to see the same batches.
    """
    groups = [entry for entry in parameters if isinstance(entry, Group)]
    groups = groups or [Group([entry for entry in parameters if not isinstance(entry, Group)])]
    weights = [weight for group in groups for weight in group.parameters]
    optimiser = _make_optimiser(groups, schedule)
    try:
        first = _restore(runtime, stage, weights, buffers, optimiser)
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise UserError(f"the kept progress of {stage} does not fit it: {error}") from error
    labels = labels.to(runtime.device)
    step = _Step(loss, weights, runtime, graph)
    mean_loss = float("nan")
    for epoch in runtime.track(range(first, schedule.epochs), stage, schedule.epochs - first):
        for settings, group in zip(optimiser.param_groups, groups, strict=True):
            settings["lr"] = schedule.rate(epoch) * group.lr_factor
        if begin_epoch is not None:
            begin_epoch(epoch)
        shuffled = torch.randperm(len(images), generator=runtime.generator(order or stage, "order", epoch)).to(
            images.index_device
        )
        total, started, counted = torch.zeros((), device=runtime.device, dtype=torch.float64), time.perf_counter(), 0
        batches = shuffled.split(schedule.batch_size)
        for number, positions in enumerate(
            runtime.track(batches, f"epoch {epoch + 1}/{schedule.epochs}", len(batches))
        ):
            share = positions[runtime.share(len(positions)).start : runtime.share(len(positions)).stop]
            # a batch smaller than the number of processes leaves some of them without a share
            for part in share.split(runtime.micro_batch or len(share)) if len(share) else ():
                batch = Batch(images.augmented(part, epoch), labels[part.to(labels.device)], part.to(labels.device))
                if extras is not None:
                    batch = replace(batch, extras=extras(part, epoch, number))
                # a part's mean loss weighs as much as its share of the whole batch
                total += step(batch, len(part) / len(positions))
            step.reduce()
            if schedule.clip is not None:
                torch.nn.utils.clip_grad_norm_(weights, schedule.clip)
            optimiser.step()
            step.clear()
            counted += len(positions)
            if (number + 1) % REPORT_EVERY == 0:
                mean_loss = float(total) / (number + 1)
                runtime.report(loss=mean_loss, images_per_s=passes * counted / (time.perf_counter() - started))
                if runtime.processes == 1 and not math.isfinite(mean_loss):  # several notice together, after the epoch
                    raise _diverged(stage, epoch, number + 1, schedule)
        mean_loss = float(runtime.sum_over_processes(total)) / len(batches)
        if not math.isfinite(mean_loss) or not all(bool(torch.isfinite(weight).all()) for weight in weights):
            raise _diverged(stage, epoch, len(batches), schedule)
        _keep(runtime, stage, weights, buffers, optimiser, epoch + 1)
        if runtime.is_main:
            took = time.perf_counter() - started
            said = f"{stage}: epoch {epoch + 1}/{schedule.epochs}, loss {mean_loss:.4g}, {duration(took)}"
            left = schedule.epochs - epoch - 1
            runtime.display.log(f"{said}, about {duration(left * took)} left" if left else said)
    return mean_loss


class _Captured(NamedTuple):
    """A step as a CUDA graph: what it reads, and what a replay writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: Tensor
    gradients: list[Tensor | None]


def _diverged(stage: str, epoch: int, step: int, schedule: Schedule) -> UserError:
    return UserError(
        f"{stage} diverged: by step {step} of epoch {epoch + 1}, at the learning rate {schedule.rate(epoch):g}, its "
        f"loss or weights are no numbers any more. Take a lower rate (--set options.lr={schedule.lr / 10:g}) or "
        f"--precision fp32. What was kept is the state after epoch {epoch}."
    )


class _Step:
    """Forward and backward of one part of a batch; on a GPU, full-size parts replay a captured CUDA graph."""

    def __init__(self, loss: Callable[[Batch], Tensor], weights: list[nn.Parameter], runtime: Runtime, graph: bool):
        self.loss, self.weights, self.runtime = loss, weights, runtime
        self.graphed = graph and runtime.cuda_graphs and runtime.device.type == "cuda"
        self.eager_steps = 0
        self.captured: _Captured | None = None

    def __call__(self, batch: Batch, weight: float) -> Tensor:
        if self.graphed and weight == 1.0:  # a replay overwrites gradients, so only whole batches may take it
            if self.captured is None and self.eager_steps >= GRAPH_WARMUP:
                self._capture(batch)
            if self.captured is not None and self.captured.batch.images.shape == batch.images.shape:
                return self._replay(self.captured, batch)
        self.eager_steps += 1
        return self._run(batch, weight)

    def _run(self, batch: Batch, weight: float) -> Tensor:
        if self.graphed and self.captured is None:  # warm up on the side stream a capture needs
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value = self.loss(batch) * weight
                value.backward()
            torch.cuda.current_stream().wait_stream(side)
            return value.detach()
        value = self.loss(batch) * weight
        value.backward()
        return value.detach()

    def _capture(self, batch: Batch) -> None:
        static = Batch(
            batch.images.clone(),
            batch.labels.clone(),
            batch.positions.clone(),
            {k: v.clone() for k, v in batch.extras.items()},
        )
        self.clear()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = self.loss(static)
            value.backward()
        self.captured = _Captured(graph, static, value.detach(), [w.grad for w in self.weights])

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        graph, static, value, gradients = captured
        static.images.copy_(batch.images)
        static.labels.copy_(batch.labels)
        static.positions.copy_(batch.positions)
        for name, tensor in batch.extras.items():
            static.extras[name].copy_(tensor)
        graph.replay()
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        return value.double()  # a copy: the next replay overwrites the original

    def reduce(self) -> None:
        if self.runtime.processes > 1:
            for weight in self.weights:
                gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
                weight.grad = self.runtime.sum_over_processes(gradient)

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None


def _make_optimiser(groups: Sequence[Group], schedule: Schedule) -> torch.optim.Optimizer:
    params: list[dict[str, Any]] = [{"params": group.parameters} for group in groups]
    if schedule.optimiser == "adam":
        return torch.optim.Adam(params, lr=schedule.lr, weight_decay=schedule.weight_decay)
    return torch.optim.SGD(
        params,
        lr=schedule.lr,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
        nesterov=schedule.nesterov,
    )


def _keep(
    runtime: Runtime,
    stage: str,
    weights: Sequence[nn.Parameter],
    buffers: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
    epoch: int,
) -> None:
    tensors = {f"weight.{i}": w.detach() for i, w in enumerate(weights)}
    tensors |= {f"buffer.{i}": b for i, b in enumerate(buffers)}
    for index, values in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": torch.as_tensor(v) for name, v in values.items() if v is not None}
    runtime.keeper.save(stage, tensors | {"epoch": torch.tensor(epoch)})


def _restore(
    runtime: Runtime,
    stage: str,
    weights: Sequence[nn.Parameter],
    buffers: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
) -> int:
    """Loads the kept progress of a stage, if any, and returns the next epoch."""
    kept = runtime.keeper.load(stage)
    if kept is None:
        return 0
    with torch.no_grad():
        for index, weight in enumerate(weights):
            weight.copy_(kept[f"weight.{index}"])
        for index, buffer in enumerate(buffers):
            buffer.copy_(kept[f"buffer.{index}"])
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in kept.items():
        if name.startswith("optimiser."):
            _, number, key = name.split(".", 2)
            state.setdefault(int(number), {})[key] = value.to(runtime.device) if key != "step" else value
    optimiser.load_state_dict(optimiser.state_dict() | {"state": state})
    logger.info("%s: going on after epoch %d", stage, int(kept["epoch"]))
    return int(kept["epoch"])
