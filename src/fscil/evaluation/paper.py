"""The numbers printed in the SMP paper (arXiv 2508.05094), as data, so that tables can set ours beside them.

Percent, means of three seeds, ViT-B/16 (AugReg, ImageNet-21k then 1k) unless said otherwise. Methods go by their
names in the registry. `BASE_NEW` is the one table not in the paper: base and new accuracy posted by ASP's author.
"""

from __future__ import annotations

from typing import NamedTuple

SOURCE = (
    "the SMP paper (arXiv 2508.05094: ViT-B/16, mean of three seeds); base and new accuracy of its comparators as "
    "posted by ASP's author"
)

TITLES = {
    "icarl": "iCaRL",
    "foster": "Foster",
    "cec": "CEC",
    "fact": "FACT",
    "teen": "TEEN",
    "l2p": "L2P",
    "dualprompt": "DualP",
    "coda": "CodaP",
    "l2p_plus": "L2P+",
    "dualp_plus": "DualP+",
    "codap_plus": "CodaP+",
    "clom": "CLOM",
    "asp": "ASP",
    "adbs": "ADBS",
    "smp": "SMP",
}

PROTOCOL = {"cifar100": (60, 5), "imagenet_r": (100, 10), "cub200": (100, 10)}  # base classes, new classes per task


class MainRow(NamedTuple):
    accuracies: tuple[float, ...]  # A_0 .. A_T
    average: float
    hacc: float

    @property
    def final(self) -> float:
        return self.accuracies[-1]


class Accuracy(NamedTuple):
    final: float
    average: float


class BaseNew(NamedTuple):
    base: float
    new: float


class Bias(NamedTuple):
    fnr: float
    fpr: float


def _main_table(text: str) -> dict[str, MainRow]:
    rows = {}
    for line in text.strip().splitlines():
        accuracies, average, hacc = line.split("|")
        name, *values = accuracies.split()
        rows[name] = MainRow(tuple(map(float, values)), float(average), float(hacc))
    return rows


