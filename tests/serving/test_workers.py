"""Several processes that answer for one model: what one is taught all know, one that dies is replaced."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from test_api import httpx, model, original, served, upload  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.extra("serve"), pytest.mark.slow, pytest.mark.timeout(300)]


def workers_of(process):
    """The answering processes: children that have children of their own, which decode."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            found += [child] if child.children() else []
    return found


def ask_anew(web, method, path, **request):
    """Over a connection of its own, so that any of the processes may answer."""
    with httpx.Client(base_url=web.base_url, headers={**web.headers, "Connection": "close"}, timeout=60) as once:
        return once.request(method, path, **request)


def names_seen(web, times):
    return [{info["name"] for info in ask_anew(web, "GET", "/classes").json()["classes"]} for _ in range(times)]


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_workers_share_what_is_taught_and_are_replaced(model):  # noqa: F811
    with served(model, "--workers", "2") as (process, web):
        until(lambda: len(workers_of(process)) == 2)
        assert web.post("/learn", files=upload(10), data={"name": "heron"}).status_code == 200
        time.sleep(2.5)  # each looks at the folder every second, and does so when it is asked
        names_seen(web, 20)
        assert all("heron" in names for names in names_seen(web, 20))
        answers = [ask_anew(web, "POST", "/predict", files=upload(10, 1, 1)).json()["answers"] for _ in range(6)]
        assert all(answer == answers[0] for answer in answers) and answers[0][0]["label"] == "heron"

        # any process adds up what all have counted
        for _ in range(3):
            lines = ask_anew(web, "GET", "/metrics").text.splitlines()
            assert 'fscil_requests_total{route="/predict",status="200"} 6.0' in lines

        time.sleep(10)  # one that ends right after its start would not be replaced
        first = workers_of(process)[0]
        first.kill()
        until(lambda: len([w for w in workers_of(process) if w.pid != first.pid]) == 2)
        assert all("heron" in names for names in names_seen(web, 10))

        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        process.wait(20)
        assert time.monotonic() - begun < 15
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive


def test_workers_end_with_a_parent_that_is_killed(model):  # noqa: F811
    with served(model, "--workers", "2") as (process, web):
        until(lambda: len(workers_of(process)) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive


HEAPS = """
import ctypes, sys, threading
from fscil.serving.memory import keep_memory_small
if sys.argv[1] == "shared":
    keep_memory_small()
held, together = [], threading.Barrier(8)
def work():
    together.wait()
    held.extend(bytearray(50_000) for _ in range(200))
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def test_threads_share_two_heaps():
    """As glibc itself counts them, in a process whose threads allocate at the same time."""
    if not hasattr(ctypes.CDLL(None), "malloc_info"):
        pytest.skip("no glibc")
    heaps = {
        how: subprocess.run([sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True).stdout
        for how in ("own", "shared")
    }
    assert heaps["own"].count("<heap nr") > 2 == heaps["shared"].count("<heap nr")
