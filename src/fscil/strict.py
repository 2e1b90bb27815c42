"""Dataclasses from what people write: strict keys, checked values, nested layers, settings as "a.b=c".

>>> from dataclasses import dataclass
>>> @dataclass
... class Engine:
...     power: int = 75
>>> build(Engine, merge({"power": 60}, parse_setting("power=90")))
Engine(power=90)
>>> build(Engine, {"pover": 90})
Traceback (most recent call last):
fscil.errors.UserError: unknown key "pover". Did you mean "power"?
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from fscil.errors import UserError, nearest
from fscil.reading import parse_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

MOST = {"lr": 1e30}  # steps of more than float32 holds cannot be added up
LEAST = {"epochs": 0, "lr": 0, "batch_size": 1, "rank": 1}  # of settings, by the end of their names


def build(cls: type[D], values: Mapping[str, Any], prefix: str = "") -> D:
    """Make the dataclass `cls` from a mapping: unknown keys and values of a wrong type are errors that name the key."""
    if not isinstance(values, Mapping):
        raise UserError(f'"{prefix.rstrip(".")}" must be a mapping of settings, got {show(values)}')
    hints = types_of(cls)
    known = [item.name for item in dataclasses.fields(cls) if item.init]
    converted = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in known]))
        converted[key] = _convert(value, hints[key], f"{prefix}{key}")
        least = _least(key)
        if least is not None and isinstance(converted[key], (int, float)) and converted[key] < least:
            raise UserError(f'"{prefix}{key}" must be at least {least}, got {show(converted[key])}')
        most = next((most for end, most in MOST.items() if key.endswith(end)), None)
        if most is not None and isinstance(converted[key], (int, float)) and converted[key] > most:
            raise UserError(f'"{prefix}{key}" must be at most {most:g}, got {show(converted[key])}')
    try:
        return cls(**converted)
    except UserError as error:
        raise UserError(f"{prefix}{error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{prefix.rstrip('.') or cls.__name__}: {error}") from error


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """The types of a dataclass by field, evaluated once."""
    return typing.get_type_hints(cls, include_extras=True)


def _least(name: str) -> int | None:
    """The least that a setting of this name can mean, in whichever options it stands.

    >>> _least("batch_size"), _least("learn_epochs"), _least("seed")
    (1, 0, None)
    """
    return next((least for end, least in LEAST.items() if name.endswith(end)), None)


def unknown_key(key: str, known: Sequence[str]) -> str:
    """What to say of a key that does not exist: it may stand in another place, or be misspelt."""
    place, _, last = key.rpartition(".")
    same = [name for name in known if name.rpartition(".")[2] == last]
    same = same or [f"{place}.{short}" for short in (initials(last),) if place and f"{place}.{short}" in known]
    hint = f' Did you mean "{same[0]}"?' if same else nearest(key, known)
    if not hint:
        inside = [name for name in known if name.startswith(f"{key.partition('.')[0]}.")]
        hint = f" Known: {', '.join(inside or dict.fromkeys(name.partition('.')[0] for name in known))}."
    return f'unknown key "{key}".{hint}'


def initials(name: str) -> str:
    """The letters that the words of a name begin with, as options are often shortened.

    >>> initials("learning_rate")
    'lr'
    """
    return "".join(word[:1] for word in name.split("_"))


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as type `hint`, or a UserError. YAML reads 1e-3 as text, so text that is a number counts as one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, key)
    if origin is Annotated:
        number = _convert(value, arguments[0], key)
        for bounds in arguments[1:]:
            if isinstance(bounds, (Between, Above)) and not bounds.holds(number):
                raise UserError(f'"{key}" must be {bounds}, got {show(value)}')
        return number
    if origin is Literal:
        if isinstance(value, bool) and {"on", "off"} <= set(arguments):  # YAML reads on and off as truth values
            value = "on" if value else "off"
        if value not in arguments or isinstance(value, bool) != any(isinstance(a, bool) for a in arguments):
            raise UserError(_not_a_choice(key, value, arguments))
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [item.value for item in hint]
        if value not in choices and not isinstance(value, hint):
            raise UserError(_not_a_choice(key, value, choices))
        return hint(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, f"{key}.")
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif hint is str and isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    elif hint in (bool, type(None)) and isinstance(value, hint):
        return value
    elif hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    elif hint is dict or origin is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif origin in (tuple, list) and isinstance(value, (list, tuple)):
        if origin is list or arguments[-1] is Ellipsis:
            kinds = [arguments[0]] * len(value)
        else:
            kinds = list(arguments)
        if len(kinds) == len(value):
            return origin(_convert(item, kind, f"{key}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds)))
    raise UserError(f'"{key}" must be {_describe(hint)}, got {show(value)}')


def _convert_union(value: Any, choices: Sequence[Any], key: str) -> Any:
    failures = []
    for choice in choices:
        try:
            return _convert(value, choice, key)
        except UserError as error:
            failures.append(error)
    useful = [f for f, choice in zip(failures, choices) if typing.get_origin(choice) in (Literal, Annotated)]
    if useful:
        raise useful[0]
    expected = " or ".join(_describe(choice) for choice in choices)
    raise UserError(f'"{key}" must be {expected}, got {show(value)}')


def _not_a_choice(key: str, value: Any, choices: Iterable[Any]) -> str:
    listed = ", ".join(str(choice) for choice in choices)
    return f'"{key}" must be one of {listed}; got {show(value)}.{nearest(str(value), map(str, choices))}'


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) in (tuple, list):
        arguments = typing.get_args(hint)
        return f"a list of {'numbers' if len(arguments) < 2 or arguments[-1] is Ellipsis else len(arguments)}"
    return str(getattr(hint, "__name__", hint))


# ---- the form of a file --------------------------------------------------------------------------------------------


class Between(NamedTuple):
    """Bounds of a number, for `Annotated`."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"at least {self.low:g}" if self.high == math.inf else f"between {self.low:g} and {self.high:g}"


