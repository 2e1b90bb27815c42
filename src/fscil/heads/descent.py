"""Gradient descent on a classifier's rows, one mini-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fscil.runtime import Runtime

GRAPH_WARMUP = 3  # eager steps before a CUDA graph is captured


class _Captured(NamedTuple):
    """A step as a CUDA graph, and the batch that a replay reads."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    y: Tensor


class Descent:
    """SGD with momentum on `rows`, by a loss of features (n, d) and labels (n,).

    A step is some fifty kernels, most of them shorter than their launch; so on a GPU whole steps, the update included,
    replay a captured CUDA graph. Batches of another size than the first run without it.

    >>> rows = nn.Parameter(torch.ones(2, 3))
    >>> descent = Descent(rows, lambda x, y: (x @ rows.T)[:, y].sum(), Runtime(), momentum=0.9, weight_decay=0.0)
    >>> descent.rate(0.5)
    >>> descent.step(torch.ones(1, 3), torch.tensor([1]))
    >>> rows.tolist()
    [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]]
    """

    def __init__(
        self,
        rows: nn.Parameter,
        loss: Callable[[Tensor, Tensor], Tensor],
        runtime: Runtime,
        momentum: float,
        weight_decay: float,
    ):
        self.loss, self.graphed = loss, runtime.cuda_graphs and rows.is_cuda
        # a graph reads its learning rate from the device, where only the fused form of SGD does without a transfer
        start = torch.zeros((), device=rows.device, dtype=torch.float32) if self.graphed else 0.0
        self.optimiser = torch.optim.SGD(
            [rows], lr=start, momentum=momentum, weight_decay=weight_decay, fused=True if self.graphed else None
        )
        self.side = torch.cuda.Stream(rows.device) if self.graphed else None  # a capture needs a stream of its own
        self.warmups = 0
        self.size: int | None = None  # of the batches that the graph is for
        self.captured: _Captured | None = None

    def rate(self, lr: float) -> None:
        """Sets the learning rate of the steps to come."""
        settings = self.optimiser.param_groups[0]
        if self.graphed:
            settings["lr"].fill_(lr)
        else:
            settings["lr"] = lr

    def step(self, x: Tensor, y: Tensor) -> None:
        self.size = len(x) if self.size is None else self.size
        if self.side is None or len(x) != self.size:
            self._run(x, y)
        elif self.warmups < GRAPH_WARMUP:
            self.warmups += 1
            self.side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self.side):
                self._run(x, y)
            torch.cuda.current_stream(x.device).wait_stream(self.side)
        else:
            if self.captured is None:
                self.captured = self._capture(x.clone(), y.clone())
            self.captured.x.copy_(x)
            self.captured.y.copy_(y)
            self.captured.graph.replay()

    def _run(self, x: Tensor, y: Tensor) -> None:
        loss = self.loss(x, y)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()

    def _capture(self, x: Tensor, y: Tensor) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # other threads, a server's that answers meanwhile, may use the device during the capture
        with torch.cuda.graph(graph, stream=self.side, capture_error_mode="thread_local"):
            self._run(x, y)
        return _Captured(graph, x, y)
