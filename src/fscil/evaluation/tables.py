"""Tables over seeds, built from the contents of results.json files; `rendering` writes them in every format.

groups = group_runs(results)                       # one row per method and setting, its seeds together
table = main_table(groups)                         # A_t per task, A_avg, HAcc, the paper's rows beside ours
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from statistics import mean, stdev
from typing import Any

from fscil import registry
from fscil.errors import UserError, nearest
from fscil.evaluation import paper
from fscil.evaluation.metrics import Averaging
from fscil.evaluation.sessions import COLUMNS, SessionColumn
from fscil.strict import flatten

Result = Mapping[str, Any]  # the contents of a results.json
Groups = Mapping[str, Sequence[Result]]  # row label -> results that differ in their seed alone


@dataclass(frozen=True)
class Column:
    title: str
    latex: str = ""
    digits: int = 1
    better: str | None = "high"  # "high", "low", or None for a column without a best value
    signed: bool = False
    detail: bool = False  # its ± may be left out on a narrow screen
    span: str = ""  # neighbours with the same span share a heading in LaTeX


@dataclass(frozen=True)
class Value:
    """A mean over seeds with its standard deviation, or with a confidence interval."""

    mean: float
    spread: float | None = None
    interval: tuple[float, float] | None = None
    bold: bool = False


@dataclass(frozen=True)
class Row:
    label: str
    values: Mapping[str, Value]
    kind: str = "ours"  # "ours", "paper" or "margin"
    limits: str = ""  # how its runs differ from their recipes: it is then marked, and a note of the table says why


@dataclass(frozen=True)
class Table:
    title: str
    columns: Mapping[str, Column]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    header: str = "Method"
    stamp: str = ""  # what was reduced; printed with the notes and in every row of the CSV

    @property
    def remarks(self) -> list[str]:
        """Everything that is said below the table."""
        return [*self.notes, *([self.stamp] if self.stamp else [])]

    def row(self, label: str, kind: str = "ours") -> Row:
        return next(row for row in self.rows if row.label == label and row.kind == kind)


@dataclass(frozen=True)
class Metric:
    """Something to read off a result, and how to show it."""

    column: Column
    read: Callable[[Result], float | None] = field(repr=False)
    paper: str = ""  # its name in `paper.reported`


def _summary(key: str) -> Callable[[Result], float | None]:
    return lambda result: result["summary"].get(key)


def _last(key: str) -> Callable[[Result], float | None]:
    return lambda result: result["sessions"][-1].get(key)


def _open_set(key: str) -> Callable[[Result], float | None]:
    """The mean over the sessions after which classes were still to come."""

    def read(result: Result) -> float | None:
        told = [session["open_set"][key] for session in result["sessions"] if session.get("open_set")]
        return mean(told) if told else None

    return read


def _seconds(result: Result) -> float:
    return sum(session.get("seconds") or 0.0 for session in result["sessions"])


OF_A_RUN: dict[str, Metric] = {
    "A_0": Metric(Column("A_0", "$A_0$"), _summary("A_0")),
    "A_final": Metric(Column("A_final", "$A_{final}$"), _summary("A_final"), "A_final"),
    "A_avg": Metric(Column("A_avg", "$A_{avg}$"), _summary("A_avg"), "A_avg"),
    "PD": Metric(Column("PD", better="low"), _summary("PD")),
    "forgetting": Metric(Column("Forgetting", better="low"), _summary("forgetting")),
    "auroc": Metric(Column("AUROC"), _open_set("auroc")),
    "fpr95": Metric(Column("FPR@95", better="low"), _open_set("fpr95")),
    "stored_images": Metric(Column("Stored images", digits=0, better=None), _last("stored_images")),
    "trainable_parameters": Metric(Column("Trainable", digits=0, better=None), _last("trainable_parameters")),
    "minutes": Metric(Column("Minutes", better=None), lambda result: _seconds(result) / 60),
    "seconds": Metric(Column("Seconds", digits=0, better=None), lambda result: _seconds(result)),
    "passes": Metric(Column("Passes", digits=0, better=None), lambda result: result["environment"].get("passes")),
}


def metrics() -> dict[str, Metric]:
    """Everything a table over seeds can show, by name: figures of a whole run, and those of its last session."""
    known = dict(OF_A_RUN)
    for name, column in COLUMNS.items():
        if column.better:
            known[name] = _at_the_end(column)
        if column.averaged:
            known |= {f"{name}_{how.value}": _at_the_end(column, how) for how in Averaging if how != Averaging.GROUP}
    return known


def _at_the_end(column: SessionColumn, averaging: Averaging = Averaging.GROUP) -> Metric:
    """A session's column, read in the last session."""
    title = column.title if averaging is Averaging.GROUP else f"{column.title} ({averaging.value})"
    return Metric(
        Column(title, column.latex, better=column.better),
        lambda result: column.read(result["sessions"][-1], averaging.value),
        column.paper,
    )


