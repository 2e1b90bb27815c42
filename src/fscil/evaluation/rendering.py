"""Tables as text on a screen, CSV, Markdown and LaTeX.

print(render(table, "markdown"))
write_table(table, "tables/main")                  # main.csv, main.md, main.tex
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from fscil.errors import UserError, nearest
from fscil.evaluation.glossary import WHERE, entry_of
from fscil.evaluation.tables import Column, Row, Table, Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


def _number(value: float, column: Column) -> str:
    text = f"{value:{'+' if column.signed else ''},.{column.digits}f}"
    return text.replace("-", "−")


def format_value(value: Value, column: Column, bold: tuple[str, str] = ("", "")) -> str:
    """A value as it is printed, `bold` around its mean where it is a best one."""
    centre = _number(value.mean, column)
    text = f"{bold[0]}{centre}{bold[1]}" if value.bold else centre
    if value.interval is not None:
        return f"{text} [{_number(value.interval[0], column)}, {_number(value.interval[1], column)}]"
    return text if value.spread is None else f"{text} ± {value.spread:.{column.digits}f}"


def row_label(row: Row) -> str:
    """What stands in front of a row."""
    return f"{row.label}, paper" if row.kind == "paper" else f"{row.label}{'*' if row.limits else ''}"


def to_markdown(table: Table) -> str:
    """A Markdown table, best values in bold, remarks below it."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def escaped(text: str) -> str:
        return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", text)

    lines = [f"**{escaped(table.title)}**", ""] if table.title else []
    lines.append(line([table.header, *(escaped(column.title) for column in table.columns.values())]))
    lines.append(line(["---", *("---:" for _ in table.columns)]))
    for row in table.rows:
        cells = [
            format_value(row.values[key], column, ("**", "**")) if key in row.values else ""
            for key, column in table.columns.items()
        ]
        lines.append(line([escaped(row_label(row)), *cells]))
    remarks = [escaped(" ".join(table.remarks))] if table.remarks else []
    remarks += [WHERE] if any(entry_of(column.title) for column in table.columns.values()) else []
    return "\n".join([*lines, *([""] if remarks else []), *remarks]) + "\n"


