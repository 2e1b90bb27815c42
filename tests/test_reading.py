"""Text, JSON and YAML of strangers: bounded, unambiguous, and refused in one line that names the file."""

import os
import tracemalloc
from typing import Annotated, Any, Literal, TypedDict

import pytest

from fscil.errors import UserError
from fscil.reading import DEPTH_AT_MOST, parse_json, parse_table, parse_yaml, read_text, read_yaml
from fscil.strict import Between, conform

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for below, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "NaN is no number"),
        ('{"a": [Infinity]}', "Infinity is no number"),
        ("-Infinity", "-Infinity is no number"),
        ('{"a": 1e999}', "1e999 is too large"),
        ("1" * 30, "is too large"),
        ("9" * 100_000, "is too large"),
        ('{"a": {"b": 1, "b": 1}}', '"b" stands there twice'),
        ('["\\ud800"]', "half a character"),
        ("[" * (DEPTH_AT_MOST + 1) + "]" * (DEPTH_AT_MOST + 1), "nested too deeply"),
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 1_000_000, "nested too deeply"),
        ("", "Expecting value"),
    ],
)
def test_json_that_others_would_read_otherwise_is_refused(text, words):
    with pytest.raises(UserError, match=f'"some.json".*{words}') as caught:
        parse_json(text, "some.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_json_at_its_bounds_is_read():
    deep = "[" * DEPTH_AT_MOST + "]" * DEPTH_AT_MOST
    assert parse_json(deep, "some.json") is not None
    assert parse_json('{"é": [-9223372036854775808, 1e308, "\\u00e9\\ud83d\\ude00"]}', "x") == {
        "é": [-(2**63), 1e308, "é😀"]
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, r"line 2 refers to another place \(\*a\)"),
        ("a: &a [*a]", "refers to another place"),
        ("a: .inf", '"a" must be a finite number'),
        ("a: {b: [1, .nan]}", r'"a.b\[1\]" must be a finite number'),
        ("a: 2020-01-01", '"a" is a date'),
        ("a: !!binary aGk=", '"a" is a bytes'),
        ("a: !!set {x}", '"a" is a set'),
        ("a: 2020-02-31", "not valid YAML"),
        ("a: !!python/object/apply:os.system [true]", "not valid YAML"),
        ("a: 1\na: 2", '"a" stands there twice'),
        ("a: 010", '"010" is a number of base 8 to YAML; write it in decimals'),
        ("a: [190:20:30]", '"190:20:30" is a number of base 60 to YAML'),
        ("a: 1:30.5", "base 60"),
        ("on: 1", "the key True must be text"),
        ("[a, b]: 1", "not valid YAML|must be text"),
        ("a: " + "9" * 30, "too large"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: " + "[" * 1000, "nested too deeply"),
        ("- " * 1000, "nested too deeply"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_yaml_that_is_more_than_settings_is_refused(text, words):
    with pytest.raises(UserError, match=words) as caught:
        parse_yaml(text, "own.yaml")
    assert "own.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_yaml_bomb_takes_no_memory():
    tracemalloc.start()
    with pytest.raises(UserError):
        parse_yaml(BOMB, "own.yaml")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_files_that_are_none_or_too_large_are_refused(tmp_path):
    pipe, large = tmp_path / "pipe", tmp_path / "large.yaml"
    os.mkfifo(pipe)  # whoever opens it would wait for ever
    large.write_text("x" * 2000)
    for path, words in ((pipe, "no regular file"), (tmp_path, "a folder"), ("/dev/zero", "no regular file")):
        with pytest.raises(UserError, match=words):
            read_text(path)
    with pytest.raises(UserError, match="more than the 1000 bytes"):
        read_yaml(large, most=1000)
    large.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="byte 3 is no UTF-8"):
        read_text(large)
    with pytest.raises(UserError, match="cannot read"):
        read_text("a\0b")


class Inner(TypedDict):
    n: Annotated[int, Between(1, 9)]


class Outer(TypedDict, total=False):
    inner: Inner
    kind: Literal["a", "b"]
    names: list[str]
    shares: dict[str, float | None]
    anything: Any


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "it must be a mapping"),
        ({"inner": {}}, 'it lacks "inner.n"'),
        ({"inner": {"n": 10}}, '"inner.n" must be a whole number from 1 to 9, got 10'),
        ({"inner": {"n": True}}, '"inner.n" must be a whole number, got true'),
        ({"inner": {"n": 1.0}}, '"inner.n" must be a whole number, got 1.0'),
        ({"kind": "c"}, '"kind" must be one of a, b; got "c"'),
        ({"names": ["x", 1]}, r'"names\[1\]" must be text, got 1'),
        ({"names": "xy"}, '"names" must be a list, got "xy"'),
        ({"shares": {"a": "1"}}, '"shares.a" must be a number'),
        ({"names": "x" * 9999}, "x…$"),
    ],
)
def test_a_form_names_the_key_that_does_not_fit(value, words):
    with pytest.raises(UserError, match=f'^"some.json": {words}' if words[0] != "x" else words):
        conform(value, Outer, "some.json")


def test_what_has_the_form_passes_as_it_is():
    value = {"inner": {"n": 1, "more": 2}, "kind": "a", "names": [], "shares": {"a": None, "b": 1}, "anything": [{}]}
    assert conform(value, Outer, "some.json") is value


def test_numbers_are_what_they_look_like():
    found = parse_yaml("[0, 7, -3, 1_000, 0x1F, 0b11, 0.5, 1.5e-3, '010', \"1:30\", 08, 00.5]", "own.yaml")
    assert found == [0, 7, -3, 1000, 31, 3, 0.5, 0.0015, "010", "1:30", "08", 0.5]


@pytest.mark.parametrize("head", ["path,label,path", "Path, path ,label", "label,path,label"])
def test_a_column_that_stands_twice_is_refused(head):
    with pytest.raises(UserError, match='some.csv": the column "(path|label)" stands there twice'):
        parse_table(f"{head}\na,b,c\n", "some.csv")
    assert parse_table("path,label,,\na,b,c,d\n", "some.csv")[1] == [{"path": "a", "label": "b", "": "d"}]
