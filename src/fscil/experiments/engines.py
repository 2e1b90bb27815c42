"""Who does a grid's jobs: worker processes of this machine, or a Ray cluster. Both give the same results.

with make_engine("local", jobs=2) as engine:
    overview = run_jobs(plan("runs/grid", configs), engine)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

from fscil.errors import UserError, nearest
from fscil.experiments.grid import Job, is_done
from fscil.experiments.jobs import run_job
from fscil.experiments.overview import Overview
from fscil.runtime import start_ray, why_ray_gave_up

POLL = 0.5  # seconds between two looks at the workers
ASK_AGAIN = 5.0  # seconds until a job that another process works on is asked for again
ENGINES = ("local", "ray")
JOB_MEMORY = 2.5e9  # bytes that a run on a CPU may need
Outcome = Mapping[str, Any]


class Engine(Protocol):
    workers: int  # jobs it does at a time

    def free(self) -> bool:
        """Whether another job can be handed over now."""

    def submit(self, job: Job) -> None: ...

    def poll(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """Jobs that ended, with how; waits at most so long for the first."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *_: Any) -> None: ...


@dataclass(frozen=True)
class Resources:
    """What one cell asks a Ray cluster for; None: chosen for the cluster."""

    cpus: float | None = None
    gpus: float | None = None  # may be a fraction: cells then share a GPU
    memory: float | None = None  # GB


def make_engine(
    name: str = "local", jobs: int = 1, address: str | None = None, resources: Resources | None = None
) -> Engine:
    """The engine of this name; `address` and `resources` are those of a Ray cluster."""
    if name not in ENGINES:
        raise UserError(f'--engine "{name}" is not one of {", ".join(ENGINES)}.{nearest(name, ENGINES)}')
    if name == "ray":
        return RayEngine(address, resources or Resources())
    if address is not None:
        raise UserError("--address is that of a Ray cluster; add --engine ray")
    return LocalEngine(jobs)


def default_jobs(device: str | None = None) -> int:
    """How many runs at a time suit this machine: small ones use CPU cores better side by side than each several."""
    import psutil
    import torch

    if device not in (None, "auto", "cpu") or (device != "cpu" and torch.cuda.is_available()):
        return 1
    return max(1, min(_cores(), int(psutil.virtual_memory().available / JOB_MEMORY)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], engine: Engine, quiet: bool = False) -> Overview:
    """Do all jobs that are not done yet. One that fails is noted and the rest goes on; one that another process works
    on is waited for. Interrupted, it can be called again and goes on where it was."""
    done = [job for job in jobs if not job.specs and is_done(job)]
    finished = {job.name for job in done}
    # adapter sets are for the cells that come after them: nothing to do once those are done
    wanted = {job.after for job in jobs if job.name not in finished}
    done += [job for job in jobs if job.specs and (job.name not in wanted or is_done(job))]
    waiting = [job for job in jobs if job not in done]
    ended = {job.name for job in done}
    asked: dict[str, float] = {}  # when to ask again for a job that another process has
    running = 0
    with Overview(jobs, done, engine.workers, quiet) as overview:
        known = {job.name for job in jobs}
        while waiting or running:
            for job in list(waiting):
                ready = job.after is None or job.after in ended or job.after not in known
                if engine.free() and ready and asked.get(job.name, 0.0) <= time.monotonic():
                    waiting.remove(job)
                    engine.submit(job)
                    overview.start(job)
                    running += 1
            if not running:
                time.sleep(POLL)
            for job, outcome in engine.poll(POLL):
                running -= 1
                if outcome["state"] == "busy":
                    overview.wait(job, outcome.get("owner"))
                    asked[job.name] = time.monotonic() + ASK_AGAIN
                    waiting.append(job)
                    continue
                ended.add(job.name)
                if outcome["state"] == "failed":
                    overview.fail(job, outcome["error"])
                else:
                    overview.finish(job, outcome.get("seconds", 0.0), _result(job))
    return overview


def _result(job: Job) -> str:
    if job.specs:
        return "on the shelf"
    from fscil.evaluation.results import load_results

    summary = load_results(job.folder, check=False).summary  # it was just written
    return f"A_final {summary['A_final']:.2f}, A_avg {summary['A_avg']:.2f}"


# ---- worker processes of this machine ------------------------------------------------------------------------------


class LocalEngine:
    """`jobs` worker processes, each of which does one job after the other; a job that kills its worker takes no other
    with it. Cores, and GPUs where there are several, are shared out among the workers."""

    def __init__(self, jobs: int = 1):
        if jobs < 1:
            raise UserError(f"--jobs is {jobs}; it must be at least 1")
        self.workers = jobs
        self.slots = [_Slot(number, jobs) for number in range(jobs)]

    def free(self) -> bool:
        return any(slot.job is None for slot in self.slots)

    def submit(self, job: Job) -> None:
        next(slot for slot in self.slots if slot.job is None).give(job)

    def poll(self, seconds: float) -> list[tuple[Job, Outcome]]:
        connection.wait([thing for slot in self.slots for thing in slot.waits_for()], seconds)
        return [ended for slot in self.slots if (ended := slot.take()) is not None]

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        for slot in self.slots:
            slot.close()