# Tables "main_cifar", "main_imr", "main_cub": A_0 … A_T | A_avg | HAcc
MAIN: dict[str, dict[str, MainRow]] = {
    "cifar100": _main_table("""
        icarl           94.2 88.9 84.7 80.0 74.9 75.6 71.8 68.2 67.1 | 78.4 | 57.5
        foster          94.2 88.3 81.6 77.0 72.8 67.9 64.4 60.9 58.3 | 73.9 | 11.0
        cec             91.6 88.1 85.3 81.7 80.2 78.0 76.5 74.8 72.6 | 81.0 | 64.1
        fact            91.0 87.2 83.5 79.7 77.2 74.8 73.1 71.6 69.4 | 78.6 | 55.5
        teen            92.9 90.2 88.4 86.8 86.4 86.0 85.8 85.1 84.0 | 87.3 | 81.2
        l2p             92.2 85.2 79.2 73.8 69.2 65.1 61.4 58.1 55.2 | 71.1 | 0.0
        dualprompt      91.8 84.7 78.6 73.3 68.7 64.6 61.1 57.8 54.9 | 70.6 | 0.1
        coda            93.4 86.2 80.1 74.7 70.1 66.0 62.3 59.0 56.0 | 72.0 | 0.0
        l2p_plus        84.7 82.3 80.1 77.5 77.0 76.0 75.6 74.1 72.3 | 77.7 | 68.0
        dualp_plus      86.0 83.6 82.9 80.2 80.6 80.2 80.5 79.0 77.4 | 81.1 | 75.3
        codap_plus      86.0 83.6 81.6 79.2 79.1 78.5 78.3 77.0 75.4 | 79.9 | 72.2
        clom            94.8 92.3 91.3 89.4 89.1 88.2 88.0 87.3 85.9 | 89.6 | 82.7
        asp             92.2 90.7 90.0 88.7 88.7 88.2 88.2 87.8 86.7 | 89.0 | 85.3
        adbs            93.3 91.4 90.4 89.2 89.0 88.4 88.2 87.6 86.5 | 89.3 | 84.7
        smp             94.5 92.7 92.0 90.7 90.7 90.2 90.1 89.6 88.7 | 91.0 | 87.1
    """),
    "imagenet_r": _main_table("""
        icarl           80.6 69.2 59.0 52.8 49.4 45.5 42.8 42.3 40.5 40.1 39.4 | 51.0 | 36.1
        foster          85.8 78.8 71.8 67.4 63.1 58.5 55.9 53.8 51.5 49.3 47.0 | 62.1 | 36.8
        cec             79.4 71.9 69.0 64.1 60.4 58.6 56.4 53.2 52.0 50.0 48.3 | 60.3 | 32.6
        fact            79.4 72.5 69.0 63.8 60.1 57.6 54.7 52.2 50.2 48.1 46.0 | 59.4 | 22.3
        teen            84.6 76.7 68.8 67.6 64.3 60.6 58.3 56.1 56.1 54.7 54.9 | 63.9 | 45.4
        l2p             80.4 73.0 67.8 62.3 58.0 55.1 52.0 48.3 45.8 42.9 40.6 | 56.9 | 1.0
        dualprompt      75.6 68.5 63.8 58.7 54.7 52.2 49.4 46.0 43.8 41.1 39.0 | 53.9 | 2.7
        coda            82.1 74.4 69.4 64.1 59.8 57.1 53.9 50.5 48.2 45.3 43.2 | 58.9 | 6.5
        l2p_plus        73.9 70.9 69.3 65.9 64.0 62.6 60.1 59.5 59.0 58.2 56.8 | 63.7 | 52.0
        dualp_plus      71.5 69.0 69.0 67.4 66.6 65.9 64.1 64.0 64.0 63.4 62.5 | 66.1 | 61.6
        codap_plus      74.4 69.3 67.7 63.7 62.0 61.3 58.5 58.2 57.5 54.7 55.3 | 62.0 | 54.5
        clom            88.0 84.5 83.6 80.5 79.0 78.1 76.6 75.9 75.5 74.6 73.2 | 79.0 | 70.2
        asp             83.3 80.4 79.6 77.0 75.6 74.7 73.0 72.1 71.9 70.9 69.7 | 75.3 | 67.0
        adbs            85.2 83.0 82.7 80.6 79.5 78.8 77.4 76.7 76.6 76.0 75.0 | 79.2 | 73.6
        smp             87.6 85.1 84.6 82.3 81.1 80.4 79.2 78.7 78.5 77.9 76.7 | 81.1 | 75.1
    """),
    "cub200": _main_table("""
        icarl           92.4 82.3 71.7 62.9 64.6 62.9 60.8 60.3 58.4 55.7 58.9 | 66.4 | 56.4
        foster          93.0 86.4 80.4 74.5 72.9 69.3 68.5 66.0 65.9 65.0 63.4 | 73.2 | 58.8
        cec             84.8 82.5 81.4 78.5 79.3 77.8 77.4 77.6 77.2 76.9 76.8 | 79.1 | 76.2
        fact            87.3 84.2 82.1 78.1 78.4 76.3 75.4 75.5 74.4 74.1 73.9 | 78.2 | 72.0
        teen            89.0 86.5 85.9 83.3 83.3 82.2 82.1 80.4 80.5 80.1 80.6 | 83.1 | 80.2
        l2p             87.8 81.3 74.2 68.9 63.4 59.2 55.8 51.9 49.0 46.3 44.3 | 62.0 | 3.3
        dualprompt      88.9 82.6 75.3 69.6 64.5 60.4 56.8 53.0 50.0 47.5 45.5 | 63.1 | 5.0
        coda            89.9 83.1 75.8 70.2 65.1 61.0 57.5 53.7 50.7 48.3 46.2 | 63.8 | 5.7
        l2p_plus        82.4 81.2 79.0 76.8 76.2 74.7 74.1 74.1 72.7 73.0 73.6 | 76.2 | 73.0
        dualp_plus      83.5 82.2 80.9 79.5 78.6 77.0 76.3 77.0 75.7 76.1 76.5 | 78.5 | 76.3
        codap_plus      79.6 78.1 76.4 75.6 75.0 73.1 72.5 72.8 72.0 72.4 72.9 | 74.6 | 72.5
        clom            91.4 90.1 88.6 87.4 87.3 85.7 85.7 86.0 85.1 85.4 85.8 | 87.1 | 85.4
        asp             87.1 86.0 84.9 83.4 83.6 82.4 82.6 83.0 82.6 83.0 83.5 | 83.8 | 83.4
        adbs            87.6 85.6 84.7 83.5 83.1 81.8 82.1 82.4 81.6 82.2 82.7 | 83.4 | 82.8
        smp             89.8 89.2 87.8 86.9 87.2 85.9 86.1 86.5 85.7 86.2 86.6 | 87.1 | 86.4
    """),
}

