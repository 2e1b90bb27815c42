"""A real `fscil serve` under load: requests held, latency, memory, and what a kill in the middle of teaching costs.

    python benchmarks/serving.py                                    # about a minute
    python benchmarks/serving.py --clients 1 8 32 128 --seconds 60  # longer
    python benchmarks/serving.py --minutes 10 --clients 64 --attackers --photos DIR --weights deit_tiny….safetensors

Serves a model of glyphs on the plain backbone and sends it one picture per request from N clients that each wait for
their answer before they send the next. `--max-batch 1` is the same server without batching, one request at a time. Then
the server is taught in a loop and killed (SIGKILL) at random moments; everything it acknowledged must be there when it
starts again. Clients run in this process, so they share the cores with the server.

With `--minutes` it is instead one server under steady load, taught meanwhile, and with `--attackers` once more beside
those (benchmarks/siege.py): answers, refusals, latency, and memory early and late.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
from common import environment
from PIL import Image
from siege import Form, form, siege

from fscil.config import DataConfig
from fscil.data.datasets import load_dataset
from fscil.data.manifests import TEST, TRAIN
from fscil.teachable.model import Teachable
from fscil.teachable.recognition import Notice


def pngs(split: str, classes: range, count: int) -> dict[str, list[bytes]]:
    dataset = load_dataset("glyphs", DataConfig())
    found: dict[str, list[bytes]] = {}
    for label in classes:
        store, kept = dataset.store(dataset.manifest.positions(split)[label][:count])
        files = [io.BytesIO() for _ in kept]
        for at, file in enumerate(files):
            Image.fromarray(store.image(at).numpy()).save(file, "PNG")
        found[dataset.manifest.class_names[label]] = [file.getvalue() for file in files]
    return found


class Served:
    """A server process."""

    def __init__(self, model: Path, *options: str):
        command = [sys.executable, "-m", "fscil", "serve", str(model), "--port", "0", "--device", "cpu"]
        command += ["--no-access-log", *options]  # nobody reads it here, and a full pipe would stop the server
        began = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        address = re.search(r"http://[\d.:]+", line)
        if not address:
            sys.exit(line + self.process.stderr.read())
        self.place = urlsplit(address[0]).netloc
        self.ask("GET", "/health")
        self.start_seconds = time.perf_counter() - began

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.place, timeout=60)

    def ask(self, verb: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
        with contextlib.closing(self.connect()) as connection:
            connection.request(verb, path, body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                sys.exit(f"{verb} {path}: {answer.status} {content.decode()}")
            return content

    def metric(self, name: str) -> float:
        return float(re.search(rf"^{name} (\S+)$", self.ask("GET", "/metrics").decode(), re.M)[1])

    def resident_mb(self) -> float:
        """Of the process, or of all that answer."""
        process = psutil.Process(self.process.pid)
        answering = [child for child in process.children() if child.children()] or [process]
        return sum(one.memory_info().rss for one in answering) / 1e6

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.process.stderr.close()


def load(server: Served, requests: list[Form], clients: int, seconds: float) -> dict[str, float]:
    """Every client sends one request after the other; latencies of all of them."""
    ends, taken, failed = time.perf_counter() + seconds, [], []

    def client(number: int) -> None:
        draw = random.Random(number)
        with contextlib.closing(server.connect()) as connection:
            while time.perf_counter() < ends:
                body, headers = draw.choice(requests)
                began = time.perf_counter()
                connection.request("POST", "/predict", body, headers)
                answer = connection.getresponse()
                answer.read()
                (taken if answer.status == 200 else failed).append(time.perf_counter() - began)

    batches, pictures = (server.metric(f"fscil_batch_pictures_{part}") for part in ("count", "sum"))
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    batches = server.metric("fscil_batch_pictures_count") - batches
    pictures = server.metric("fscil_batch_pictures_sum") - pictures
    p50, p95, p99 = np.percentile(taken, [50, 95, 99]) * 1000
    return dict(
        requests=len(taken), failed=len(failed), rate=len(taken) / elapsed, p50=p50, p95=p95, p99=p99,
        batch=pictures / batches, memory=server.resident_mb(),
    )  # fmt: skip


def kill_while_teaching(model: Path, lessons: list[list[bytes]], kills: int) -> str:
    draw, acknowledged, attempts = random.Random(0), [], 0
    for _ in range(kills):
        server = Served(model)
        killer = threading.Timer(draw.uniform(0.3, 1.2), server.process.kill)
        killer.start()
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(server.connect()) as connection,
        ):
            while True:
                name, attempts = f"taught {attempts}", attempts + 1
                body, headers = form(draw.choice(lessons), name=name)
                connection.request("POST", "/learn", body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    acknowledged.append(name)
        killer.join()
        server.process.wait()
        server.process.stderr.close()
    server = Served(model)
    known = {info["name"] for info in json.loads(server.ask("GET", "/classes"))["classes"]}
    server.stop()
    lost = [name for name in acknowledged if name not in known]
    return f"{kills} kills, {len(acknowledged)} lessons acknowledged, {len(lost)} lost"


def steady(chosen: argparse.Namespace) -> None:
    """One server under load for minutes: siege.py."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if chosen.photos:
            by_class = [sorted(path.iterdir()) for path in sorted(chosen.photos.iterdir()) if path.is_dir()]
            files = [[path.read_bytes() for path in paths[:15]] for paths in by_class[:30]]
        else:
            files = [*pngs(TRAIN, range(30), 15).values()]
        backbone, weights = (chosen.backbone, chosen.weights) if chosen.photos else ("glyph_vit_a", None)
        clf = Teachable(backbone=backbone, weights=weights, train="never", device="cpu")
        known = [(data, f"class {label}") for label, group in enumerate(files[:20]) for data in group[:10]]
        clf.fit(*map(list, zip(*known))).save(model)
        server = Served(model, *(["--weights", str(weights)] if weights else []))
        requests = [form([data]) for group in files[:20] for data in group[10:]]
        lessons = [group[:5] for group in files[20:]]
        sides = [Image.open(io.BytesIO(group[0])).size for group in files[:20]]
        print(f"{backbone}, 20 classes; {os.cpu_count()} cores; {environment()}")
        print(f"{chosen.clients[-1]} clients, {chosen.minutes:g} minutes a row; pictures like {sides[:3]}\n")
        siege(server, requests, lessons, chosen.clients[-1], chosen.minutes, chosen.attackers)
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=5.0, help="per row")
    parser.add_argument("--workers", type=int, nargs="*", default=[2], help="rows with so many processes")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--minutes", type=float, help="steady load for so long, instead of all that")
    parser.add_argument("--attackers", action="store_true", help="with --minutes: once more beside eight attackers")
    parser.add_argument("--photos", type=Path, help="with --minutes: a folder of class folders, not glyphs")
    parser.add_argument("--backbone", default="deit_tiny_patch16_224.fb_in1k", help="for the photos")
    parser.add_argument("--weights", type=Path, help="its weights")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", Notice)
    if chosen.minutes:
        return steady(chosen)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "glyphs"
        base = pngs(TRAIN, range(20), 15)
        pairs = [(data, name) for name, files in base.items() for data in files]
        clf = Teachable(backbone="glyph_vit_a", train="never", device="cpu")
        clf.fit([data for data, _ in pairs], [name for _, name in pairs]).save(model)
        requests = [form([data]) for files in pngs(TEST, range(20), 5).values() for data in files]
        lessons = [files for files in pngs(TRAIN, range(60, 80), 5).values()]

        print(f"glyph_vit_a, 20 classes, one picture per request; {os.cpu_count()} cores; {environment()}\n")
        print("| server | clients | requests | failed | requests/s | p50 ms | p95 ms | p99 ms | pictures/pass | MB |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        rates: dict[tuple[str, int], float] = {}
        several = [(f"{count} processes", ("--workers", str(count))) for count in chosen.workers]
        for name, options in (("batched", ()), ("one at a time", ("--max-batch", "1")), *several):
            server = Served(model, *options)
            load(server, requests, 4, 1.0)  # warm
            started = server.resident_mb()
            for clients in chosen.clients:
                row = load(server, requests, clients, chosen.seconds)
                rates[name, clients] = row["rate"]
                times = " | ".join(f"{row[key]:.1f}" for key in ("p50", "p95", "p99", "batch"))
                count = f"{row['requests']} | {row['failed']} | {row['rate']:.0f}"
                print(f"| {name} | {clients} | {count} | {times} | {row['memory']:.0f} |")
            print(f"| {name}, memory when warm | | | | | | | | | {started:.0f} |")
            server.stop()
        ratios = [
            f"{n} clients {rates['batched', n] / rates['one at a time', n]:.2f}" for n in dict.fromkeys(chosen.clients)
        ]
        print(f"\nbatched / one at a time, requests per second: {', '.join(ratios)}")
        print(f"from command to first answer {server.start_seconds:.1f} s")
        print(f"killed while teaching: {kill_while_teaching(model, lessons, chosen.kills)}")


if __name__ == "__main__":
    main()
