"""The python version of CIFAR is a pickle, and unpickling runs what a file says. Here it is read as data, never run.

`pickletools.genops` only lists opcodes. A small stack machine follows those that these files hold: numbers, strings,
lists, tuples, dicts and uint8 arrays. Names of functions are data too: nothing is imported, and any other name or
opcode refuses the file.
"""

from __future__ import annotations

import math
import os
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fscil.errors import UserError


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
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = {"BININT", "BININT1", "BININT2", "BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
SHORT_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain_pickle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict that a CIFAR file holds, keys as text; UserError for anything else.

    Strings of Python 2 come as bytes, arrays as uint8 `ndarray`s.
    """
    try:
        with Path(path).open("rb") as file:
            result = _follow(file)
        if not isinstance(result, dict):
            raise ValueError("it holds no dict")
        return {_text(key): value.value if isinstance(value, _Array) else value for key, value in result.items()}
    except OSError as error:
        raise UserError(f'cannot read "{path}": {error.strerror or error}') from error
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f'"{path}" is refused as a CIFAR python file: {error}') from error


def _follow(file: BinaryIO) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

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
            stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name == "APPEND":
            item = stack.pop()
            _expect(stack[-1], list).append(item)
        elif name == "APPENDS":
            items = since_mark()
            _expect(stack[-1], list).extend(items)
        elif name == "SETITEM":
            key, value = stack[-2:]
            del stack[-2:]
            _expect(stack[-1], dict)[key] = value
        elif name == "SETITEMS":
            items = since_mark()
            _expect(stack[-1], dict).update(zip(items[::2], items[1::2]))
        elif name == "GLOBAL":
            if argument not in NAMES:
                raise ValueError(f"it calls for {argument.replace(' ', '.')}")
            stack.append(_Name(argument))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = _called(_expect(stack[-1], _Name).text, _expect(arguments, tuple))
        elif name == "BUILD":
            state = stack.pop()
            _built(stack[-1], _expect(state, tuple))
        elif name == "STOP":
            return stack.pop()
        else:
            raise ValueError(f"opcode {name} at byte {position} has no place in one")
    raise ValueError("it ends early")


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
    if fortran or len(data) != math.prod(_expect(shape, tuple)):
        raise ValueError("it holds an array of another layout")
    target.value = np.frombuffer(data, np.uint8).reshape(shape)


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__.strip('_')} where a {kind.__name__.strip('_')} belongs")
    return value


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else _expect(value, str)
