"""Strict keys and checked values."""

import dataclasses
from typing import Literal

import pytest

from fscil.errors import UserError
from fscil.strict import Natural, Positive, Share, build, flatten, merge, parse_setting


@dataclasses.dataclass(frozen=True)
class Sample:
    number: float = 1.0
    count: int | None = None
    kind: Literal["one", "two"] = "one"
    switch: bool = False
    pair: tuple[float, float] = (0.0, 1.0)
    text: str = ""
    part: Share = 0.5
    rate: Positive | None = None
    layers: Natural = 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"number": 3}, {"number": 3.0}),
        ({"number": "1e-3"}, {"number": 0.001}),  # YAML reads 1e-3 as text
        ({"count": None}, {"count": None}),
        ({"count": 4}, {"count": 4}),
        ({"pair": [0, 2]}, {"pair": (0.0, 2.0)}),
        ({"text": 256}, {"text": "256"}),
        ({"part": 1, "rate": 2, "layers": 3}, {"part": 1.0, "rate": 2.0, "layers": 3}),
        ({"rate": None}, {"rate": None}),
    ],
)
def test_values_take_the_type_of_their_field(values, expected):
    made = build(Sample, values)
    for key, value in expected.items():
        assert getattr(made, key) == value
        assert type(getattr(made, key)) is type(value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"number": "many"}, ["number", '"many"']),
        ({"number": float("nan")}, ["number"]),
        ({"number": True}, ["number", "true"]),
        ({"count": 1.5}, ["count", "1.5"]),
        ({"kind": "tow"}, ["kind", "one, two", '"tow"', 'Did you mean "two"?']),
        ({"switch": 1}, ["switch", "true or false"]),
        ({"pair": [1]}, ["pair", "[1]"]),
        ({"pair": [1, "x"]}, ["pair[1]", '"x"']),
        ({"part": 1.5}, ['"part" must be between 0 and 1, got 1.5']),
        ({"part": "half"}, ['"part" must be a number, got "half"']),
        ({"rate": 0}, ['"rate" must be above 0, got 0']),
        ({"layers": 0}, ['"layers" must be at least 1, got 0']),
        ({"layers": 1.5}, ['"layers" must be a whole number, got 1.5']),
        ({"swich": True}, ['"swich"', 'Did you mean "switch"?']),
    ],
)
def test_a_wrong_value_is_named_with_its_key(values, words):
    with pytest.raises(UserError) as caught:
        build(Sample, values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("setting", ["options.epochs", "=3", "a..b=1", "seed=[1"])
def test_a_setting_that_cannot_be_read_says_so(setting):
    with pytest.raises(UserError, match="--set"):
        parse_setting(setting)


def test_layers_merge_key_by_key_and_leave_what_they_are_made_of_alone():
    below, above = {"a": {"x": 1, "y": [1]}, "b": {"z": 2}}, {"a": {"y": [2, 3]}, "b": 5}
    merged = merge(below, above)
    assert merged == {"a": {"x": 1, "y": [2, 3]}, "b": 5}
    assert flatten(merged) == {"a.x": 1, "a.y": [2, 3], "b": 5}
    assert below == {"a": {"x": 1, "y": [1]}, "b": {"z": 2}} and above == {"a": {"y": [2, 3]}, "b": 5}


def test_rates_that_no_optimizer_can_use_are_refused_by_key():
    @dataclasses.dataclass
    class Training:
        lr: float = 0.1
        learn_lr: float = 0.1

    assert build(Training, {"lr": 1e30}).lr == 1e30
    for key in ("lr", "learn_lr"):
        with pytest.raises(UserError, match=f'"options.{key}" must be at most 1e.30, got 1e.308'):
            build(Training, {key: 1e308}, "options.")
    with pytest.raises(UserError, match="--set seed.: it is too large a number"):
        parse_setting(f"seed={10**30}")
