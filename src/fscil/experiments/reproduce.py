"""Every table and figure of the paper: which runs it needs, and how it is made of them. Our own method's: `beyond`.

Runs that several of them need are made once (they are the same cells of one grid), and so are adapter sets and base
models that different runs share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.config import RunConfig, resolve
from fscil.errors import UserError, nearest
from fscil.evaluation import paper
from fscil.evaluation.limits import changes
from fscil.strict import flatten, merge, parse_setting
from fscil.text import file_name

if TYPE_CHECKING:
    from fscil.evaluation.tables import Table

MARGINS = (0.05, 0.10, 0.15, 0.20, 0.25)
SHOTS = (1, 5, 10, 20)
SEEDS = 3
NAMES = {"data.limit": "images per base class and per class to test on"}  # settings whose own name says too little
SECOND_BACKBONE = {"glyphs": "glyph_vit_b"}  # other datasets: the paper's
PAPER_SECOND_BACKBONE = "vit_base_patch16_224.augreg_in21k"

Groups = Mapping[str, Sequence[Mapping[str, Any]]]  # row label -> results of its seeds
Panels = Mapping[str, Groups]  # dataset -> rows
Make = Callable[[Panels, str], dict[str, Any]]  # (results, stamp) -> tables and charts by name


@dataclass(frozen=True)
class Variant:
    """A row of a table or a point of a figure: a method and what is set differently."""

    method: str
    settings: tuple[str, ...] = ()
    second_backbone: bool = False
    fast: tuple[str, ...] = ()  # settings of a quick look (--fast, --limit), where the usual ones take minutes each


@dataclass(frozen=True)
class Experiment:
    """A table or figure, of the paper or of `beyond`."""

    title: str
    variants: Mapping[str, Variant]  # by label
    make: Make = field(repr=False)


# ---- how each is made ----------------------------------------------------------------------------------------------


def per_dataset(make: Callable[[str, Groups], Table]) -> Make:
    """One table for each dataset."""

    def make_all(panels: Panels, stamp: str) -> dict[str, Any]:
        from fscil.evaluation.versions import code_notes
        from fscil.experiments.comparison import provenance

        made = {}
        for dataset, groups in panels.items():
            table = make(dataset, groups)
            results = [result for members in groups.values() for result in members]
            notes = [*table.notes, provenance(results), *code_notes(groups)]
            made[f"-{dataset}"] = replace(table, notes=notes, stamp=stamp)
        return made

    return make_all


def figure(draw: Callable[[dict[str, Any], str], Any]) -> Make:
    """One figure with a panel per dataset."""

    def make(panels: Panels, stamp: str) -> dict[str, Any]:
        from fscil.evaluation.tables import dataset_title

        return {"": draw({dataset_title(dataset): groups for dataset, groups in panels.items()}, stamp)}

    return make


def together(*parts: Make) -> Make:
    return lambda panels, stamp: {name: made for part in parts for name, made in part(panels, stamp).items()}


def metrics_table(title: str, metrics: Sequence[str], header: str = "Method", quoted: Callable | None = None) -> Make:
    def make(dataset: str, groups: Groups) -> Table:
        from fscil.evaluation.tables import dataset_title, metric_table

        return metric_table(
            groups, metrics, f"{title} on {dataset_title(dataset)}", header=header, paper_numbers_of=quoted
        )

    return per_dataset(make)


def _main(dataset: str, groups: Groups) -> Table:
    from fscil.evaluation.tables import main_table

    return main_table(groups)


def _leads(panels: Panels, stamp: str) -> dict[str, Any]:
    from fscil.evaluation.tables import difference_table
    from fscil.experiments.comparison import reference_row

    several = {dataset: groups for dataset, groups in panels.items() if len(groups) > 1}
    return {
        f"-{dataset}-differences": replace(difference_table(groups, reference_row(groups)), stamp=stamp)
        for dataset, groups in several.items()
    }


def _curves(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import accuracy_curves

    return accuracy_curves(panels, stamp=stamp)


def _bars(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import base_new_bars

    return base_new_bars(panels, stamp=stamp)


def _merging(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import merging_bars
    from fscil.evaluation.tables import metric, paper_numbers

    quoted = {
        title: {
            label: {
                name: numbers[metric(name).paper]
                for name in ("base", "new", "A_final", "A_avg")
                if metric(name).paper in (numbers := paper_numbers(members[0]))
            }
            for label, members in groups.items()
        }
        for title, groups in panels.items()
    }
    return merging_bars(panels, stamp=stamp, quoted=quoted)


def by_number(groups: Groups) -> dict[float, Sequence[Mapping[str, Any]]]:
    """Rows such as "m = 0.05" by their number."""
    return {float(label.split()[-1]): members for label, members in groups.items()}


def _margins(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import margin_sweep

    return margin_sweep({title: by_number(groups) for title, groups in panels.items()}, stamp=stamp)


def _shots(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import shots

    return shots({title: by_number(groups) for title, groups in panels.items()}, stamp=stamp)


def _tradeoff(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import tradeoff

    return tradeoff({title: by_number(groups) for title, groups in panels.items()}, stamp=stamp)


def _fisher(panels: Panels, stamp: str) -> Any:
    from fscil.evaluation.figures import fisher

    return fisher({title: groups["SMP"] for title, groups in panels.items()}, stamp=stamp)


def _quoted_shots(label: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's number of a row that the label, not the configuration, gives (its default of 5 may be unwritten)."""
    found = paper.SHOTS.get(result["config"]["dataset"], {}).get(int(label.split()[-1]))
    return {} if found is None else {"A_final": found.final, "A_avg": found.average}