def to_csv(table: Table) -> str:
    """Unrounded numbers; every column that has a spread or an interval is followed by it. What is limited says so."""
    keys: list[tuple[str, str]] = []
    for key in table.columns:
        values = [row.values[key] for row in table.rows if key in row.values]
        keys.append((key, "mean"))
        if any(value.spread is not None for value in values):
            keys.append((key, "std"))
        if any(value.interval is not None for value in values):
            keys += [(key, "low"), (key, "high")]

    def part(value: Value | None, which: str) -> str:
        if value is None:
            return ""
        low, high = value.interval or (None, None)
        number = {"mean": value.mean, "std": value.spread, "low": low, "high": high}[which]
        return "" if number is None else f"{number:.10g}"

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    limited, stamped = any(row.limits for row in table.rows), bool(table.stamp)
    names = [k if which == "mean" else f"{k}_{which}" for k, which in keys]
    writer.writerow([table.header.lower(), "kind", *names, *["limits"] * limited, *["note"] * stamped])
    for row in table.rows:
        numbers = [part(row.values.get(key), which) for key, which in keys]
        writer.writerow([row.label, row.kind, *numbers, *[row.limits] * limited, *[table.stamp] * stamped])
    return stream.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": r"$-$",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def to_latex(table: Table) -> str:
    """A booktabs table; needs \\usepackage{booktabs}."""
    columns = list(table.columns.values())

    def heading(column: Column) -> str:
        return column.latex or _latex(column.title)

    def cell(value: Value, column: Column) -> str:
        text = _latex(format_value(replace(value, bold=False), column)).replace(r" $\pm$ ", r"\,$\pm$\,")
        number = _latex(_number(value.mean, column))
        return text.replace(number, rf"\textbf{{{number}}}", 1) if value.bold else text

    lines = [r"\begin{table}[htbp]", r"\centering", rf"\caption{{{_latex(table.title)}.}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    if any(column.span for column in columns):
        spans, rules, first = [""], [], 2
        for span, members in groupby(columns, key=lambda column: column.span):
            width = len(list(members))
            spans += [rf"\multicolumn{{{width}}}{{c}}{{{span}}}"] if span else [""] * width
            rules += [rf"\cmidrule(lr){{{first}-{first + width - 1}}}"] if span else []
            first += width
        lines += [" & ".join(spans) + r" \\", " ".join(rules)]
    lines += [" & ".join([_latex(table.header), *map(heading, columns)]) + r" \\", r"\midrule"]
    for row in table.rows:
        if row.kind == "margin":
            lines.append(r"\midrule")
        cells = [cell(row.values[key], column) if key in row.values else "" for key, column in table.columns.items()]
        lines.append(" & ".join([_latex(row_label(row)), *cells]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.remarks:
        lines.append(rf"\par\smallskip{{\footnotesize {_latex(' '.join(table.remarks))}}}")
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def to_rich(table: Table, keep: str = "all") -> RichTable:
    """A rich table. Of the columns of single tasks, `keep` shows "all", only the "means", or only the "ends"."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    columns, notes = dict(table.columns), table.remarks
    details = [key for key, column in columns.items() if column.detail]
    if keep != "all":
        notes.append("A wider window shows " + ("the ± of each task." if keep == "means" else "every task."))
    if keep == "ends":
        columns = {key: column for key, column in columns.items() if key not in details[1:-1]}
    shown = RichTable(
        title=table.title or None, caption="\n".join(notes) or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column(table.header)
    for column in columns.values():
        shown.add_column(column.title, justify="right", no_wrap=column.detail)
    for row in table.rows:
        if row.kind == "margin":
            shown.add_section()
        cells = [Text(row_label(row))]
        for key, column in columns.items():
            value = row.values.get(key)
            if value is not None and column.detail and keep != "all":
                value = replace(value, spread=None)
            cells.append(Text(format_value(value, column), style="bold" if value.bold else "") if value else Text(""))
        shown.add_row(*cells, style="dim" if row.kind == "paper" else "italic" if row.kind == "margin" else None)
    return shown


def print_table(table: Table, console: Console | None = None) -> None:
    """Print to the terminal, with as much of the single tasks as its width allows."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    console = console or Console()
    unbounded = console.options.update(max_width=10_000)
    candidates = [to_rich(table, keep) for keep in ("all", "means", "ends")]
    if not any(column.detail for column in table.columns.values()):
        candidates = candidates[:1]
    widths = (Measurement.get(console, unbounded, candidate).maximum for candidate in candidates)
    fitting = (candidate for candidate, width in zip(candidates, widths, strict=True) if width <= console.width)
    chosen = next(fitting, candidates[-1])
    # a narrow table would break its title and remarks into many lines
    title, chosen.title, remarks, chosen.caption = chosen.title, None, chosen.caption, None
    if title:
        console.print(Text(str(title), style="italic"))
    console.print(chosen)
    if remarks:
        console.print(Text(str(remarks), style="dim italic"))
    console.print()


RENDERERS: dict[str, Callable[[Table], str]] = {"csv": to_csv, "markdown": to_markdown, "latex": to_latex}
_SUFFIX = {"csv": ".csv", "markdown": ".md", "latex": ".tex"}


def render(table: Table, form: str) -> str:
    if form not in RENDERERS:
        raise UserError(f'unknown table format "{form}"; known: {", ".join(RENDERERS)}.{nearest(form, RENDERERS)}')
    return RENDERERS[form](table)


def write_table(table: Table, path: str | Path) -> list[Path]:
    """Write `path`.csv, .md and .tex; returns the three paths."""
    from fscil.files import atomic_write

    written = []
    for form, suffix in _SUFFIX.items():
        target = Path(f"{path}{suffix}")
        atomic_write(target, render(table, form))
        written.append(target)
    return written
