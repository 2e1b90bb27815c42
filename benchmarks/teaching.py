"""How long a person waits: start of `fscil predict`, recognising 100 photos, teaching five classes of five pictures.

    python benchmarks/teaching.py                       # DeiT-Tiny, 60 known classes; made-up photos of 640 x 480

Weights and photos are random: neither changes the time. Known classes are not trained on (that is `pipeline.py`);
every lesson is a new one in a warm process, the first one apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import timm
import torch
from common import environment, peak_gb, seconds
from PIL import Image
from safetensors.torch import save_file

from fscil import FewShotClassifier


def write_photos(folder: Path, count: int, rng: np.random.Generator) -> list[Path]:
    """JPEGs of 640 x 480 with some structure, so that they are as large as photos."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        rough = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        files.append(folder / f"{number}.jpg")
        rough.resize((640, 480), Image.Resampling.BICUBIC).save(files[-1])
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--classes", type=int, default=60, help="known classes, of 20 pictures each")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rng, rows = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        torch.manual_seed(0)
        vit = timm.create_model(arguments.backbone, num_classes=0)
        save_file({name: tensor.contiguous() for name, tensor in vit.state_dict().items()}, place / "vit.safetensors")
        base = [
            (file, f"known {c}") for c in range(arguments.classes) for file in write_photos(place / f"{c}", 20, rng)
        ]
        photos = write_photos(place / "photos", 100, rng)
        for calibration in ("closed_form", "mpcc"):
            clf = FewShotClassifier(
                backbone=arguments.backbone, weights=place / "vit.safetensors", train="never", head=calibration,
                device=arguments.device, verbose=False,
            )  # fmt: skip
            clf.fit(*map(list, zip(*base)))
            clf.save(place / calibration)
            lessons = []
            for lesson in range(4):
                taught = [
                    (file, f"new {lesson} {c}")
                    for c in range(5)
                    for file in write_photos(place / f"n{lesson}{c}", 5, rng)
                ]
                with clf.editing():
                    lessons.append(seconds(clf.learn, *map(list, zip(*taught))))
            rows.append((f"teach 5 classes x 5 pictures, {calibration}, first", lessons[0]))
            rows.append((f"teach 5 classes x 5 pictures, {calibration}, warm", float(np.median(lessons[1:]))))
        clf.predict(photos[:1])
        rows.append(("recognise 100 photos", seconds(clf.predict, photos)))
        command = [sys.executable, "-m", "fscil", "predict", str(place / "closed_form"), str(photos[0])]
        starts = [seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3)]
        rows.append(("fscil predict, one photo, start to end", float(np.median(starts))))
    peak = f"; peak {peak_gb():.1f} GB" if torch.cuda.is_available() else ""
    print(f"{environment()}; {arguments.backbone}, {arguments.classes} known classes{peak}")
    print("| what | seconds |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value:.2f} |")


if __name__ == "__main__":
    main()
