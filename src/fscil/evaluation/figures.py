"""The paper's figures, drawn from results: one look, legible in print, safe for colour-blind readers.

Every function returns a `Chart`, which saves PNG, SVG and PDF with its data as CSV beside them:

    accuracy_curves({"CIFAR100": group_runs(results)}).save("figures/curves")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fscil.errors import UserError
from fscil.evaluation import paper
from fscil.evaluation.charts import (
    BLUE,
    COLUMN,
    GREEN,
    INK,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILLION,
    Chart,
    band,
    bars,
    cut_axis,
    finish,
    legend_of_looks,
    legend_paper,
    looks_of,
    row_of,
    shades_of,
    spread_labels,
    style,
    subplots,
)
from fscil.evaluation.limits import changed_settings, reductions
from fscil.evaluation.tables import Groups, Result, Value, dataset_title, metric, over_seeds, run_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -------------------------------------------------------------------------------------------------------------- curves


def accuracy_curve(result: Result, path: str | Path | None = None, stamp: str = "") -> Chart:
    """One run: accuracy on all seen classes after every task, and on base and new classes apart; its title says where
    it was limited, the line below it which settings are not the recipe's."""
    sessions = result["sessions"]
    lines = {
        "all classes": ("accuracy", VERMILLION, "-", "o"),
        "base classes": ("base_accuracy", BLUE, "--", "s"),
        "new classes": ("new_accuracy", GREEN, "--", "^"),
    }
    rows = [
        {"task": t, "classes": session["seen"], **{name: session[key] for name, (key, *_) in lines.items()}}
        for t, session in enumerate(sessions)
    ]
    with style():
        figure, grid = subplots(size=(COLUMN * 1.35, 2.7))
        axes = grid[0, 0]
        for name, (key, colour, line, marker) in lines.items():
            points = [(t, session[key]) for t, session in enumerate(sessions) if session[key] is not None]
            if not points:
                continue
            at, values = zip(*points)
            strong = {"linewidth": 2.0, "markersize": 5, "zorder": 3} if name == "all classes" else {}
            looks = {"marker": marker, "markeredgecolor": "white", "markeredgewidth": 0.5, **strong}
            axes.plot(at, values, line, color=colour, label=name, **looks)
        ends = {name: row for name in lines if (row := sessions[-1][lines[name][0]]) is not None}
        for name, (height, value) in spread_labels(ends, axes).items():
            axes.annotate(
                f"{value:.1f}", (len(sessions) - 1, height), (6, 0), textcoords="offset points", va="center",
                color=lines[name][1], fontsize=7.5, fontweight="bold" if name == "all classes" else "normal",
            )  # fmt: skip
        axes.set_xticks(range(len(sessions)), [f"{t}\n{session['seen']}" for t, session in enumerate(sessions)])
        axes.set_xlabel("task, and classes seen after it")
        axes.set_ylabel("top-1 accuracy (%)")
        axes.margins(x=0.05)
        config = result["config"]
        name = run_title(config["method"], (config.get("head") or {}).get("name"))
        title = f"{name} on {dataset_title(config['dataset'])}, seed {config['seed']}"
        axes.set_title("\n".join([title, *reductions(result)]))
        figure.legend(loc="outside upper center", ncols=3)
        changed = "; ".join(changed_settings(result).values())
    return finish(figure, rows, path, stamp or changed)


def accuracy_curves(panels: Mapping[str, Groups], path: str | Path | None = None, stamp: str = "") -> Chart:
    """A_t of many methods, one panel per dataset; {"CIFAR100": {"SMP": [results of its seeds], …}, …}."""
    rows = []
    labels = list(dict.fromkeys(label for groups in panels.values() for label in groups))
    looks = looks_of(labels)
    with style():
        figure, grid = subplots(1, len(panels), (PAGE if len(panels) > 1 else COLUMN * 1.45, 2.9))
        for axes, (title, groups) in zip(grid[0], panels.items()):
            length = 0
            for label, members in groups.items():
                tasks = range(max(len(member["sessions"]) for member in members))
                length = max(length, len(tasks))
                values = [
                    over_seeds(m["sessions"][t]["accuracy"] for m in members if t < len(m["sessions"])) for t in tasks
                ]
                rows += [row_of(value, dataset=title, method=label, task=t) for t, value in zip(tasks, values)]
                colour, line, marker = looks[label]
                strong = {"linewidth": 2.2, "markersize": 5.5, "zorder": 4} if label == "SMP" else {}
                band(axes, tasks, values, colour, line, marker=marker, **strong)
            axes.set_title(title)
            axes.set_xticks(range(length))
            axes.set_xlabel("task")
        grid[0, 0].set_ylabel("top-1 accuracy (%)")
        legend_of_looks(figure, labels, looks, beside=len(panels) == 1 and len(labels) > 4)
    return finish(figure, rows, path, stamp)