# Table "abla" (A_final, A_avg) and the same with the ImageNet-21k ViT, table "abla_i21k"
ABLATION: dict[str, dict[str, Accuracy]] = {
    "cifar100": {
        "baseline": Accuracy(87.4, 90.0),
        "miam": Accuracy(88.1, 90.7),
        "mpcc": Accuracy(88.3, 90.5),
        "smp": Accuracy(88.7, 91.0),
    },
    "imagenet_r": {
        "baseline": Accuracy(71.7, 77.7),
        "miam": Accuracy(75.8, 80.6),
        "mpcc": Accuracy(72.9, 78.2),
        "smp": Accuracy(76.7, 81.1),
    },
    "cub200": {
        "baseline": Accuracy(84.2, 84.8),
        "miam": Accuracy(85.3, 86.1),
        "mpcc": Accuracy(85.2, 85.5),
        "smp": Accuracy(86.6, 87.1),
    },
}
ABLATION_21K: dict[str, dict[str, Accuracy]] = {
    "cifar100": {
        "baseline": Accuracy(87.7, 90.3),
        "miam": Accuracy(88.4, 91.0),
        "mpcc": Accuracy(88.6, 90.7),
        "smp": Accuracy(89.2, 91.4),
    },
    "imagenet_r": {
        "baseline": Accuracy(69.5, 76.4),
        "miam": Accuracy(74.1, 79.6),
        "mpcc": Accuracy(70.6, 76.8),
        "smp": Accuracy(75.1, 80.0),
    },
    "cub200": {
        "baseline": Accuracy(84.9, 85.3),
        "miam": Accuracy(85.6, 86.2),
        "mpcc": Accuracy(85.6, 85.7),
        "smp": Accuracy(87.0, 87.1),
    },
}

# Figure "f_balance": base and new accuracy at the last session, as its text states them
MERGING: dict[str, dict[str, BaseNew]] = {
    "cifar100": {
        "single_m0": BaseNew(92.5, 81.1),
        "single_m02": BaseNew(93.5, 73.8),
        "miam": BaseNew(93.4, 80.2),
    },
    "imagenet_r": {
        "single_m0": BaseNew(85.3, 63.8),
        "single_m02": BaseNew(87.4, 59.5),
        "miam": BaseNew(86.9, 64.4),
    },
}

# Table "shot_size", SMP by number of shots
SHOTS: dict[str, dict[int, Accuracy]] = {
    "cifar100": {1: Accuracy(79.3, 85.9), 5: Accuracy(88.7, 91.0), 10: Accuracy(89.7, 91.7), 20: Accuracy(90.2, 92.0)},
    "imagenet_r": {
        1: Accuracy(65.2, 74.2),
        5: Accuracy(76.7, 81.1),
        10: Accuracy(78.8, 82.3),
        20: Accuracy(79.4, 82.8),
    },
    "cub200": {1: Accuracy(77.0, 81.4), 5: Accuracy(86.6, 87.1), 10: Accuracy(88.2, 88.2), 20: Accuracy(88.8, 88.6)},
}

# Table "cab": FNR and FPR without (miam) and with (smp) MPCC
BIAS: dict[str, dict[str, Bias]] = {
    "cifar100": {"miam": Bias(1.7, 15.1), "smp": Bias(1.9, 13.7)},
    "imagenet_r": {"miam": Bias(1.8, 16.3), "smp": Bias(2.0, 15.2)},
    "cub200": {"miam": Bias(0.9, 2.8), "smp": Bias(1.1, 2.0)},
}

# Table "tab_cab_m": no calibration, calibration without margin, with margin
CALIBRATION_MARGIN: dict[str, dict[str, Accuracy]] = {
    "cifar100": {
        "miam": Accuracy(88.1, 90.7),
        "smp_no_margin": Accuracy(88.2, 90.8),
        "smp": Accuracy(88.7, 91.0),
    },
    "imagenet_r": {
        "miam": Accuracy(75.8, 80.6),
        "smp_no_margin": Accuracy(76.2, 80.8),
        "smp": Accuracy(76.7, 81.1),
    },
}

