"""How well pictures of untaught classes are told apart, by score, on one model's features.

    python benchmarks/openset.py                                                   # glyphs
    python benchmarks/openset.py --dataset cifar100 --data-root DIR --backbone deit_tiny_patch16_224.fb_in1k

Fits the base classes, then teaches half of the others from five pictures each; test pictures of classes not taught yet
are the unknown ones. AUROC and FPR@95 compare scores without any threshold; the last columns give each score the
threshold at which it rejects 5 % of the base test pictures. The line above each table is what a user sees.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace

import torch
from common import environment, labelled_pictures, seconds

from fscil.config import DataConfig
from fscil.data.datasets import load_dataset
from fscil.data.manifests import TEST, TRAIN
from fscil.evaluation import openset
from fscil.registry import dataset_entry
from fscil.teachable import unknown
from fscil.teachable.model import Teachable
from fscil.teachable.recognition import Notice


def compare(
    clf: Teachable, features: torch.Tensor, known: torch.Tensor, taught: torch.Tensor
) -> list[tuple[str, float, float, float | None, float]]:
    """One row per score; `known` marks pictures of known classes, `taught` those of classes taught after the base."""
    logits, fit = clf.knowledge_.judge_features(features)
    temperature, space = clf.calibration_["temperature"], clf.knowledge_.space
    scores = {
        "max-softmax": unknown.max_softmax(logits, temperature),
        "energy": unknown.energy(logits, temperature),
        "max logit": unknown.max_logit(logits),
        "max cosine": unknown.max_cosine(features, space.means).cpu(),
        "Mahalanobis": space.scores(features, relative=False).amax(1).cpu(),
        "relative Mahalanobis": replace(space, background=1.0, softness=0.0).fit(features).cpu(),
        f"ours (w = {space.background:g}, {'soft' if space.softness else 'best class'})": fit,
    }
    rows = []
    for name, score in scores.items():
        threshold, others = score[known & ~taught].quantile(0.05), score[~known]
        rows.append(
            (
                name,
                openset.auroc(score[known], others),
                openset.fpr_at_tpr(score[known], others),
                percent(score < threshold, taught),
                percent(score < threshold, ~known),
            )
        )
    return rows


def percent(values: torch.Tensor, chosen: torch.Tensor) -> float | None:
    return float(100 * values[chosen].double().mean()) if bool(chosen.any()) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="glyphs")
    parser.add_argument("--data-root")
    parser.add_argument("--backbone")
    parser.add_argument("--weights")
    parser.add_argument("--split", help="of datasets that have several: official")
    parser.add_argument("--method", default="smp")
    parser.add_argument("--head", default="closed_form")
    parser.add_argument("--train", default="auto")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--per-class", type=int, help="base pictures per class")
    parser.add_argument("--test-per-class", type=int)
    parser.add_argument("--seed", type=int, default=2023)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", Notice)

    dataset = load_dataset(chosen.dataset, DataConfig(root=chosen.data_root, split=chosen.split))
    names = dataset.manifest.class_names
    base, half = dataset.base, dataset.base + (len(names) - dataset.base) // 2
    clf = Teachable(
        backbone=chosen.backbone or dataset_entry(chosen.dataset).backbone,
        weights=chosen.weights,
        method=chosen.method,
        head=chosen.head,
        train=chosen.train,
        options={"epochs": chosen.epochs} if chosen.epochs is not None else None,
        seed=chosen.seed,
    )
    images, labels = labelled_pictures(dataset, TRAIN, range(base), chosen.per_class)
    print(f"{chosen.dataset}, {clf.backbone}, {chosen.method}, head {chosen.head}; {environment()}")
    print(f"fit: {len(labels)} pictures of {base} classes in {seconds(clf.fit, images, labels):.0f} s; {clf.plan_}")
    tests, truth = labelled_pictures(dataset, TEST, range(len(names)), chosen.test_per_class)
    number = torch.tensor([names.index(label) for label in truth])
    features = torch.from_numpy(clf.embed(tests)).to(clf.runtime_.device)
    for classes in (base, half):
        if classes > base:
            shots = labelled_pictures(dataset, TRAIN, range(base, half), 5)
            print(f"\nteach: {half - base} classes x 5 pictures in {seconds(clf.learn, *shots):.2f} s")
        known, taught = number < classes, (number >= base) & (number < classes)
        logits, fit = clf.knowledge_.judge_features(features)
        order = torch.tensor([names.index(name) for name in clf.classes_])
        probabilities = (logits / clf.calibration_["temperature"]).softmax(1)
        column = torch.argsort(order)[number.clamp(max=classes - 1)]  # of the true class, where it is known
        threshold = clf.calibration_["threshold"]
        rejected = fit < threshold if threshold is not None else torch.zeros(len(fit), dtype=torch.bool)
        right = probabilities.argmax(1) == column
        facts = {
            "known classes": classes,
            "accuracy": percent(right, known),
            "of base classes": percent(right, known & ~taught),
            "of taught classes": percent(right, taught),
            "calibration error": openset.calibration_error(probabilities[known], column[known]),
            "base rejected": percent(rejected, known & ~taught),
            "taught rejected": percent(rejected, taught),
            "unknown rejected": percent(rejected, ~known),
        }
        if clf.calibration_["taught_rejection"] is not None:
            facts["taught rejected, as the model says"] = 100 * clf.calibration_["taught_rejection"]
        print("\n" + ", ".join(f"{key} {value:.1f}" for key, value in facts.items() if value is not None))
        print("\n| score | AUROC | FPR@95 | taught rejected | unknown rejected |\n|---|---|---|---|---|")
        for name, *values in compare(clf, features, known, taught):
            print(f"| {name} | {' | '.join('–' if value is None else f'{value:.1f}' for value in values)} |")


if __name__ == "__main__":
    main()