# ---- the experiments -----------------------------------------------------------------------------------------------


def _titles(*methods: str, second_backbone: bool = False) -> dict[str, Variant]:
    from fscil.registry import METHODS

    return {METHODS[method].title: Variant(method, second_backbone=second_backbone) for method in methods}


def _margin_rows(method: str, margins: Sequence[float]) -> dict[str, Variant]:
    return {f"m = {m:g}": Variant(method, (f"options.margin={m:g}",)) for m in margins}


_EVERYONE = _titles(*paper.TITLES)
_ABLATION = ("baseline", "miam", "mpcc", "smp")
_END = ("A_final", "A_avg")

EXPERIMENTS: dict[str, Experiment] = {
    "main": Experiment(
        "main table: A_t of each task, A_avg and HAcc of all methods",
        _EVERYONE,
        together(per_dataset(_main), _leads),
    ),
    "curves": Experiment("accuracy curves of all methods", _EVERYONE, figure(_curves)),
    "base-new": Experiment(
        "base and new accuracy of all methods after the last task",
        _EVERYONE,
        together(figure(_bars), metrics_table("Accuracy of base and new classes", ("base", "new", "hacc"))),
    ),
    "ablation": Experiment(
        "ablation of MIAM and MPCC", _titles(*_ABLATION), metrics_table("Ablation of MIAM and MPCC", (*_END, "hacc"))
    ),
    "ablation-backbone": Experiment(
        "the same ablation with another backbone",
        _titles(*_ABLATION, second_backbone=True),
        metrics_table("Ablation of MIAM and MPCC, second backbone,", (*_END, "hacc")),
    ),
    "merging": Experiment(
        "effect of merging the two adapter sets",
        {"m = 0": Variant("single_m0"), "m = 0.2": Variant("single_m02"), "merged": Variant("miam")},
        together(figure(_merging), metrics_table("Effect of merging", ("base", "new", *_END), "Adapters")),
    ),
    "margins": Experiment(
        "margin sweep: the same m in MIAM and MPCC",
        _margin_rows("smp", MARGINS),
        together(figure(_margins), metrics_table("Effect of the margin", (*_END, "hacc"), "Margin", lambda *_: {})),
    ),
    "shots": Experiment(
        "number of shots: 1, 5, 10, 20",
        # 5 is every dataset's default: leaving it unwritten makes it the same run as in the other tables
        {f"K = {shots}": Variant("smp", () if shots == 5 else (f"data.shots={shots}",)) for shots in SHOTS},
        together(
            figure(_shots), metrics_table("Effect of the number of shots", (*_END, "hacc"), "Shots", _quoted_shots)
        ),
    ),
    "bias": Experiment(
        "FNR and FPR without and with MPCC",
        {"Without MPCC": Variant("miam"), "With MPCC": Variant("smp")},
        metrics_table("False negative and false positive rates (%)", ("fnr", "fpr"), "Setting"),
    ),
    "calibration": Experiment(
        "margin of the calibration",
        {
            "No calibration": Variant("miam"),
            "Calibration, m = 0": Variant("smp_no_margin"),
            "Calibration, m = 0.2": Variant("smp"),
        },
        metrics_table("Margin of the classifier calibration", (*_END, "hacc"), "Setting"),
    ),
    "fisher": Experiment(
        "Fisher magnitudes and merging weights, layer by layer", {"SMP": Variant("smp")}, figure(_fisher)
    ),
    "tradeoff": Experiment(
        "introduction: base against new accuracy as the margin of one adapter set grows",
        {
            "m = 0": Variant("single_m0"),
            **_margin_rows("single_m02", MARGINS),
        },
        together(
            figure(_tradeoff), metrics_table("One adapter set, prototypes,", ("base", "new"), "Margin", lambda *_: {})
        ),
    ),
}


