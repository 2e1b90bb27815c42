"""How teaching and recognising grow with the classes already known: simulated features, d = 768, made-up statistics.

    python benchmarks/scale.py --heads closed_form chord --classes 1000 10000 100000
    python benchmarks/scale.py --heads mpcc --classes 100 1000 --images 30 100 500 --device cpu --steps 100
    python benchmarks/scale.py --heads model --classes 1000 10000 100000

A lesson is five new classes of five images. `chord` is the closed form with the options CHORD gives it: four views a
shot and the trained heads of all known classes as second judges. The first batch after a lesson solves for the
weights, later ones do not. MPCC draws its embeddings epoch by epoch while they fit and part by part beyond; there only
a part and `--steps` calibration steps of every epoch are timed and scaled to the full session. `model` is a saved
model's folder: a head with so many names is written, read, taught five more and asked whether it changed. On a CPU,
seconds are CPU seconds, and the peak is that of the process, so a row that matters deserves a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import cpu_seconds, environment, peak_gb, seconds

from fscil.heads import mpcc
from fscil.heads.base import Head, Lesson
from fscil.heads.closed_form import ClosedForm, ClosedFormOptions
from fscil.heads.embeddings import EPOCH_SET_BYTES, PART_BYTES, Features, embedding_batches
from fscil.heads.mpcc import MPCC, MPCCOptions
from fscil.runtime import Runtime
from fscil.teachable.folder import ModelFolder, Version

DIM, WAY, SHOTS, BATCH = 768, 5, 5, 32
CHORD = ClosedFormOptions(views=4, trained=1.0)


def knowing(kind: str, classes: int, images: int, runtime: Runtime) -> Head:
    """A head that already knows `classes` classes of `images` images each."""
    device = runtime.device
    if kind == "mpcc":
        head: Head = MPCC(DIM, MPCCOptions(), runtime)
        head.rows = torch.nn.functional.normalize(torch.randn(classes, DIM, device=device), dim=1)
        head.donor = torch.arange(classes, device=device)
        head.roots_floor = torch.tensor([1e-3**0.5], dtype=torch.float64)
        if images - 1 < DIM / 2:
            head.roots_basis = made_up(DIM**-0.5, classes, DIM, images - 1, device=device)
            head.roots_spread = torch.rand(classes, images - 1, device=device)
        else:
            head.roots_packed = made_up(1 / DIM, classes, DIM * (DIM + 1) // 2, device=device)
    else:
        head = ClosedForm(DIM, CHORD if kind == "chord" else ClosedFormOptions(), runtime)
        head.pooled = torch.eye(DIM, device=device)
        head.trained = torch.randn(classes, DIM, device=device) if kind == "chord" else None
    head.prototypes = torch.randn(classes, DIM, device=device)
    head.counts = torch.full((classes,), images, device=device)
    return head


def made_up(scale: float, *shape: int, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(shape, device=device)
    for part in tensor.split(256):
        part.normal_().mul_(scale)
    return tensor


def lesson_after(classes: int, device: torch.device) -> Lesson:
    features = torch.randn(WAY * SHOTS, DIM, device=device)
    labels = torch.arange(classes, classes + WAY, device=device).repeat_interleave(SHOTS)

    def views(numbers: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        rows = features.repeat(len(numbers), 1) if positions is None else features[positions.to(device)]
        return rows + 0.1 * torch.randn_like(rows)

    return Lesson(features, labels, classes + WAY, views, number=1)


def measure(kind: str, classes: int, images: int, steps: int, runtime: Runtime) -> list[Any]:
    """Seconds of a lesson, of the first batch after it and of a later one; how many steps were timed; peak GB."""
    head, lesson = knowing(kind, classes, images, runtime), lesson_after(classes, runtime.device)
    whole = timed = 5 * (classes + WAY)  # steps of a session
    part = PART_BYTES // (MPCCOptions().batch_size * DIM * 4)  # steps whose features are drawn together
    clock = seconds if runtime.device.type == "cuda" else cpu_seconds
    drawing: list[float] = []

    def few(*inputs: Any) -> Iterator[Features]:
        kept: list[Features] = []
        drawing.append(clock(lambda: kept.extend(islice(embedding_batches(*inputs), part))))
        yield from kept[: steps // 5]

    if kind == "mpcc" and classes * 256 * DIM * 4 > EPOCH_SET_BYTES and whole > 5 * max(part, steps // 5):
        timed, mpcc.embedding_batches = 5 * (steps // 5), few
    taught = clock(head.teach, lesson)
    if drawing:
        taught = whole * ((taught - sum(drawing)) / timed + sum(drawing) / (5 * part))
    mpcc.embedding_batches = embedding_batches
    queries = torch.randn(BATCH, DIM, device=runtime.device)
    with torch.no_grad():
        first, later = (clock(head.scores, queries) for _ in range(2))
    return [f"{taught:.2f}", f"{first:.2f}", f"{later:.3f}", timed if kind == "mpcc" else "-", f"{peak_gb():.2f}"]


def folder_seconds(classes: int) -> list[str]:
    """A model's head with so many classes: MB, seconds to write, read, write a lesson, and see that nothing changed."""

    def record(count: int) -> dict[str, Any]:
        info = [{"name": f"class {c}", "pictures": 5, "base": c < classes, "since": "2026"} for c in range(count)]
        rates = dict.fromkeys(("held_out_accuracy", "held_out_rejection", "taught_rejection"))
        calibration = {"temperature": 1.0, "threshold": None, "score": "x", "false_rejection": 0.05, "held_out": 0}
        event = {"action": "learn", "when": "2026", "classes": {}, "known": count}
        return {"event": event, "classes": info, "calibration": calibration | rates, "stored_pictures": 0}

    backbone = {"name": "none", "hash": "", "image_size": 224, "weights": None, "embedded": False}
    parameters = {"held_out": 0.1, "false_rejection": 0.05, "unknown": None, "skip_bad": False, "thumbnails": 0}
    config = {"method": "smp", "options": {}, "backbone": backbone, "trained": False, "seed": 0}
    config |= {"transform": {"size": 224, "resize": 256, "std": [1.0] * 3}, "parameters": parameters}
    with tempfile.TemporaryDirectory() as place:
        folder = ModelFolder(Path(place) / "model")
        versions = [Version(record(classes), {"means": torch.zeros(classes, DIM)})]
        written = cpu_seconds(lambda: folder.write(config, versions))
        heads = []
        read = cpu_seconds(lambda: heads.append(folder.read()))
        more = [*heads[0].versions, Version(record(classes + WAY), {"means": torch.zeros(classes + WAY, DIM)})]
        lesson = cpu_seconds(lambda: folder.write(config, more, before=heads[0]))
        asked = cpu_seconds(folder.revision)
        size = (folder.path / "model.json").stat().st_size / 2e6
    return [f"{size:.1f}", f"{written:.2f}", f"{read:.2f}", f"{lesson:.2f}", f"{asked:.3f}"]


