"""SLCA++'s classifier alignment (Zhang et al., "SLCA++: Unleash the Power of Sequential Fine-tuning for Continual
Learning with Pre-training", 2024; docs/heads/slca.md): the ancestor of MPCC, with no margin and no real features.

    every class c of task t:  256 draws of N(μ_c (0.9 + 0.1 (t + 1) / (T + 1)), Σ_c)
    a linear classifier trained on them for 5 epochs, logits divided by the mean of their norms over tasks, and by 0.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil.heads.base import Head, Lesson, Linear
from fscil.maths.gaussians import Roots, packed_roots
from fscil.maths.margins import cosine_schedule
from fscil.runtime import Runtime
from fscil.strict import Natural, NotNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class SLCAOptions:
    epochs: int = 5
    lr: float = 0.01
    momentum: Share = 0.9
    weight_decay: NotNegative = 5e-4
    draws: Natural = 256  # per class and epoch, and the size of a batch
    temperature: Positive = 0.1  # of the normalised logits
    covariance_eps: NotNegative = 1e-3  # added to the diagonal


class SLCA(Head):
    """A linear classifier aligned on Gaussian features of all classes whenever some arrive."""

    Options = SLCAOptions
    after_base = frozenset("epochs lr momentum weight_decay draws temperature covariance_eps".split())
    exact = False
    means: Tensor
    scatter: Tensor
    tasks: Tensor
    rows: Tensor
    biases: Tensor

    def __init__(self, dim: int, options: Any, runtime: Runtime):
        super().__init__(dim, options, runtime)
        self.register_buffer("means", torch.zeros(0, dim, **self.place))
        self.register_buffer("scatter", torch.zeros(0, dim, dim, **self.place))  # Σ (f − μ)(f − μ)ᵀ of each class
        self.register_buffer("tasks", torch.zeros(0, dtype=torch.int64, device=runtime.device))  # each class came with
        self.register_buffer("rows", torch.zeros(0, dim, **self.place))
        self.register_buffer("biases", torch.zeros(0, **self.place))

    def describe(self, lesson: Lesson) -> None:
        self.means, self.scatter, self.tasks = self.means[:0], self.scatter[:0], self.tasks[:0]
        self.rows, self.biases = self.rows[:0], self.biases[:0]
        self._take_in(lesson, torch.zeros_like(self.counts))

    def learn(self, lesson: Lesson, before: Tensor) -> None:
        self._take_in(lesson, before)
        self._align(lesson)

    def drop(self, label: int, keep: Tensor) -> None:
        self.means, self.scatter, self.tasks = self.means[keep], self.scatter[keep], self.tasks[keep]
        self.rows, self.biases = self.rows[keep], self.biases[keep]

    def scores(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.rows.dtype), self.rows, self.biases)

    def linear(self) -> Linear:
        return Linear(self.rows.double().cpu(), self.biases.double().cpu(), unit=False)

    def _take_in(self, lesson: Lesson, before: Tensor) -> None:
        """Means and scatter run on; rows of new classes start at their unit means, the nearest thing to a head trained
        on them that fixed features have."""
        known, fresh = len(self.means), lesson.means()
        old = torch.cat([self.means, torch.zeros_like(fresh[known:])])
        scatter = torch.cat([self.scatter, self.scatter.new_zeros(self.seen - known, self.dim, self.dim)])
        for label in torch.unique(lesson.labels).tolist():
            own = lesson.features[lesson.labels == label]
            centred, shift, count = own - own.mean(0), own.mean(0) - old[label], int(before[label])
            scatter[label] += centred.T @ centred + torch.outer(shift, shift) * count * len(own) / (count + len(own))
        self.means, self.scatter = self.running(self.means, fresh, before), scatter
        self.tasks = torch.cat([self.tasks, self.tasks.new_full((self.seen - known,), lesson.number)])
        self.rows = torch.cat([self.rows, F.normalize(self.means[known:], dim=1)])
        self.biases = torch.cat([self.biases, self.biases.new_zeros(self.seen - known)])

    def _align(self, lesson: Lesson) -> None:
        o, seen, last = self.options, self.seen, lesson.number
        centres = self.means * (0.9 + 0.1 * (self.tasks + 1) / (last + 1))[:, None].to(self.means.dtype)
        roots = self._roots()
        rows, biases = nn.Parameter(self.rows.clone()), nn.Parameter(self.biases.clone())
        optimiser = torch.optim.SGD([rows, biases], lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
        every = torch.arange(seen, device=centres.device)
        groups = [(self.tasks == task).nonzero().squeeze(1) for task in torch.unique(self.tasks)]
        for epoch in self.runtime.track(range(o.epochs), f"alignment of task {last}"):
            optimiser.param_groups[0]["lr"] = cosine_schedule(o.lr, epoch, o.epochs)
            z = self.runtime.randn((seen, o.draws, self.dim), "slca", "z", last, epoch, dtype=centres.dtype)
            inputs = (centres[:, None] + roots.apply(every, z)).flatten(0, 1)
            order = torch.randperm(len(inputs), generator=self.runtime.generator("slca", "order", last, epoch))
            labels = every.repeat_interleave(o.draws)
            for chosen in order.to(centres.device).split(o.draws):
                logits = F.linear(inputs[chosen], rows, biases)
                norms = torch.stack([logits[:, group].norm(dim=1) for group in groups]).mean(0) + 1e-7
                loss = F.cross_entropy(logits / norms[:, None] / o.temperature, labels[chosen])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
        self.rows, self.biases = rows.detach(), biases.detach()

    def _roots(self) -> Roots:
        """Square roots of the unbiased class covariances + εI."""
        counts = (self.counts - 1).clamp(min=1).to(self.scatter.dtype)
        return packed_roots(self.scatter / counts[:, None, None], self.options.covariance_eps)[0]