# ---------------------------------------------------------------------------------------------------------------- bars


def merging_bars(
    panels: Mapping[str, Groups], path: str | Path | None = None, stamp: str = "", quoted: Mapping | None = None
) -> Chart:
    """Base, new, final and average accuracy of m = 0, m = 0.2 and the merged adapters, one row of panels per dataset.

    `quoted` gives the paper's values as {dataset title: {setting: {metric: value}}}; they are drawn as diamonds.
    """
    names = {
        "base": "Base classes",
        "new": "New classes",
        "A_final": "After the last task",
        "A_avg": "Average of all tasks",
    }
    colours = (SKY, ORANGE, VERMILLION, GREEN, PURPLE)
    rows = []
    quoted = quoted or {}
    with style():
        figure, grid = subplots(len(panels), len(names), (PAGE, 0.55 + 1.75 * len(panels)))
        for line, (title, groups) in zip(grid, panels.items()):
            for axes, (name, heading) in zip(line, names.items()):
                values = [over_seeds(metric(name).read(result) for result in members) for members in groups.values()]
                theirs = [quoted.get(title, {}).get(setting, {}).get(name) for setting in groups]
                rows += [
                    {**row_of(value, dataset=title, metric=name, setting=setting), "paper": number}
                    for setting, value, number in zip(groups, values, theirs)
                ]
                edges = [v.mean + sign * (v.spread or 0.0) for v in values if v for sign in (-1, 1)]
                cut_axis(axes, edges + [number for number in theirs if number is not None])
                bars(axes, np.arange(len(values)), values, colours, width=0.68, inside=True)
                for at, number in enumerate(theirs):
                    if number is not None:
                        axes.plot(at + 0.22, number, "D", color=INK, markersize=3.6, markeredgecolor="white", zorder=4)
                axes.set_xticks(range(len(groups)), [setting.replace(" = ", "=") for setting in groups])
                axes.tick_params(axis="x", length=0)
                axes.set_title(heading if axes in grid[0] else "")
            line[0].set_ylabel(f"{title}\naccuracy (%), axis cut")
        if any(row["paper"] is not None for row in rows):
            legend_paper(figure)
    return finish(figure, rows, path, stamp)


def base_new_bars(panels: Mapping[str, Groups], path: str | Path | None = None, stamp: str = "") -> Chart:
    """Accuracy of base and of new classes after the last task, all methods, one panel per dataset."""
    from matplotlib.patches import Patch

    rows = []
    with style():
        widest = max(len(groups) for groups in panels.values())
        width = PAGE if widest > 6 else 1.3 + 0.75 * widest
        figure, grid = subplots(len(panels), 1, (width, 0.6 + 2.0 * len(panels)))
        for axes, (title, groups) in zip(grid[:, 0], panels.items()):
            at = np.arange(len(groups))
            for offset, name, colour in ((-0.2, "base", BLUE), (0.2, "new", ORANGE)):
                values = [over_seeds(metric(name).read(result) for result in members) for members in groups.values()]
                rows += [row_of(v, dataset=title, classes=name, method=label) for label, v in zip(groups, values)]
                bars(axes, at + offset, values, [colour] * len(values), width=0.36, size=6 if widest > 6 else 7)
            slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if widest > 6 else {}
            axes.set_xticks(at, list(groups), **slanted)
            for tick, label in zip(axes.get_xticklabels(), groups):
                tick.set_fontweight("bold" if label == "SMP" else "normal")
            axes.tick_params(axis="x", length=0)
            axes.set_ylim(0, 112)
            axes.set_yticks(range(0, 101, 20))
            axes.set_xlim(-0.6, len(groups) - 0.4)
            axes.set_title(title)
            axes.set_ylabel("accuracy (%)")
        handles = [Patch(color=BLUE, label="base classes"), Patch(color=ORANGE, label="new classes")]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return finish(figure, rows, path, stamp)