# Base and new accuracy at the last session, posted by ASP's author (FSCIL-ASP issue 5), quoted as posted
BASE_NEW: dict[str, dict[str, BaseNew]] = {
    "cifar100": {
        "icarl": BaseNew(82.2, 44.3),
        "foster": BaseNew(93.2, 5.8),
        "cec": BaseNew(87.2, 50.7),
        "fact": BaseNew(88.7, 40.4),
        "teen": BaseNew(91.3, 73.1),
        "l2p": BaseNew(92.0, 0.0),
        "dualprompt": BaseNew(91.5, 0.0),
        "coda": BaseNew(93.4, 0.0),
        "l2p_plus": BaseNew(82.0, 57.9),
        "dualp_plus": BaseNew(82.5, 68.5),
        "codap_plus": BaseNew(83.1, 63.4),
        "asp": BaseNew(90.9, 80.3),
    },
    "cub200": {
        "icarl": BaseNew(70.5, 47.3),
        "foster": BaseNew(80.3, 46.6),
        "cec": BaseNew(83.7, 70.1),
        "fact": BaseNew(86.3, 61.8),
        "teen": BaseNew(86.1, 75.0),
        "l2p": BaseNew(87.7, 1.7),
        "dualprompt": BaseNew(89.2, 2.6),
        "coda": BaseNew(90.2, 2.9),
        "l2p_plus": BaseNew(80.5, 66.9),
        "dualp_plus": BaseNew(80.9, 72.2),
        "codap_plus": BaseNew(78.1, 67.6),
        "asp": BaseNew(86.6, 80.4),
    },
    "imagenet_r": {
        "icarl": BaseNew(51.0, 28.0),
        "foster": BaseNew(69.9, 25.0),
        "cec": BaseNew(75.1, 20.9),
        "fact": BaseNew(78.4, 13.1),
        "teen": BaseNew(78.2, 32.0),
        "l2p": BaseNew(79.6, 0.5),
        "dualprompt": BaseNew(75.6, 1.6),
        "coda": BaseNew(81.9, 3.4),
        "l2p_plus": BaseNew(65.2, 40.6),
        "dualp_plus": BaseNew(71.1, 54.4),
        "codap_plus": BaseNew(62.1, 48.6),
        "asp": BaseNew(82.8, 56.3),
    },
}


def main_row(dataset: str, method: str) -> MainRow | None:
    """The paper's main-table row, or None where it has none.

    >>> main_row("cifar100", "smp").final
    88.7
    """
    return MAIN.get(dataset, {}).get(method)


def reported(dataset: str, method: str, shots: int = 5, pretraining: str = "1k") -> dict[str, float | tuple]:
    """Everything the paper reports for one configuration, by metric name; {} when it reports nothing.

    >>> reported("cifar100", "miam")
    {'A_final': 88.1, 'A_avg': 90.7, 'base_accuracy': 93.4, 'new_accuracy': 80.2, 'fnr': 1.7, 'fpr': 15.1}
    """
    numbers: dict[str, float | tuple] = {}

    def take(row: NamedTuple | None, **names: str) -> None:
        if row is not None:
            numbers.update({metric: getattr(row, field) for metric, field in names.items()})

    if pretraining == "21k":
        if shots == 5:
            take(ABLATION_21K.get(dataset, {}).get(method), A_final="final", A_avg="average")
        return numbers
    if shots != 5:
        take(SHOTS.get(dataset, {}).get(shots) if method == "smp" else None, A_final="final", A_avg="average")
        return numbers
    take(main_row(dataset, method), accuracies="accuracies", A_final="final", A_avg="average", hacc="hacc")
    for table in (ABLATION, CALIBRATION_MARGIN):
        take(table.get(dataset, {}).get(method), A_final="final", A_avg="average")
    for pairs in (BASE_NEW, MERGING):
        take(pairs.get(dataset, {}).get(method), base_accuracy="base", new_accuracy="new")
    take(BIAS.get(dataset, {}).get(method), fnr="fnr", fpr="fpr")
    return numbers
