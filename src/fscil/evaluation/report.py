"""`fscil report`: one or more run folders as a single HTML file that needs no network to open.

write_report(["runs/glyphs-smp-seed2023-1"], "report.html")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fscil.data.shots import read_shots
from fscil.data.uris import data_uri
from fscil.errors import UserError
from fscil.evaluation import figures, tables
from fscil.evaluation.limits import limits, limits_of_rows, reductions, with_limits
from fscil.evaluation.metrics import task_bounds
from fscil.evaluation.pages import heading, identifier, render_page
from fscil.evaluation.rendering import format_value, row_label
from fscil.evaluation.sessions import SessionColumn, columns_of
from fscil.evaluation.versions import code_notes, module_line
from fscil.files import atomic_write, load_tensors
from fscil.strict import build, flatten
from fscil.text import duration, percent

if TYPE_CHECKING:
    from fscil.data.pixels import Pixels
    from fscil.data.stream import Stream

THUMBNAIL = 96  # pixels of the longer side: twice what is shown, for sharp displays
MOST_WITH_IMAGES = 6  # runs in one report; beyond that the page would grow too large
SHOTS_SHOWN, PAIRS_SHOWN, EXAMPLES_SHOWN, HARDEST_SHOWN = 5, 12, 4, 10


def write_report(folders: Sequence[str | Path], out: str | Path, title: str | None = None, images: bool = True) -> Path:
    """Write the report of finished runs to `out`. Images of shots and confusions are shown where the data can be read
    again; `images=False` leaves them out (a page to publish should hold no images of datasets that forbid it)."""
    from markupsafe import Markup

    from fscil.evaluation.results import load_results

    if not folders:
        raise UserError("name at least one run folder to report on")
    results = [load_results(folder).to_dict() for folder in folders]
    no_images = "" if images else "they were not asked for."
    if images and len(results) > MOST_WITH_IMAGES:
        no_images = f"left out of a report on more than {MOST_WITH_IMAGES} runs; a report on this run alone has them."
    runs = []
    for number, (folder, result) in enumerate(zip(folders, results)):
        try:
            runs.append(_describe_run(Path(folder), result, f"run{number + 1}", no_images))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(f'"{Path(folder) / "results.json"}" is damaged: {type(error).__name__} {error}') from error
    comparisons = _compare(results) if len(runs) > 1 else []
    if title is None:
        datasets = list(dict.fromkeys(tables.dataset_title(result["config"]["dataset"]) for result in results))
        title = runs[0]["title"] if len(runs) == 1 else f"{len(runs)} runs on {', '.join(datasets)}"
    # what matplotlib drew is markup; everything else comes from files and is escaped by the template
    for run in runs:
        run.update({key: Markup(run[key]) for key in ("curve", "confusion", "fisher")})
    for part in comparisons:
        part["figures"] = [Markup(figure) for figure in part["figures"]]
    page = render_page(
        "report.html",
        title=title,
        subtitle=runs[0]["subtitle"] if len(runs) == 1 else "Open a run below for its details.",
        runs=runs,
        comparisons=comparisons,
    )
    out = Path(out)
    atomic_write(out, page)
    return out


# -------------------------------------------------------------------------------------------------------- several runs


def _compare(results: Sequence[tables.Result]) -> list[dict[str, Any]]:
    """A table and figures for each dataset that has several runs."""
    parts = []
    for dataset, groups in tables.by_dataset(results).items():
        members = [result for seeds in groups.values() for result in seeds]
        of_rows = limits_of_rows(groups)
        name = tables.dataset_title(dataset)
        shown = []
        if len({len(result["sessions"]) for result in members}) == 1:
            main = tables.main_table(groups, extras=("trainable_parameters", "minutes"))
            shown.append(with_limits(main, of_rows))
        chosen = ("base", "new", "fnr", "fpr", "forgetting", "PD")
        at_the_end = tables.metric_table(groups, chosen, "Base and new classes after the last task")
        shown.append(with_limits(at_the_end, of_rows))
        if len(groups) > 1:
            best = tables.best_row(groups)
            shown.append(with_limits(tables.difference_table(groups, best), of_rows, best))
        shown[0] = replace(shown[0], notes=[*shown[0].notes, *code_notes(groups)])
        charts = {
            f"curves-{dataset}": (figures.accuracy_curves({name: groups}), f"accuracy of each task on {name}"),
            f"bars-{dataset}": (figures.base_new_bars({name: groups}), f"base and new accuracy on {name}"),
        }
        parts.append(
            {
                "dataset": name,
                "tables": [_plain_table(table) for table in shown],
                "figures": [chart.inline_svg(identifier(key), text) for key, (chart, text) in charts.items()],
            }
        )
    return parts


def _plain_table(table: tables.Table) -> dict[str, Any]:
    def cell(value: tables.Value | None, column: tables.Column) -> dict[str, Any]:
        if value and column.detail:  # the figure shows the spread of single tasks
            value = replace(value, spread=None)
        return {"text": format_value(value, column) if value else "", "bold": bool(value and value.bold)}

    return {
        "title": table.title,
        "header": table.header,
        "columns": [heading(column.title) for column in table.columns.values()],
        "rows": [
            {
                "label": row_label(row),
                "kind": row.kind,
                "cells": [cell(row.values.get(key), column) for key, column in table.columns.items()],
            }
            for row in table.rows
        ],
        "notes": list(table.notes),
    }


# ------------------------------------------------------------------------------------------------------------- one run


def _describe_run(folder: Path, result: tables.Result, identifier: str, no_images: str) -> dict[str, Any]:
    """Everything the page shows of one run, as text, numbers and finished pictures."""
    config, stream_facts = result["config"], result["stream"]
    names, base = stream_facts["class_names"], stream_facts["base_classes"]
    counts = np.asarray(result["confusion"], dtype=np.int64)
    gallery = None if no_images else _Gallery(folder, result)
    name = tables.run_title(config["method"], (config.get("head") or {}).get("name"))
    title = f"{name} on {tables.dataset_title(config['dataset'])}"
    date = (result["environment"].get("date") or "")[:10]
    parts = [f"seed {config['seed']}", config["backbone"], folder.name, *([date] if date else []), *reductions(result)]
    merging = ""
    if (result["sessions"][0].get("diagnostics") or {}).get("fisher_norms"):
        chart = figures.fisher({tables.dataset_title(config["dataset"]): [result]})
        merging = chart.inline_svg(f"{identifier}-fisher", "Fisher magnitudes and merging weights")
    return {
        "id": identifier,
        "title": title,
        "limits": "; ".join(limits(result)),
        "subtitle": " · ".join(parts),
        "tiles": _tiles(result),
        "curve": figures.accuracy_curve(result).inline_svg(f"{identifier}-curve", "accuracy after each task"),
        **_session_table(result["sessions"], config.get("evaluation", {}).get("hacc", "group")),
        "matrix": [[_heat(value) for value in row] for row in result["summary"]["accuracy_matrix"]],
        "confusion": figures.confusion_matrix(counts, base).inline_svg(f"{identifier}-confusion", "confusion matrix"),
        "hardest": _hardest(result["sessions"][-1]["per_class"], names, base, stream_facts["way"]),
        "pairs": _confused_pairs(counts, names, gallery),
        "fisher": merging,
        "shots": _shots(folder, gallery),
        "no_images": gallery.reason if gallery else no_images,
        "environment": _key_values({**result["environment"], "modules": module_line([result])}),
        "data": _key_values({key: value for key, value in stream_facts.items() if key != "class_names"}),
        "config": _key_values(config),
    }


_TILE_NAMES = {
    "A_0": "First task",
    "A_final": "Last task",
    "A_avg": "Average of tasks",
    "base": "Base classes",
    "new": "New classes",
}


def _tiles(result: tables.Result) -> list[dict[str, Any]]:
    quoted = tables.paper_numbers(result)
    tiles = []
    for name in ("A_final", "A_avg", "hacc", "A_0", "base", "new", "fnr", "fpr", "forgetting", "minutes"):
        entry = tables.metric(name)
        value = entry.read(result)
        if value is not None:
            tiles.append(
                {
                    "name": _TILE_NAMES.get(name, entry.column.title),
                    "value": f"{value:.1f}" if name == "minutes" else percent(value / 100),
                    "note": f"paper {percent(quoted[entry.paper] / 100)}" if entry.paper in quoted else "",
                    "lead": name in ("A_final", "A_avg"),
                }
            )
    return tiles


def _session_table(sessions: Sequence[Mapping[str, Any]], averaging: str) -> dict[str, Any]:
    """Headings and rows; cells with a `share` are drawn as bars."""
    columns = columns_of(sessions, averaging)
    largest = [max(column.read(session, averaging) or 0 for session in sessions) or 1 for column in columns]

    def cell(column: SessionColumn, most: float, session: Mapping[str, Any]) -> dict[str, Any]:
        value = column.read(session, averaging)
        if value is None:
            return {"text": "–", "share": None}
        return {"text": column.show(value), "share": round(100 * value / most) if column.bar else None}

    rows = [
        [
            {"text": str(number), "share": None},
            {"text": str(session["seen"]), "share": None},
            *(cell(column, most, session) for column, most in zip(columns, largest)),
        ]
        for number, session in enumerate(sessions)
    ]
    total = sum(session.get("seconds") or 0.0 for session in sessions)
    stored = sessions[-1].get("stored_images") or 0
    notes = [f"Accuracies in percent, HAcc averaged by {averaging}; {duration(total)} in all; memory is the peak."]
    if sessions[-1].get("trainable_parameters") is not None:
        notes.append(f"{sessions[-1]['trainable_parameters']:,} trainable parameters, {stored:,} stored images.")
    return {
        "session_headings": [heading(title) for title in ("Task", "Classes", *(column.title for column in columns))],
        "session_rows": rows,
        "session_note": " ".join(notes),
    }


def _heat(value: float | None) -> dict[str, Any]:
    return {"text": "–", "share": 0} if value is None else {"text": f"{value:.1f}", "share": round(0.6 * value)}


def _hardest(per_class: Sequence[float | None], names: Sequence[str], base: int, way: int) -> list[dict[str, Any]]:
    bounds = task_bounds(base, len(per_class), way)
    known = sorted((value, label) for label, value in enumerate(per_class) if value is not None)[:HARDEST_SHOWN]
    return [
        {
            "name": names[label],
            "task": next(task for task, (low, high) in enumerate(bounds) if low <= label < high),
            "accuracy": percent(value / 100),
            "share": round(value),
        }
        for value, label in known
    ]


def _confused_pairs(counts: np.ndarray, names: Sequence[str], gallery: _Gallery | None) -> list[dict[str, Any]]:
    """The off-diagonal cells with most images, each with examples where images can be shown."""
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS_SHOWN]
    pairs = []
    for true, predicted in zip(*np.unravel_index(order, wrong.shape)):
        if wrong[true, predicted] == 0:
            break
        total = counts[true].sum()
        pair = {
            "true": names[true],
            "predicted": names[predicted],
            "count": int(wrong[true, predicted]),
            "total": int(total),
            "percent": f"{100 * wrong[true, predicted] / total:.0f}",
        }
        if gallery is not None and not gallery.reason:
            pair |= {"images": gallery.confused(true, predicted), "reference": gallery.typical(predicted)}
        pairs.append(pair)
    return pairs


def _shots(folder: Path, gallery: _Gallery | None) -> list[dict[str, Any]]:
    """The ledger of the run, class by class, with thumbnails where they can be had."""
    ledger = read_shots(folder / "shots.json")["tasks"] if (folder / "shots.json").is_file() else {}
    tasks = []
    for task, classes in sorted(ledger.items(), key=lambda item: int(item[0])):
        described = []
        for name, listed in classes.items():
            pictures = gallery.shots(int(task), name) if gallery is not None and not gallery.reason else []
            described.append(
                {
                    "name": name,
                    "listed": ", ".join(str(image) for image in listed),
                    "images": pictures,
                    "more": len(listed) - len(pictures),
                }
            )
        tasks.append({"number": task, "classes": described})
    return tasks


def _key_values(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    def text(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(map(text, value)) or "none"
        return "–" if value is None else f"{value:,}" if isinstance(value, int) and abs(value) > 9999 else str(value)

    return [(key, text(value)) for key, value in flatten(values).items()]


# -------------------------------------------------------------------------------------------------------------- images


class _Gallery:
    """Thumbnails of a run's images, as data URIs. `reason` says why there are none, or is empty."""

    def __init__(self, folder: Path, result: tables.Result):
        self.reason = ""
        try:
            self.stream = _rebuild_stream(result)
            self._load_predictions(folder, len(result["sessions"]) - 1)
        except UserError as error:
            self.reason = str(error)

    def _load_predictions(self, folder: Path, session: int) -> None:
        tensors, _ = load_tensors(folder / "predictions" / f"session_{session}.safetensors")
        self.labels, self.positions, top = (tensors[key].numpy() for key in ("labels", "images", "top"))
        self.predicted = top[:, 0]
        known = self.stream.test_labels.numpy()
        if self.positions.max(initial=-1) >= len(known) or (known[self.positions] != self.labels).any():
            raise UserError("the test images found here are not those of the run's predictions.")

    def confused(self, true: int, predicted: int) -> list[str]:
        wanted = (self.labels == true) & (self.predicted == predicted)
        return [_thumbnail(self.stream.test, int(at)) for at in self.positions[wanted][:EXAMPLES_SHOWN]]

    def typical(self, label: int) -> str | None:
        """A test image of a class, one that was recognised if there is any."""
        candidates = self.positions[self.labels == label]
        recognised = self.positions[(self.labels == label) & (self.predicted == label)]
        chosen = recognised if len(recognised) else candidates
        return _thumbnail(self.stream.test, int(chosen[0])) if len(chosen) else None

    def shots(self, task: int, name: str) -> list[str]:
        found = self.stream.tasks[task]
        label = self.stream.class_names.index(name)
        positions = (found.labels == label).nonzero().flatten().tolist()[:SHOTS_SHOWN]
        return [_thumbnail(found.images, at) for at in positions]


def _rebuild_stream(result: tables.Result) -> Stream:
    """The stream of a finished run, from data that are still there; never by a download."""
    from fscil.config import DataConfig
    from fscil.data.datasets import load_dataset
    from fscil.data.stream import make_stream
    from fscil.data.transforms import Transform

    config = result["config"]
    try:
        data = replace(build(DataConfig, config["data"], "data."), download=False)
        stream = make_stream(load_dataset(config["dataset"], data), data, Transform(), config["seed"])
    except OSError as error:
        raise UserError(f"the data cannot be read again ({error}).") from error
    if stream.split_hash != result["stream"]["split_hash"]:
        raise UserError("the data found here are another split than the run's.")
    return stream


def _thumbnail(pixels: Pixels, position: int) -> str:
    return data_uri(pixels.raw(position).numpy(), THUMBNAIL)
