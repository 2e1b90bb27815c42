"""Trackers, as options: loss, speed and every session's metrics go to TensorBoard, Weights & Biases or MLflow.

pip install "fscil[tensorboard]"        fscil run --tensorboard       tensorboard --logdir runs
pip install "fscil[wandb]"              fscil run --track wandb       WANDB_MODE=offline keeps it on this machine
pip install "fscil[mlflow]"             fscil run --track mlflow      MLFLOW_TRACKING_URI says where to

A tracker takes figures with a step and is closed at the end. `Tracking` stands before a run's display, so methods
report to trackers what they report to people.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fscil.config import RunConfig, RuntimeConfig
from fscil.errors import UserError
from fscil.evaluation.sessions import COLUMNS
from fscil.runtime import Display, Runtime

if TYPE_CHECKING:
    from fscil.experiments.run_folder import RunRecord

T = TypeVar("T")
PROJECT = "fscil"  # what a tracker with projects or experiments files runs under


class Tracker(Protocol):
    """Where figures go."""

    def log(self, stage: str, figures: Mapping[str, float], step: int) -> None:
        """Figures of a stage of the run (a stage of training, or "session"), numbered by `step` within it."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: RunConfig):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, stage: str, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"{stage}/{name}", value, step)
        if stage == "session":
            self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of its own, whose steps are counted by each stage: the axis of STAGE/loss is STAGE/step."""

    def __init__(self, folder: Path, config: RunConfig):
        import wandb

        self.run = wandb.init(project=PROJECT, name=folder.name, dir=str(folder), config=asdict(config))
        self.stages: set[str] = set()

    def log(self, stage: str, figures: Mapping[str, float], step: int) -> None:
        if stage not in self.stages:
            self.stages.add(stage)
            self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self.run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in figures.items()}})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of the experiment `fscil`, with the configuration as its parameters."""

    def __init__(self, folder: Path, config: RunConfig):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(PROJECT)
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params({name: str(value)[:500] for name, value in _flat(asdict(config)).items()})

    def log(self, stage: str, figures: Mapping[str, float], step: int) -> None:
        named = {re.sub(r"[^\w./ -]", "_", f"{stage}/{name}"): value for name, value in figures.items()}
        self.mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, tuple[str, type[Any]]] = {  # name, which is also that of its extra -> module to be found, tracker
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "mlflow": ("mlflow", MLflow),
}


def trackers_of(config: RuntimeConfig) -> list[str]:
    """The trackers that a run asks for; one that is unknown or not installed is said at once.

    >>> trackers_of(RuntimeConfig())
    []
    """
    asked = [name.strip() for name in config.trackers.split(",") if name.strip()]
    names = list(dict.fromkeys([*(["tensorboard"] if config.tensorboard else []), *asked]))
    for name in names:
        if name not in TRACKERS:
            raise UserError(f'--track (runtime.trackers) "{name}" is not one of {", ".join(TRACKERS)}.')
        if importlib.util.find_spec(TRACKERS[name][0]) is None:
            raise UserError(f'a run is to be tracked by {name}, which is not installed; pip install "fscil[{name}]"')
    return names


class Tracking(Display):
    """Stands before a run's display and passes on what goes by: what training reports, and each session's metrics."""

    def __init__(self, trackers: Sequence[Tracker], display: Display, averaging: str):
        self.trackers, self.display, self.averaging = trackers, display, averaging
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
        self._log(stage, {name: value for name, value in fields.items() if isinstance(value, (int, float))}, step)
        self.display.report(**fields)

    def session(self, session: Mapping[str, Any]) -> None:
        """The columns of a session that has just ended."""
        read = {column.key: column.read(session, self.averaging) for column in COLUMNS.values()}
        self._log("session", {key: value for key, value in read.items() if value is not None}, session["session"])

    def _log(self, stage: str, figures: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(stage, figures, step)


@contextlib.contextmanager
def tracking(record: RunRecord, runtime: Runtime) -> Iterator[None]:
    """Track a run for the length of a `with` block, where its configuration asks for it."""
    names = trackers_of(record.config.runtime) if runtime.is_main else []
    if not names:
        yield
        return
    with contextlib.ExitStack() as stack:
        trackers = []
        for name in names:
            trackers.append(_started(name, record))
            stack.callback(trackers[-1].close)
        display = runtime.display
        record.scalars = runtime.display = Tracking(trackers, display, record.config.evaluation.hacc)
        try:
            yield
        finally:
            runtime.display = display


def _started(name: str, record: RunRecord) -> Tracker:
    try:
        tracker: Tracker = TRACKERS[name][1](record.folder, record.config)
    except Exception as error:  # of any kind: no login, a server that does not answer, a store of another version
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f'{name} could not be started ({said}); put that right and go on with: fscil run --resume "{record.folder}"'
        ) from error
    return tracker


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """
    >>> _flat({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat
