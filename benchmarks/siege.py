"""Many honest clients at a real `fscil serve` for minutes, while it is taught, alone and beside eight attackers.

`benchmarks/serving.py --minutes` runs it. An honest client sends a picture, waits for its answer and sends the next;
where it is told to come back it does, after the second that it is told, and its time goes on until it has an answer.
The attackers live in a process of their own, each in a loop that waits for what becomes of its last attack:

    2 x scan bombs      progressive JPEGs of thousands of scans, and one of as many as are let through
    2 x half a header   a hundred connections each, on which a header begins and never ends
    2 x half a body     most of a large request, and then nothing
    2 x large PNGs      eight at a time, each of as many pixels as are let through, in a few kilobytes
"""

from __future__ import annotations

import contextlib
import http.client
import io
import multiprocessing
import random
import socket
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
from PIL import Image

Form = tuple[bytes, dict[str, str]]
EARLY = 0.2  # of the time: when memory is looked at first, minute 2 of 10
SAMPLED = 1.0  # seconds between looks at memory


def form(pictures: Sequence[bytes], **fields: str) -> Form:
    """Body and headers of a multipart request, made once: the client should cost little beside the server."""
    edge = uuid.uuid4().hex
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()
    ]
    for at, data in enumerate(pictures):
        head = f'--{edge}\r\nContent-Disposition: form-data; name="files"; filename="{at}.png"\r\n\r\n'
        parts.append(head.encode() + data + b"\r\n")
    return b"".join(parts) + f"--{edge}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={edge}"}


# ---- attackers -------------------------------------------------------------------------------------------------------


def many_scans(side: int, count: int) -> bytes:
    """A progressive JPEG of one colour whose last scan is there `count` times more."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[start:end] * count + data[end:]


def large_png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 30)).save(file, "PNG")
    return file.getvalue()


def ask(place: str, body: bytes, headers: dict[str, str]) -> None:
    with contextlib.closing(http.client.HTTPConnection(place, timeout=60)) as connection:
        connection.request("POST", "/predict", body, headers)
        connection.getresponse().read()


def scan_bombs(place: str) -> Callable[[], None]:
    forms = [form([many_scans(1000, 4000)]), form([many_scans(3300, 80)])]  # refused by its header; just let through
    draw = random.Random(0)
    return lambda: ask(place, *draw.choice(forms))


def large_pngs(place: str) -> Callable[[], None]:
    body, headers = form([large_png(7700)] * 8)
    return lambda: ask(place, body, headers)


def unfinished(place: str, sent: bytes, connections: int) -> None:
    """Begins so many requests and waits until the server has given up on all."""
    host, port = place.split(":")
    with contextlib.ExitStack() as stack:
        made = (socket.create_connection((host, int(port)), timeout=60) for _ in range(connections))
        opened = [stack.enter_context(one) for one in made]
        for one in opened:
            one.sendall(sent)
        for one in opened:
            while one.recv(65536):
                pass


def half_headers(place: str) -> Callable[[], None]:
    return lambda: unfinished(place, b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", 100)


def half_bodies(place: str) -> Callable[[], None]:
    size = 60_000_000
    lines = ("POST /predict HTTP/1.1", "Host: localhost", "Content-Type: multipart/form-data; boundary=x")
    head = "".join(f"{line}\r\n" for line in (*lines, f"Content-Length: {size}", ""))
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    return lambda: unfinished(place, head.encode() + part + bytes(size * 9 // 10), 1)


ATTACKS = (scan_bombs, half_headers, half_bodies, large_pngs)


def besiege(place: str, ends: float, counts: multiprocessing.Queue) -> None:
    """Two attackers of each kind until the clock (`time.time`) says so."""
    done: Counter[str] = Counter()

    def attack(kind: Callable[[str], Callable[[], None]]) -> None:
        strike = kind(place)
        while time.time() < ends:
            with contextlib.suppress(OSError, http.client.HTTPException):  # cut off: as it should be
                strike()
            done[kind.__name__] += 1

    threads = [threading.Thread(target=attack, args=(kind,), daemon=True) for kind in ATTACKS for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends + 15 - time.time()))
    counts.put(dict(done))


# ---- honest clients --------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What honest clients met with."""

    seconds: list[float] = field(default_factory=list)  # from the first try of a request to its answer
    refusals: int = 0  # told to come back
    refused_for: float = 0.0  # the longest time for which a client was
    failed: list[str] = field(default_factory=list)  # anything else
    lessons: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the start, MB)

    def memory_at(self, moment: float, around: float) -> float:
        """Median over a while: what decoding takes comes and goes."""
        return statistics.median(mb for at, mb in self.memory if abs(at - moment) <= around)


Connect = Callable[[], http.client.HTTPConnection]


