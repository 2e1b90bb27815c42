"""`fscil tune`: settings of a head, compared on a validation stream with one trained base and many draws of the shots.

The stream is cut from the training images of the base classes (`data.validation`): neither test images nor new classes
of the dataset are read, so what is chosen here may be reported on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from fscil.config import RunConfig
from fscil.data.datasets.common import Dataset
from fscil.display import LiveDisplay
from fscil.errors import UserError
from fscil.evaluation import tables
from fscil.evaluation.limits import reductions
from fscil.experiments.one_base import Draws, OneBase, fresh_head, represented
from fscil.experiments.run import make_runtime
from fscil.experiments.shelf import DiskShelf
from fscil.files import write_json

AS_IT_IS = "as it is"  # the row of the head's own options, which the others are compared with
METRICS = ("A_avg", "A_final", "hacc", "base", "new")
GAINS = METRICS[:3]
OF_WHOLE_RUNS = ("stored_images", "trainable_parameters", "minutes", "seconds", "passes")  # settings share them here


def check_metric(name: str) -> None:
    """Refuse a metric by which settings of a head cannot be told apart."""
    tables.metric(name)
    if name in OF_WHOLE_RUNS:
        usable = ", ".join(known for known in tables.metrics() if known not in OF_WHOLE_RUNS)
        raise UserError(f"--by {name}: settings of a head share one run, so it decides nothing; choose one of {usable}")


def head_settings(variants: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of the head by label, those it has anyway first.

    >>> head_settings([{"head.correction": 0.5}, {"head.correction": 1}])
    {'as it is': {}, 'correction=0.5': {'correction': 0.5}, 'correction=1': {'correction': 1}}
    """
    settings: dict[str, dict[str, Any]] = {AS_IT_IS: {}}
    for variant in variants:
        strange = next((key for key in variant if not key.startswith("head.")), None)
        if strange is not None:
            raise UserError(
                f"--vary {strange}: one trained base serves options of the head alone (head.NAME); for others: "
                f"fscil compare --set data.validation=true --vary {strange}=…"
            )
        if "head.name" in variant:
            raise UserError("--vary head.name: settings of one head are compared; run fscil tune with each --head NAME")
        options = {key.removeprefix("head."): value for key, value in variant.items()}
        settings[", ".join(f"{key}={value}" for key, value in options.items())] = options
    if len(settings) == 1:
        raise UserError("name what to compare: --vary head.NAME=VALUE,VALUE")
    return settings


def tune(
    config: RunConfig,
    settings: Mapping[str, Mapping[str, Any]],
    draws: int = 10,
    shelf: str | Path | None = None,
    display: LiveDisplay | None = None,
    dataset: Dataset | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """The results of every setting on every draw, by label: of the head that `config` chooses, or of the method's own.

    The base is trained once; its adapter sets stay on `shelf`, where a later call finds them.
    """
    display = display or LiveDisplay(quiet=True)
    config = replace(config, data=replace(config.data, validation=True))
    runtime = make_runtime(config, display, **({"shelf": DiskShelf(shelf)} if shelf else {}))
    drawn = Draws.make(config, draws, runtime, dataset)
    method = represented(config.method, config.options, drawn.backbone, runtime)
    head, chosen = head_name(config), {key: value for key, value in config.head.items() if key != "name"}
    for options in settings.values():
        fresh_head(method, head, {**chosen, **options})  # complains about an option before anything is trained
    display.line(f"{config.method} on {config.dataset}, validation stream: {drawn.streams[0].protocol}")
    base = OneBase(method, drawn)
    groups: dict[str, list[dict[str, Any]]] = {}
    for label, options in settings.items():
        for draw in range(draws):
            about = {**config.to_dict(), "seed": f"{config.seed}, draw {draw}"}
            result = base.examine(fresh_head(method, head, {**chosen, **options}), draw)
            groups.setdefault(label, []).append({"config": about, "environment": {}, **result})
        display.line(f"{label}: A_avg {mean(result['summary']['A_avg'] for result in groups[label]):.2f}")
    return groups


def head_name(config: RunConfig) -> str:
    """The head that is tuned, as `--head` says it."""
    return config.head.get("name", "own")


def tuning_tables(groups: tables.Groups, title: str) -> dict[str, tables.Table]:
    """Mean and spread of every setting, and what is gained over the head as it is, paired by draw."""
    draws = len(next(iter(groups.values())))
    note = f"Mean ± standard deviation over {draws} draws of the shots, on a validation stream of base classes alone."
    reduced = reductions(groups[AS_IT_IS][0])
    stamp = f"A quick look: {'; '.join(reduced)}." if reduced else ""
    means = tables.metric_table(groups, METRICS, title, beside_paper=False, header="Setting")
    gains = tables.difference_table(groups, AS_IT_IS, GAINS)
    columns = {**gains.columns, "seeds": replace(gains.columns["seeds"], title="Draws")}
    rows = [replace(row, values={key: _turned(key, value) for key, value in row.values.items()}) for row in gains.rows]
    paired = "Paired by draw; brackets: 95% confidence interval of Student's t over the draws."
    gained = replace(gains, title="Gain over the head as it is", columns=columns, rows=rows, header="Setting")
    return {
        "tune": replace(means, notes=[note], stamp=stamp),
        "tune-gains": replace(gained, notes=[paired], stamp=stamp),
    }


def _turned(key: str, value: tables.Value) -> tables.Value:
    """A lead of the reference as a gain over it."""
    if key == "seeds" or value.interval is None:
        return value if key == "seeds" else replace(value, mean=-value.mean)
    return replace(value, mean=-value.mean, interval=(-value.interval[1], -value.interval[0]))


def best_setting(groups: tables.Groups, by: str = "A_avg") -> str:
    """The label with the best mean; the head as it is where nothing beats it."""
    metric = tables.metric(by)
    measured = {label: tables.over_seeds(map(metric.read, members)) for label, members in groups.items()}
    means = {label: value.mean for label, value in measured.items() if value is not None}
    sign = -1 if metric.column.better == "low" else 1
    return max(means, key=lambda label: (sign * means[label], label == AS_IT_IS))


def save(groups: tables.Groups, config: RunConfig, path: Path) -> None:
    """Everything that was measured, draw by draw."""
    measured = {
        label: [{"draw": result["config"]["seed"], **result["summary"]} for result in members]
        for label, members in groups.items()
    }
    write_json(path, {"config": config.to_dict(), "head": head_name(config), "settings": measured})
