"""Heads on representations, over several draws of the shots, without training anything twice.

    python benchmarks/heads.py --dataset cub200 --data-root DIR --weights FILE --methods 'miam;chord' --heads 'own;mpcc'
    python benchmarks/heads.py --dataset cifar100 --validation --draws 10     # to choose settings on: base data alone
    python benchmarks/heads.py --dataset cub200 --vary data.shots=1,10,20 --vary data.way=1,5,20   # further protocols

Every method learns the base task once per seed (adapter sets are shared through a shelf); then each head learns the
few-shot tasks of every draw. Draw 0 is the protocol's own, so its figures are those of `fscil run --method M --head H`.
`own` is the head that belongs to the method. `--vary` adds protocols that cut the few-shot tasks otherwise, each value
by itself; they share the base task, too. Results are written as they come, a line of JSON each; the table at the end
has means over seeds and draws, and paired differences to the first row.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fscil import registry
from fscil.config import RunConfig, resolve
from fscil.display import LiveDisplay
from fscil.errors import UserError
from fscil.evaluation.tables import metric
from fscil.experiments.grid import LATER
from fscil.experiments.one_base import Draws, OneBase, fresh_head, represented, train_together
from fscil.experiments.run import make_runtime
from fscil.experiments.shelf import DiskShelf
from fscil.methods.represented import Represented
from fscil.strict import flatten, merge, parse_setting

FIGURES = ("A_0", "A_final", "A_avg", "hacc", "base", "new")
OPEN_SET = ("auroc", "fpr95")
TRAINING = ("epochs", "batch_size", "lr", "weight_decay")  # options of `--set` that every method takes over


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
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B", help=f"KEY: {', '.join(LATER)}")
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


def make(text: str, config: RunConfig, settings: list[str], draws: Draws, runtime: Any) -> Represented:
    """The method of "NAME:key=value" by its own recipe, with what `--set` says about training."""
    name, options = split_choice(text)
    known = registry.method_class(name).Options.__dataclass_fields__
    complete = resolve(method=name, dataset=config.dataset, backbone=config.backbone).options
    said = {setting.partition("=")[0].removeprefix("options.") for setting in settings}
    asked = {key: config.options[key] for key in TRAINING if key in known and key in said}
    return represented(name, {**complete, **asked, **options}, draws.backbone, runtime)


def check_settings(settings: list[str]) -> None:
    """Refuse what `--set` would not change, with the option that does."""
    flags = {"method": "--methods", "dataset": "--dataset", "seed": "--seeds", "head": "--heads"}
    flags["runtime.device"] = "--device"
    for key, value in flatten(merge(*map(parse_setting, settings))).items():
        group, _, name = key.partition(".")
        if group == "options" and name not in TRAINING:
            raise UserError(
                f"--set {key}={value}: only {', '.join(TRAINING)} are set for all methods; write it in --methods, "
                f"as NAME:{name}={json.dumps(value)}"
            )
        flag = flags.get(key) or flags.get(group)
        if flag is not None:
            how = f", as NAME:{name}={json.dumps(value)}" if group == "head" else ""
            raise UserError(f"--set {key}={value} has no effect: write it in {flag}{how}")


def protocols(varied: list[str]) -> dict[str, dict[str, Any]]:
    """What each protocol changes in the data's settings, by its name; the first, without a name, changes nothing."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for text in varied:
        key, _, values = text.partition("=")
        if key not in LATER:
            raise UserError(f'--vary "{text}": what leaves the base task as it is can be varied: {", ".join(LATER)}')
        if not values:
            raise UserError(f'--vary "{text}": write it as KEY=A,B, for example data.shots=1,10')
        for value in values.split(","):
            setting = parse_setting(f"{key}={value}")["data"]
            if key == "data.index_files":
                setting["sampler"] = "index_files"
            found[f"{key.removeprefix('data.')}={value}"] = setting
    return found


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """What a line of the output has."""
    summary = result["summary"]
    return {
        "accuracies": summary["accuracies"],
        **{key: summary[key] for key in ("A_0", "A_final", "A_avg")},
        "hacc": summary["hacc"]["group"],
        "base": summary["base_accuracy"],
        "new": summary["new_accuracy"],
        **{key: metric(key).read(result) for key in OPEN_SET},
    }


def main() -> None:
    chosen = arguments()
    check_settings(chosen.set)
    rows: list[dict[str, Any]] = []
    flags = {"backbone": chosen.backbone, "weights": chosen.weights}
    data = {"root": chosen.data_root, "limit": chosen.limit, "validation": chosen.validation or None}
    flags["data"] = {key: value for key, value in data.items() if value is not None} or None
    names = chosen.heads.split(";") if chosen.heads != "all" else ["own", *registry.heads()]
    for seed in map(int, chosen.seeds.split(",")):
        config = resolve(method="smp", dataset=chosen.dataset, seed=seed, settings=chosen.set, **flags)
        config = replace(config, runtime=replace(config.runtime, device=chosen.device))
        runtime = make_runtime(config, LiveDisplay(quiet=True), shelf=DiskShelf(chosen.shelf))
        cuts = protocols(chosen.vary)
        draws = Draws.make(config, chosen.draws, runtime, protocols=list(cuts.values()))
        methods = {text: make(text, config, chosen.set, draws, runtime) for text in chosen.methods.split(";")}
        train_together(list(methods.values()), draws.streams[0])
        for text, method in methods.items():
            began = time.perf_counter()
            base = OneBase(method, draws)
            print(f"seed {seed}, {text}: base task in {time.perf_counter() - began:.1f} s", flush=True)
            for number, (protocol, draw) in enumerate(product(cuts, range(chosen.draws))):
                for head in names:
                    began = time.perf_counter()
                    result = base.examine(fresh_head(method, *split_choice(head)), number)
                    row = {"dataset": config.dataset, "seed": seed, "draw": draw, "method": text, "head": head}
                    row |= {"protocol": protocol, **figures(result), "seconds": time.perf_counter() - began}
                    rows.append(row)
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means, and paired differences to the first row with their standard deviation."""
    for row in rows:
        row["label"] = f"{row['method']} {row['protocol']}".rstrip(), row["head"]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    of = {label: [row for row in rows if row["label"] == label] for label in labels}
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
            parts.append(f"{np.mean(gaps):+.2f}" + (f" ({np.std(gaps, ddof=1):.2f})" if len(gaps) > 1 else ""))
        print(f"{label[0]:32} {label[1]:28} " + " ".join(f"{part:>13}" for part in parts))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
