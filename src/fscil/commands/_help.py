"""How `--help` looks: what an option takes in words (NUMBER, TEXT, FILE, DIR), not as Python's types."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

# What options take that say nothing else, by the name of their type in this or another version of typer.
WORDS = {"int": "NUMBER", "integer": "NUMBER", "float": "NUMBER", "str": "TEXT", "text": "TEXT", "path": "PATH"}


class Readable:
    """A command, or a group of them, whose parameters are shown in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, `--help` too."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        make_readable(params)
        return params


class Command(Readable, TyperCommand):
    pass


class Group(Readable, TyperGroup):
    pass


def make_readable(params: list[Any]) -> None:
    """Sets how each parameter is shown: flags take nothing, arguments are called by their name alone."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""
        elif param.metavar is None and not _is_choice(param):
            param.metavar = WORDS.get(_type_name(param))


def _type_name(param: Any) -> str:
    """
    >>> from types import SimpleNamespace as Made
    >>> _type_name(Made(type=Made(name="integer range"))), _type_name(Made(type_descriptor=Made(annotation=float)))
    ('integer', 'float')
    """
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is not None:
        return str(getattr(descriptor.annotation, "__name__", "")).lower()
    return str(getattr(param.type, "name", "")).partition(" ")[0]


def wanted_number(param: Any) -> str:
    """What a parameter that takes a number asks for, in words; empty if it takes something else.

    >>> from types import SimpleNamespace as Made
    >>> wanted_number(Made(type=Made(name="integer range", min=1, max=None)))
    'a whole number of at least 1'
    """
    kind = {"int": "a whole number", "integer": "a whole number", "float": "a number"}.get(_type_name(param), "")
    least, most = (getattr(param, end, getattr(getattr(param, "type", None), end, None)) for end in ("min", "max"))
    if not kind or (least is None and most is None):
        return kind
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    return f"{kind} of at least {least}" if most is None else f"{kind} of at most {most}"


def _is_choice(param: Any) -> bool:
    descriptor = getattr(param, "type_descriptor", None)
    return bool(descriptor.is_choice if descriptor is not None else hasattr(param.type, "choices"))
