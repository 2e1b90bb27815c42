"""A grid of runs in one folder: what it consists of, who works on what, what is finished.

    GRID/cells/glyphs-smp-seed2023-1f0c…/   run folders, named by what they compute
    GRID/logs/NAME.log                      what a cell said, attempt after attempt
    GRID/claims/NAME.json                   who works on a cell right now: machine, process, what it is doing
    GRID/shelf/                             adapters and base models that cells share
    GRID/streams/NAME/                      training of adapter sets for several cells in one pass

Any number of processes, on any machines that see the folder, may work on the same grid: a cell is claimed by a lock
that the system frees when its process dies, so no cell runs twice at a time and a dead worker's cell can be taken over,
from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fscil.config import RunConfig, complete, differences, read_config
from fscil.errors import UserError
from fscil.files import atomic_write, read_json
from fscil.strict import build, flatten, merge

HEARTBEAT = 10.0  # seconds between two signs of life of whoever works on a cell
SILENT = 120.0  # after so long without one, a worker on another machine counts as gone
DEBRIS = {".lock", "split.json", "shots.json"}  # what a run leaves that was killed before it began


@dataclass(frozen=True)
class Job:
    """Something to be done for a grid: a cell, or the adapter sets (`specs`) of several cells in one pass."""

    grid: Path
    config: RunConfig
    share_base: bool = False  # another cell starts from the same base model
    specs: tuple[tuple[float, float, bool], ...] = ()  # margin, scale, learnable
    after: str | None = None  # name of the job that should come first
    apart: str = ""  # what sets it apart from cells with the same method, dataset and seed

    @property
    def name(self) -> str:
        if self.specs:
            content = json.dumps([_base_of(self.config), _plan_of(self.config)[1], self.specs], sort_keys=True)
            digest = hashlib.sha256(content.encode()).hexdigest()[:8]
            return f"{self.config.dataset}-adapters-seed{self.config.seed}-{digest}"
        return cell_name(self.config)

    @property
    def folder(self) -> Path:
        return self.grid / ("streams" if self.specs else "cells") / self.name

    @property
    def log(self) -> Path:
        return self.grid / "logs" / f"{self.name}.log"

    @property
    def title(self) -> str:
        if self.specs:
            return f"{len(self.specs)} adapter sets on {self.config.dataset}, seed {self.config.seed}"
        return f"{self.config.method} on {self.config.dataset}, seed {self.config.seed}{self.apart}"

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values, for another process or machine; paths stay relative to `directory`."""
        return {**vars(self), "grid": str(self.grid), "config": self.config.to_dict(), "directory": os.getcwd()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        values = {key: value for key, value in values.items() if key != "directory"}
        specs = tuple((margin, scale, learnable) for margin, scale, learnable in values.pop("specs"))
        return cls(Path(values.pop("grid")), complete(values.pop("config")), specs=specs, **values)


def cell_name(config: RunConfig) -> str:
    return f"{config.dataset}-{config.method}-seed{config.seed}-{config.fingerprint()[:8]}"


# ---- what the grid consists of -------------------------------------------------------------------------------------


def plan(grid: str | Path, configs: Sequence[RunConfig]) -> list[Job]:
    """The jobs that make these runs, in order; each run appears once, and what runs share is done once, before them."""
    grid = Path(grid).absolute()
    unique = list({cell_name(config): config for config in configs}.values())
    starts = [_identity(config) for config in unique]
    cells = [
        Job(grid, config, share_base=starts.count(start) > 1, apart=_apart(config, unique))
        for config, start in zip(unique, starts)
    ]
    groups: dict[str, list[Job]] = {}
    for cell in cells:
        found = _plan_of(cell.config)
        if found is not None:
            key = json.dumps([_base_of(cell.config), found[1]], sort_keys=True)
            groups.setdefault(key, []).append(cell)
    jobs: list[Job] = []
    before: dict[str, str] = {}
    for members in groups.values():
        wanted = [_plan_of(member.config)[0] for member in members]
        specs = tuple(dict.fromkeys(spec for specs in wanted for spec in specs))
        if len(specs) > min(map(len, wanted)):  # otherwise the first of the cells trains them all
            job = Job(grid, members[0].config, specs=specs)
            jobs.append(job)
            before.update({member.name: job.name for member in members})
    return jobs + [replace(cell, after=before.get(cell.name)) for cell in cells]


def _apart(config: RunConfig, others: Sequence[RunConfig]) -> str:
    """The settings in which a run differs from others with the same method, dataset and seed: ", shots=1"."""
    named = (config.method, config.dataset, config.seed)
    rivals = [other for other in others if (other.method, other.dataset, other.seed) == named and other != config]
    own = flatten(config.to_dict())
    keys = dict.fromkeys(text.split(":")[0] for rival in rivals for text in differences(rival, config))
    return "".join(f", {key.rpartition('.')[2]}={own[key]}" for key in keys if own.get(key) is not None)


def _identity(config: RunConfig) -> str:
    """What decides the base model of a run."""
    from fscil.registry import method_class, method_entry

    after = method_class(config.method).after_base
    options = {key: value for key, value in config.options.items() if key not in after}
    return json.dumps([method_entry(config.method).target, _base_of(config), options], sort_keys=True)


def _base_of(config: RunConfig) -> dict[str, Any]:
    """What decides the base task: the configuration without the method and without what concerns later tasks."""
    later = ("data.shots", "data.tasks", "data.way", "data.sampler", "data.index_files", "data.shots_file")
    apart = ("method", "recipe", "evaluation", "options")
    kept = flatten({key: value for key, value in config.to_dict().items() if key not in apart})
    return {key: value for key, value in kept.items() if key not in later}


def _plan_of(config: RunConfig) -> tuple[tuple, list] | None:
    """(adapter sets, how they are trained) of a run whose method trains some by `train_streams`, in plain values."""
    from fscil.registry import method_class

    cls = method_class(config.method)
    found = cls.stream_plan(build(cls.Options, config.options, "options."))
    if found is None:
        return None
    specs = tuple(dataclasses.astuple(spec) for spec in found.specs)
    return specs, [found.rank, found.init, dataclasses.asdict(found.schedule)]


# ---- what is in a folder -------------------------------------------------------------------------------------------


def inspect(folder: Path, config: RunConfig) -> tuple[str, str]:
    """("finished" | "unfinished" | "new" | "foreign", why) of the folder in which `config` is to run."""
    if not folder.exists():
        return "new", ""
    if not folder.is_dir():
        return "foreign", f'"{folder}" is a file where a run folder belongs; move it away'
    names = {path.name for path in folder.iterdir()}
    try:
        if "results.json" in names:
            stored = complete(read_json(folder / "results.json").get("config") or {})
        elif "config.yaml" in names:
            stored = read_config(folder / "config.yaml")
        elif {name for name in names if not name.endswith(".part")} <= DEBRIS:
            return "new", ""
        else:
            return "foreign", f'"{folder}" holds other files ({sorted(names)[0]}, …) and no run; move it away'
    except UserError as error:
        return "foreign", str(error)
    changed = differences(stored, complete(merge(stored.to_dict(), _decided(config.to_dict()))))
    if changed:
        return "foreign", f'"{folder}" holds a run of another configuration ({"; ".join(changed[:3])})'
    return ("finished" if "results.json" in names else "unfinished"), ""


def _decided(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that are None, which the dataset or the backbone decides."""
    return {
        key: _decided(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """Run folders among and below `places`, finished or not."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise UserError(f'"{place}" does not exist; name a run folder, or a folder that holds some')
        inside = {path.parent for name in ("config.yaml", "results.json") for path in sorted(place.rglob(name))}
        if not inside:
            raise UserError(f'"{place}" is not a run folder and holds none')
        found.update(dict.fromkeys(sorted(inside)))
    return list(found)


# ---- who works on what ---------------------------------------------------------------------------------------------


@dataclass
class Claim:
    """That this process works on a job, written down for others to see."""

    path: Path
    started: float = field(default_factory=time.time)
    doing: str = "starting"

    def write(self) -> None:
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": self.started, "doing": self.doing}
        atomic_write(self.path, json.dumps(owner) + "\n")


def owner_of(path: Path) -> dict[str, Any] | None:
    """Who a claim names, and how long ago it gave a sign of life; None when nobody is there."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return {**owner, "silent": time.time() - path.stat().st_mtime}
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def claim(job: Job) -> Iterator[Claim | None]:
    """Take a job for this process; None when another has it. A dead process's claim is void.

    On one machine the lock alone decides. Some network filesystems do not carry locks to other machines; there the
    claim's last sign of life does.
    """
    path = claim_path(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield None
        return
    ended = threading.Event()
    try:
        owner = owner_of(path)
        if owner and owner.get("host") != socket.gethostname() and owner["silent"] < SILENT:
            yield None
            return
        mine = Claim(path)
        mine.write()

        def live() -> None:
            while not ended.wait(HEARTBEAT):
                with contextlib.suppress(OSError):
                    os.utime(path)

        threading.Thread(target=live, daemon=True).start()
        try:
            yield mine
        finally:
            ended.set()
            path.unlink(missing_ok=True)
    finally:
        lock.release()


def claim_path(job: Job) -> Path:
    return job.grid / "claims" / f"{job.name}.json"


# ---- doing a job ---------------------------------------------------------------------------------------------------


def run_job(values: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job, here, and say how it ended: {"state": "done" | "busy" | "failed", …}. Exceptions go to its log."""
    with contextlib.suppress(OSError):
        os.chdir(values["directory"])
    job = Job.from_dict(values)
    with claim(job) as mine:
        if mine is None:
            return {"state": "busy", "owner": owner_of(claim_path(job))}
        began = time.time()
        try:
            with _log_of(job, mine) as display:
                fresh = _train_streams(job, display) if job.specs else _run_cell(job, display)
        except Exception as error:
            return {"state": "failed", "error": _one_line(error)}
        return {"state": "done", "fresh": fresh, "seconds": time.time() - began}


def _run_cell(job: Job, display: Any) -> bool:
    from fscil.experiments import run as protocol
    from fscil.experiments.shelf import DiskShelf

    state, why = inspect(job.folder, job.config)
    if state == "finished":
        return False
    if state == "foreign":
        raise UserError(why)
    if state == "unfinished":
        display.line(f"continuing from the checkpoints in {job.folder.name}")
    elif job.folder.is_dir():
        for path in job.folder.iterdir():  # nothing but DEBRIS
            path.unlink()
    shelf = DiskShelf(job.grid / "shelf")
    services = {"shelf": shelf}
    resume = state == "unfinished"
    protocol.run(job.config, job.folder, resume, display, None, None, True, services, job.share_base)
    return True


def _train_streams(job: Job, display: Any) -> bool:
    """Several cells' adapter sets in one pass over the base task; they end up on the shelf."""
    from fscil.backbones.loading import make_backbone
    from fscil.data.datasets import load_dataset
    from fscil.data.stream import make_stream
    from fscil.data.transforms import make_transform
    from fscil.experiments import run as protocol
    from fscil.experiments.keeper import RunKeeper
    from fscil.experiments.shelf import DiskShelf
    from fscil.files import write_json
    from fscil.methods.families.adapter_sets import StreamPlan, StreamSpec
    from fscil.registry import method_class

    config = job.config
    runtime = protocol.make_runtime(config, display, shelf=DiskShelf(job.grid / "shelf"))
    runtime.keeper = RunKeeper(job.folder, job.name)
    backbone = make_backbone(config.backbone, config.weights, config.transform.size)
    transform = make_transform(config.transform, backbone)
    stream = make_stream(load_dataset(config.dataset, config.data), config.data, transform, config.seed, runtime.device)
    backbone.prepare(runtime)
    cls = method_class(config.method)
    common = cls.stream_plan(build(cls.Options, config.options, "options."))
    specs = tuple(StreamSpec(*spec) for spec in job.specs)
    display.line(f"{job.title}: margins {', '.join(f'{spec.margin:g}' for spec in specs)}")
    StreamPlan(specs, common.rank, common.init, common.schedule).train(backbone, stream.tasks[0], runtime)
    write_json(job.folder / "done.json", {"specs": job.specs})
    runtime.keeper.clear()
    return True


def is_done(job: Job) -> bool:
    """Whether a job left nothing to do."""
    return (job.folder / "done.json").exists() if job.specs else inspect(job.folder, job.config)[0] == "finished"


@contextlib.contextmanager
def _log_of(job: Job, mine: Claim) -> Iterator[Any]:
    """The display of a job: lines go to its log, progress to its claim. Exceptions are written down and passed on."""
    from rich.console import Console

    from fscil.experiments.overview import JobDisplay

    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "a", encoding="utf-8", buffering=1) as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.getLogger("fscil")
        level, logger.level = logger.level, logging.INFO
        logger.addHandler(handler)
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"---- {when}, process {os.getpid()} on {socket.gethostname()}\n")

        def progress(text: str) -> None:
            mine.doing = text
            mine.write()

        try:
            yield JobDisplay(Console(file=file, width=160, highlight=False), progress)
        except UserError as error:
            file.write(f"error: {_one_line(error)}\n")
            raise
        except Exception:
            file.write(traceback.format_exc())
            raise
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}" if text else type(error).__name__


def last_lines(path: Path, count: int = 10) -> list[str]:
    """The end of a log."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []
