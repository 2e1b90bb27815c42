"""Whatever parses takes or refuses any input: made-up values, changed files, and inputs that once failed.

`python tests/fuzzing.py` tries many more.
"""

import json
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzzing import PARSERS, cases, problem

FOUND = sorted((Path(__file__).parent / "data" / "hostile").iterdir())


def marked(value, name):
    """A parameter for the parser of this name, with the extra that it needs."""
    extra = PARSERS[name].extra
    return pytest.param(value, marks=pytest.mark.extra(extra) if extra else ())


NAMES = [marked(name, name) for name in PARSERS]
few = settings(max_examples=25, derandomize=True, deadline=None, database=None)

numbers = st.integers() | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=st.integers(0, 2**32))
def test_changed_files(name, seed):
    data = next(cases(PARSERS[name], random.Random(seed)))
    assert problem(name, data) == ""


@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.binary(max_size=300))
def test_any_bytes(name, data):
    assert problem(name, data) == ""


@pytest.mark.parametrize("name", [name for name in PARSERS if PARSERS[name].form != "bytes"])
@few
@given(value=values, at=st.integers(0, 1000), version=st.sampled_from([1, 1, 1, 2, "1"]))
def test_any_value_as_the_whole_or_a_part(name, value, at, version):
    """`value` takes the place of the entry number `at` of a true file."""
    form = PARSERS[name].form
    seed = PARSERS[name].seeds()[0]
    whole = yaml.safe_load(seed) if form == "yaml" else json.loads(seed.splitlines()[0] if form == "lines" else seed)
    whole[list(whole)[at % len(whole)]] = value
    if "format_version" in whole:
        whole["format_version"] = version
    for made in (value, whole):
        text = yaml.safe_dump(made, allow_unicode=True) if form == "yaml" else json.dumps(made)
        assert problem(name, text.encode("utf-8", "surrogatepass")) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_true_file_is_taken(name, tmp_path):
    """So that a parser which refuses everything would not pass."""
    PARSERS[name].parse(PARSERS[name].seeds()[0], tmp_path)


@pytest.mark.parametrize("path", [marked(path, path.name.partition("-")[0]) for path in FOUND], ids=lambda p: p.name)
def test_what_once_failed(path):
    assert problem(path.name.partition("-")[0], path.read_bytes()) == ""