# -------------------------------------------------------------------------------------------------------------- sweeps

Sweep = Mapping[float, Sequence[Result]]  # setting -> results of its seeds
_FINAL_AND_AVERAGE = (("A_final", "$A_{final}$", VERMILLION, "o"), ("A_avg", "$A_{avg}$", BLUE, "s"))


def margin_sweep(panels: Mapping[str, Sweep], path: str | Path | None = None, stamp: str = "") -> Chart:
    """Final and average accuracy against the margin m, one panel per dataset."""
    return _sweep(panels, "margin", "margin $m$", path, stamp)


def correction_sweep(panels: Mapping[str, Sweep], path: str | Path | None = None, stamp: str = "") -> Chart:
    """Final and average accuracy against the correction for few images, one panel per dataset."""
    return _sweep(panels, "correction", "correction $\\gamma$", path, stamp)


def shots(
    panels: Mapping[str, Sweep], path: str | Path | None = None, stamp: str = "", beside_paper: bool = True
) -> Chart:
    """Final and average accuracy against the number of shots; hollow marks are the paper's, on its own datasets."""
    return _sweep(panels, "shots", "shots per new class", path, stamp, paper.SHOTS if beside_paper else {}, even=True)


def _sweep(
    panels: Mapping[str, Sweep],
    setting: str,
    axis: str,
    path: str | Path | None,
    stamp: str,
    quoted: Mapping[str, Mapping[Any, paper.Accuracy]] | None = None,
    even: bool = False,
) -> Chart:
    rows, hollow = [], False
    with style():
        figure, grid = subplots(1, len(panels), (min(PAGE, COLUMN * max(1.15, len(panels))), 2.6))
        for axes, (title, sweep) in zip(grid[0], panels.items()):
            points = sorted(sweep)
            x = list(range(len(points))) if even else points
            dataset = next(iter(sweep.values()))[0]["config"]["dataset"]
            theirs = (quoted or {}).get(dataset, {})
            for name, label, colour, marker in _FINAL_AND_AVERAGE:
                values = [over_seeds(metric(name).read(result) for result in sweep[point]) for point in points]
                numbers = [
                    getattr(theirs[point], "final" if name == "A_final" else "average") if point in theirs else None
                    for point in points
                ]
                rows += [
                    {**row_of(value, dataset=title, metric=name, **{setting: point}), "paper": number}
                    for point, value, number in zip(points, values, numbers)
                ]
                band(axes, x, values, colour, marker=marker, label=label)
                said = [(at, number) for at, number in zip(x, numbers) if number is not None]
                if said:
                    hollow = True
                    axes.plot(*zip(*said), ":", color=colour, marker=marker, markerfacecolor="none", linewidth=1.0)
                for at, value in zip(x, values):
                    if value is not None and not said:
                        axes.annotate(
                            f"{value.mean:.1f}", (at, value.mean), (0, -10 if name == "A_final" else 5),
                            textcoords="offset points", ha="center", fontsize=6.5, color=colour,
                        )  # fmt: skip
            axes.set_xticks(x, [f"{point:g}" if even else f"{point:.2f}" for point in points])
            axes.set_xlabel(axis)
            axes.set_title(title)
            axes.margins(x=0.08, y=0.18)
        grid[0, 0].set_ylabel("top-1 accuracy (%)")
        handles, names = grid[0, 0].get_legend_handles_labels()
        if hollow:
            from matplotlib.lines import Line2D

            handles.append(Line2D([], [], linestyle=":", color=INK, marker="o", markerfacecolor="none", linewidth=1.0))
            names.append("the paper, ViT-B/16")
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return finish(figure, rows, path, stamp)


def _measured(name: str, results: Sequence[Result]) -> Value:
    value = over_seeds(metric(name).read(result) for result in results)
    if value is None:
        raise UserError(f"none of these runs has a value of {name}; the trade-off needs runs with few-shot tasks")
    return value


