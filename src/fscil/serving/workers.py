"""Several processes that answer for one model: the kernel hands each connection to one of them.

Each has the model open and looks at its folder every second, so what one is taught the others know a second later;
lessons take turns by the folder's lock. One that dies is replaced. What is bounded is bounded per process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from fscil.errors import UserError, stoppable

GRACE = 5.0  # seconds for a worker to end by itself
QUICK = 10.0  # seconds: a worker that ends sooner than that after its start will not do better next time
COLLECTED = "PROMETHEUS_MULTIPROC_DIR"  # where processes put what they count, so that any of them can add it up


@dataclass(frozen=True)
class Service:
    """What every worker serves, and how."""

    model: str
    weights: str | None
    device: str
    token: str | None
    address: str
    max_batch: int
    access_log: bool = True

    def run(self, listening: socket.socket, opened: Any = None) -> None:
        """Answers until told to stop; `opened` is called with the host once the model is open."""
        from fscil.serving.api import make_app
        from fscil.serving.decoding import Decoders
        from fscil.serving.host import Host
        from fscil.serving.listening import make_server
        from fscil.serving.memory import keep_memory_small
        from fscil.serving.operating import access_log_on_stderr

        keep_memory_small()
        host = Host(self.model, self.weights, self.device, decoders=Decoders().start())
        if opened is not None:
            opened(host)
        app = make_app(host, self.token, self.address, max_batch=self.max_batch)
        shown = access_log_on_stderr() if self.access_log else contextlib.nullcontext()
        with shown, contextlib.suppress(KeyboardInterrupt):
            make_server(app, host).run(sockets=[listening])


def serve_with(workers: int, service: Service, listening: socket.socket, ready: Any) -> None:
    """Keeps so many processes answering until SIGTERM or Ctrl-C; `ready` is called when all are."""
    context = multiprocessing.get_context("spawn")  # a forked CUDA or OpenMP does not work
    opened = context.Semaphore(0)
    arguments = (service, listening, opened)
    with tempfile.TemporaryDirectory(prefix="fscil-metrics-") as counts, stoppable():
        os.environ[COLLECTED] = counts
        running: dict[BaseProcess, float] = {}
        try:
            for _ in range(workers):
                running[_start(context, arguments)] = time.monotonic()
            waiting = workers
            while True:
                ended = connection.wait([process.sentinel for process in running], 0.2 if waiting else None)
                while waiting and opened.acquire(block=False):
                    waiting -= 1
                    if not waiting:
                        ready()
                for process in [process for process in running if process.sentinel in ended]:
                    _replace(process, running, context, arguments)
        except KeyboardInterrupt:
            pass
        finally:
            _stop(list(running))
            del os.environ[COLLECTED]


def _start(context: Any, arguments: tuple[Any, ...]) -> BaseProcess:
    process: BaseProcess = context.Process(target=_work, args=arguments, name="fscil serve")
    process.start()
    return process


def _replace(process: BaseProcess, running: dict[BaseProcess, float], context: Any, arguments: tuple[Any, ...]) -> None:
    from prometheus_client.multiprocess import mark_process_dead

    process.join()
    lived = time.monotonic() - running.pop(process)
    mark_process_dead(process.pid)
    status = process.exitcode or 0
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if lived < QUICK:
        raise UserError(f"a worker {how} {lived:.0f} s after its start; without --workers the reason is shown.")
    print(f"fscil: a worker {how}; another takes its place.", file=sys.stderr, flush=True)
    running[_start(context, arguments)] = time.monotonic()


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()  # it answers what has arrived and ends
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _work(service: Service, listening: socket.socket, opened: Any) -> None:
    """A worker's life. It ends with its parent, however that ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        service.run(listening, lambda host: opened.release())
    except UserError as error:
        print(f"fscil: error: {error}", file=sys.stderr)
        sys.exit(2)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