def choose(names: Sequence[str]) -> dict[str, Experiment]:
    """Experiments by name; "all" is all of the paper, "beyond" all about our own method."""
    from fscil.experiments.beyond import BEYOND

    groups: dict[str, Mapping[str, Experiment]] = {"all": EXPERIMENTS, "beyond": BEYOND}
    single = {**EXPERIMENTS, **BEYOND}
    chosen: dict[str, Experiment] = {}
    for name in names:
        known = [*groups, *single]
        if name not in known:
            raise UserError(f'unknown table or figure "{name}".{nearest(name, known)} Known: {", ".join(known)}')
        chosen |= groups.get(name) or {name: single[name]}
    return chosen


@dataclass(frozen=True)
class Request:
    """Which experiments, on what, and with how much."""

    experiments: Mapping[str, Experiment]
    datasets: Sequence[str]
    seeds: Sequence[int]
    fast: bool = False
    settings: Sequence[str] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)  # of `config.resolve`, as the command line gives them
    second_backbone: str | None = None
    second_weights: str | None = None

    def __post_init__(self) -> None:
        from fscil.experiments.comparison import refuse_apart

        chosen = merge(*map(parse_setting, self.settings))
        refuse_apart(chosen, "the table")
        for key, value in flatten(chosen).items():
            for name, experiment in self.experiments.items():
                rows = [self._own_settings(variant) for variant in experiment.variants.values()]
                if any(key in row for row in rows) and any(row.get(key) != value for row in rows):
                    raise UserError(
                        f'--set {key}={value}: rows of "{name}" say this setting themselves; leave it out, or make '
                        "other tables with it"
                    )

    def _own_settings(self, variant: Variant) -> dict[str, Any]:
        """What a row says itself, over the settings of the request."""
        return flatten(merge(*map(parse_setting, variant.settings + self._quick(variant, self.fast))))

    def _quick(self, variant: Variant, fast: bool) -> tuple[str, ...]:
        return variant.fast if fast or self._limit else ()

    def config(self, dataset: str, seed: int, variant: Variant, fast: bool | None = None) -> RunConfig:
        flags = dict(self.flags)
        if variant.second_backbone:
            flags["backbone"] = self.second_backbone or SECOND_BACKBONE.get(dataset, PAPER_SECOND_BACKBONE)
            flags["weights"] = self.second_weights
        fast = self.fast if fast is None else fast
        settings = [*self.settings, *variant.settings, *self._quick(variant, fast)]
        return resolve(variant.method, dataset, None, settings, fast, seed=seed, **flags)

    @property
    def _limit(self) -> int | None:
        return (self.flags.get("data") or {}).get("limit")

    def variants(self) -> list[Variant]:
        return list(dict.fromkeys(v for experiment in self.experiments.values() for v in experiment.variants.values()))

    def configs(self) -> list[RunConfig]:
        """All runs, seed by seed."""
        return [self.config(d, seed, v) for d in self.datasets for seed in self.seeds for v in self.variants()]

    def stamp(self, experiment: Experiment) -> str:
        """What was reduced, for everything that is made of it; empty when nothing was."""
        limit = self._limit
        if not (self.fast or self.settings or limit):
            return ""
        said = []
        if self.fast:
            changed: dict[str, dict[str, None]] = {}
            for dataset in self.datasets:
                for variant in experiment.variants.values():
                    full, fast = (self.config(dataset, self.seeds[0], variant, fast=how) for how in (False, True))
                    for key, before, after in changes(full, fast):
                        said_so = f"{after} instead of {before}" if before != "null" else after
                        name = NAMES.get(key) or key.rpartition(".")[2]
                        changed.setdefault(name, {})[said_so] = None
            parts = [f"{len(self.seeds)} seed{'s' * (len(self.seeds) > 1)} instead of {SEEDS}"]
            parts = (parts if len(self.seeds) < SEEDS else []) + [
                f"{key} {' or '.join(v)}" for key, v in changed.items()
            ]
            said.append(f"Reduced by --fast: {'; '.join(parts)}.")
        said += [f"Set: {', '.join(self.settings)}."] if self.settings else []
        said += [f"Limited to {limit} images per class."] if limit else []
        quick = dict.fromkeys(text for variant in experiment.variants.values() for text in variant.fast)
        said += [f"Quick: {', '.join(quick)}."] if quick and limit and not self.fast else []
        return " ".join(said)


