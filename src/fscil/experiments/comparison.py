"""From a grid of methods x datasets x seeds x settings to its tables and figures, and into a Markdown file.

>>> grid = GridSpec(methods=("baseline", "smp"), seeds=(2023, 2024), settings=({"data.shots": 1}, {"data.shots": 5}))
>>> len(grid.configs())
8
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fscil import registry
from fscil.config import RunConfig, refuse_tasks_of_validation, resolve
from fscil.errors import UserError
from fscil.evaluation import paper, tables
from fscil.evaluation.limits import limits_of_rows, with_limits
from fscil.evaluation.results import load_results
from fscil.evaluation.versions import code_notes
from fscil.experiments.api import as_settings
from fscil.experiments.grid import Job, is_done
from fscil.files import atomic_write
from fscil.reading import parse_yaml, read_yaml
from fscil.strict import build, flatten

FIRST_SEED = 2023  # the paper's seeds are 2023, 2024, 2025


@dataclass(frozen=True)
class GridSpec:
    """What is compared with what. In a YAML file these are the keys."""

    methods: tuple[str, ...] = ("smp",)
    datasets: tuple[str, ...] = ("glyphs",)
    seeds: tuple[int, ...] = (FIRST_SEED,)
    settings: tuple[dict[str, Any], ...] = ({},)  # variants: each runs with all methods, datasets and seeds
    set: dict[str, Any] = field(default_factory=dict)  # for all runs
    fast: bool = False

    def __post_init__(self) -> None:
        for name in ("methods", "datasets", "seeds", "settings"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; name at least one")
        for settings in (self.set, *self.settings):
            refuse_apart(settings)
        _refuse_twice(self.set, self.settings)
        object.__setattr__(self, "methods", expand_methods(self.methods))

    def configs(self, **flags: Any) -> list[RunConfig]:
        """The configuration of every run; `flags` are those of `resolve`. Seed by seed, so that a whole table of one
        seed is there first."""
        _refuse_twice(flags, self.settings)
        configs = [
            resolve(method, dataset, None, as_settings(self.set) + as_settings(variant), self.fast, seed=seed, **flags)
            for dataset, seed, method, variant in itertools.product(
                self.datasets, self.seeds, self.methods, self.settings
            )
        ]
        for config, variant in zip(configs, itertools.cycle(self.settings)):
            refuse_tasks_of_validation(config, self.set, variant)
        computed = [config.fingerprint() for config in configs]
        rows = [computed[number :: len(self.settings)] for number in range(len(self.settings))]
        for one, other in itertools.combinations(range(len(rows)), 2):
            if rows[one] == rows[other]:
                _refuse_one_row(self.settings[one], self.settings[other], configs[one], configs[other])
        return configs


def refuse_apart(settings: Mapping[str, Any], method: str = "--methods") -> None:
    """Refuse settings that would have no effect, because something else says them; of the method, `method` does."""
    said_by = {"method": method, "dataset": "--dataset", "seed": "--seeds"}
    for key, value in settings.items():
        if key == "recipe":
            raise UserError(f"recipe={value}: runs take the recipe of their method; fscil run --recipe takes another")
        if key in said_by:
            raise UserError(f"{key}={value} cannot be set: {said_by[key]} says the {key}")


def _refuse_twice(common: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is said for all runs and by a variant as well: one of the two would be passed over."""
    said = flatten(common)
    for key, value in (item for variant in variants for item in flatten(variant).items()):
        if said.get(key) is not None:
            raise UserError(
                f"{key}={said[key]} for all runs (by --set, an option, or `set` of a grid) and {key}={value} of a "
                "variant (by --vary, or `settings` of a grid) exclude one another; leave one of them out"
            )


