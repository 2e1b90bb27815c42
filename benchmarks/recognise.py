"""Recognising on a CPU in float32 and in bf16: how fast, and whether the answers agree.

    python benchmarks/recognise.py                                                 # glyphs
    python benchmarks/recognise.py --dataset cifar100 --data-root DIR --backbone deit_tiny_patch16_224.fb_in1k \\
        --weights FILE --train 10 --test 20

One model of all classes, nothing trained, is saved and opened twice. The two answer the same test pictures in turns, a
batch each, so that whatever else the machine does falls on both alike; CPU seconds, which that changes less, stand
beside the clock's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from common import environment, labelled_pictures

from fscil.config import DataConfig
from fscil.data.datasets import load_dataset
from fscil.data.manifests import TEST, TRAIN
from fscil.registry import dataset_entry
from fscil.teachable.model import Teachable
from fscil.teachable.recognition import Notice

PRECISIONS = ("fp32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="glyphs")
    parser.add_argument("--data-root")
    parser.add_argument("--backbone")
    parser.add_argument("--weights")
    parser.add_argument("--train", type=int, default=10, help="pictures per class to learn from")
    parser.add_argument("--test", type=int, default=20, help="pictures per class to recognise")
    parser.add_argument("--batch", type=int, default=32, help="pictures per turn")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", Notice)
    torch.set_num_threads(chosen.threads)
    dataset = load_dataset(chosen.dataset, DataConfig(root=chosen.data_root))
    backbone = chosen.backbone or dataset_entry(chosen.dataset).backbone
    classes = range(len(dataset.manifest.class_names))
    with tempfile.TemporaryDirectory() as place:
        fitted = Teachable(backbone=backbone, weights=chosen.weights, train="never", device="cpu", precision="fp32")
        fitted.fit(*labelled_pictures(dataset, TRAIN, classes, chosen.train)).save(Path(place) / "model")
        opened = {
            precision: Teachable.load(Path(place) / "model", device="cpu", precision=precision, weights=chosen.weights)
            for precision in PRECISIONS
        }
    pictures, labels = labelled_pictures(dataset, TEST, classes, chosen.test)
    names = {precision: [] for precision in PRECISIONS}
    unknown = {precision: [] for precision in PRECISIONS}
    spent = {precision: np.zeros(2) for precision in PRECISIONS}  # seconds of the clock and of the CPU
    for model in opened.values():
        model.answers(pictures[: chosen.batch])
    for start in range(0, len(pictures), chosen.batch):
        for precision, model in opened.items():
            began = np.array([time.perf_counter(), time.process_time()])
            probabilities, rejected, _ = model.answers(pictures[start : start + chosen.batch])
            spent[precision] += np.array([time.perf_counter(), time.process_time()]) - began
            names[precision] += model.classes_[probabilities.argmax(1)].tolist()
            unknown[precision] += rejected.tolist()
    print(f"{environment()}; {backbone}, {len(classes)} classes, {len(pictures)} test pictures of {chosen.dataset}")
    columns = ("precision", "ms a picture", "CPU ms", "× fp32", "× fp32, CPU", "accuracy", "same label", "same unknown")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for precision in PRECISIONS:
        own, other = names[precision], unknown[precision]
        pairs = (own, labels), (own, names["fp32"]), (other, unknown["fp32"])
        shares = [100 * np.mean(np.array(these) == np.array(those)) for these, those in pairs]
        cells = [*(1000 * spent[precision] / len(pictures)), *(spent["fp32"] / spent[precision]), *shares]
        print(f"| {precision} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