def make_artefacts(
    request: Request, results: Mapping[str, Mapping[str, Any]], folder: Path
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Make and write every table and figure whose runs are among `results` (by cell name).

    Returns the tables and charts by experiment and name, and a line for everything that could not be made whole.
    """
    from fscil.evaluation.rendering import write_table
    from fscil.evaluation.tables import Table
    from fscil.experiments.grid import cell_name

    made, problems = {}, []
    for name, experiment in request.experiments.items():
        panels: dict[str, dict[str, list]] = {}
        missing = []
        for dataset in request.datasets:
            for label, variant in experiment.variants.items():
                cells = [cell_name(request.config(dataset, seed, variant)) for seed in request.seeds]
                found = [results[cell] for cell in cells if cell in results]
                if found:
                    panels.setdefault(dataset, {})[label] = found
                missing += [cell for cell in cells if cell not in results]
        if missing:
            problems.append(f"{name}: {len(missing)} of its runs are missing ({missing[0]}, …)")
        if not panels:
            continue
        stamp = request.stamp(experiment)
        try:
            parts = experiment.make(panels, stamp)
        except UserError as error:
            problems.append(f"{name}: not made: {error}")
            continue
        made[name] = parts
        for suffix, part in parts.items():
            if isinstance(part, Table):
                write_table(part, folder / file_name(f"{name}{suffix}"))
            else:
                part.save(folder / file_name(f"{name}{suffix}"))
    return made, problems


def write_index(request: Request, made: Mapping[str, Mapping[str, Any]], folder: Path) -> Path:
    """One page with every table and figure."""
    from fscil.evaluation.rendering import render
    from fscil.evaluation.tables import Table, dataset_title
    from fscil.files import atomic_write

    titles = ", ".join(dataset_title(dataset) for dataset in request.datasets)
    lines = [f"# Tables and figures on {titles}", ""]
    for name, parts in made.items():
        experiment = request.experiments[name]
        lines += [f"## {experiment.title[0].upper()}{experiment.title[1:]}", "", f"`fscil reproduce {name}`", ""]
        for suffix, part in parts.items():
            if isinstance(part, Table):
                lines += [render(part, "markdown"), ""]
            else:
                lines += [f"![{experiment.title}]({name}{suffix}.png)", ""]
                lines += [part.stamp, ""] if part.stamp else []
    atomic_write(folder / "index.md", "\n".join(lines).rstrip() + "\n")
    return folder / "index.md"
