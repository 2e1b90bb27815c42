"""Text, JSON and YAML that others may have written, read as data: bounded in size and depth, without ambiguities.

Whatever is not as it should be is a UserError of one line that names the file; nothing here hangs, runs what it reads,
or takes more memory than a small multiple of the file.

>>> parse_json('{"a": [1, 2.5, null]}', "some.json")
{'a': [1, 2.5, None]}
>>> parse_json('{"a": 1, "a": 2}', "some.json")
Traceback (most recent call last):
fscil.errors.UserError: "some.json" is not a JSON file: "a" stands there twice
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from typing import Any, NoReturn

import yaml

from fscil.errors import UserError

Source = str | os.PathLike[str]

TEXT_AT_MOST = 64 * 2**20  # bytes of a text file; the split of a million images is about as long
TABLE_AT_MOST = 2**30  # bytes of a list of pictures: ten million of them
YAML_AT_MOST = 2**20  # bytes of settings; recipes have a few thousand
DEPTH_AT_MOST = 40  # containers within containers; ours have less than ten
DIGITS_AT_MOST = 19  # of a whole number: 64 bits


def read_text(path: Source, most: int = TEXT_AT_MOST) -> str:
    """A regular text file of at most `most` bytes."""
    return decode(read_bytes(path, most), path)


def read_bytes(path: Source, most: int = TEXT_AT_MOST) -> bytes:
    """A regular file of at most `most` bytes."""
    data = first_bytes(path, most + 1)
    if len(data) > most:
        raise UserError(f'"{path}" is too large: more than the {most} bytes that such a file may have')
    return data


def first_bytes(path: Source, count: int) -> bytes:
    """The first bytes of a regular file: a pipe or a device could be endless, or keep whoever opens it waiting."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f'cannot read "{path}": it is {"a folder" if os.path.isdir(path) else "no regular file"}')
        with open(path, "rb") as file:
            return file.read(min(count, status.st_size + 1))  # room for as much is set aside at once
    except OSError as error:
        raise UserError(f'cannot read "{path}": {error.strerror or error}') from error
    except UserError:
        raise
    except ValueError as error:  # a path with a NUL in it
        raise UserError(f'cannot read "{path}": {error}') from error


def decode(data: bytes, path: Source) -> str:
    """UTF-8 as text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f'"{path}" is not a text file: byte {error.start} is no UTF-8') from error


# ---- CSV -----------------------------------------------------------------------------------------------------------


def parse_csv(text: str, path: Source, delimiter: str = ",") -> list[list[str]]:
    """The rows of a CSV file that hold anything."""
    try:
        lines = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=delimiter)
        return [row for row in lines if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f'cannot read "{path}": {error}') from error


def parse_table(text: str, path: Source, delimiter: str = ",") -> tuple[list[str], list[dict[str, str]]]:
    """The columns that the first row of a CSV file names, and the other rows by them; a cell that is absent is empty.

    >>> parse_table("path,label\\na.jpg,jay\\nb.jpg\\n", "some.csv")
    (['path', 'label'], [{'path': 'a.jpg', 'label': 'jay'}, {'path': 'b.jpg', 'label': ''}])
    """
    head, *rows = parse_csv(text, path, delimiter) or [[]]
    names = [name.strip().lower() for name in head]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f'"{path}": the column "{twice}" stands there twice; rename or remove one.')
    return head, [dict(zip(head, [*row, *[""] * (len(head) - len(row))])) for row in rows]


# ---- JSON ----------------------------------------------------------------------------------------------------------


def parse_json(text: str, path: Source) -> Any:
    """JSON with finite numbers of 64 bits, no key twice, valid text, and containers at most DEPTH_AT_MOST deep."""
    try:
        data = json.loads(
            text, object_pairs_hook=_object, parse_int=_whole, parse_float=_finite, parse_constant=_constant
        )
        if "\\u" in text:  # an escape may be half of a character
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError(f'"{path}" is not a JSON file of fscil: it is nested too deeply') from None
    except UnicodeEncodeError:
        raise UserError(f'"{path}" is not a JSON file: it escapes half a character') from None
    except ValueError as error:
        raise UserError(f'"{path}" is not a JSON file: {error}') from error
    if _too_deep(data):
        raise UserError(f'"{path}" is not a JSON file of fscil: it is nested too deeply')
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f'"{twice}" stands there twice')
    return found


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS_AT_MOST:
        raise ValueError(f"the number {digits[:20]}… is too large")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(DEPTH_AT_MOST):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


# ---- YAML ----------------------------------------------------------------------------------------------------------

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):  # type: ignore[misc]
    """The safe loader; a key that stands twice in a mapping is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f'"{twice}" stands there twice', node.start_mark)
        return super().construct_mapping(node, deep)


def _decimal(loader: Any, node: Any) -> int | float:
    """A number as everybody reads it: to YAML 1.1, 010 is eight and 1:30 is ninety."""
    text = loader.construct_scalar(node)
    if ":" in text or re.fullmatch(r"[-+]?0[0-9_]+", text):
        words = f'"{text}" is a number of base {60 if ":" in text else 8} to YAML; write it in decimals, or in quotes'
        raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
    if node.tag.endswith(":int"):
        return int(loader.construct_yaml_int(node))
    return float(loader.construct_yaml_float(node))


for _tag in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _decimal)


def parse_yaml(text: str, path: Source) -> Any:
    """YAML of plain values: finite numbers, text, truth values, null, lists, and mappings with text as keys.

    Aliases are refused before anything is built from them: ten lines of them can stand for billions of values.
    """
    try:
        _check_events(yaml.parse(text, Loader=_Loader))
        data = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: the 31st of February, endless digits
        raise UserError(f'"{path}" is not valid YAML: {" ".join(str(error).split())}') from error
    _check_plain(data, "", path)
    return data


def _check_events(events: Iterable[yaml.Event]) -> None:
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = f"line {event.start_mark.line + 1}" if event.start_mark else "it"
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{line} refers to another place (*{event.anchor}); write it out")
        if depth > DEPTH_AT_MOST:
            raise ValueError(f"{line} is nested too deeply")


def _check_plain(value: Any, key: str, path: Source) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(f'"{path}": the key {str(name)[:40]} must be text; put it in quotes')
            _check_plain(item, f"{key}.{name}".lstrip("."), path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_plain(item, f"{key}[{number}]", path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f'"{path}": "{key}" must be a finite number, got {value}')
    elif isinstance(value, int) and abs(value) >= 10**DIGITS_AT_MOST:
        named = f'"{key}"' if key else "it"
        raise UserError(f'"{path}": {named} is too large a number')
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise UserError(f'"{path}": "{key}" is a {type(value).__name__}; put it in quotes if it is text')


def read_yaml(path: Source, most: int = YAML_AT_MOST) -> dict[str, Any]:
    """A YAML file that holds a mapping; an empty one holds an empty mapping."""
    values = parse_yaml(read_text(path, most), path)
    if values is not None and not isinstance(values, dict):
        raise UserError(f'"{path}" must hold a mapping of settings')
    return values or {}
