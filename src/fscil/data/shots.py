"""Which K images of each new class are learned from: a seeded draw, published lists, or a former run's ledger.

A ledger maps task number -> class name -> images (as the manifest names them); tasks count from 1, the base task uses
everything.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from fscil.errors import UserError, nearest
from fscil.files import read_json, write_json
from fscil.reading import parse_json, read_text
from fscil.strict import conform

Image = str | int
Ledger = dict[int, dict[str, list[Image]]]
Pools = Mapping[int, Mapping[str, Sequence[Image]]]  # task -> class, in order of arrival -> all its training images


def seeded_shots(pools: Pools, shots: int, seed: int) -> Ledger:
    """The draw of the released code for a seed, from a stream of its own.

    That code seeds Python's generator once, then per task builds two training subsets, and each of them shuffles a
    copy of every class's image numbers and keeps the first K. Only the second draw is ever used, yet both advance the
    stream.

    >>> seeded_shots({1: {"cat": range(100), "dog": range(100, 200)}}, shots=2, seed=2023)
    {1: {'cat': [40, 59], 'dog': [136, 105]}}
    """
    for task, classes in pools.items():
        for name, images in classes.items():
            if len(images) < shots:
                raise UserError(
                    f'shots is {shots}, but class "{name}" of task {task} has only {len(images)} training images; '
                    f"ask for at most {len(images)} shots"
                )
    stream = random.Random(seed)
    ledger: Ledger = {}
    for task in sorted(pools):
        for _ in range(2):
            drawn: dict[str, list[Image]] = {}
            for name, images in pools[task].items():
                order = list(images)
                stream.shuffle(order)
                drawn[name] = order[:shots]
        ledger[task] = drawn
    return ledger


def index_file_shots(folder: str | os.PathLike[str], pools: Pools) -> tuple[list[Image], Ledger]:
    """The lists that CEC and its successors share: (images of the base task, ledger).

    `folder` holds session_1.txt (base) and one session_<t+1>.txt for each task t, an image a line: for CIFAR its
    position in the official train order, else its path, of which the last two parts count. `pools` holds the base
    task as task 0.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f'index_files: "{folder}" is not a folder with session_1.txt, session_2.txt, …')
    owner = {
        image: (task, name) for task, classes in pools.items() for name, images in classes.items() for image in images
    }
    by_tail = {_tail(image, 2): image for image in owner}
    names = Counter(_tail(image, 1) for image in owner)
    # A file name alone will do where no other image has it (miniImageNet keeps all images in one folder).
    by_tail.update((_tail(image, 1), image) for image in owner if names[_tail(image, 1)] == 1)
    base: list[Image] = []
    ledger: Ledger = {}
    for task, classes in sorted(pools.items()):
        path = folder / f"session_{task + 1}.txt"
        listed: dict[str, list[Image]] = {name: [] for name in classes}
        for line in _lines(path):
            image = by_tail.get(_tail(line, 2), by_tail.get(_tail(line, 1)))
            if image is None:
                raise UserError(
                    f'{path} lists "{line}", which is no training image of this split and these classes; such '
                    "lists belong "
                    "to the natural class order and the official split (--set data.split=official)"
                )
            where, name = owner[image]
            if where != task:
                raise UserError(
                    f'{path} lists "{line}" of class "{name}", which arrives with task {where}, not {task}; these '
                    "lists belong to "
                    "one class order and one choice of base and way"
                )
            listed[name].append(image)
        missing = [name for name, images in listed.items() if not images]
        if missing:
            raise UserError(f'{path} lists no image of class "{missing[0]}", which arrives with task {task}')
        if task == 0:
            base = [image for images in listed.values() for image in images]
        else:
            ledger[task] = listed
    return base, ledger


def ledger_shots(path: str | os.PathLike[str], pools: Pools) -> Ledger:
    """Exactly the shots of a ledger file, checked against the stream they are to serve."""
    saved = load_ledger(path)
    ledger: Ledger = {}
    for task, classes in sorted(pools.items()):
        known = saved.get(task, {})
        ledger[task] = {}
        for name, images in classes.items():
            if name not in known:
                hint = nearest(name, known)
                raise UserError(
                    f'shots_file {path}: task {task} has no shots of class "{name}", which it brings.{hint}'
                )
            strange = [image for image in known[name] if image not in set(images)]
            if strange or not known[name] or len(set(known[name])) != len(known[name]):
                problem = (
                    f"{strange[0]!r} is none of its training images" if strange else "none are listed, or one twice"
                )
                raise UserError(f'shots_file {path}: task {task}, class "{name}": {problem}')
            ledger[task][name] = list(known[name])
    return ledger


def save_ledger(path: str | os.PathLike[str], ledger: Ledger, **about: object) -> None:
    """Write a ledger (a run's shots.json); `about` is kept beside it, the split hash say."""
    write_json(path, {"kind": "shots", **about, "tasks": {str(task): classes for task, classes in ledger.items()}})


class _Shots(TypedDict):
    tasks: dict[str, dict[str, list[str | int]]]


class Shots(_Shots, total=False):
    """shots.json."""

    split_hash: str


def read_shots(path: str | os.PathLike[str]) -> Shots:
    """A run's shots.json, checked; its tasks are numbered in text."""
    shots: Shots = conform(read_json(path), Shots, path)
    strange = next((task for task in shots["tasks"] if not task.isdecimal() or len(task) > 9), None)
    if strange is not None:
        raise UserError(f'"{path}": "tasks.{strange}" must be named by the number of a task')
    return shots


def load_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Read a ledger: what `save_ledger` wrote, or the bare JSON object {task: {class: [images]}}."""
    if not os.path.exists(path):
        raise UserError(f'--shots-file (data.shots_file) "{path}" does not exist')
    data = parse_json(read_text(path), path)
    if not isinstance(data, dict):
        raise UserError(f'shots_file: "{path}" is not a JSON ledger {{task: {{class: [images]}}}}')
    tasks = data.get("tasks", data)
    if isinstance(tasks, dict):
        tasks = {task: classes for task, classes in tasks.items() if task.isdecimal() and len(task) < 10}
    conform(tasks, dict[str, dict[str, list[str | int]]], f"{path}: tasks")
    ledger = {int(task): classes for task, classes in tasks.items()}
    if not ledger:
        raise UserError(f'shots_file: "{path}" holds no tasks')
    return ledger


def _tail(image: Image, parts: int) -> str:
    return "/".join(re.split(r"[\\/]", str(image))[-parts:])


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]