def persist(seen: Seen, connect: Connect, path: str, request: Form, ends: float) -> bool:
    """Sends a request until it is answered or `ends` has come; whether it was. Each try has a connection of its own."""
    first_refused = None
    while True:
        try:
            with contextlib.closing(connect()) as connection:
                connection.request("POST", path, *request)
                answer = connection.getresponse()
                content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            seen.failed.append(f"{path}: {type(error).__name__} {error}")
            return False
        now = time.perf_counter()
        if first_refused is not None:
            seen.refused_for = max(seen.refused_for, now - first_refused)
        if answer.status == 200 and b'"error":"' not in content.replace(b" ", b""):
            return True
        if answer.status != 503:
            seen.failed.append(f"{path}: {answer.status} {content[:200]!r}")
            return False
        seen.refusals += 1
        first_refused = first_refused or now
        if now > ends:
            return False
        time.sleep(float(answer.headers.get("Retry-After", 1)))


def endure(
    connect: Connect,
    process: psutil.Process,
    requests: Sequence[Form],
    lessons: Sequence[Sequence[bytes]],
    clients: int,
    seconds: float,
) -> Seen:
    """So many clients for so long, one that teaches and takes it back, and a look at memory every second."""
    seen, began = Seen(), time.perf_counter()
    ends = began + seconds

    def client(number: int) -> None:
        draw = random.Random(number)
        while (first := time.perf_counter()) < ends:
            if persist(seen, connect, "/predict", draw.choice(requests), ends):
                seen.seconds.append(time.perf_counter() - first)

    def teacher() -> None:
        draw = random.Random(-1)
        while time.perf_counter() < ends:
            if persist(seen, connect, "/learn", form(draw.choice(lessons), name="taught meanwhile"), ends):
                seen.lessons += persist(seen, connect, "/undo", form([], steps="1"), ends + 60)

    def memory() -> None:
        while (now := time.perf_counter()) < ends:
            total = 0
            for one in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += one.memory_info().rss
            seen.memory.append((now - began, total / 1e6))
            time.sleep(SAMPLED)

    work = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    work += [threading.Thread(target=teacher), threading.Thread(target=memory)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    return seen


COLUMNS = (
    "beside", "answers", "failed", "told to come back", "longest refusal s", "lessons", "answers/s", "p50 ms", "p99 ms",
    "slowest ms", "MB early", "MB late",
)  # fmt: skip


def row(beside: str, seen: Seen, seconds: float) -> str:
    """A line of the table."""
    p50, p99 = np.percentile(seen.seconds, [50, 99]) * 1000
    around = min(15.0, 0.1 * seconds)
    early, late = seen.memory_at(EARLY * seconds, around), seen.memory_at(seconds - around, around)
    cells = (
        beside, len(seen.seconds), len(seen.failed), seen.refusals, f"{seen.refused_for:.1f}", seen.lessons,
        f"{len(seen.seconds) / seconds:.1f}", f"{p50:.0f}", f"{p99:.0f}", f"{1000 * max(seen.seconds):.0f}",
        f"{early:.0f}", f"{late:.0f} ({100 * (late / early - 1):+.1f} %)",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def siege(server, requests: Sequence[Form], lessons, clients: int, minutes: float, attackers: bool) -> None:
    """Prints the table, without attackers and, if asked for, with them."""
    seconds, process = 60 * minutes, psutil.Process(server.process.pid)
    endure(server.connect, process, requests, lessons, clients, min(20.0, seconds / 2))  # warm
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    alone = endure(server.connect, process, requests, lessons, clients, seconds)
    print(row("nobody", alone, seconds), flush=True)
    rounds = [alone]
    if attackers:
        context = multiprocessing.get_context("spawn")
        counts = context.Queue()
        enemy = context.Process(target=besiege, args=(server.place, time.time() + seconds, counts))
        enemy.start()
        beset = endure(server.connect, process, requests, lessons, clients, seconds)
        print(row("eight attackers", beset, seconds), flush=True)
        print(f"\nattacks: {counts.get()}")
        enemy.join()
        p99 = [float(np.percentile(seen.seconds, 99)) for seen in (alone, beset)]
        print(f"p99 with attackers by without: {p99[1] / p99[0]:.2f}")
        rounds.append(beset)
    for beside, seen in zip(("nobody", "eight attackers"), rounds):
        course = [f"{seen.memory_at(tenth * seconds / 10, 0.05 * seconds):.0f}" for tenth in range(1, 11)]
        print(f"memory beside {beside}, MB after each tenth of the time: {' '.join(course)}")
    for said, count in Counter(text for seen in rounds for text in seen.failed).most_common(10):
        print(f"failed {count} times: {said}")
