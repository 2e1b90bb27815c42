"""What the pages say about the code is so: names, files and options that they cite exist, and lists are complete."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer

import fscil
from fscil.cli import app
from fscil.commands.list import Kind, list_choices

ROOT, SOURCE = Path(__file__).parents[1], Path(fscil.__file__).parent
PAGES = sorted([*ROOT.glob("docs/methods/*.md"), *ROOT.glob("docs/heads/*.md")])
SECTIONS = {"head": "Options", "options": "Options", "data": "Config", "runtime": "Config", "transform": "Config"}
DOTTED = re.compile(r"(\w+)\.(\w+)(?:\(.*\))?")  # Class.attribute, module.function, section.option
FILE = re.compile(r"((?:\w+/)+\w+\.py)(?: (\w+))?")  # heads/mpcc.py, or with the name of something in it


class Code:
    """What the package defines, read from its syntax trees."""

    def __init__(self) -> None:
        self.trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        self.classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.names = {name for node in nodes for name in named(node)}

    def attributes(self, class_name: str) -> set[str]:
        """Of classes of that name and those they are made of: methods, class variables, and what is set on self."""
        found = set()
        for node in self.classes:
            if node.name == class_name:
                found |= {name for inner in node.body for name in named(inner)}
                own = [inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute)]
                found |= {inner.attr for inner in own if getattr(inner.value, "id", "") == "self"}
                found = found.union(*(self.attributes(base.id) for base in node.bases if isinstance(base, ast.Name)))
        return found

    def module(self, path: Path) -> set[str]:
        return {name for node in self.trees[path].body for name in named(node)}

    def settings(self, kind: str) -> set[str]:
        """Fields of all classes called …Options or …Config."""
        found = {node.name for node in self.classes if node.name.endswith(kind)}
        return {name for class_name in found for name in self.attributes(class_name)}

    def knows(self, owner: str, name: str) -> bool:
        if owner in SECTIONS:
            return name in self.settings(SECTIONS[owner])
        modules = [path for path in self.trees if path.stem == owner]
        return name in self.attributes(owner) or any(name in self.module(path) for path in modules) or owner == "self"


def named(node: ast.AST) -> list[str]:
    """The names that a statement gives to something."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


@cache
def code() -> Code:
    return Code()


def file_of(cited: str) -> Path | None:
    """A file of the package by its path in it, or of the repository."""
    return next((place / cited for place in (SOURCE, ROOT) if (place / cited).is_file()), None)


def wrong_citations(text: str) -> list[str]:
    """What a page cites that is not there."""
    wrong = []
    for line in text.splitlines():
        quoted = re.findall(r"`([^`]+)`", line)
        of_files = any(FILE.fullmatch(item) for item in quoted)
        for item in quoted:
            if match := FILE.fullmatch(item):
                path = file_of(match[1])
                known = path is not None and (match[2] is None or match[2] in code().module(path))
            elif match := DOTTED.fullmatch(item):
                known = code().knows(match[1], match[2])
            elif of_files and re.fullmatch(r"[a-z]+(_[a-z]+)+|([A-Z][a-z]+){2,}", item):  # beside a file: a name in it
                known = item in code().names
            else:
                continue
            wrong += [] if known else [item]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_what_a_page_cites_of_the_code_exists(page):
    assert not wrong_citations(page.read_text(encoding="utf-8"))


def test_a_citation_that_leads_nowhere_is_found():
    text = "`heads/mpcc.py`: `SMP._describe_base`, `Prompted.encode`, `no_such_name` · `maths/gone.py`"
    text += "\n`embeddings.nothing` `maths/calibrating.py nothing` `head.nothing` `FOSTER.logits` `L2P.task`"
    wrong = ["SMP._describe_base", "no_such_name", "maths/gone.py", "embeddings.nothing"]
    assert wrong_citations(text) == [*wrong, "maths/calibrating.py nothing", "head.nothing"]


def test_every_public_name_is_on_the_page_of_the_api():
    shown = set(re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE))
    public = [getattr(fscil, name) for name in fscil.__all__ if name != "__version__"]
    assert {f"{thing.__module__}.{thing.__qualname__}" for thing in public} <= shown


def test_pages_that_the_code_cites_are_in_the_repository():
    """Whoever reads the code can open what it refers to."""
    written = {"main.md", "index.md"}  # by compare and reproduce
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.yaml")]:
        for cited in re.findall(r"(?<![\w/])(?:\w+/)*\w+\.md\b", path.read_text(encoding="utf-8")):
            assert cited in written or (ROOT / cited).is_file(), f"{path.relative_to(SOURCE)} cites {cited}"


def test_every_row_of_a_table_stands_below_a_header():
    """A row after an empty line is text on a page: the table ended before it."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        lines = ["", *page.read_text(encoding="utf-8").split("\n"), ""]
        for before, line, after in zip(lines, lines[1:], lines[2:]):
            if line.startswith("|") and not before.startswith("|"):
                assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", after), f"{page.name}: {line[:80]}"


# ---- commands --------------------------------------------------------------------------------------------------------
COMMANDS = typer.main.get_command(app).commands
OF_ANOTHER = {  # options that a page names though they are another command's
    ("app", "--thumbnails"): "fit",
    ("evaluate", "--false-rejection"): "fit",
    ("info", "--weights"): "predict",
    ("fetch", "--backbone"): "run",
    ("fetch", "--dataset"): "run",
    ("leaderboard", "--limit"): "run",
    ("leaderboard", "--fast"): "run",
    ("report", "--limit"): "run",
    ("report", "--fast"): "run",
    ("report", "--set"): "run",
    ("verify", "--set"): "run",
}


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in (*parameter.opts, *parameter.secondary_opts)}


def sections() -> list[tuple[str, str]]:
    """(command, text) of every `# fscil COMMAND` in the pages."""
    found = []
    for page in sorted(ROOT.glob("docs/commands/*.md")):
        parts = re.split(r"^# fscil (\w+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found += list(zip(parts[1::2], parts[2::2]))
    return found


@pytest.mark.parametrize(("command", "text"), sections(), ids=[name for name, _ in sections()])
def test_options_that_a_page_names_are_options_of_the_command(command, text):
    """A line that names another command (`fscil predict … --json`) may have options of that one, too."""
    for line in text.splitlines():
        told = [name for name in re.findall(r"fscil (\w+)", line) if name in COMMANDS]
        known = {"--help"}.union(options_of(command), *map(options_of, told))
        for option in re.findall(
            r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"\b(accelerate|curl|docker|hf|tensorboard) .*", "", line)
        ):
            other = OF_ANOTHER.get((command, option))
            assert option in (known if other is None else options_of(other)), f"{command}: {option}"


def test_the_page_of_list_shows_what_the_command_says(capsys):
    text = (ROOT / "docs/commands/list.md").read_text(encoding="utf-8")
    assert {kind.value for kind in Kind} == set(re.findall(r"fscil list (\w+)", text))
    for kind in re.findall(r"^\$ fscil list (\w+)", text, re.MULTILINE):
        list_choices(Kind(kind))
        assert f"$ fscil list {kind}\n{capsys.readouterr().out}" in text
