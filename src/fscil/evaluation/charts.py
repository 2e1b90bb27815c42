"""How every figure looks (legible in print, safe for colour-blind readers), and the marks that figures are made of."""

from __future__ import annotations

import csv
import html
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fscil.evaluation.tables import Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.5, 7.16  # inches: one column and the full width of a two-column page

# Okabe and Ito's palette: distinguishable with every common kind of colour vision
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
INK, FAINT = "#262626", "#d4d4d4"  # text and grid; the report lets them follow its colour scheme

_PAGE_COLOURS = {INK: "currentColor", FAINT: f"var(--line, {FAINT})"} | {
    colour: f"var(--{name}, {colour})" for name, colour in (("blue", BLUE), ("sky", SKY), ("green", GREEN))
}

# A method looks the same in every figure: colour, line, marker. SMP alone is vermillion and thick.
_LOOKS: dict[str, tuple[str, str, str]] = {
    "SMP": (VERMILLION, "-", "o"),
    "Baseline": (INK, "--", "s"),
    "CLOM": (BLUE, "-", "^"),
    "ASP": (GREEN, "-", "D"),
    "ADBS": (PURPLE, "-", "v"),
    "TEEN": (ORANGE, "-", "s"),
    "CEC": (SKY, "-", "h"),
    "FACT": (BLUE, "--", "p"),
    "iCaRL": (GREEN, "--", "<"),
    "FOSTER": (PURPLE, "--", ">"),
    "L2P": (ORANGE, ":", "^"),
    "DualP": (SKY, ":", "v"),
    "CodaP": (BLUE, ":", "D"),
    "L2P+": (ORANGE, "--", "^"),
    "DualP+": (SKY, "--", "v"),
    "CodaP+": (GREEN, ":", "D"),
    "MIAM + closed form": (INK, "-", "*"),
}
_SPARE = [(c, line, m) for line, m in (("-.", "d"), ("-.", "8")) for c in (BLUE, ORANGE, GREEN, PURPLE, SKY, INK)]