def tradeoff(panels: Mapping[str, Sweep], path: str | Path | None = None, stamp: str = "") -> Chart:
    """Base against new accuracy as the margin of one adapter set grows: change with m, and the path of the pair."""
    rows = []
    with style():
        figure, grid = subplots(len(panels), 2, (PAGE * 0.86, 0.35 + 2.35 * len(panels)))
        for (left, right), (title, sweep) in zip(grid, panels.items()):
            margins = sorted(sweep)
            values = {name: [_measured(name, sweep[m]) for m in margins] for name in ("base", "new")}
            for name, line in values.items():
                rows += [row_of(value, dataset=title, classes=name, margin=m) for m, value in zip(margins, line)]
            for name, colour, marker in (("base", BLUE, "s"), ("new", ORANGE, "^")):
                start = values[name][0].mean
                change = [Value(value.mean - start, value.spread) for value in values[name]]
                band(left, margins, change, colour, marker=marker, label=f"{name} classes")
            left.axhline(0, color=INK, linewidth=0.7)
            left.set_xticks(margins, [f"{m:g}" for m in margins])
            left.set_xlabel("margin $m$")
            left.set_ylabel(f"change from $m={margins[0]:g}$ (points)")
            left.set_title(f"{title}: effect of the margin")
            left.legend(loc="best")

            new, base = ([value.mean for value in values[name]] for name in ("new", "base"))
            right.plot(new, base, "-", color="#8c8c8c", linewidth=1.0, zorder=1)
            shades = shades_of(len(margins))
            right.scatter(new, base, s=30, color=shades, edgecolor=INK, linewidth=0.6, zorder=2)
            places: dict[tuple[float, float], list[float]] = {}  # margins with the same accuracies share a label
            for m, x, y in zip(margins, new, base):
                places.setdefault((round(x, 3), round(y, 3)), []).append(m)
            width, height = (max(values) - min(values) or 1.0 for values in (new, base))
            previous = None
            for place, same in places.items():
                text = f"$m={', '.join(f'{m:g}' for m in same)}$"
                # outside the falling curve, that is above on the right; below on the left if the last label is there
                crowded = previous is not None and (
                    abs(place[0] - previous[0]) < 0.26 * width and abs(place[1] - previous[1]) < 0.05 * height
                )
                offset, side = ((-5, -10), "right") if crowded else ((5, 4), "left")
                right.annotate(text, place, offset, textcoords="offset points", fontsize=7, ha=side)
                previous = None if crowded else place
            right.set_xlabel("accuracy on new classes (%)")
            right.set_ylabel("accuracy on base classes (%)")
            right.grid(True, axis="both")
            right.margins(0.2, 0.16)
            right.set_title(f"{title}: the trade-off")
    return finish(figure, rows, path, stamp)


# -------------------------------------------------------------------------------------------------------------- Fisher


def fisher(panels: Mapping[str, Sequence[Result]], path: str | Path | None = None, stamp: str = "") -> Chart:
    """Fisher magnitudes and merging weights per layer: keys and values apart, both models, least-squares lines.

    {"CIFAR100": [results of the seeds of SMP or MIAM], …}; several seeds are averaged. Set g was trained without
    margin, set d with.
    """
    sets = {"g": ("without margin", BLUE, "s"), "d": ("with margin", VERMILLION, "o")}
    kinds = {"fisher_norms": "Fisher magnitude", "merge_weights": "merging weight"}
    projections = {"k": "keys", "v": "values"}
    rows = []
    with style():
        from matplotlib.lines import Line2D

        pairs = len(panels)
        figure, grid = subplots(2, 2 * pairs, (PAGE if pairs > 1 else PAGE * 0.86, 3.9))
        for pair, (title, members) in enumerate(panels.items()):
            for line, (kind, name_of_kind) in enumerate(kinds.items()):
                norms = np.mean([_diagnosed(result, kind) for result in members], axis=0)  # (layer, set, projection)
                logarithmic = kind == "fisher_norms" and (norms > 0).all()
                layers = np.arange(1, len(norms) + 1)
                for side, (projection, heading) in enumerate(projections.items()):
                    axes = grid[line, 2 * pair + side]
                    for number, (name, (label, colour, marker)) in enumerate(sets.items()):
                        values = norms[:, number, side]
                        where = {"dataset": title, "quantity": kind, "projection": projection, "set": name}
                        rows += [{**where, "layer": int(i), "value": float(v)} for i, v in zip(layers, values)]
                        looks = {"marker": marker, "ms": 3.8, "mec": "white", "mew": 0.4}
                        axes.plot(layers, values, color=colour, linewidth=1.1, label=label, **looks)
                        axes.plot(layers, _fitted(layers, values, logarithmic), "--", color=colour, linewidth=1.0)
                    _fisher_axes(axes, norms, logarithmic, layers)
                    if kind == "merge_weights":
                        axes.axhline(0.5, color=INK, linewidth=0.6)
                        axes.set_xlabel("layer")
                    else:
                        axes.set_title(f"{title}\n{heading}" if pairs > 1 else f"{title}, {heading}")
                grid[line, 2 * pair + 1].tick_params(labelleft=False)
                grid[line, 0].set_ylabel(name_of_kind)
        handles, names = grid[0, 0].get_legend_handles_labels()
        handles.append(Line2D([], [], linestyle="--", color=INK, linewidth=1.0))
        figure.legend(handles, [*names, "least squares"], loc="outside upper center", ncols=3)
    return finish(figure, rows, path, stamp)