def _refuse_one_row(one: Mapping[str, Any], other: Mapping[str, Any], made: RunConfig, also: RunConfig) -> None:
    """Say why two variants would be the same runs, of whose configurations the first are `made` and `also`."""
    before, after = flatten(made.to_dict()), flatten(also.to_dict())
    names = [", ".join(f"{key}={value}" for key, value in flatten(variant).items()) for variant in (one, other)]
    for key, value in before.items():
        if value != after.get(key):
            raise UserError(
                f'{key}: runs are told apart by what they compute, and "{names[0]}" and "{names[1]}" compute the same '
                "up to rounding; give each a compare and an --output of its own"
            )
    raise UserError(f'"{names[0]}" and "{names[1]}" are the same runs; leave one out')


def read_grid(path: str | Path) -> GridSpec:
    """A GridSpec from a YAML file; unknown keys are errors."""
    values = read_yaml(path)
    for key in ("methods", "datasets"):  # a single name needs no brackets
        if isinstance(values.get(key), str):
            values[key] = split_names(values[key])
    if isinstance(values.get("seeds"), int):
        values["seeds"] = list(parse_seeds(str(values["seeds"])))
    try:
        return build(GridSpec, values)
    except UserError as error:
        raise UserError(f'"{path}": {error}') from error


def expand_methods(names: Sequence[str]) -> tuple[str, ...]:
    """`all` is every method of the paper's main tables, in its order."""
    expanded = [method for name in names for method in (paper.TITLES if name == "all" else [name])]
    for name in expanded:
        registry.method_entry(name)
    return tuple(dict.fromkeys(expanded))


