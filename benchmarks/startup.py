"""How long a command takes that recognises one photo, as a multiple of `import torch` in the same run.

    python benchmarks/startup.py [--repeat 5] [--busy]

Every row is the median of several starts, taken in turns, so that whatever else the machine does falls on all of them
alike. `--busy` keeps every core at work meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

IMPORTS_TIMM = "import timm.models.vision_transformer"  # what opening a model imported before plain_vit.py
MATRICES = """
import time, torch
torch.set_num_threads(2)
a = torch.randn(64, 192); b = torch.randn(192, 192)
for _ in range(200): a @ b
start = time.perf_counter()
for _ in range(5000): torch.softmax(a @ b, 1)
print(time.perf_counter() - start)
"""


def photos(root: Path) -> Path:
    draw = np.random.default_rng(0)
    for name in "abc":
        (root / name).mkdir(parents=True)
        colour = draw.integers(0, 256, 3)
        for number in range(6):
            picture = np.clip(colour + draw.normal(0, 30, (480, 640, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(picture).save(root / name / f"{number}.jpg")
    return root


def wall(command: list[str], **environment: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, env={**os.environ, **environment})
    return time.perf_counter() - start


def spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="keep every core at work meanwhile")
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    base, model = photos(root / "base"), root / "model"
    fscil = [sys.executable, "-m", "fscil"]
    subprocess.run([*fscil, "fit", base, "-o", model, "--backbone", "glyph_vit_a", "-q"], check=True)
    photo = str(base / "a" / "0.jpg")
    altered = shutil.copytree(model, root / "altered") / "model.json"
    altered.write_text(altered.read_text().replace("glyph_vit_a", "glyph_vit_b"))
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "fscil predict, one photo": [*fscil, "predict", str(model), photo],
        "import torch and timm": [sys.executable, "-c", f"import torch; {IMPORTS_TIMM}"],
        "refusal: no such model": [*fscil, "predict", str(root / "none"), photo],
        "refusal: model.json was altered": [*fscil, "predict", str(altered.parent), photo],
        "refusal: no such class to forget": [*fscil, "forget", str(model), "nobody"],
        "refusal: no such option": [*fscil, "predict", str(model), photo, "--jsno"],
    }
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)] * chosen.busy
    for other in others:
        other.start()
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(chosen.repeat):
        for name, command in commands.items():
            times[name].append(wall(command))
    unit = statistics.median(times["import torch"])
    print("| | s | × import torch |\n|---|---|---|")
    for name, values in times.items():
        print(f"| {name} | {statistics.median(values):.2f} | {statistics.median(values) / unit:.2f} |")
    waiting = {}
    for policy in ("ACTIVE", "PASSIVE"):
        environment = {**os.environ, "OMP_WAIT_POLICY": policy, "OMP_NUM_THREADS": "2"}
        runs = [
            float(subprocess.run([sys.executable, "-c", MATRICES], capture_output=True, env=environment).stdout)
            for _ in range(chosen.repeat)
        ]
        waiting[policy] = statistics.median(runs)
    ratio = waiting["PASSIVE"] / waiting["ACTIVE"]
    print(f"5000 small matrix steps on two threads: passive / active waiting {ratio:.2f}")
    for other in others:
        other.kill()


if __name__ == "__main__":
    main()
