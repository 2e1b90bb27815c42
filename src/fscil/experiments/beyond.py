"""`fscil reproduce beyond`: the tables of CHORD, our own method, in the manner of the paper's (docs/methods/chord.md).

Runs that share adapter sets or a base model share them here as well: a table of heads trains each representation once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fscil.experiments.reproduce import (
    SHOTS,
    Experiment,
    Groups,
    Panels,
    Variant,
    by_number,
    figure,
    metrics_table,
    per_dataset,
    together,
)
from fscil.registry import HEADS, METHODS

END = ("A_final", "A_avg", "hacc", "base", "new")
WAYS = (1, 2, 5, 10, 20)
CORRECTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25)
# What a representation is called in the table of heads: g and d are SMP's sets before they are merged.
REPRESENTATIONS = {
    "frozen": "frozen",
    "baseline": "baseline",
    "g": "single_m0",
    "d": "single_m02",
    "merged": "miam",
    "CHORD": "chord",
}
# Heads that solve for thousands of random features, or look at every shot hundreds of times: a quick look makes do with
# fewer.
FEWER = {
    "mpcc": ("head.views=2",),
    **{name: ("head.projections=500",) for name in ("ranpac", "ranpac_balanced", "c_ranpac")},
    "klda": ("head.dimensions=500", "head.ensemble=2"),
}

ABLATION: dict[str, tuple[str, ...]] = {
    "CHORD": (),
    "without the trained heads": ("options.trained=null",),
    "without frozen features": ("options.frozen=false",),
    "spaces weighed alike": ("options.tight=1.0",),
    "margins 0 and 0.2": ("options.margins=[0.0, 0.2]",),
    "margin 0.2 alone": ("options.margins=[0.2]",),
    "margin -0.1 alone": ("options.margins=[-0.1]",),
    "one pass (merged)": ("options.form=merged",),
    "correction 1": ("options.correction=1.0",),
    "correction 0.5": ("options.correction=0.5",),
    "no correction": ("options.correction=0.0",),
    "10 views": ("options.views=10",),
}


def _swept(key: str, values: Sequence[int], usual: int | None = None) -> dict[str, Variant]:
    """CHORD and SMP at each value; what is usual is left unwritten, so that it is the same run as in other tables."""
    return {
        f"{METHODS[method].title}, {value}": Variant(method, () if value == usual else (f"{key}={value}",))
        for method in ("chord", "smp")
        for value in values
    }


def _heads() -> dict[str, Variant]:
    own = {f"own head on {name}": Variant(method) for name, method in REPRESENTATIONS.items()}
    return own | {
        f"{entry.title} on {name}": Variant(method, (f"head.name={head}",), fast=FEWER.get(head, ()))
        for head, entry in HEADS.items()
        for name, method in REPRESENTATIONS.items()
    }


def _grid(metric_name: str) -> Callable[[str, Groups], Any]:
    """Heads down, representations across, one figure of merit."""

    def make(dataset: str, groups: Groups) -> Any:
        from fscil.evaluation.tables import Column, Row, Table, dataset_title, metric, over_seeds

        read, title = metric(metric_name), metric(metric_name).column.title
        rows: dict[str, dict[str, Any]] = {}
        for label, members in groups.items():
            head, _, name = label.rpartition(" on ")
            value = over_seeds(read.read(result) for result in members)
            if value is not None:
                rows.setdefault(head, {})[name] = value
        columns = {name: Column(name) for name in REPRESENTATIONS}
        note = f"{title}; g and d are SMP's adapter sets (margins 0 and 0.2), merged is +MIAM."
        shown = [Row(head, values) for head, values in rows.items()]
        return Table(f"{title} of heads on representations on {dataset_title(dataset)}", columns, shown, [note], "Head")

    return make


def _named(suffix: str, make: Callable[[Panels, str], dict[str, Any]]) -> Callable[[Panels, str], dict[str, Any]]:
    """The same tables under further names, where an experiment makes several for a dataset."""
    return lambda panels, stamp: {f"{name}-{suffix}": table for name, table in make(panels, stamp).items()}


def _leads(panels: Panels, stamp: str) -> dict[str, Any]:
    """What each part is worth: CHORD's lead over the forms without it, paired by seed."""
    from fscil.evaluation.tables import difference_table

    return {
        f"-{dataset}-differences": replace(difference_table(groups, "CHORD", END), stamp=stamp)
        for dataset, groups in panels.items()
        if "CHORD" in groups and len(groups) > 1
    }


def _curve(panels: Mapping[str, Groups], stamp: str) -> Any:
    from fscil.evaluation.figures import correction_sweep

    return correction_sweep({title: by_number(groups) for title, groups in panels.items()}, stamp=stamp)


def _quotes_nothing(*_: Any) -> dict[str, float]:
    return {}


BEYOND: dict[str, Experiment] = {
    "beyond-ablation": Experiment(
        "CHORD without each of its parts",
        {label: Variant("chord", settings) for label, settings in ABLATION.items()},
        together(metrics_table("Ablation of CHORD", END, "Form", _quotes_nothing), _leads),
    ),
    "beyond-heads": Experiment(
        "every head on every representation",
        _heads(),
        together(*(_named(name, per_dataset(_grid(name))) for name in ("A_avg", "A_final", "hacc"))),
    ),
    "beyond-shots": Experiment(
        "CHORD and SMP by number of shots: 1, 5, 10, 20",
        _swept("data.shots", SHOTS, 5),
        metrics_table("Effect of the number of shots", END, "Method, shots", _quotes_nothing),
    ),
    "beyond-sessions": Experiment(
        "CHORD and SMP by length of a session: 1 to 20 new classes at a time",
        _swept("data.way", WAYS),
        metrics_table("Effect of the number of classes per task", END, "Method, way", _quotes_nothing),
    ),
    "beyond-openset": Experiment(
        "how well classes still to come are told apart",
        {METHODS[method].title: Variant(method) for method in ("simplecil", "baseline", "smp", "closed_form", "chord")},
        metrics_table("Open set", ("auroc", "fpr95", "A_avg"), "Method", _quotes_nothing),
    ),
    "beyond-correction": Experiment(
        "CHORD's correction, on the validation stream",
        {
            f"correction {value:g}": Variant("chord", (f"options.correction={value:g}", "data.validation=true"))
            for value in CORRECTIONS
        },
        together(
            figure(_curve),
            metrics_table("Effect of the correction, validation stream,", END, "Correction", _quotes_nothing),
        ),
    ),
}
