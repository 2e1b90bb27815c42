"""The parts of the web page as HTML: answers, tables, the chart of the history. Pure functions, no Gradio.

Everything that people can name (classes, files, reasons) is escaped here and nowhere else.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from fscil.data.uris import data_uri
from fscil.text import count, percent

if TYPE_CHECKING:
    from fscil.teachable.recognition import Recognition

PREVIEW = 320  # pixels of the longer side of the copy that the answer shows
NAMED = 4  # classes that a line of the history names
TINY = 56  # pixels of the longer side of pictures in tables
MOVED = 0.02  # of a figure, from which on a change is worth a word
TROUBLE = "Something went wrong on the server; the model is as it was. Please try again."
QUIET: dict[str, Any] = {"api_visibility": "private", "queue": False}  # of Gradio's events that need no queue
Event = Mapping[str, Any]
ACTIONS = {
    "fit": "Started with",
    "learn": "Learned",
    "forget": "Removed",
    "drop history": "History dropped;",
    "push": "Uploaded with",
}
SERIES = (
    ("held_out_accuracy", "base", "right on held-out base pictures"),
    ("taught_rejection", "taught", "taught pictures called unknown"),
)


# ---- words -----------------------------------------------------------------------------------------------------------
def sentence(text: str) -> str:
    """
    >>> sentence("class \\"a\\" is known")
    'Class "a" is known.'
    """
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def moment(stamp: str) -> str:
    """
    >>> moment("2026-11-05T22:01:34Z")
    '5 Nov 2026, 22:01 UTC'
    """
    try:
        at = time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return stamp
    return f"{at.tm_mday} {time.strftime('%b %Y, %H:%M', at)} UTC"


def in_words(event: Event) -> str:
    """
    >>> in_words({"action": "learn", "classes": {"heron": 5}})
    'Learned “heron” (5 pictures)'
    >>> in_words({"action": "fit", "classes": {"jay": 30, "owl": 30}})
    'Started with 2 classes (60 pictures)'
    """
    classes, pictures = event["classes"], count(sum(event["classes"].values()), "picture")
    named = ", ".join(f"“{name}”" for name in list(classes)[:NAMED])
    more = f" and {len(classes) - NAMED} more" if len(classes) > NAMED else ""
    if event["action"] not in ("learn", "forget"):  # these name every class
        named, more = count(len(classes), "class", "classes"), ""
    return f"{ACTIONS.get(event['action'], event['action'])} {named}{more} ({pictures})"


# ---- pieces ----------------------------------------------------------------------------------------------------------
def message(text: str, kind: str = "good") -> str:
    """A sentence in a box; `kind` is good, bad, ask or busy (with a moving bar)."""
    role = "alert" if kind == "bad" else "status"
    bar = '<span class="working" aria-hidden="true"></span>' if kind == "busy" else ""
    return f'<div class="fs-message fs-{kind}" role="{role}"><p>{escape(text)}</p>{bar}</div>'


def placeholder(text: str) -> str:
    """What stands where something will appear."""
    return f'<p class="fs-empty">{escape(text)}</p>'


def bars(top: Sequence[tuple[Any, float]], muted: bool = False) -> str:
    """The best classes, each with its probability as a bar and in figures."""
    rows = "".join(
        f'<li><span class="name">{escape(str(name))}</span><span class="figure">{escape(percent(share, 0))}</span>'
        f'<span class="track" aria-hidden="true"><span style="width:{100 * share:.1f}%"></span></span></li>'
        for name, share in top
    )
    return f'<ol class="bars{" muted" if muted else ""}" aria-label="best classes">{rows}</ol>'


def answer(found: Recognition, picture: np.ndarray | None = None) -> str:
    """What one picture shows: the class or "Unknown" in large letters, bars, and the kept pictures most like it."""
    if found.error is not None:
        return message(f"This file cannot be used: {found.error.rstrip('.')}.", "bad")
    best, share = found.top[0]
    if found.unknown:
        head = (
            '<p class="verdict unknown">Unknown</p>'
            "<p>It does not look like anything this model was taught. "
            f"Nearest is <b>{escape(str(best))}</b>.</p>"
        )
        under = "<h3>If it had to be one of the known classes</h3>"
    else:
        sure = f"About {round(100 * share)} of 100 answers this sure are right." if share < 0.995 else ""
        head = f'<p class="verdict">{escape(str(best))}</p><p><b>{escape(percent(share, 0))} sure.</b> {sure}</p>'
        under = "<h3>Best classes</h3>"
    shown = (
        f'<img class="preview" src="{data_uri(picture, PREVIEW)}" alt="your picture">' if picture is not None else ""
    )
    pictures = "".join(
        f'<figure><img src="{data_uri(small)}" alt="known picture of {escape(str(name))}">'
        f"<figcaption>{escape(str(name))}</figcaption></figure>"
        for name, _, small in found.alike
    )
    pictures = f'<h3>Known pictures most like it</h3><div class="alike">{pictures}</div>' if pictures else ""
    return (
        f'<section class="fs-card" role="status" aria-label="answer"><div class="top">{shown}<div>{head}</div></div>'
        f"{under}{bars(found.top, found.unknown)}{pictures}</section>"
    )


def answers_table(names: Sequence[str], found: Sequence[Recognition], pictures: Sequence[np.ndarray | None]) -> str:
    """What several pictures show, a row each, and all of it to be downloaded as a CSV file."""
    rows = []
    for name, item, picture in zip(names, found, pictures):
        small = f'<img class="tiny" src="{data_uri(picture, TINY)}" alt="">' if picture is not None else ""
        shown = item.error or ("Unknown" if item.unknown else str(item.label))
        style = ' class="unknown"' if item.unknown or item.error else ""
        sure = "" if item.error else f"nearest: {item.top[0][0]}" if item.unknown else percent(item.confidence, 0)
        rows.append((small, f"<b{style}>{escape(shown)}</b>", escape(sure), escape(name)))
    table = _table(("", "Answer", "Sure", "File"), rows, main=1, numbers=())
    link = f'<p class="fs-download">{_csv_link(names, found)}</p>'
    return f'<section role="status" aria-label="answers">{table}{link}</section>'


def inbox_card(picture: np.ndarray, reason: str, number: int, total: int) -> str:
    """One picture to be labelled, and why it is asked about."""
    return (
        f'<section class="fs-card" aria-label="picture to label"><p class="fs-soft">{number} of {total}</p>'
        f'<img class="large" src="{data_uri(picture, PREVIEW)}" alt="picture to label">'
        f"<p>{escape(sentence(reason))}</p>"
        "</section>"
    )


def strip(pictures: Sequence[np.ndarray]) -> str:
    """Some pictures in a row."""
    shown = "".join(f'<img class="tiny" src="{data_uri(picture)}" alt="">' for picture in pictures)
    return f'<span class="strip">{shown}</span>'


def _csv_link(names: Sequence[str], found: Sequence[Recognition]) -> str:
    """The answers as `fscil predict --csv` has them, in the page itself."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["file", "label", "confidence", "unknown", "error"])
    for name, item in zip(names, found):
        writer.writerow(
            [_no_formula(name), _no_formula(item.shown), f"{item.confidence:.4f}", item.unknown, item.error or ""]
        )
    data = base64.b64encode(lines.getvalue().encode("utf-8")).decode()
    return f'<a download="answers.csv" href="data:text/csv;charset=utf-8;base64,{data}">Download as CSV</a>'


