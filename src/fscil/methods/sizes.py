"""How large a stream is: what a method needs to say how much a run of it computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fscil.data.stream import Stream

TRAINING = 2.3  # a training pass in forward passes: the backward pass through frozen weights costs about one more


@dataclass(frozen=True)
class Sizes:
    """Images and classes of a stream, task by task, the base task first.

    >>> sizes = Sizes(images=(600, 25, 25), classes=(60, 5, 5), tests=(120, 130, 140))
    >>> sizes.base, sizes.later, sizes.known
    (600, (25, 25), (60, 65, 70))
    """

    images: tuple[int, ...]  # training images of each task
    classes: tuple[int, ...]  # classes that are new in each task
    tests: tuple[int, ...]  # test images of all classes known after each task

    @classmethod
    def of(cls, stream: Stream) -> Sizes:
        tasks = stream.tasks
        tests = tuple(int((stream.test_labels < stream.seen(task.index)).sum()) for task in tasks)
        return cls(tuple(len(task.images) for task in tasks), tuple(len(task.classes) for task in tasks), tests)

    @property
    def base(self) -> int:
        """Training images of the base task."""
        return self.images[0]

    @property
    def later(self) -> tuple[int, ...]:
        """Training images of each few-shot task."""
        return self.images[1:]

    @property
    def known(self) -> tuple[int, ...]:
        """Classes known after each task."""
        return tuple(accumulate(self.classes))
