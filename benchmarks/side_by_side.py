"""Base training of several seeds in one pass (`fscil compare --one-pass`), against one seed after the other.

    python benchmarks/side_by_side.py                                    # DeiT-Tiny and ViT-B/16, three seeds
    python benchmarks/side_by_side.py --device cpu --steps 3 --backbones deit_tiny_patch16_224

SMP's two adapter sets for every seed. An epoch of each form is timed after one that pays for compilation and graph
capture. Images and weights are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch
from common import environment, made_up_task, peak_gb
from train_step import EpochClock

from fscil.backbones.vit import Backbone
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec, Base, train_for_seeds
from fscil.methods.training import Schedule
from fscil.runtime import Runtime

CLASSES = 60


def epoch_seconds(backbone: Backbone, bases: Sequence[Base], plan: AdapterPlan) -> float:
    """Of the last of two epochs."""
    clock = bases[0].runtime.display = EpochClock()
    train_for_seeds(backbone, bases, plan)
    return clock.marks[-1] - clock.marks[-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", default="deit_tiny_patch16_224,vit_base_patch16_224")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    runtime = Runtime.make(device=arguments.device)
    per_class = max(1, arguments.batch * arguments.steps // CLASSES)
    task = made_up_task(CLASSES, per_class, device=str(runtime.device))
    plan = AdapterPlan((AdapterSpec(0.0), AdapterSpec(0.2)), 10, "sparse", Schedule(2, arguments.batch, 0.01, 5e-4))
    what = f"batch {arguments.batch}, two sets a seed, {arguments.seeds} seeds, epochs of {len(task.labels)} images"
    print(f"{environment()}; {what}")
    print("| backbone | one after the other, s | in one pass, s | ratio | peak GB |\n|---|---|---|---|---|")
    for name in arguments.backbones.split(","):
        backbone = Backbone(timm.create_model(name, num_classes=0), name).prepare(runtime)
        first = Base(task, runtime)
        bases = [first, *(first.reseeded(runtime.seed + number) for number in range(1, arguments.seeds))]
        apart = sum(epoch_seconds(backbone, [base], plan) for base in bases)
        if runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        together = epoch_seconds(backbone, bases, plan)
        print(f"| {name} | {apart:.2f} | {together:.2f} | {apart / together:.2f} | {peak_gb():.1f} |", flush=True)


if __name__ == "__main__":
    main()