def _diagnosed(result: Result, kind: str) -> np.ndarray:
    """What the base session of a run with two adapter sets left in its diagnostics."""
    found = (result["sessions"][0].get("diagnostics") or {}).get(kind)
    if found is None:
        method = result["config"]["method"]
        raise UserError(f'the run of "{method}" recorded no {kind}; the Fisher figure needs runs of "smp" or "miam"')
    return np.asarray(found, dtype=float)


def _fitted(x: np.ndarray, y: np.ndarray, logarithmic: bool) -> np.ndarray:
    """The least-squares line at x; of the logarithm where the axis is logarithmic, so that it is drawn straight."""
    slope, offset = np.polyfit(x, np.log(y) if logarithmic else y, 1)
    return np.exp(offset + slope * x) if logarithmic else offset + slope * x


def _fisher_axes(axes: Axes, values: np.ndarray, logarithmic: bool, layers: np.ndarray) -> None:
    """Keys and values of one dataset share their limits, so that they can be compared."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = values.min(), values.max()
    if logarithmic:
        axes.set_yscale("log")
        room = max(high / low, 1.1) ** 0.06
        axes.set_ylim(low / room, high * room)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e−")))
    else:
        room = 0.06 * max(high - low, 1e-3)
        axes.set_ylim(low - room, high + room)
    axes.set_xticks(layers[:: max(1, len(layers) // 6)])


# ---------------------------------------------------------------------------------------------------------- single runs


def confusion_matrix(
    counts: np.ndarray,
    base_classes: int,
    path: str | Path | None = None,
    stamp: str = "",
    names: Sequence[str] = (),
) -> Chart:
    """Rows are true classes, columns predictions, each row in percent; a line parts base from new classes. `names` are
    written beside them, and the figure grows with them."""
    counts = np.asarray(counts)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [{"true": int(i), "predicted": int(j), "images": int(counts[i, j])} for i, j in zip(*np.nonzero(counts))]
    with style():
        from matplotlib.colors import PowerNorm

        room = max(1.0, len(names) * 0.13 / COLUMN)  # inches that a line of small letters takes
        figure, grid = subplots(size=(COLUMN * (room + 0.35), COLUMN * (room + 0.15)))
        axes = grid[0, 0]
        # a square-root scale lets rare confusions show beside the diagonal
        image = axes.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 100), interpolation="nearest")
        if base_classes < len(counts):
            for draw in (axes.axhline, axes.axvline):
                draw(base_classes - 0.5, color=VERMILLION, linewidth=0.8)
        axes.grid(False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        if len(names):
            short = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
            axes.set_xticks(range(len(names)), short, rotation=90, fontsize=6, parse_math=False)
            axes.set_yticks(range(len(names)), short, fontsize=6, parse_math=False)
        bar = figure.colorbar(image, ax=axes, shrink=0.85, ticks=[0, 5, 20, 50, 100])
        bar.set_label("share of the true class (%)")
        bar.outline.set_visible(False)
    return finish(figure, rows, path, stamp)
