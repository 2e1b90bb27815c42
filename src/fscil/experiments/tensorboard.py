"""TensorBoard, as an option: `--set runtime.tensorboard=true` writes loss, speed and metrics into RUN/tensorboard.

pip install "fscil[tensorboard]"
fscil run --tensorboard
tensorboard --logdir runs
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fscil.errors import UserError
from fscil.evaluation.sessions import COLUMNS
from fscil.runtime import Display, Runtime

if TYPE_CHECKING:
    from fscil.experiments.run_folder import RunRecord

T = TypeVar("T")


def check_tensorboard() -> None:
    """Say early what is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError('runtime.tensorboard is on but TensorBoard is not installed; pip install "fscil[tensorboard]"')


class TensorBoard(Display):
    """Stands before a run's display and writes down what passes: what training reports, and each session's metrics."""

    def __init__(self, folder: Path, display: Display, averaging: str):
        from torch.utils.tensorboard import SummaryWriter

        self.display, self.averaging = display, averaging
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.stages: list[str] = []
        self.steps: dict[str, int] = {}

    def track(self, iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
        self.stages.append(description)
        try:
            yield from self.display.track(iterable, description, total)
        finally:
            self.stages.remove(description)

    def report(self, **fields: Any) -> None:
        """Figures of a stage of training, such as loss and images/s, numbered by report."""
        stage = self.stages[0] if self.stages else "run"
        step = self.steps[stage] = self.steps.get(stage, 0) + 1
        for name, value in fields.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"{stage}/{name}", value, step)
        self.display.report(**fields)

    def session(self, session: Mapping[str, Any]) -> None:
        """The columns of a session that has just ended."""
        for column in COLUMNS.values():
            value = column.read(session, self.averaging)
            if value is not None:
                self.writer.add_scalar(f"session/{column.key}", value, session["session"])
        self.writer.flush()


@contextlib.contextmanager
def tensorboard(record: RunRecord, runtime: Runtime) -> Iterator[None]:
    """Log a run for the length of a `with` block, where its configuration asks for it."""
    if not (record.config.runtime.tensorboard and runtime.is_main):
        yield
        return
    scalars = TensorBoard(record.folder, runtime.display, record.config.evaluation.hacc)
    record.scalars, runtime.display = scalars, scalars
    try:
        yield
    finally:
        runtime.display = scalars.display
        scalars.writer.close()
