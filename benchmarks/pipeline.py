"""The whole CIFAR100 recipe of SMP on ViT-B/16, phase by phase (random weights and images: neither changes the time).

python benchmarks/pipeline.py                  # 20 base epochs, as the recipe
python benchmarks/pipeline.py --epochs 4       # fewer measured epochs; the total scales them to 20 and says so
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import timm
import torch
from common import environment, made_up_task, peak_gb, seconds, synchronize

from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec, fisher_information
from fscil.methods.smp.method import SMP, SMPOptions
from fscil.methods.training import Schedule
from fscil.runtime import Runtime

RECIPE_EPOCHS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="vit_base_patch16_224")
    parser.add_argument("--epochs", type=int, default=RECIPE_EPOCHS)
    parser.add_argument("--per-class", type=int, default=500)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    phases: dict[str, float] = {}
    start = time.perf_counter()
    vit = timm.create_model(arguments.backbone, num_classes=0)
    place = {"device": arguments.device, "size": vit.patch_embed.img_size[0]}
    everything = made_up_task(100, arguments.per_class, **place)
    test = made_up_task(100, min(100, arguments.per_class), seed=1, **place)
    base_images = 60 * arguments.per_class
    base = Task(0, tuple(range(60)), everything.images.select(range(base_images)), everything.labels[:base_images])
    runtime = Runtime.make(device=arguments.device)
    backbone = Backbone(vit, arguments.backbone).prepare(runtime)
    synchronize()
    phases["load"] = time.perf_counter() - start
    small = Task(0, base.classes, base.images.select(range(480)), base.labels[:480])
    method = SMP(backbone, SMPOptions(fisher="sample"), runtime)
    plan = AdapterPlan((AdapterSpec(0.0), AdapterSpec(0.2)), 10, "sparse", Schedule(arguments.epochs, 48, 0.01, 5e-4))
    brief = replace(plan, schedule=Schedule(1, 48, 0.01))
    compile_seconds = seconds(brief.train, backbone, small, runtime)

    trained = []
    phases["train"] = seconds(lambda: trained.append(plan.train(backbone, base, runtime)))
    phases["train"] *= RECIPE_EPOCHS / arguments.epochs
    streams = trained[0]
    compile_seconds += seconds(lambda: fisher_information(backbone, streams, small, 48, "sample", runtime))
    phases["Fisher (per-sample, both sets)"] = seconds(lambda: setattr(method, "lora", method._merge(streams, base)))
    compile_seconds += seconds(lambda: method.features(small.images))
    method.trained_rows = streams.rows[-1]
    method.count_classes(base)
    phases["features and statistics of base images"] = seconds(method.describe, base)
    phases["test features"] = seconds(method.features, test.images)
    sessions = []
    for number in range(arguments.sessions):
        labels = torch.arange(60 + 5 * number, 65 + 5 * number).repeat_interleave(5)
        positions = torch.cat([torch.arange(5) + int(label) * arguments.per_class for label in labels[::5]])
        task = Task(number + 1, tuple(labels[::5].tolist()), everything.images.select(positions), labels)
        if number == 0:  # pay for compilation at the new batch sizes on a copy of the state
            state = {name: tensor.clone() for name, tensor in method.state().items()}
            compile_seconds += seconds(method.learn, task)
            method.load_state(state)
        sessions.append(seconds(method.learn, task))
    closed = SMP(backbone, SMPOptions(calibration="closed_form"), runtime)
    closed.adopt(
        streams.select(1), Task(0, base.classes, base.images.select(range(0, base_images, 50)), base.labels[::50])
    )
    closed_seconds = []
    for number in range(4):
        labels = torch.arange(60 + 5 * number, 65 + 5 * number).repeat_interleave(5)
        positions = torch.cat([torch.arange(5) + int(label) * arguments.per_class for label in labels[::5]])
        closed_seconds.append(
            seconds(
                closed.learn, Task(number + 1, tuple(labels[::5].tolist()), everything.images.select(positions), labels)
            )
        )
    phases[f"{len(sessions)} few-shot sessions (MPCC, 6,500 views each)"] = sum(sessions)
    print(
        f"{environment()}; {arguments.backbone}; {base_images} base images, "
        f"{arguments.epochs} epochs measured; peak {peak_gb():.1f} GB"
    )
    print("| phase | seconds |\n|---|---|")
    for name, value in phases.items():
        scaled = (
            f" (scaled from {arguments.epochs} epochs)" if name == "train" and arguments.epochs != RECIPE_EPOCHS else ""
        )
        print(f"| {name}{scaled} | {value:.1f} |")
    print(f"| total, compilation apart | {sum(phases.values()):.1f} |")
    print(f"| compilation and graph capture | {compile_seconds:.1f} |")
    epoch = phases["train"] / RECIPE_EPOCHS
    print(
        f"one epoch {epoch:.2f} s; Fisher = {phases['Fisher (per-sample, both sets)'] / epoch:.2f} epochs; "
        f"session {sum(sessions) / len(sessions):.2f} s on average; closed form {min(closed_seconds[1:]):.3f} s"
    )


if __name__ == "__main__":
    main()