@dataclass(frozen=True)
class _Worker:
    """A process that does jobs, and the pipe to it."""

    process: multiprocessing.process.BaseProcess
    pipe: connection.Connection

    @classmethod
    def start(cls, number: int, of: int) -> _Worker:
        context = multiprocessing.get_context("spawn")  # a forked CUDA or OpenMP does not work
        pipe, other = context.Pipe()
        process = context.Process(target=_serve, args=(other, number, of), name=f"fscil-{number}", daemon=True)
        process.start()
        other.close()
        return cls(process, pipe)


class _Slot:
    """A place for a worker, and what it works on."""

    def __init__(self, number: int, of: int):
        self.number, self.of = number, of
        self.job: Job | None = None
        self.worker: _Worker | None = None

    def give(self, job: Job) -> None:
        if self.worker is None or not self.worker.process.is_alive():
            self.worker = _Worker.start(self.number, self.of)
        self.job = job
        self.worker.pipe.send_bytes(json.dumps(job.to_dict()).encode())

    def waits_for(self) -> list[Any]:
        """What shows that a job ended: an answer, or the end of its worker."""
        return [self.worker.pipe, self.worker.process.sentinel] if self.job and self.worker else []

    def take(self) -> tuple[Job, Outcome] | None:
        """How the job ended, if it did."""
        job, worker = self.job, self.worker
        if job is None or worker is None:
            return None
        try:
            if worker.pipe.poll():
                self.job = None
                return job, json.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        if worker.process.is_alive():
            return None
        worker.process.join()
        code, self.job, self.worker = worker.process.exitcode or 0, None, None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        hint = " (out of memory?)" if code == -9 else ""
        return job, {"state": "failed", "error": f"its process {how}{hint}; the same command goes on with it"}

    def close(self) -> None:
        if self.worker is not None:
            process = self.worker.process
            process.terminate()  # every file is written whole or not at all, so this harms nothing
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(pipe: connection.Connection, number: int, of: int) -> None:
    """A worker's life: read a job, do it, say how it ended, until there are no more."""
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    if "OMP_NUM_THREADS" not in os.environ:  # torch read it when it was imported: setting it now would do nothing
        torch.set_num_threads(max(1, _cores() // of))
    _choose_gpu(number)
    while True:
        try:
            values = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(json.dumps(run_job(values)).encode())


def _choose_gpu(number: int) -> None:
    """With several GPUs, worker n takes the n-th; this must happen before CUDA is used."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


# ---- a cluster -----------------------------------------------------------------------------------------------------


class RayEngine:
    """Jobs as Ray tasks. A task whose worker or machine dies is started again, elsewhere if need be, and goes on from
    the checkpoints in the grid's folder, which all machines must see under the same path."""

    RETRIES = 3
    workers = 1

    def __init__(self, address: str | None, resources: Resources):
        self.ray, self.started = start_ray(address)
        ray = self.ray
        total = ray.cluster_resources()
        gpus = resources.gpus if resources.gpus is not None else float(total.get("GPU", 0) > 0)
        cpus = resources.cpus if resources.cpus is not None else 1.0
        for name, asked in (("GPU", gpus), ("CPU", cpus)):
            if asked > total.get(name, 0):
                raise UserError(f"a cell asks for {asked:g} {name}, the cluster has {total.get(name, 0):g}")
        needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if resources.memory is not None:
            needs["memory"] = int(resources.memory * 1e9)
        # a fresh process per job gives the GPU's memory back
        self.task = ray.remote(max_retries=self.RETRIES, max_calls=1, **needs)(_ray_job)
        share = [total[name] / amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0]
        self.workers = max(1, int(min(share)))
        self.threads = max(1, int(cpus))
        self.jobs: dict[Any, Job] = {}

    def free(self) -> bool:
        return True  # Ray queues what does not fit

    def submit(self, job: Job) -> None:
        self.jobs[self.task.remote(job.to_dict(), self.threads)] = job

    def poll(self, seconds: float) -> list[tuple[Job, Outcome]]:
        if not self.jobs:
            return []
        ready, _ = self.ray.wait(list(self.jobs), num_returns=1, timeout=seconds)
        return [(self.jobs.pop(task), self._outcome(task)) for task in ready]

    def _outcome(self, task: Any) -> Outcome:
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            reason = why_ray_gave_up(self.ray, error)
            said = f"Ray gave it up after {self.RETRIES} retries: {reason}; the same command goes on with it"
            return {"state": "failed", "error": said}

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        for task in self.jobs:
            self.ray.cancel(task, force=True)
        if self.started:
            self.ray.shutdown()


def _ray_job(values: Mapping[str, Any], threads: int) -> Outcome:
    import torch

    torch.set_num_threads(threads)
    return run_job(values)