def looks_of(labels: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, line and marker of each label; those that are no method of the paper get what is left."""
    strangers = [label for label in labels if label not in _LOOKS]
    return {label: _LOOKS.get(label) or _SPARE[strangers.index(label) % len(_SPARE)] for label in dict.fromkeys(labels)}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib settings of every figure, for the length of a `with` block; the Agg canvas, never a window."""
    import matplotlib

    settings: dict[Any, Any] = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlepad": 7,
        "axes.labelsize": 8,
        "axes.labelpad": 3,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "legend.handlelength": 2.2,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "xtick.major.width": 0.7,
        "ytick.major.width": 0.7,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.2,
        "axes.unicode_minus": True,
        "figure.dpi": 100,
        "savefig.dpi": 300,
        "pdf.fonttype": 42,  # text stays text
        "svg.fonttype": "path",
        "svg.hashsalt": "fscil",  # the same data gives the same file
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context(settings):
        yield


def subplots(rows: int = 1, columns: int = 1, size: tuple[float, float] = (COLUMN, 2.5)) -> tuple[Figure, np.ndarray]:
    """A figure with a grid of axes, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


@dataclass
class Chart:
    """A drawn figure and the numbers behind it."""

    figure: Figure
    rows: list[dict[str, Any]]
    stamp: str = ""  # what was reduced, printed on the figure and in every row of the CSV

    def save(self, path: str | Path) -> list[Path]:
        """Write `path`.png, .svg, .pdf and .csv; returns the four paths."""
        from fscil.files import atomic_write

        written = []
        for suffix in ("png", "svg", "pdf"):
            target = Path(f"{path}.{suffix}")
            atomic_write(target, self.rendered(suffix))
            written.append(target)
        target = Path(f"{path}.csv")
        atomic_write(target, self.csv())
        return [*written, target]

    def rendered(self, suffix: str) -> bytes:
        """The picture as png, svg or pdf; the same data give the same bytes."""
        stream = io.BytesIO()
        undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[suffix]
        with style():
            self.figure.savefig(stream, format=suffix, metadata=undated, facecolor="white")
        return stream.getvalue()

    def inline_svg(self, name: str, description: str = "") -> str:
        """SVG for a page: transparent, text and grid in the page's own colours; `name` keeps its ids apart."""
        stream = io.StringIO()
        with style():
            self.figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
        svg = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>", "", stream.getvalue(), flags=re.DOTALL)
        svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
        for colour, token in _PAGE_COLOURS.items():
            svg = re.sub(colour, token, svg, flags=re.IGNORECASE)  # matplotlib writes lower case
        tag, rest = svg.split(">", 1)
        width = 72 * self.figure.get_size_inches()[0]
        tag = re.sub(r' (width|height)="[^"]*"', "", tag)
        label = html.escape(description, quote=True)
        size = f"width:100%;max-width:{1.25 * width:.0f}pt;height:auto"
        return f'{tag} role="img" aria-label="{label}" style="{size}">{rest}'

    def csv(self) -> str:
        """The numbers behind the picture, unrounded."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        stream = io.StringIO()
        writer = csv.DictWriter(stream, [*names, *(["note"] if self.stamp else [])], lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            shown = {key: f"{value:.10g}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**shown, **({"note": self.stamp} if self.stamp else {})})
        return stream.getvalue()


def finish(figure: Figure, rows: list[dict[str, Any]], path: str | Path | None, stamp: str) -> Chart:
    """The chart of a drawn figure, its stamp below it, saved where a path is given."""
    if stamp:
        width, height = figure.get_size_inches()
        lines = textwrap.wrap(stamp, int(width * 72 / 3.3))  # a letter at 6 points is about 3.3 wide
        figure.set_size_inches(width, height + 0.11 * len(lines))
        figure.supxlabel("\n".join(lines), fontsize=6, color="#767676", x=0.01, ha="left")
    chart = Chart(figure, rows, stamp)
    if path is not None:
        chart.save(path)
    return chart


def band(
    axes: Axes, x: Sequence[float], values: Sequence[Value | None], colour: str, line: str = "-", **kw: Any
) -> None:
    """A line of means with a band of one standard deviation where there are several seeds."""
    present = [(position, value) for position, value in zip(x, values) if value is not None]
    if not present:
        return
    at, means = [position for position, _ in present], np.array([value.mean for _, value in present])
    spread = np.array([value.spread or 0.0 for _, value in present])
    kw = {"markeredgecolor": "white", "markeredgewidth": 0.5, **kw}
    axes.plot(at, means, line, color=colour, **kw)
    if spread.any():
        axes.fill_between(at, means - spread, means + spread, color=colour, alpha=0.15, linewidth=0, zorder=0.5)


def row_of(value: Value | None, **where: Any) -> dict[str, Any]:
    """A point of a figure as a row of its CSV."""
    return {**where, "mean": None if value is None else value.mean, "std": None if value is None else value.spread}


def cut_axis(axes: Axes, values: Sequence[float]) -> None:
    """Limits that show differences between bars: the axis starts below the smallest bar, not at zero."""
    low, high = min(values), max(values)
    span = max(high - low, 1.0)
    axes.set_ylim(max(0.0, low - 0.6 * span), high + 0.06 * span)


def spread_labels(values: Mapping[str, float], axes: Axes) -> dict[str, tuple[float, float]]:
    """Heights for labels at line ends so that none covers another: {name: (height, value)}."""
    low, high = axes.get_ylim()
    gap = 0.06 * (high - low)
    placed: dict[str, tuple[float, float]] = {}
    previous = -np.inf
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        previous = max(value, previous + gap)
        placed[name] = (previous, value)
    return placed


def legend_of_looks(figure: Figure, labels: Sequence[str], looks: Mapping[str, tuple], beside: bool) -> None:
    """Lines and markers of all labels, below the panels or beside a single one."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=c, linestyle=line, marker=m, markeredgecolor="white", markeredgewidth=0.5, label=label)
        for label, (c, line, m) in ((label, looks[label]) for label in labels)
    ]
    if beside:
        figure.legend(handles=handles, loc="outside right center")
    else:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(labels), 8))


def bars(
    axes: Axes,
    at: np.ndarray,
    values: Sequence[Value | None],
    colours: Sequence[Any],
    width: float,
    size: float = 7.5,
    inside: bool = False,
) -> None:
    """Bars with error bars where there are several seeds, and their values above them or inside, at the foot."""
    foot = axes.get_ylim()[0]
    for position, value, colour in zip(at, values, colours):
        if value is None:
            continue
        axes.bar(position, value.mean, width, color=colour, linewidth=0)
        if value.spread is not None:
            axes.errorbar(position, value.mean, value.spread, color=INK, linewidth=0.8, capsize=2, capthick=0.8)
        height = foot if inside else value.mean + (value.spread or 0.0)
        axes.annotate(
            f"{value.mean:.1f}", (position, height), (0, 3 if inside else 2), textcoords="offset points",
            ha="center", fontsize=size, color=BLACK if inside else INK,
        )  # fmt: skip


def legend_paper(figure: Figure) -> None:
    """Says that diamonds are the paper's values."""
    from matplotlib.lines import Line2D

    mark = Line2D([], [], linestyle="", marker="D", color=INK, markersize=3.4, label="the paper, ViT-B/16")
    figure.legend(handles=[mark], loc="outside lower right")


def shades_of(count: int) -> list:
    """Light to dark in one hue, which also reads in grey."""
    from matplotlib import colormaps

    return [colormaps["cividis_r"](0.15 + 0.8 * i / max(1, count - 1)) for i in range(count)]
