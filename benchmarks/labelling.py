"""What a label is worth: accuracy after so many labels that `fscil suggest` asked for, against pictures at random.

    python benchmarks/labelling.py                        # built-in glyphs
    python benchmarks/labelling.py --cifar data/cifar --backbone deit_tiny_patch16_224.fb_in1k --weights FILE

A model starts with some classes of a few pictures each. A pool holds pictures of those and of as many classes that it
does not know, without labels. Each round asks for the labels of some pictures and teaches them; accuracy is that of
pictures of all classes, known or not, so a class nobody has asked about counts as wrong. Nothing is trained.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import environment
from torch import Tensor

from fscil.maths.choosing import choose_diverse, margin_worth
from fscil.teachable.model import Teachable
from fscil.teachable.suggesting import suggest_from

Chooser = Callable[[Teachable, Tensor, int, np.random.Generator], list[int]]


def at_random(clf: Teachable, features: Tensor, count: int, rng: np.random.Generator) -> list[int]:
    return rng.permutation(len(features))[:count].tolist()


def by_margin(clf: Teachable, features: Tensor, count: int, rng: np.random.Generator) -> list[int]:
    """The least certain ones, alike or not, known or not."""
    logits, _ = clf.knowledge_.judge_features(features)
    return margin_worth((logits / clf.calibration_["temperature"]).softmax(1)).topk(count).indices.tolist()


def by_distance(clf: Teachable, features: Tensor, count: int, rng: np.random.Generator) -> list[int]:
    """k-centre: as different from one another as can be."""
    points, width = clf.knowledge_.space.whitened(features)
    return choose_diverse(torch.ones(len(points)), points, 100 * width, count)


def by_suggestion(clf: Teachable, features: Tensor, count: int, rng: np.random.Generator) -> list[int]:
    return [item.position for item in suggest_from(clf.knowledge_, features, count)]


CHOOSERS: dict[str, Chooser] = {
    "random": at_random,
    "margin": by_margin,
    "k-centre": by_distance,
    "suggest": by_suggestion,
}


def glyphs() -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray], np.ndarray]:
    from fscil.data.glyphs import glyph_images

    images, labels, _ = glyph_images("benchmark", "train")
    tests, truth, _ = glyph_images("benchmark", "test")
    return list(images), labels, list(tests), truth


def cifar(root: Path) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray], np.ndarray]:
    from fscil.config import DataConfig
    from fscil.data.datasets.cifar100 import cifar100

    dataset = cifar100(DataConfig(root=str(root)))
    found = {}
    for split in ("train", "test"):
        places = [at for at, entry in enumerate(dataset.manifest.entries) if entry.split == split]
        store, _ = dataset.store(places)
        labels = np.array([dataset.manifest.entries[at].label for at in places])
        found[split] = [store.image(at).numpy() for at in range(len(places))], labels
    return *found["train"], *found["test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, help="folder of CIFAR-100, binary or python version; without it, glyphs")
    parser.add_argument("--backbone", default="glyph_vit_a")
    parser.add_argument("--weights")
    parser.add_argument("--known", type=int, default=20, help="classes at the start; as many more are in the pool")
    parser.add_argument("--shots", type=int, default=5, help="pictures of each at the start")
    parser.add_argument("--pool", type=int, default=20, help="pictures of each known class in the pool,")
    parser.add_argument("--rare", type=int, default=20, help="and of each of the others")
    parser.add_argument("--tests", type=int, default=20, help="pictures of each class to test on")
    parser.add_argument("--ask", type=int, default=20, help="labels per round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    images, labels, tests, truth = cifar(o.cifar) if o.cifar else glyphs()
    curves: dict[str, list[list[float]]] = {name: [] for name in CHOOSERS}
    found: dict[str, list[list[int]]] = {name: [] for name in CHOOSERS}
    began = time.perf_counter()
    for seed in range(o.seeds):
        rng = np.random.default_rng(seed)
        classes = rng.permutation(labels.max() + 1)[: 2 * o.known]
        own = {c: rng.permutation(np.nonzero(labels == c)[0]) for c in classes}
        start = [at for c in classes[: o.known] for at in own[c][: o.shots]]
        sizes = [o.pool] * o.known + [o.rare] * o.known
        pool = np.array([at for c, size in zip(classes, sizes) for at in own[c][o.shots : o.shots + size]])
        judged = [at for c in classes for at in np.nonzero(truth == c)[0][: o.tests]]
        features = {}
        for name, choose in CHOOSERS.items():
            clf = Teachable(backbone=o.backbone, weights=o.weights, train="never", device=o.device)
            clf.fit([images[at] for at in start], [int(labels[at]) for at in start])
            if not features:
                features = {key: torch.from_numpy(clf.embed([source[at] for at in places]))
                            for key, source, places in (("pool", images, pool), ("test", tests, judged))}  # fmt: skip
            right, classes_found = [accuracy(clf, features["test"], truth[judged])], [o.known]
            left = np.arange(len(pool))
            for number in range(o.rounds):
                chosen = choose(clf, features["pool"][left], o.ask, np.random.default_rng([seed, number]))
                asked = pool[left[chosen]]
                clf.learn([images[at] for at in asked], [int(labels[at]) for at in asked], add=True)
                left = np.delete(left, chosen)
                right.append(accuracy(clf, features["test"], truth[judged]))
                classes_found.append(len(clf.classes_))
            curves[name].append(right)
            found[name].append(classes_found)
    print(f"{environment()}; {'CIFAR-100' if o.cifar else 'glyphs'}, {o.backbone}; {time.perf_counter() - began:.0f} s")
    print(f"{o.known} classes of {o.shots} pictures; pool: {o.pool} more of each, {o.rare} each of {o.known} others")
    print(f"| labels | {' | '.join(f'{name} | ± | classes' for name in CHOOSERS)} |")
    print("|---" * (1 + 3 * len(CHOOSERS)) + "|")
    for at in range(o.rounds + 1):
        cells = []
        for name in CHOOSERS:
            values = 100 * np.array(curves[name])[:, at]
            error = values.std(ddof=1) / np.sqrt(o.seeds) if o.seeds > 1 else 0.0
            cells.append(f"{values.mean():.1f} | {error:.1f} | {np.array(found[name])[:, at].mean():.1f}")
        print(f"| {at * o.ask} | {' | '.join(cells)} |")


def accuracy(clf: Teachable, features: Tensor, truth: np.ndarray) -> float:
    """Share of pictures whose likeliest class is theirs; a class that is not known counts as wrong."""
    logits, _ = clf.knowledge_.judge_features(features)
    return float((clf.classes_[logits.argmax(1).numpy()] == truth).mean())


if __name__ == "__main__":
    main()
