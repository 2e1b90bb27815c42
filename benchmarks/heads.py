"""Heads on representations, over several draws of the shots, without training anything twice.

    python benchmarks/heads.py --dataset cub200 --data-root DIR --weights FILE --methods 'miam;chord' --heads 'own;mpcc'
    python benchmarks/heads.py --dataset cifar100 --validation --draws 10     # to choose settings on: base data alone

Every method learns the base task once per seed (adapter sets are shared through a shelf); then each head learns the
few-shot tasks of every draw. Draw 0 is the protocol's own, so its figures are those of `fscil run --method M --head H`.
`own` is the head that belongs to the method. Results are written as they come, a line of JSON each; the table at the
end has means over seeds and draws, and paired differences to the first row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fscil import registry
from fscil.backbones.loading import make_backbone
from fscil.config import RunConfig, resolve
from fscil.data.datasets import load_dataset
from fscil.data.stream import Stream, make_stream
from fscil.data.transforms import make_transform
from fscil.display import LiveDisplay
from fscil.evaluation import metrics
from fscil.experiments.run import make_runtime
from fscil.experiments.shelf import DiskShelf
from fscil.heads.base import Head, Lesson
from fscil.methods.making import make_head, make_method
from fscil.methods.represented import Headed, Represented
from fscil.strict import build

FIGURES = ("A_0", "A_final", "A_avg", "hacc", "base", "new")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="glyphs")
    parser.add_argument("--data-root")
    parser.add_argument("--backbone")
    parser.add_argument("--weights")
    parser.add_argument("--methods", default="miam;chord", help="representations; NAME:key=value changes options")
    parser.add_argument("--heads", default="own", help="names of `fscil list heads`, `own`, `all`; NAME:key=value")
    parser.add_argument("--seeds", default="2023")
    parser.add_argument("--draws", type=int, default=1, help="of the shots, for every seed")
    parser.add_argument("--validation", action="store_true", help="the stream cut from the base task")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shelf", default="runs/shelf")
    parser.add_argument("--out", type=Path, default=Path("heads.jsonl"))
    return parser.parse_args()


def split_choice(text: str) -> tuple[str, dict[str, Any]]:
    """ "closed_form:shrinkage=0.5:views=4" as a name and its options, values as JSON."""
    name, *pairs = text.split(":")
    return name, {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def streams(config: RunConfig, draws: int, device: torch.device) -> Iterator[tuple[int, Stream]]:
    """The protocol's stream, and further ones for their shots alone: of these few other images are read."""
    dataset = load_dataset(config.dataset, config.data)
    backbone = make_backbone(config.backbone, config.weights, config.transform.size)
    transform = make_transform(config.transform, backbone)
    for draw in range(draws):
        data = config.data if draw == 0 else replace(config.data, limit=1)
        yield draw, make_stream(dataset, data, transform, config.seed + 1000 * draw, device)


def represented(name: str, options: dict[str, Any], config: RunConfig, backbone: Any, runtime: Any) -> Represented:
    """A method ready for heads of any kind; its own head is there as well."""
    cls = registry.method_class(name)
    known = {field for field in cls.Options.__dataclass_fields__}
    complete = resolve(method=name, dataset=config.dataset, backbone=config.backbone).options
    base = {key: value for key, value in config.options.items() if key in known and key in TRAINING}
    method = make_method(name, {**complete, **base, **options}, backbone, runtime)
    if isinstance(method, Represented):
        return method
    return Headed(method, make_head({"name": "prototypes"}, method.feature_dim, runtime))


TRAINING = ("epochs", "batch_size", "lr", "weight_decay")


def evaluate(head: Head, lessons: list[Lesson], tests: torch.Tensor, stream: Stream) -> dict[str, Any]:
    """All sessions of one head: what `fscil run` would report."""
    labels, sessions = stream.test_labels, []
    for number, lesson in enumerate(lessons):
        (head.fit if number == 0 else head.teach)(lesson)
        seen = stream.seen(number)
        positions = (labels < seen).nonzero().squeeze(1)
        with torch.no_grad():
            top = head.scores(tests[positions.to(tests.device)]).topk(min(5, seen), 1).indices.cpu()
        sessions.append(
            metrics.evaluate_session(labels[positions].numpy(), top.numpy(), stream.base_classes, seen, stream.way)
        )
    summary = metrics.summarise(sessions)
    return {
        "accuracies": summary["accuracies"],
        **{key: summary[key] for key in ("A_0", "A_final", "A_avg")},
        "hacc": summary["hacc"]["group"],
        "base": summary["base_accuracy"],
        "new": summary["new_accuracy"],
    }


