"""A grid of runs in one folder: what it consists of and what of it is finished.

    GRID/cells/glyphs-smp-seed2023-1f0c…/   run folders, named by what they compute
    GRID/logs/NAME.log                      what a cell said, attempt after attempt
    GRID/claims/NAME.json                   who works on a cell right now: machine, process, what it is doing
    GRID/shelf/                             adapters and base models that cells share
    GRID/streams/NAME/                      training of adapter sets for several cells in one pass

Any number of processes, on any machines that see the folder, may work on the same grid: a cell is claimed by a lock
that the system frees when its process dies, so no cell runs twice at a time and a dead worker's cell can be taken over,
from its last checkpoint. `claims` keeps who works on what, `jobs` does the work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.config import RunConfig, as_made, complete, differences, read_config
from fscil.errors import UserError
from fscil.evaluation.forms import Configured
from fscil.experiments.leftovers import never_began
from fscil.files import read_json
from fscil.strict import build, conform, flatten, merge
from fscil.text import count, file_name

if TYPE_CHECKING:
    from fscil.methods.base import Method

# Settings of the data that leave the base task as it is.
LATER = ("data.shots", "data.tasks", "data.way", "data.sampler", "data.index_files", "data.shots_file")


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
            return f"{file_name(self.config.dataset)}-adapters-seed{self.config.seed}-{digest}"
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
            return f"{count(len(self.specs), 'adapter set')} on {self.config.dataset}, seed {self.config.seed}"
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
    return f"{file_name(config.dataset)}-{config.method}-seed{config.seed}-{config.fingerprint()[:8]}"


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
        specs, training = _plan_of(cell.config)
        if specs:
            key = json.dumps([_base_of(cell.config), training], sort_keys=True)
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
    alike = [rival for rival in rivals if rival.head.get("name") == config.head.get("name")]
    keys = dict.fromkeys(text.split(":")[0] for rival in alike for text in differences(rival, config))
    if len(alike) < len(rivals):  # another head says it all: its options are not those of this one
        keys = {"head.name": None, **keys}
    return "".join(f", {key.rpartition('.')[2]}={own[key]}" for key in keys if own.get(key) is not None)


def _identity(config: RunConfig) -> str:
    """What decides the base model of a run."""
    from fscil.registry import method_class, method_entry

    cls: type[Method] = method_class(config.method)
    options = {key: value for key, value in config.options.items() if key not in cls.after_base}
    head = [config.head] if config.head else []  # it learns the base classes as well
    return json.dumps([method_entry(config.method).target, _base_of(config), options, *head], sort_keys=True)


def _base_of(config: RunConfig) -> dict[str, Any]:
    """What decides the base task: the configuration without method and head, and without what concerns later tasks."""
    apart = ("method", "recipe", "evaluation", "options", "head")
    kept = flatten({key: value for key, value in config.to_dict().items() if key not in apart})
    return {key: value for key, value in kept.items() if key not in LATER}


def _plan_of(config: RunConfig) -> tuple[tuple, list]:
    """(adapter sets that a run's method trains by `AdapterPlan.train`, how they are trained), in plain values."""
    from fscil.registry import method_class

    cls: type[Method] = method_class(config.method)
    found = cls.adapter_plan(build(cls.Options, config.options, "options."))
    if found is None:
        return (), []
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
            results = conform(read_json(folder / "results.json"), Configured, folder / "results.json")
            stored = complete(as_made(results["config"]))
        elif "config.yaml" in names:
            stored = read_config(folder / "config.yaml")
        elif never_began(folder):
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


def is_done(job: Job) -> bool:
    """Whether a job left nothing to do."""
    return (job.folder / "done.json").exists() if job.specs else inspect(job.folder, job.config)[0] == "finished"
