"""Each extra alone, and none: the whole suite is collected and the extra's tests pass with the other extras hidden."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

# Those tests of each extra (`-k`, of the ones marked with it) that take seconds.
SHORT = {
    "app": "the_interface_behind_the_page",
    "bulk": "local",
    "cluster": "one_line",
    "docs": "linked_as_pages",
    "export": "peft or onnxruntime",
    "heic": "heic",
    "hf": "columns",
    "serve": "test_api and not killed and not sigterm",
    "tensorboard": "tensorboard",
}

# Imported at the start of every Python below: neither imports nor metadata know what is hidden.
HIDING = """
    import sys
    from importlib.machinery import PathFinder
    from packaging.utils import canonicalize_name

    class Hiding(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in {modules!r} else super().find_spec(name, path, target)

        @classmethod
        def find_distributions(cls, *context, **more):
            found = super().find_distributions(*context, **more)
            return (one for one in found if canonicalize_name(one.metadata["Name"]) not in {distributions!r})

    sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def asked_by(name: str, extra: str = "") -> set[tuple[str, str]]:
    """What a distribution (with one of its extras) asks for directly: pairs of a name and an extra of it."""
    asked = map(Requirement, metadata.requires(name) or [])
    wanted = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {(canonicalize_name(r.name), of) for r in wanted for of in ("", *r.extras)}


def closure(first: set[tuple[str, str]]) -> set[str]:
    """Everything that is installed for the sake of these."""
    found, todo = set(), set(first)
    while todo:
        name, extra = one = todo.pop()
        found.add(one)
        try:
            todo |= asked_by(name, extra) - found
        except metadata.PackageNotFoundError:  # for another platform, or hidden already
            continue
    return {name for name, _ in found}


def modules_of(distribution: str) -> set[str]:
    """Top-level modules and packages in a distribution's list of files."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return set()
    tops = {file.parts[0].partition(".")[0] for file in files if file.suffix in (".py", ".so", ".pyd")}
    return {top for top in tops if top.isidentifier()}


def environment_with(extras: set[str], folder: Path) -> dict[str, str]:
    """Variables under which Python sees, of all the optional parts, only what these extras bring."""
    everything = asked_by("fscil", "slow")
    optional = set().union(*(asked_by("fscil", extra) for extra in SHORT)) - asked_by("fscil")
    seen = closure(everything - optional | set().union(*(asked_by("fscil", extra) for extra in extras)))
    hidden = closure(everything) - seen
    modules = set().union(*map(modules_of, hidden)) - set().union(*map(modules_of, seen))
    source = textwrap.dedent(HIDING).format(modules=modules, distributions=hidden)
    (folder / "sitecustomize.py").write_text(source)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "FSCIL_REQUIRE_ALL": "0", "OMP_NUM_THREADS": "1"}


def outcomes_of(arguments: list[str], environment: dict[str, str], folder: Path = ROOT) -> tuple[dict[str, int], str]:
    """Runs pytest: how many tests passed, failed, … and all that was printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    *_, last = done.stdout.splitlines() or [""]
    return {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", last)}, done.stdout + done.stderr


def skipped_for(printed: str) -> set[str]:
    """The extras that skipped tests say they need."""
    lines = re.findall(r"^SKIPPED.*", printed, re.MULTILINE)
    assert all("needs fscil[" in line for line in lines), printed
    return {re.search(r"needs fscil\[(\w+)\]", line)[1] for line in lines}


@pytest.mark.slow
# not Ray: what is hidden is hidden from the processes that it starts, too; the workflow installs it alone
@pytest.mark.parametrize("extra", sorted(SHORT.keys() - {"cluster"}))
def test_an_extra_works_without_the_others(extra, tmp_path):
    arguments = ["-m", "extra", "-k", SHORT[extra]]
    outcomes, printed = outcomes_of(arguments, environment_with({extra}, tmp_path))
    assert outcomes.keys() <= {"passed", "deselected", "skipped", "warning", "warnings"} and outcomes.get("passed"), (
        printed
    )
    assert extra not in skipped_for(printed), printed


@pytest.mark.slow
def test_without_any_extra_their_tests_are_skipped_and_say_what_they_need(tmp_path):
    outcomes, printed = outcomes_of(["-m", "extra"], environment_with(set(), tmp_path))
    assert outcomes.keys() <= {"deselected", "skipped", "warning", "warnings"}, printed
    assert skipped_for(printed) == set(SHORT)


def test_only_what_an_extra_brings_may_be_missing_from_a_module_with_examples(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "ours.py").write_text("raise ModuleNotFoundError('no fastapi', name='fastapi.responses')")
    (tmp_path / "odd.py").write_text("import a_module_of_nobody")
    (tmp_path / "fine.py").write_text('""">>> 1 + 1\n2"""')
    arguments = ["--doctest-modules", "-rs", "--continue-on-collection-errors"]
    environment = {**os.environ, "FSCIL_REQUIRE_ALL": "0"}
    outcomes, printed = outcomes_of(arguments, environment, tmp_path)
    assert outcomes == {"passed": 1, "skipped": 1, "error": 1}, printed
    assert "ours.py: needs fscil[serve]" in printed and "a_module_of_nobody" in printed
    outcomes, printed = outcomes_of(arguments, environment | {"FSCIL_REQUIRE_ALL": "1"}, tmp_path)
    assert outcomes == {"passed": 1, "errors": 2}, printed
