"""Training of adapter sets on the base task, several as streams of one pass, and the Fisher passes that weigh them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.backbones.lora import LoRA, initial_lora
from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.maths import fisher as fisher_maths
from fscil.maths.margins import cosine, streams_loss
from fscil.methods.training import Batch, Schedule, train
from fscil.runtime import Runtime

# Stage of a single adapter set without margin. It keys the order of the batches of all adapter sets; a method that
# trains under this name and whose own mechanisms are switched off gives exactly the plain adapters.
PLAIN_STAGE = "adapters m0"


@dataclass(frozen=True)
class AdapterSpec:
    """How one adapter set is trained: its margin, and a logit scale that is fixed or learned from its initial value."""

    margin: float
    scale: float = 16.0
    learnable: bool = False


@dataclass
class AdapterSets:
    """Adapter sets with their classifiers: rows (S, classes, d) and scales (S,)."""

    lora: LoRA
    rows: Tensor
    scales: Tensor

    def select(self, *sets: int) -> AdapterSets:
        return AdapterSets(self.lora.select(*sets), self.rows[list(sets)], self.scales[list(sets)])

    def tensors(self, number: int) -> dict[str, Tensor]:
        """A set as the shelf keeps it."""
        lora = self.lora
        return {
            "A": lora.A[:, number],
            "B": lora.B[:, number],
            "rows": self.rows[number],
            "scale": self.scales[number],
        }

    @classmethod
    def of(cls, sets: Sequence[dict[str, Tensor]], runtime: Runtime) -> AdapterSets:
        """Sets as the shelf keeps them, side by side."""
        A, B, rows, scales = (
            torch.stack([tensors[name].to(runtime.device) for tensors in sets], axis)
            for name, axis in (("A", 1), ("B", 1), ("rows", 0), ("scale", 0))
        )
        return cls(LoRA(A.detach(), B.detach()).requires_grad_(False), rows, scales)


@dataclass(frozen=True)
class AdapterPlan:
    """The adapter sets a method needs, and how they are trained."""

    specs: tuple[AdapterSpec, ...]
    rank: int
    init: str
    schedule: Schedule

    def train(self, backbone: Backbone, task: Task, runtime: Runtime, joint: bool = True) -> AdapterSets:
        """One adapter set and cosine head per spec, all from the same initial values and the same augmented batches.

        The sets share no parameter, so a joint pass gives what separate passes give (9.3). Sets that the runtime's
        shelf already holds are not trained again.
        """
        if not joint:
            apart = [replace(self, specs=(spec,)).train(backbone, task, runtime) for spec in self.specs]
            return AdapterSets.of([sets.tensors(0) for sets in apart], runtime)
        keys = [_shelf_key(backbone, task, spec, self, runtime) for spec in self.specs]
        with runtime.shelf.reserve(keys):
            found = _found(runtime, keys)
            missing = [number for number in range(len(keys)) if number not in found]
            if missing:
                lacking = replace(self, specs=tuple(self.specs[number] for number in missing))
                trained = _train(backbone, task, lacking, runtime)
                for place, number in enumerate(missing):
                    found[number] = trained.tensors(place)
                    runtime.shelf.put(keys[number], found[number])
        return AdapterSets.of([found[number] for number in range(len(keys))], runtime)


def _train(backbone: Backbone, task: Task, plan: AdapterPlan, runtime: Runtime) -> AdapterSets:
    specs, sets, wide = plan.specs, len(plan.specs), runtime.place["dtype"]
    lora = initial_lora(backbone.depth, backbone.dim, plan.rank, sets, runtime.generator("lora"), plan.init, wide)
    lora = lora.to(runtime.device)
    rows = nn.Parameter(initial_rows(len(task.classes), backbone.dim, runtime).expand(sets, -1, -1).clone())
    scale = nn.Parameter(torch.tensor([s.scale for s in specs], device=runtime.device, dtype=wide))
    learnable = torch.tensor([s.learnable for s in specs], device=runtime.device)
    fixed = scale.detach().clone()
    margins = torch.tensor([s.margin for s in specs], device=runtime.device, dtype=wide)

    def loss(batch: Batch) -> Tensor:
        scales = torch.where(learnable, scale, fixed)
        return streams_loss(backbone(batch.images, lora), rows, batch.labels, scales, margins).sum()

    trained = [lora.A, lora.B, rows] + ([scale] if bool(learnable.any()) else [])
    stage = "adapters " + "+".join(f"m{s.margin:g}{'s' if s.learnable else ''}" for s in specs)
    # the same order of batches whichever sets are trained together, so that a set does not depend on its company
    train(stage, task.images, task.labels, trained, loss, plan.schedule, runtime, passes=sets, order=PLAIN_STAGE)
    return AdapterSets(lora.requires_grad_(False), rows.detach(), torch.where(learnable, scale.detach(), fixed))


def initial_rows(classes: int, dim: int, runtime: Runtime) -> Tensor:
    """Rows of a fresh cosine head: U(−1/√d, 1/√d)."""
    draws = torch.rand(classes, dim, generator=runtime.generator("head"), dtype=torch.float64)
    return ((draws * 2 - 1) / math.sqrt(dim)).to(**runtime.place)


def fisher_information(
    backbone: Backbone,
    streams: AdapterSets,
    task: Task,
    batch_size: int,
    form: str,
    runtime: Runtime,
    shared_head: int | None = None,
) -> Tensor:
    """Diagonal Fisher of every dense ΔW under the margin-free loss: (blocks, sets, 2, d, d), all sets in one pass.

    Images are taken plain and grouped by class, in batches of the base batch size (4.3). Each set uses its own head
    unless `shared_head` names one for all (9.5). `form` is `batch` (mean over batches of squared batch-mean gradients)
    or `sample` (mean over samples, Eq. 8).
    """
    lora, sets = streams.lora, streams.lora.sets
    heads = streams.rows if shared_head is None else streams.rows[[shared_head] * sets]
    labels = task.labels.to(runtime.device)
    # single samples do not care for their batch, and two batches in one pass are a little faster
    size = batch_size * (2 if form == "sample" else 1)
    batches = torch.argsort(task.labels.cpu(), stable=True).split(size)
    square = fisher_maths.batch_square if form == "batch" else fisher_maths.sample_square
    shape = (backbone.depth, sets, 2, backbone.dim, backbone.dim)
    total = torch.zeros(shape, device=runtime.device, dtype=lora.A.dtype)
    for number in runtime.track(runtime.share(len(batches)), "Fisher"):
        positions, kept = batches[number], len(batches[number])
        if runtime.compile and len(batches) > 1:  # one batch shape, compiled once; what fills it up has no loss
            positions = torch.cat([positions, positions[:1].expand(size - kept)])
        target = labels[positions.to(labels.device)]
        tokens = backbone.embed(task.images.plain(positions))
        count, length, dim = tokens.shape
        probes = [tokens.new_zeros(sets * count, length, 2 * dim, requires_grad=True) for _ in range(backbone.depth)]
        tokens, inputs = backbone.blocks(tokens, lora=lora, pooled=True, probes=probes)
        logits = streams.scales.view(-1, 1, 1) * cosine(backbone.pool(tokens).view(sets, count, -1), heads)
        losses = F.cross_entropy(logits.flatten(0, 1), target.repeat(sets), reduction="none")
        losses = losses.view(sets, count)[:, :kept]
        gradients = torch.autograd.grad(losses.mean(1).sum() if form == "batch" else losses.sum(), probes)
        for block, (x, g) in enumerate(zip(inputs, gradients, strict=True)):
            x = x.detach().view(-1, count, length, dim).expand(sets, -1, -1, -1)  # all sets read the same in block 0
            total[block] += square(x, g.view(sets, count, length, 2 * dim)).view(sets, 2, dim, dim)
    divisor = len(batches) if form == "batch" else len(labels)
    return runtime.sum_over_processes(total) / divisor


def fisher_norms(
    backbone: Backbone,
    streams: AdapterSets,
    task: Task,
    batch_size: int,
    form: str,
    runtime: Runtime,
    shared_head: int | None = None,
) -> Tensor:
    """Frobenius norms (blocks, sets, 2) of `fisher_information`; those of sets that the shelf knows are read from
    it."""
    if shared_head is not None:
        streams = AdapterSets(streams.lora, streams.rows[[shared_head] * streams.lora.sets], streams.scales)
    keys = []
    for number in range(streams.lora.sets):
        own = streams.select(number)
        tensors = (own.lora.A, own.lora.B, own.rows, own.scales)
        keys.append(
            {
                "part": "Fisher norms",
                "set": hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest(),
                **_data_key(backbone, task),
                "batch_size": batch_size,
                "form": form,
                "precision": str(backbone.dtype),
            }
        )
    with runtime.shelf.reserve(keys):
        found = _found(runtime, keys)
        missing = [number for number in range(len(keys)) if number not in found]
        if missing:
            computed = fisher_maths.block_norms(
                fisher_information(backbone, streams.select(*missing), task, batch_size, form, runtime)
            )
            for place, number in enumerate(missing):
                found[number] = {"norms": computed[:, place]}
                runtime.shelf.put(keys[number], found[number])
    return torch.stack([found[number]["norms"].to(runtime.device) for number in range(len(keys))], 1)


def _found(runtime: Runtime, keys: Sequence[dict[str, Any]]) -> dict[int, dict[str, Tensor]]:
    """What the shelf has of these parts, by their place among the keys."""
    parts = {number: runtime.shelf.get(key) for number, key in enumerate(keys)}
    return {number: tensors for number, tensors in parts.items() if tensors is not None}


def _data_key(backbone: Backbone, task: Task) -> dict[str, str]:
    return {
        "backbone": backbone.hash,
        "images": task.images.fingerprint,
        "labels": hashlib.sha256(task.labels.cpu().numpy().tobytes()).hexdigest()[:16],
    }


def _shelf_key(
    backbone: Backbone, task: Task, spec: AdapterSpec, plan: AdapterPlan, runtime: Runtime
) -> dict[str, Any]:
    return {
        "part": "adapter",
        **_data_key(backbone, task),
        "spec": asdict(spec),
        "rank": plan.rank,
        "init": plan.init,
        "schedule": asdict(plan.schedule),
        "seed": runtime.seed,
        "precision": str(runtime.dtype),
    }