def details() -> list[str]:
    """The metrics behind the averages, in the order `fscil compare` shows them."""
    return [
        *("A_0", "A_final"),
        *(name for name, column in COLUMNS.items() if column.better and column.in_details),
        *("trainable_parameters", "stored_images", "minutes"),
    ]


def metric(name: str) -> Metric:
    """One of `metrics`, by name."""
    known = metrics()
    if name not in known:
        raise UserError(f'unknown metric "{name}"; known: {", ".join(known)}.{nearest(name, known)}')
    return known[name]


# ---------------------------------------------------------------------------------------------- grouping and statistics


def _setting(config: Mapping[str, Any], weights: str | None) -> dict[str, Any]:
    """What sets one row apart from another: everything but the seed, where it was computed and where data lay."""
    apart = {"seed", "recipe", "runtime", "evaluation"}
    kept = {key: value for key, value in {**config, "weights": weights}.items() if key not in apart}
    return {key: value for key, value in flatten(kept).items() if key not in ("data.root", "data.download")}


def _weights_name(result: Result, names: dict[str, str | None]) -> str | None:
    """The name of the file that the backbone's weights came from. `names` has those of the results before, by hash: the
    same weights keep their name wherever they lie, and others of the same name are told apart by their hash."""
    path, backbone = result["config"].get("weights"), (result.get("environment") or {}).get("backbone") or {}
    name, digest = PurePath(path).name if path else None, backbone.get("hash")
    if digest is None:
        return name
    if digest not in names:
        names[digest] = f"{name} {digest[:7]}" if name and name in names.values() else name
    return names[digest]