class Above(NamedTuple):
    """A lower bound that is not reached itself."""

    low: float

    def holds(self, value: float) -> bool:
        return value > self.low

    def __str__(self) -> str:
        return f"above {self.low:g}"


Positive = Annotated[float, Above(0)]
NotNegative = Annotated[float, Between(0, math.inf)]
Share = Annotated[float, Between(0, 1)]
Natural = Annotated[int, Between(1, math.inf)]
Whole = Annotated[int, Between(0, math.inf)]
Count = Annotated[int, Between(0, 2**53)]


def conform(value: Any, form: Any, path: object) -> Any:
    """`value`, which was read from `path`, if it has the declared form; else a UserError that names the key.

    A form is a type, a union, a Literal, `list[…]`, `dict[str, …]`, `Annotated[int, Between(…)]`, or a TypedDict, whose
    keys must be there and of their form; further ones may be there.

    >>> conform({"a": [1, "x"]}, dict[str, list[int]], "some.json")
    Traceback (most recent call last):
    fscil.errors.UserError: "some.json": "a[1]" must be a whole number, got "x"
    """
    if problem := _problem(value, form, ""):
        raise UserError(f'"{path}": {problem}')
    return value


def _problem(value: Any, form: Any, key: str) -> str:
    """What is wrong with a value, or ""."""
    origin, arguments = typing.get_origin(form), typing.get_args(form)
    if form is Any:
        return ""
    if origin is Literal:
        return "" if value in arguments else _not_a_choice(key, value, arguments)
    if typing.is_typeddict(form):
        if not isinstance(value, dict):
            return _wrong(key, "a mapping", value)
        if missing := sorted(form.__required_keys__ - value.keys()):
            return f'it lacks "{_below(key, missing[0])}"'
        inner = ((value[name], hint, _below(key, name)) for name, hint in _fields(form).items() if name in value)
    elif origin is dict:
        if not isinstance(value, dict):
            return _wrong(key, "a mapping", value)
        inner = ((item, arguments[1], _below(key, name)) for name, item in value.items())
    elif origin is list:
        if not isinstance(value, list):
            return _wrong(key, "a list", value)
        if arguments[0] in (int, str) and {*map(type, value)} <= {arguments[0]}:  # long lists, in one look
            return ""
        inner = ((item, arguments[0], f"{key}[{number}]") for number, item in enumerate(value))
    elif origin is Annotated:
        low, high = arguments[1]
        within = f"{_describe(arguments[0])} from {low:g} to {high:g}"
        return _problem(value, arguments[0], key) or ("" if low <= value <= high else _wrong(key, within, value))
    elif origin in (typing.Union, types.UnionType):
        problems = [_problem(value, choice, key) for choice in arguments]
        return "" if "" in problems else problems[0]
    else:
        fits = type(value) is form or (form is float and type(value) is int)
        return "" if fits else _wrong(key, _describe(form), value)
    return next(filter(None, (_problem(*item) for item in inner)), "")


@functools.cache
def _fields(form: Any) -> dict[str, Any]:
    return typing.get_type_hints(form, include_extras=True)


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _wrong(key: str, wanted: str, value: Any) -> str:
    name = f'"{key}"' if key else "it"
    return f"{name} must be {wanted}, got {show(value)}"


# ---- layers --------------------------------------------------------------------------------------------------------


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings on top of one another; the later wins."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def parse_setting(text: str) -> dict[str, Any]:
    """ "a.b=c" as {"a": {"b": c}}, the value read as YAML.

    >>> parse_setting("options.views=8")
    {'options': {'views': 8}}
    """
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f'--set "{text}": write it as key=value, for example --set options.epochs=5')
    parsed = parse_yaml(value, f"--set {key}") if value.strip() else None
    setting: dict[str, Any] = {parts[-1]: parsed}
    for part in reversed(parts[:-1]):
        setting = {part: setting}
    return setting


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return items


# ---- values --------------------------------------------------------------------------------------------------------


def require(condition: bool, name: str, value: Any, meaning: str) -> None:
    """Refuse a value of a dataclass, saying what it means: for `__post_init__`."""
    if not condition:
        raise UserError(f"{name} must be {meaning}, got {show(value)}")


def plain(value: Any) -> Any:
    """Only what YAML and JSON can say: tuples become lists, enums their values, paths text."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def show(value: Any) -> str:
    """A value as a message quotes it, not more than a line of it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"
