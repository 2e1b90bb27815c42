"""Doing a job of a grid, here: a cell, or the adapter sets of several cells in one pass."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fscil.errors import UserError
from fscil.experiments.claims import Claim, claim, claim_path, owner_of
from fscil.experiments.grid import Job, inspect
from fscil.experiments.overview import JobDisplay
from fscil.files import refuse_links
from fscil.strict import build

if TYPE_CHECKING:
    from fscil.methods.base import Method


def run_job(values: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job, here, and say how it ended: {"state": "done" | "busy" | "failed", …}. Exceptions go to its log."""
    with contextlib.suppress(OSError):
        os.chdir(values["directory"])
    job, began = Job.from_dict(values), time.monotonic()
    try:
        with claim(job) as mine:
            if mine is None:
                return {"state": "busy", "owner": owner_of(claim_path(job))}
            with _log_of(job, mine) as display:
                fresh = _train_streams(job, display) if job.specs else _run_cell(job, display)
    except Exception as error:  # a folder that cannot be written to comes to light with the claim already
        return {"state": "failed", "error": _one_line(error)}
    return {"state": "done", "fresh": fresh, "seconds": time.monotonic() - began}


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
    protocol.run(
        job.config,
        job.folder,
        resume=state == "unfinished",
        display=display,
        announce=True,
        runtime={"shelf": DiskShelf(job.grid / "shelf")},
        share_base=job.share_base,
    )
    return True


def _train_streams(job: Job, display: Any) -> bool:
    """Several cells' adapter sets in one pass over the base task; they end up on the shelf."""
    from fscil.backbones.loading import make_backbone
    from fscil.data.datasets import load_dataset
    from fscil.data.stream import make_stream
    from fscil.experiments import run as protocol
    from fscil.experiments.keeper import RunKeeper
    from fscil.experiments.shelf import DiskShelf
    from fscil.files import write_json
    from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec
    from fscil.registry import method_class

    config = job.config
    keeper = RunKeeper(job.folder, job.name)
    runtime = protocol.make_runtime(config, display, shelf=DiskShelf(job.grid / "shelf"), keeper=keeper)
    backbone = make_backbone(config.backbone, config.weights, config.transform.size)
    transform = protocol.make_transform(config.transform, backbone)
    stream = make_stream(load_dataset(config.dataset, config.data), config.data, transform, config.seed, runtime.device)
    backbone.prepare(runtime)
    cls: type[Method] = method_class(config.method)
    common = cls.adapter_plan(build(cls.Options, config.options, "options."))
    assert common is not None  # or there were no `specs`
    specs = tuple(AdapterSpec(*spec) for spec in job.specs)
    display.line(f"{job.title}: margins {', '.join(f'{spec.margin:g}' for spec in specs)}")
    AdapterPlan(specs, common.rank, common.init, common.schedule).train(backbone, stream.tasks[0], runtime)
    write_json(job.folder / "done.json", {"specs": job.specs})
    keeper.clear()
    return True


@contextlib.contextmanager
def _log_of(job: Job, mine: Claim) -> Iterator[Any]:
    """The display of a job: lines go to its log, progress to its claim. Exceptions are written down and passed on."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    refuse_links(job.log.parent, job.log.name)
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