def split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_seeds(text: str) -> tuple[int, ...]:
    """A number of seeds, or the seeds themselves.

    >>> parse_seeds("3"), parse_seeds("7,2023"), parse_seeds("2024")
    ((2023, 2024, 2025), (7, 2023), (2024,))
    """
    try:
        numbers = tuple(int(part) for part in split_names(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0 or numbers == (0,):
        raise UserError(f'--seeds "{text}": write how many (3 means 2023, 2024, 2025) or which (2023,2024)')
    counted = len(numbers) == 1 and "," not in text and numbers[0] < 100
    return tuple(range(FIRST_SEED, FIRST_SEED + numbers[0])) if counted else tuple(dict.fromkeys(numbers))


def parse_variants(texts: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Every combination of `--vary KEY=VALUE,VALUE`.

    >>> parse_variants(["data.shots=1,5", "options.rank=4"])
    ({'data.shots': 1, 'options.rank': 4}, {'data.shots': 5, 'options.rank': 4})
    """
    axes = []
    for text in texts:
        key, equals, listed = text.partition("=")
        try:
            values = parse_yaml(f"[{listed}]", f"--vary {key}")
        except UserError:
            values = None
        if not (key.strip() and equals and values):
            raise UserError(f'--vary "{text}": write it as KEY=VALUE,VALUE, for example --vary data.shots=1,5,10')
        axes.append([(key.strip(), value) for value in values])
    return tuple(dict(combination) for combination in itertools.product(*axes))


# ---- results -------------------------------------------------------------------------------------------------------


def load_cells(jobs: Sequence[Job]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The results of the cells that are finished, by name, and a line for every one that is damaged."""
    results, problems = {}, []
    for job in jobs:
        if not job.specs and is_done(job):
            try:
                results[job.name] = load_results(job.folder).to_dict()
            except UserError as error:
                problems.append(str(error))
    return results, problems


def load_folders(folders: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Results of finished runs, and a line for every folder that cannot be used."""
    results, problems = [], []
    for folder in folders:
        try:
            result = load_results(folder).to_dict()
            tables.metric("A_avg").read(result), result["sessions"][0]["accuracy"], result["config"]["dataset"]
            results.append(result)
        except UserError as error:
            problems.append(str(error))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            problems.append(f'"{folder / "results.json"}" is damaged: {type(error).__name__} {error}')
    return sorted(results, key=_place), problems


def _place(result: tables.Result) -> int:
    """Where a run stands in tables made of folders: the paper's order, the ablations after it, SMP last."""
    from fscil.evaluation import paper
    from fscil.registry import METHODS

    order = [name for name in (*paper.TITLES, *METHODS) if name != "smp"]
    method = result["config"]["method"]
    return order.index(method) if method in order else len(order)


PARTS = ("", "-details", "-differences")  # of a dataset's tables, in the order they are shown


def comparison_tables(results: Sequence[tables.Result], remarks: Sequence[str] = ()) -> dict[str, tables.Table]:
    """The main table, what is behind its averages, and the paired differences of every dataset, by file name."""
    made: dict[str, tables.Table] = {}
    for dataset, groups in tables.by_dataset(results).items():
        members = [result for seeds in groups.values() for result in seeds]
        of_rows = limits_of_rows(groups)
        title = tables.dataset_title(dataset)
        if len({len(result["sessions"]) for result in members}) == 1:
            table = tables.main_table(groups)
        else:  # tasks cannot be set side by side
            metrics = ("A_0", "A_final", "A_avg", "base", "new", "hacc")
            table = tables.metric_table(groups, metrics, f"Accuracy on {title}, runs of different length")
        table = replace(table, notes=[*table.notes, *remarks, provenance(members), *code_notes(groups)])
        made[dataset] = with_limits(table, of_rows)
        details = tables.metric_table(groups, tables.details(), f"Base and new classes at the last task on {title}")
        if any(session.get("parts_from_shelf") for result in members for session in result["sessions"]):
            shared = "Minutes leave out parts that another run had trained."
            details = replace(details, notes=[*details.notes, shared])
        made[f"{dataset}-details"] = with_limits(details, of_rows)
        if len(groups) > 1:
            reference = reference_row(groups)
            made[f"{dataset}-differences"] = with_limits(tables.difference_table(groups, reference), of_rows, reference)
    return made


def reference_row(groups: tables.Groups) -> str:
    """SMP where it is compared, else the row with the best average."""
    smp = tables.method_title("smp")
    return smp if smp in groups else tables.best_row(groups)


def provenance(results: Sequence[tables.Result]) -> str:
    """With what the numbers were computed, in one sentence."""

    def listed(*path: str) -> str:
        found = []
        for result in results:
            value: Any = result
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            found.append(value)
        return ", ".join(dict.fromkeys(str(value) for value in found if value))

    parts = [f"backbone {listed('config', 'backbone')}", f"fscil {listed('environment', 'fscil')}"]
    device, commit = listed("environment", "device"), short_commits(listed("environment", "commit"))
    parts += [f"on {device}"] if device else []
    parts += [f"commit {commit}"] if commit else []
    return f"Measured with {', '.join(parts)}."


def short_commits(text: str) -> str:
    """Commits by their first seven digits."""
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}", r"\1", text)


# ---- into a document -----------------------------------------------------------------------------------------------


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- fscil:{name} -->", f"<!-- /fscil:{name} -->"


def check_places(path: str | Path, names: Sequence[str]) -> None:
    """Refuse early, before hours of work, a document that has no place for a table."""
    path = Path(path)
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'--markdown "{path}" cannot be read: {error}') from error
    for name in names:
        start, end = _marks(name)
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise UserError(f'--markdown "{path}" has no place for "{name}"; put the lines {start} and {end} into it')


def splice(path: str | Path, blocks: Mapping[str, str]) -> None:
    """Replace what stands between the marks of each block; a file that does not exist is made of the blocks."""
    path = Path(path)
    check_places(path, list(blocks))
    known = path.read_bytes().decode() if path.exists() else "\n\n".join("\n".join(_marks(b)) for b in blocks) + "\n"
    end_of_line = "\r\n" if "\r\n" in known else "\n"
    for name, block in blocks.items():
        start, end = _marks(name)
        before, rest = known.split(start)
        marked = f"{start}\n{block.strip()}\n{end}".replace("\n", end_of_line)
        known = f"{before}{marked}{rest.split(end)[1]}"
    atomic_write(path, known)