def group_runs(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Gather results by method and setting, in order of appearance; a method with several settings is labelled by what
    differs between them, as in "SMP (data.shots=1)". Two results of one setting and seed are refused."""
    gathered: dict[tuple, list[Result]] = {}
    settings: dict[tuple, dict] = {}
    weights: dict[str, str | None] = {}
    for result in results:
        flat = _setting(result["config"], _weights_name(result, weights))
        identity = tuple(sorted((key, repr(value)) for key, value in flat.items()))
        gathered.setdefault(identity, []).append(result)
        settings[identity] = flat

    groups = {}
    for identity, members in gathered.items():
        own = settings[identity]
        method, head = own["method"], own.get("head.name")
        rivals = [other for other in settings.values() if (other["method"], other.get("head.name")) == (method, head)]
        differing = [key for key in own if any(other.get(key) != own[key] for other in rivals)]
        # the reader knows which dataset a table is about, so it names a setting only when nothing else does
        shown = [key for key in differing if key != "dataset"] or differing
        label = run_title(method, head)
        if shown:
            label += " (" + ", ".join(f"{key.removeprefix('options.')}={own[key]}" for key in shown) + ")"
        if label in groups:
            label = f"{label} [{method}]"
        seeds = [member["config"].get("seed") for member in members]
        if len(set(seeds)) < len(seeds):
            twice = next(seed for seed in seeds if seeds.count(seed) > 1)
            where = f"{label} on {dataset_title(own['dataset'])}"
            raise UserError(f"{where}: two of the runs have the same settings and seed {twice}; leave one of them out")
        groups[label] = members
    return groups


def by_dataset(results: Iterable[Result]) -> dict[str, dict[str, list[Result]]]:
    """The rows of each dataset's tables: every table, page and document that is made of runs starts here."""
    members: dict[str, list[Result]] = {}
    for result in results:
        members.setdefault(result["config"]["dataset"], []).append(result)
    return {dataset: group_runs(found) for dataset, found in members.items()}


def method_title(method: str) -> str:
    """The name a method carries in tables and figures."""
    entry = registry.methods().get(method) or registry.METHODS.get(method)
    return entry.title if entry else method


def run_title(method: str, head: str | None = None) -> str:
    """A method's name, with that of the head where it is not the method's own: "+MIAM + closed form"."""
    if head is None:
        return method_title(method)
    entry = registry.heads().get(head)
    return f"{method_title(method)} + {entry.title if entry else head}"


def dataset_title(dataset: str) -> str:
    entry = registry.datasets().get(dataset)
    return entry.title if entry else dataset


def over_seeds(values: Iterable[float | None]) -> Value | None:
    """Mean and sample standard deviation (n - 1); None when nothing was measured.

    >>> over_seeds([1.0, 2.0, 3.0])
    Value(mean=2.0, spread=1.0, interval=None, bold=False)
    """
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return Value(mean(measured), stdev(measured) if len(measured) > 1 else None)


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Value:
    """Mean of first - second over paired runs, with a t interval (n - 1 degrees of freedom) from two pairs on."""
    from scipy.stats import t as student

    differences = [a - b for a, b in zip(first, second, strict=True)]
    if not differences:
        raise ValueError("a paired difference needs at least one pair")
    centre = mean(differences)
    if len(differences) == 1:
        return Value(centre)
    spread = stdev(differences)
    half = float(student.ppf((1 + confidence) / 2, len(differences) - 1)) * spread / math.sqrt(len(differences))
    return Value(centre, spread, (centre - half, centre + half))


def _with_best_in_bold(rows: Sequence[Row], columns: Mapping[str, Column]) -> list[Row]:
    """Bold what would be printed as the best of our own rows, ties included."""
    rows = list(rows)
    for key, column in columns.items():
        ours = [row.values[key].mean for row in rows if row.kind == "ours" and key in row.values]
        if column.better is None or len(ours) < 2:
            continue
        best = round((max if column.better == "high" else min)(ours), column.digits)
        for index, row in enumerate(rows):
            if row.kind == "ours" and key in row.values and round(row.values[key].mean, column.digits) == best:
                rows[index] = replace(row, values={**row.values, key: replace(row.values[key], bold=True)})
    return rows


def _margin_row(rows: Sequence[Row], columns: Mapping[str, Column]) -> Row | None:
    """By how much the best of our rows leads the second best, per column."""
    margins = {}
    for key, column in columns.items():
        ours = sorted(row.values[key].mean for row in rows if row.kind == "ours" and key in row.values)
        if column.better is not None and len(ours) > 1:
            margins[key] = Value(ours[-1] - ours[-2] if column.better == "high" else ours[1] - ours[0])
    return Row("Lead over 2nd best", margins, "margin") if margins else None


def best_row(groups: Groups) -> str:
    """The row with the best average accuracy."""
    return max(groups, key=lambda label: mean(result["summary"]["A_avg"] for result in groups[label]))


def _seeds_note(groups: Groups) -> str:
    counts = sorted({len(results) for results in groups.values()})
    if counts == [1]:
        return "One seed."
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean ± standard deviation over {span} seeds."


# --------------------------------------------------------------------------------------------------------------- tables


def main_table(
    groups: Groups,
    averaging: Averaging | str = Averaging.GROUP,
    beside_paper: bool = True,
    extras: Sequence[str] = (),
    title: str | None = None,
) -> Table:
    """The paper's main table: A_t of each task, A_avg and HAcc, with the lead over the second best.

    `extras` appends columns by metric name: "A_final", "base", "stored_images", "trainable_parameters", "minutes"…
    """
    results = [result for members in groups.values() for result in members]
    if not results:
        raise UserError("there are no finished runs to make a table of")
    datasets = sorted({result["config"]["dataset"] for result in results})
    if len(datasets) > 1:
        raise UserError(f"one main table holds one dataset, these runs have several: {', '.join(datasets)}")
    lengths = sorted({len(result["sessions"]) for result in results})
    if len(lengths) > 1:
        raise UserError(f"these runs have {lengths[0]} and {lengths[-1]} sessions; compare runs of equal length")

    columns: dict[str, Column] = {
        f"A_{t}": Column(str(t), detail=True, span="Accuracy $A_t$ in each task (\\%)") for t in range(lengths[0])
    }
    hacc = _at_the_end(COLUMNS["hacc"], Averaging(averaging))
    columns |= {"A_avg": metric("A_avg").column, "hacc": hacc.column}
    columns |= {name: metric(name).column for name in extras}

    def measured(members: Sequence[Result]) -> dict[str, Value]:
        values = {f"A_{t}": over_seeds(r["sessions"][t]["accuracy"] for r in members) for t in range(lengths[0])}
        values["A_avg"] = over_seeds(metric("A_avg").read(r) for r in members)
        values["hacc"] = over_seeds(hacc.read(r) for r in members)
        for name in extras:
            value = over_seeds(metric(name).read(r) for r in members)
            values[name] = value if value is None or metric(name).column.better else replace(value, spread=None)
        return {key: value for key, value in values.items() if value is not None}

    rows, quoted = [], False
    for label, members in groups.items():
        rows.append(Row(label, measured(members)))
        numbers = paper_numbers(members[0]) if beside_paper else {}
        values = {f"A_{t}": Value(a) for t, a in enumerate(numbers.get("accuracies", ())) if f"A_{t}" in columns}
        if not values and "A_final" in numbers:  # ablations: the paper gives the end of the row alone
            values = {f"A_{lengths[0] - 1}": Value(numbers["A_final"])}
        names = {"A_avg": "A_avg", "hacc": "hacc", **{name: metric(name).paper for name in extras}}
        values |= {key: Value(numbers[name]) for key, name in names.items() if name in numbers}
        if values:
            rows.append(Row(label, values, "paper"))
            quoted = True
    margin = _margin_row(rows, {key: column for key, column in columns.items() if key not in extras})
    notes = [_seeds_note(groups)]
    if quoted:
        notes.append('Rows marked "paper" quote the paper, ViT-B/16.')
    return Table(
        title or f"Top-1 accuracy of each task, average and harmonic accuracy on {dataset_title(datasets[0])}",
        columns,
        _with_best_in_bold(rows, columns) + ([margin] if margin else []),
        notes,
    )


def metric_table(
    groups: Groups,
    metrics: Sequence[str] = ("A_final", "A_avg"),
    title: str = "",
    beside_paper: bool = True,
    header: str = "Method",
    paper_numbers_of: Callable[[str, Result], Mapping[str, float]] | None = None,
) -> Table:
    """A table of chosen metrics (ablations, shots, FNR/FPR); the paper's numbers in columns beside ours.

    `paper_numbers_of(label, result)` says what the paper reports for a row; by default it follows from the config.
    """
    look_up = paper_numbers_of or (lambda label, result: paper_numbers(result))
    quoted = {label: look_up(label, members[0]) if beside_paper else {} for label, members in groups.items()}
    columns: dict[str, Column] = {}
    for name in metrics:
        columns[name] = metric(name).column
        if any(metric(name).paper in numbers for numbers in quoted.values()):
            column = columns[name]
            columns[f"{name}_paper"] = replace(
                column, title=f"{column.title} (paper)", latex=f"{column.latex or column.title} (paper)", better=None
            )
    rows = []
    for label, members in groups.items():
        values = {name: over_seeds(metric(name).read(result) for result in members) for name in metrics}
        for name, value in values.items():
            if value is not None and metric(name).column.better is None:  # counts and times need no ±
                values[name] = replace(value, spread=None)
        values |= {
            f"{name}_paper": Value(quoted[label][metric(name).paper])
            for name in metrics
            if metric(name).paper in quoted[label]
        }
        rows.append(Row(label, {key: value for key, value in values.items() if value is not None}))
    return Table(title, columns, _with_best_in_bold(rows, columns), [_seeds_note(groups)], header)


def difference_table(
    groups: Groups,
    reference: str,
    metrics: Sequence[str] = ("A_final", "A_avg", "hacc"),
    confidence: float = 0.95,
) -> Table:
    """How far `reference` leads every other row, paired by seed, with confidence intervals over the seeds."""
    if reference not in groups:
        raise UserError(f'no row "{reference}" to compare with.{nearest(reference, groups)}')

    def by_seed(members: Sequence[Result], name: str) -> dict[Any, float]:
        values = {result["config"].get("seed"): metric(name).read(result) for result in members}
        return {seed: value for seed, value in values.items() if value is not None}

    columns = {name: replace(metric(name).column, digits=2, better=None, signed=True) for name in metrics}
    columns["seeds"] = Column("Common seeds", digits=0, better=None)
    rows = []
    for label, members in groups.items():
        if label == reference:
            continue
        values: dict[str, Value] = {}
        pairs = 0
        for name in metrics:
            mine, theirs = by_seed(groups[reference], name), by_seed(members, name)
            common = sorted(mine.keys() & theirs.keys(), key=str)
            pairs = max(pairs, len(common))
            if common:
                difference = paired_difference([mine[s] for s in common], [theirs[s] for s in common], confidence)
                values[name] = replace(difference, spread=None)
        rows.append(Row(label, {**values, "seeds": Value(pairs)}))
    note = f"Paired by seed; brackets: {confidence:.0%} confidence interval of Student's t, from two common seeds on."
    return Table(f"Lead of {reference} over the others", columns, rows, [note], "Over")


def paper_numbers(result: Result) -> dict:
    """What the paper reports for the configuration of a result; {} when nothing, or when the protocol is another."""
    config = result["config"]
    data = config.get("data") or {}
    base, way = paper.PROTOCOL.get(config["dataset"], (None, None))
    same_protocol = data.get("base") in (None, base) and data.get("way") in (None, way) and data.get("limit") is None
    if not same_protocol or data.get("tasks") is not None or data.get("validation") or config.get("head"):
        return {}
    pretraining = "21k" if (config.get("backbone") or "").endswith("augreg_in21k") else "1k"
    return paper.reported(config["dataset"], config["method"], data.get("shots") or 5, pretraining)
