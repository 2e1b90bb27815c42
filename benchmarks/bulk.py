"""Pictures recognised per second, from files: one process, and Ray with 1, 2, … workers beside it.

    python benchmarks/bulk.py                                      # glyphs, 4,000 pictures, 1 and 2 workers
    python benchmarks/bulk.py --model MODEL --photos DIR --workers 1 2 4 8

Each row is a whole command's work, the start of its workers included; `steady` leaves out everything before the first
file of answers. One thread per process, so that workers do not share cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import environment  # noqa: E402
from PIL import Image  # noqa: E402

from fscil.config import DataConfig  # noqa: E402
from fscil.data.datasets import load_dataset  # noqa: E402
from fscil.data.manifests import TEST, TRAIN  # noqa: E402
from fscil.serving.bulk import ModelAt, make_engine, recognise_all  # noqa: E402
from fscil.teachable.model import Teachable  # noqa: E402

SIZE = 128  # pictures a file of answers: enough files to see them come


def glyph_photos(folder: Path, split: str, classes: range, count: int) -> Path:
    dataset = load_dataset("glyphs", DataConfig())
    for label in classes:
        store, kept = dataset.store(dataset.manifest.positions(split)[label][:count])
        target = folder / dataset.manifest.class_names[label]
        target.mkdir(parents=True)
        for at in range(len(kept)):
            Image.fromarray(store.image(at).numpy()).save(target / f"{at:04d}.png")
    return folder


def measure(name: str, model: ModelAt, photos: Path, folder: Path, workers: int | None) -> tuple[float, float]:
    """Pictures per second of the whole command, and from the first file of answers to the last."""
    out = folder / f"{name}.parquet"
    engine = make_engine("local") if workers is None else make_engine("ray", workers)
    begun = time.time()
    done = recognise_all(model, [str(photos)], str(out), engine, size=SIZE, quiet=True)
    ended = time.time()
    times = sorted(path.stat().st_mtime for path in out.glob("part-*"))
    steady = (done.answered - SIZE) / max(times[-1] - times[0], 1e-9)
    return done.answered / (ended - begun), steady


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model is None:
            clf = Teachable(backbone="glyph_vit_a", train="never", verbose=False)
            clf.fit(str(glyph_photos(folder / "base", TRAIN, range(20), 20)))
            options.model = str(clf.save(folder / "model"))
        photos = options.photos or glyph_photos(folder / "photos", TEST, range(40), 100)
        model = ModelAt(options.model, options.weights)
        print(environment())
        print("| engine | pictures/s | steady | × one process |\n|---|---|---|---|")
        whole, first = measure("local", model, photos, folder, None)
        print(f"| one process | {whole:.1f} | {first:.1f} | 1.00 |", flush=True)
        for workers in options.workers:
            whole, steady = measure(f"ray-{workers}", model, photos, folder, workers)
            print(f"| ray, {workers} workers | {whole:.1f} | {steady:.1f} | {steady / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