def main() -> None:
    chosen = arguments()
    rows: list[dict[str, Any]] = []
    flags = {"backbone": chosen.backbone, "weights": chosen.weights}
    data = {"root": chosen.data_root, "limit": chosen.limit, "validation": chosen.validation or None}
    flags["data"] = {key: value for key, value in data.items() if value is not None} or None
    names = chosen.heads.split(";") if chosen.heads != "all" else ["own", *registry.heads()]
    for seed in map(int, chosen.seeds.split(",")):
        config = resolve(method="smp", dataset=chosen.dataset, seed=seed, settings=chosen.set, **flags)
        config = replace(config, runtime=replace(config.runtime, device=chosen.device))
        runtime = make_runtime(config, LiveDisplay(quiet=True), shelf=DiskShelf(chosen.shelf))
        backbone = make_backbone(config.backbone, config.weights, config.transform.size).prepare(runtime)
        drawn = dict(streams(config, chosen.draws, runtime.device))
        methods = {
            text: represented(*split_choice(text), config, backbone, runtime) for text in chosen.methods.split(";")
        }
        train_together(list(methods.values()), drawn[0])
        for text, method in methods.items():
            began = time.perf_counter()
            method.fit_base(drawn[0].tasks[0])
            base = method.lesson(drawn[0].tasks[0])
            tests = method.features(drawn[0].test)
            print(f"seed {seed}, {text}: base task in {time.perf_counter() - began:.1f} s", flush=True)
            for draw, stream in drawn.items():
                lessons = [replace(base, number=0)]
                for task in stream.tasks[1:]:
                    method.count_classes(task)
                    lessons.append(method.lesson(task))
                for head_text in names:
                    began = time.perf_counter()
                    result = evaluate(fresh_head(method, head_text), lessons, tests, drawn[0])
                    seconds = time.perf_counter() - began
                    row = {"dataset": config.dataset, "seed": seed, "draw": draw, "method": text, "head": head_text}
                    rows.append({**row, **result, "seconds": seconds})
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                method.class_counts = method.class_counts[: stream.base_classes]
                method.tasks_seen = torch.ones_like(method.tasks_seen)
    print_table(rows)


def train_together(methods: list[Represented], stream: Stream) -> None:
    """The adapter sets of all methods that are trained alike, in one pass; they end up on the shelf."""
    inner = [method.inner if isinstance(method, Headed) else method for method in methods]
    plans = [plan for method in inner if (plan := method.adapter_plan(method.options)) is not None]
    for kind in dict.fromkeys((plan.rank, plan.init, plan.schedule) for plan in plans):
        alike = [plan for plan in plans if (plan.rank, plan.init, plan.schedule) == kind]
        specs = tuple(dict.fromkeys(spec for plan in alike for spec in plan.specs))
        replace(alike[0], specs=specs).train(inner[0].backbone, stream.tasks[0], inner[0].runtime)


def fresh_head(method: Represented, text: str) -> Head:
    name, options = split_choice(text)
    if name == "own":
        own = method.head.twin()
        if options:
            own.options = build(type(own.options), {**asdict(own.options), **options}, "head.")
        return own
    return make_head({"name": name, **options}, method.feature_dim, method.runtime)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means, and paired differences to the first row with their standard deviation."""
    labels = list(dict.fromkeys((row["method"], row["head"]) for row in rows))
    of = {label: [row for row in rows if (row["method"], row["head"]) == label] for label in labels}
    print(f"{'method':32} {'head':28} " + " ".join(f"{figure:>8}" for figure in FIGURES) + "      s")
    for label in labels:
        values = [np.mean([row[figure] for row in of[label]]) for figure in FIGURES]
        seconds = np.mean([row["seconds"] for row in of[label]])
        print(f"{label[0]:32} {label[1]:28} " + " ".join(f"{value:8.2f}" for value in values) + f" {seconds:6.2f}")
    print("\npaired differences to the first row, mean (standard deviation)")
    for label in labels[1:]:
        pairs = list(zip(of[label], of[labels[0]], strict=True))
        parts = []
        for figure in FIGURES:
            gaps = [own[figure] - first[figure] for own, first in pairs]
            parts.append(f"{np.mean(gaps):+.2f} ({np.std(gaps):.2f})")
        print(f"{label[0]:32} {label[1]:28} " + " ".join(f"{part:>13}" for part in parts))


if __name__ == "__main__":
    main()
