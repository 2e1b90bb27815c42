"""Requests that wait at the same time share a forward pass: pictures go through the model together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from fscil.serving.host import Host
from fscil.teachable.recognition import Recognition

if TYPE_CHECKING:
    from fscil.serving.api import Metrics


class Busy(Exception):
    """More than can wait; its text says so to the client."""


class Room:
    """Pictures that may be in memory at once, decoded or about to be; a single visitor may have half of them."""

    def __init__(self, pictures: int = 512):
        self.pictures = pictures
        self.taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def take(self, visitor: str, count: int) -> Iterator[None]:
        full = sum(self.taken.values()) + count > self.pictures
        if full or self.taken[visitor] + count > max(self.pictures // 2, count):
            raise Busy("too many pictures are being looked at already; try again in a second")
        self.taken[visitor] += count
        try:
            yield
        finally:
            self.taken[visitor] -= count
            if not self.taken[visitor]:
                del self.taken[visitor]


@dataclass
class _Job:
    pictures: list[np.ndarray | str]
    top: int
    answer: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Requests that wait at the same time share a forward pass; one thread runs them.

    While the model is busy they gather by themselves; if it is free, the first waits `patience` seconds for others. At
    most `max_batch` pictures go together, unless a single request has more.
    """

    def __init__(self, host: Host, metrics: Metrics, max_batch: int = 32, waiting: int = 128, patience: float = 0.002):
        self.host, self.metrics, self.max_batch, self.patience = host, metrics, max_batch, patience
        self.queue: asyncio.Queue[_Job] = asyncio.Queue(waiting)
        self.thread = ThreadPoolExecutor(1, "recognising")
        self.left_over: _Job | None = None  # taken from the queue but too large for the last batch
        self.running = False

    async def recognise(self, pictures: list[np.ndarray | str], top: int) -> list[Recognition]:
        job = _Job(pictures, top)
        try:
            self.queue.put_nowait(job)
        except asyncio.QueueFull:
            raise Busy("too many requests wait already; try again in a second") from None
        self.metrics.queue.set(self.queue.qsize())
        return await job.answer

    async def run(self) -> None:
        """Works until cancelled."""
        self.running = True
        while True:
            jobs = await self._gather()
            self.metrics.queue.set(self.queue.qsize())
            self.metrics.batch.observe(sum(len(job.pictures) for job in jobs))
            if not await self._answer(jobs) and len(jobs) > 1:
                for job in jobs:  # one picture that fails must not fail the others' requests
                    await self._answer([job])

    async def _gather(self) -> list[_Job]:
        jobs = [self.left_over or await self.queue.get()]
        self.left_over = None
        self._join(jobs)
        if self.left_over is None and sum(len(job.pictures) for job in jobs) < self.max_batch:
            await asyncio.sleep(self.patience)
            self._join(jobs)
        return jobs

    def _join(self, jobs: list[_Job]) -> None:
        """Adds what waits in the queue as long as it fits."""
        count = sum(len(job.pictures) for job in jobs)
        while self.left_over is None and not self.queue.empty():
            job = self.queue.get_nowait()
            count += len(job.pictures)
            if count > self.max_batch:
                self.left_over = job
            else:
                jobs.append(job)

    async def _answer(self, jobs: Sequence[_Job]) -> bool:
        """Answers the jobs; of several that fail together none is answered and the result is False."""
        together, top = [item for job in jobs for item in job.pictures], max(job.top for job in jobs)
        loop = asyncio.get_running_loop()
        try:
            found = iter(await loop.run_in_executor(self.thread, self.host.recognise_decoded, together, top))
        except Exception as error:
            if len(jobs) == 1 and not jobs[0].answer.done():
                jobs[0].answer.set_exception(error)
            return False
        for job in jobs:
            own = [next(found) for _ in job.pictures]
            if not job.answer.done():  # else the client has gone
                job.answer.set_result([replace(item, top=item.top[: job.top]) for item in own])
        return True