def table(*titles: str) -> None:
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["closed_form", "chord", "model"], help="and mpcc")
    parser.add_argument("--classes", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--images", type=int, nargs="+", default=[30], help="per known class; they matter to MPCC")
    parser.add_argument("--steps", type=int, default=1000, help="calibration steps of MPCC timed at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    runtime = Runtime.make(device=chosen.device, precision="fp32", compile="off")
    print(f"{environment()}; d = {DIM}, {WAY} new classes of {SHOTS} images, batches of {BATCH}\n")
    heads = [kind for kind in chosen.heads if kind != "model"]
    if heads:
        table("head", "known classes", "images", "lesson s", "first batch s", "batch s", "steps timed", "peak GB")
    for kind in heads:
        for images in chosen.images if kind == "mpcc" else chosen.images[:1]:
            for classes in chosen.classes:
                if chosen.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                row = [kind, classes, images, *measure(kind, classes, images, chosen.steps, runtime)]
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    if "model" in chosen.heads:
        print()
        table("known classes", "model.json, MB a version", "write s", "read s", "write a lesson s", "unchanged? s")
        for classes in chosen.classes:
            print(f"| {' | '.join(map(str, [classes, *folder_seconds(classes)]))} |", flush=True)


if __name__ == "__main__":
    main()