def _no_formula(text: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    >>> _no_formula("=1+1"), _no_formula("jay")
    ("'=1+1", 'jay')
    """
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def notes(texts: Sequence[str]) -> str:
    """What is wrong with the model as a whole, if anything is."""
    return "".join(message(sentence(text), "bad") for text in texts)


def heading(name: str, classes: Sequence[Mapping[str, Any]], user: str | None = None) -> str:
    taught = sum(not info["base"] for info in classes)
    known = f"knows {count(len(classes), 'class', 'classes')}" + (f", {taught} of them taught" if taught else "")
    out = '<a href="/logout?all_session=false">Log out</a>'  # of this browser alone
    leave = f"<span>{escape(user)} · {out}</span>" if user is not None else ""
    return f'<header class="fs-head"><div><h1>{escape(name)}</h1><p>{known}</p></div>{leave}</header>'


def in_order(name: object) -> list[tuple[int, int | str]]:
    """How people sort names: without regard to case, numbers by size.

    >>> sorted(["class 10", "Owl", "class 9", "jay"], key=in_order)
    ['class 9', 'class 10', 'jay', 'Owl']
    """
    parts = re.split(r"(\d+)", str(name).casefold())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def class_table(
    classes: Sequence[Mapping[str, Any]], pictures: Mapping[str, Sequence[np.ndarray]] | None = None
) -> str:
    """All classes in order of their names, with small copies of their pictures where those are kept."""
    origin = {True: '<span class="chip">base</span>', False: '<span class="chip taught">taught</span>'}
    rows = []
    for info in sorted(classes, key=lambda info: in_order(info["name"])):
        name, kept = escape(str(info["name"])), (pictures or {}).get(str(info["name"]), ())
        strip = "".join(f'<img class="tiny" src="{data_uri(small, TINY)}" alt="picture of {name}">' for small in kept)
        rows.append(
            (
                f"{name}<span class='strip'>{strip}</span>" if strip else name,
                info["pictures"],
                origin[bool(info["base"])],
                _time(info["since"]),
            )
        )
    return _table(("Class", "Pictures", "Origin", "Since"), rows, main=0, numbers=(1,), style="tall")


def matters(event: Event, before: Event | None) -> bool:
    """Whether a change did more than add some pictures: a class came or went, or a figure moved by points."""
    if before is None or event["action"] != "learn" or event["known"] != before["known"]:
        return True
    pairs = [(event.get(key), before.get(key)) for key, _, _ in SERIES]
    return any(now is not None and was is not None and abs(now - was) >= MOVED for now, was in pairs)


def history_table(history: Sequence[Event]) -> str:
    """The changes that matter, newest first, numbered as in the chart; small ones are folded away below."""
    large: list[tuple[Any, ...]] = []
    small: list[tuple[Any, ...]] = []
    for number, event in enumerate(history):
        before = history[number - 1] if number else None
        row = (
            number,
            escape(in_words(event)),
            _time(event["when"]),
            event["known"],
            _moved(event, before, "held_out_accuracy", good=1),
            _moved(event, before, "taught_rejection", good=-1),
        )
        (large if matters(event, before) else small).append(row)
    titles = ("No.", "Change", "When", "Classes", "Base accuracy", "Taught called unknown")
    shown, folded = (
        _table(titles, list(reversed(rows)), main=1, numbers=(0, 3, 4, 5)) if rows else "" for rows in (large, small)
    )
    if not folded:
        return shown
    return f"{shown}<details><summary>{count(len(small), 'smaller change')}</summary>{folded}</details>"


def _moved(event: Event, before: Event | None, key: str, good: int) -> str:
    """A figure, and by how many points it moved if that is worth a word; `good` is the direction that is."""
    now, was = event.get(key), (before or {}).get(key)
    if now is None or was is None or abs(now - was) < MOVED:
        return escape(percent(now, 0))
    step = round(100 * (now - was))
    style = "up" if good * step > 0 else "down"
    points = f"{step:+d}".replace("-", "−")
    return f'{escape(percent(now, 0))} <span class="{style}">{points}</span>'


def _time(stamp: str) -> str:
    return f'<time datetime="{escape(stamp)}">{escape(moment(stamp))}</time>'


def _table(
    titles: Sequence[str], rows: Sequence[Sequence[Any]], main: int, numbers: Sequence[int], style: str = ""
) -> str:
    """Cells are HTML. On a phone a row is a block: its `main` cell, below it the others with their titles."""
    side = ["right" if column in numbers else "" for column in range(len(titles))]
    head = "".join(f'<th scope="col" class="{side[column]}">{title}</th>' for column, title in enumerate(titles))
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>'
            if column == main
            else f'<td class="{side[column]}" data-title="{titles[column]}">{cell}</td>'
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="fs-table {style}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# ---- the chart -------------------------------------------------------------------------------------------------------
HEIGHT, TOP, BOTTOM = 260, 14, 30  # pixels of the chart, and of its margins


def place(number: int, changes: int, share: float) -> tuple[float, float]:
    """(per cent of the width, pixels from the top) of one value: relative across, so that letters keep their size.

    >>> place(0, 5, 1.0), place(1, 5, 0.5), place(4, 5, 0.0)
    ((0.0, 14.0), (25.0, 122.0), (100.0, 230.0))
    """
    return 100 * number / (changes - 1) if changes > 1 else 50.0, TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def history_chart(history: Sequence[Event]) -> str:
    """Accuracy on held-out base pictures and rejection of taught ones after every change, as an SVG of any width."""
    if all(event.get(key) is None for event in history for key, _, _ in SERIES):
        return message("There are no figures: the model had too few pictures to keep some for checking.", "ask")
    parts = []
    for level in (0, 25, 50, 75, 100):
        y = place(0, 1, level / 100)[1]
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="-10" y="{y + 4}" text-anchor="end">{level} %</text>')
    changes = len(history)
    every = -(-changes // 8)
    for number in range(0, changes, every):
        x = place(number, changes, 0)[0]
        parts.append(f'<text x="{x}%" y="{HEIGHT - 8}" text-anchor="middle">{number}</text>')
    for key, style, meaning in SERIES:
        known = [(number, event[key]) for number, event in enumerate(history) if event.get(key) is not None]
        spots = [place(number, changes, share) for number, share in known]
        parts += [
            f'<line class="{style}" x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}"/>'
            for (x1, y1), (x2, y2) in zip(spots, spots[1:])
        ]
        parts += [
            f'<circle class="{style}" cx="{x:.2f}%" cy="{y:.1f}" r="4">'
            f"<title>change {number}: {escape(percent(share, 0))} {meaning}</title></circle>"
            for (x, y), (number, share) in zip(spots, known)
        ]
    legend = "".join(f'<li class="{style}">{meaning}</li>' for _, style, meaning in SERIES)
    last = history[-1]
    said = "; ".join(f"{meaning}: now {escape(percent(last.get(key), 0))}" for key, _, meaning in SERIES)
    return (
        f'<figure class="fs-card fs-chart"><ul class="legend">{legend}</ul>'
        f'<svg width="100%" height="{HEIGHT}" role="img" aria-label="After each of {changes} changes. {said}.">'
        f"{''.join(parts)}</svg><figcaption>number of the change, as in the table below</figcaption></figure>"
    )
