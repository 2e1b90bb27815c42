"""The python version of CIFAR is a pickle, and unpickling runs what a file says. Here it is read as data, never run.

`pickletools.genops` only lists opcodes. A small stack machine follows those that these files hold: numbers, strings,
lists, tuples, dicts and uint8 arrays. Names of functions are data too: nothing is imported, and any other name or
opcode refuses the file. Memory stays within a small multiple of the file's size: an object that is asked for twice is
one object, what a container holds is bounded, and none lies more than a few deep.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fscil.errors import UserError
from fscil.reading import read_bytes


class _Name(NamedTuple):
    """A function or class the pickle names."""

    text: str


class _Uint8:
    """The dtype |u1 under construction."""


class _Array:
    """An ndarray under construction."""

    value: np.ndarray | None = None


RECONSTRUCT = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}  # before and since numpy 2
NAMES = RECONSTRUCT | {"numpy ndarray", "numpy dtype", "_codecs encode"}
CONTAINERS = (list, tuple, dict)
FILE_AT_MOST = 512 * 2**20  # bytes; the largest of CIFAR has 150 million
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
DEPTH_AT_MOST = 8  # containers within containers; CIFAR's arrays are tuples of tuples in a dict
ITEMS_PER_BYTE = 2  # that all containers together may hold, per byte of the file: every one costs an opcode
VALUES = {"BININT", "BININT1", "BININT2", "BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
SHORT_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain_pickle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict that a CIFAR file holds, keys as text; UserError for anything else.

    Strings of Python 2 come as bytes, arrays as uint8 `ndarray`s.
    """
    try:
        content = io.BytesIO(read_bytes(path, FILE_AT_MOST))  # `genops` may not ask a file of any length for its rest
        result = _follow(content)
        if not isinstance(result, dict):
            raise ValueError("it holds no dict")
        return {key: _flat(value) for key, value in result.items()}
    except UserError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f'"{path}" is refused as a CIFAR python file: {error}') from error


def _follow(file: io.BytesIO) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    budget = _Budget(ITEMS_PER_BYTE * len(file.getbuffer()))

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    operations: Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(file)
    for opcode, argument, position in operations:
        name = opcode.name
        if name == "PROTO":
            continue
        elif name in VALUES:
            stack.append(argument)
        elif name in ("BINSTRING", "SHORT_BINSTRING"):  # `str` of Python 2: bytes
            stack.append(argument.encode("latin-1"))
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in SHORT_TUPLES:
            size = SHORT_TUPLES[name]
            if size > len(stack) - (marks[-1] if marks else 0):
                raise ValueError(f"a tuple at byte {position} lacks items")
            stack[len(stack) - size :] = [budget.made(tuple(stack[len(stack) - size :]))]
        elif name == "TUPLE":
            stack.append(budget.made(tuple(since_mark())))
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            _expect(stack[-1], list).extend(items)
            budget.filled(stack[-1], items)
        elif name in ("SETITEM", "SETITEMS"):
            items = since_mark() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
            names, values = items[::2], items[1::2]
            _expect(stack[-1], dict).update(zip([_text(key) for key in names], values, strict=True))
            budget.filled(stack[-1], values)
        elif name == "GLOBAL":
            if argument not in NAMES:
                raise ValueError(f"it calls for {argument.replace(' ', '.')}")
            stack.append(_Name(argument))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = _called(_expect(stack[-1], _Name).text, _expect(arguments, tuple))
            budget.spend(len(stack[-1]) if isinstance(stack[-1], bytes) else 1)
        elif name == "BUILD":
            state = stack.pop()
            _built(stack[-1], _expect(state, tuple))
        elif name == "STOP":
            return stack.pop()
        else:
            raise ValueError(f"opcode {name} at byte {position} has no place in one")
    raise ValueError("it ends early")


class _Budget:
    """How deep each container is and how many items there are in all, with limits to both."""

    def __init__(self, items: int):
        self.items = items
        self.depths: dict[int, tuple[Any, int]] = {}  # id of a container -> itself, so that the id stays its own; depth

    def made(self, container: tuple[Any, ...]) -> tuple[Any, ...]:
        self.filled(container, container)
        return container

    def filled(self, container: Any, items: Sequence[Any]) -> None:
        """Counts items that came into a container. One that comes into itself counts as deep without end."""
        inner = max((self._depth(item) for item in items if isinstance(item, CONTAINERS)), default=0)
        depth = max(inner + 1, self._depth(container))
        if depth > DEPTH_AT_MOST or any(item is container for item in items):
            raise ValueError("it is nested too deeply")
        self.depths[id(container)] = container, depth
        self.spend(1 + len(items))

    def _depth(self, container: Any) -> int:
        return self.depths.get(id(container), (None, 1))[1]

    def spend(self, items: int) -> None:
        self.items -= items
        if self.items < 0:
            raise ValueError("it holds more than a file of its size can")


def _called(name: str, arguments: tuple[Any, ...]) -> Any:
    """What the call of a known name stands for."""
    if name in RECONSTRUCT and arguments[0] == _Name("numpy ndarray"):
        return _Array()
    if name == "numpy dtype" and _text(arguments[0]) == "u1":
        return _Uint8()
    if name == "_codecs encode" and arguments[1:] in (
        ("latin1",),
        ("latin-1",),
    ):  # bytes, as Python 3 writes protocol 2
        return _expect(arguments[0], str).encode("latin-1")
    raise ValueError(f"it calls {name.replace(' ', '.')} in an unknown way")


def _built(target: Any, state: tuple[Any, ...]) -> None:
    if isinstance(target, _Uint8):  # byte order and flags: one byte has no order
        return
    _, shape, dtype, fortran, data = state
    _expect(target, _Array)
    _expect(dtype, _Uint8)
    _expect(data, bytes)
    sizes = [_expect(size, int) for size in _expect(shape, tuple)]
    if fortran or len(sizes) > 4 or min(sizes, default=0) < 0 or len(data) != math.prod(sizes):
        raise ValueError("it holds an array of another layout")
    target.value = np.frombuffer(data, np.uint8).reshape(shape)


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__.strip('_')} where a {kind.__name__.strip('_')} belongs")
    return value


def _flat(value: Any) -> Any:
    """A value of the dict: an array, a number, text, or a list of these two."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, list) and not all(isinstance(item, (int, str, bytes)) for item in value):
        raise ValueError("it holds a list of more than numbers and text")
    if not isinstance(value, (int, str, bytes, list, type(None))):
        raise ValueError(f"it holds a {type(value).__name__.strip('_')}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, (bytes, str)) and len(value) > 100:
        raise ValueError("it has a name of more than 100 letters")
    return value.decode("latin-1") if isinstance(value, bytes) else _expect(value, str)
