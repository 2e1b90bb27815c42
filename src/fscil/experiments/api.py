"""`fscil.run`: in Python what `fscil run` does on the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fscil.config import RunConfig, complete, read_config, refuse_tasks_of_validation, resolve
from fscil.errors import UserError
from fscil.evaluation.results import Results
from fscil.experiments.leftovers import check_began
from fscil.strict import flatten, merge, parse_setting

# Where in a configuration the flags of `fscil run` and `fscil compare` go.
_PLACES = {
    "head": "head.name",
    "data_root": "data.root",
    "limit": "data.limit",
    "shots_file": "data.shots_file",
    "store": "data.store",
    "skip_bad": "data.skip_bad",
    "device": "runtime.device",
    "precision": "runtime.precision",
    "tensorboard": "runtime.tensorboard",
    "track": "runtime.trackers",
}


def run(
    method: str | None = None,
    dataset: str | None = None,
    *,
    settings: Sequence[str] | Mapping[str, Any] = (),
    folder: str | Path | None = None,
    resume: bool = False,
    recipe: str | None = None,
    fast: bool = False,
    head: str | None = None,
    backbone: str | None = None,
    weights: str | Path | None = None,
    seed: int | None = None,
    limit: int | None = None,
    data_root: str | Path | None = None,
    shots_file: str | Path | None = None,
    store: str | int | None = None,
    skip_bad: bool = False,
    device: str | None = None,
    precision: str | None = None,
    tensorboard: bool = False,
    track: str | None = None,
    progress: bool = False,
) -> Results:
    """Run a method (default: smp) on a dataset (default: glyphs): base task, few-shot tasks, evaluation after each.

    The arguments are the options of `fscil run`, and mean the same; `settings` are those of `--set`, as texts
    ("options.epochs=3") or as a mapping ({"options.epochs": 3}), and `folder` is the run's, by default a new one under
    runs/. With `resume`, a stopped run in `folder` goes on. It says nothing unless `progress` is set.

    >>> import tempfile
    >>> small = {"data.base": 4, "data.way": 2, "data.tasks": 1, "options.epochs": 1}
    >>> with tempfile.TemporaryDirectory() as place:
    ...     results = run("teen", limit=2, settings=small, folder=f"{place}/run", device="cpu")
    >>> [session["seen"] for session in results.sessions]
    [4, 6]
    """
    from fscil.display import LiveDisplay
    from fscil.experiments.run import run as run_config

    config = configure(
        method,
        dataset,
        settings=settings,
        recipe=recipe,
        fast=fast,
        resume=_named(folder) if resume else None,
        head=head,
        backbone=backbone,
        weights=weights,
        seed=seed,
        limit=limit,
        data_root=data_root,
        shots_file=shots_file,
        store=store,
        skip_bad=skip_bad,
        device=device,
        precision=precision,
        tensorboard=tensorboard,
        track=track,
    )
    return run_config(config, folder, resume=resume, display=LiveDisplay(quiet=not progress), announce=progress)


def _named(folder: str | Path | None) -> Path:
    if folder is None:
        raise UserError("resume goes on with the run in a folder; name it with folder")
    return Path(folder)


def configure(
    method: str | None = None,
    dataset: str | None = None,
    *,
    settings: Sequence[str] | Mapping[str, Any] = (),
    recipe: str | None = None,
    fast: bool = False,
    resume: Path | None = None,
    **flags: Any,
) -> RunConfig:
    """The configuration that the arguments of `fscil run` describe; of a run to `resume`, its own with them on top
    (the run itself refuses what would change its numbers)."""
    texts = as_settings(settings) if isinstance(settings, Mapping) else list(settings)
    chosen = {"method": method, "dataset": dataset, **place_flags(**flags)}
    if resume is None:
        config = resolve(recipe=recipe, settings=texts, fast=fast, **chosen)
        refuse_tasks_of_validation(config, *map(parse_setting, texts))
        return config
    check_began(resume)
    if recipe or fast:
        raise UserError("--resume takes the settings of the run folder; leave --recipe and --fast out")
    given = {key: value for key, value in chosen.items() if value is not None}
    return complete(merge(read_config(resume / "config.yaml").to_dict(), *map(parse_setting, texts), given))


def place_flags(**flags: Any) -> dict[str, Any]:
    """Flags as `config.resolve` takes them; None and False mean not given.

    >>> place_flags(seed=7, limit=3, data_root=None, skip_bad=True)
    {'seed': 7, 'data': {'limit': 3, 'skip_bad': True}}
    """
    placed: dict[str, Any] = {}
    for name, value in flags.items():
        if value is not None and value is not False:
            group, _, key = _PLACES.get(name, name).rpartition(".")
            where = placed.setdefault(group, {}) if group else placed
            where[key] = str(value) if isinstance(value, Path) else value
    return placed


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """Nested or dotted settings as `--set` texts.

    >>> as_settings({"options": {"epochs": 3}, "transform.scale": [0.5, 1]})
    ['options.epochs=3', 'transform.scale=[0.5, 1]']
    """
    return [f"{key}={json.dumps(value)}" for key, value in flatten(values).items()]
