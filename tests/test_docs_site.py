"""The documentation: commands and options in it exist, and the site is built whole and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fscil.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^(?:\$ )?(fscil [a-z].*)", re.MULTILINE)


def commands_of(page: Path) -> list[str]:
    """Lines of code blocks, and code within lines, that call the command."""
    text = page.read_text(encoding="utf-8")
    blocks = [block.replace("\\\n", " ") for _, block in FENCE.findall(text)]
    inline = re.findall(r"`(fscil [a-z][^`]*)`", FENCE.sub("", text))
    return [line for block in blocks for line in PROMPT.findall(block)] + [line.replace("\\|", "|") for line in inline]


def test_the_pages_are_found_and_hold_commands():
    assert len(PAGES) > 40 and sum(len(commands_of(page)) for page in PAGES) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_in_the_docs_exist(page):
    known = typer.main.get_command(app).commands
    for line in commands_of(page):
        line = re.split(r"\s[|>&#]+\s|…\s*$|;\s", line)[0]
        try:
            words = shlex.split(line)[1:]
        except ValueError:  # a quotation that goes on in the next line
            continue
        name = words[0].rstrip(".,:")
        assert name in known, f"{page.name}: fscil {name}"
        options = {option for found in known[name].params for option in (*found.opts, *found.secondary_opts)}
        for word in words[1:]:
            option = word.partition("=")[0].rstrip(".,:)")
            if re.fullmatch(r"--[a-z][a-z-]*|-[a-z]", option):
                assert option in options | {"--help", "-h"}, f"{page.name}: {line}"


@pytest.mark.slow
@pytest.mark.extra("docs")
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40 and (tmp_path / "api.html").read_text(encoding="utf-8").count("partial_fit") > 1
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)", page.read_text())
        assert loaded == [], f"{page.name} loads {loaded}"


@pytest.mark.extra("docs")
def test_pages_of_the_repository_are_linked_as_pages():
    """What `scripts/docs_hooks.py` does to links, case by case."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    class Known:
        def get_file_from_path(self, path):
            return path if (ROOT / "docs" / path).exists() or path in hooks.BORROWED.values() else None

    def shown(source: str, text: str) -> str:
        page = type("Page", (), {"file": type("File", (), {"src_uri": source})})
        return hooks.on_page_markdown(text, page, None, Known())

    assert shown("methods/smp.md", "[a](../../src/fscil/methods/smp/method.py)") == "a"
    assert shown("index.md", "[a](docs/tutorial.md#teach)") == "[a](tutorial.md#teach)"
    assert shown("commands/serve.md", "[a](../../benchmarks/RESULTS.md)") == "[a](../performance.md)"
    assert shown("index.md", "[a](https://example.org) [b](nowhere.md)") == "[a](https://example.org) [b](nowhere.md)"
    assert shown("index.md", "```\n[a](docs/tutorial.md)\n```") == "```\n[a](docs/tutorial.md)\n```"


APART = ("--watch", "--purge")  # never ends by itself; leaves nothing for the rest of the page. Both have own tests
FOLLOWED = ("fit", "learn", "predict", "evaluate", "info", "forget", "export")  # pages about one model, in this order


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what the pages about photos start from."""
    root = tmp_path_factory.mktemp("desk")
    subprocess.run([sys.executable, ROOT / "scripts" / "glyph_photos.py", "glyph-photos"], cwd=root, check=True)
    for number, folder in enumerate(sorted((root / "glyph-photos" / "base").iterdir())[:5]):
        (root / "few" / folder.name).mkdir(parents=True)
        for picture in sorted(folder.iterdir())[:5]:
            shutil.copy(picture, root / "few" / folder.name)
        shutil.copy(sorted(folder.iterdir())[9], root / f"hand{number + 1}.png")
    strangers = sorted((root / "glyph-photos" / "test").iterdir())[-1]
    for place in ("more-hands", "some", "more", "unsorted", "photos"):
        (root / place).mkdir()
        for number, picture in enumerate(sorted(strangers.iterdir())[:3]):
            shutil.copy(picture, root / place / f"hand{number + 1}.png")
    (root / "some" / "notes.jpg").write_text("no picture")
    shutil.copy(root / "hand1.png", root / "some.png")
    return root


def transcript(page: Path) -> list[tuple[str, str]]:
    """(command, what the page shows of its output) of the blocks with a prompt."""
    found = []
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:] if not language else []
        found += [tuple(part.partition("\n")[::2]) for part in parts if part.startswith("fscil ")]
    return [(command, output) for command, output in found if not any(option in command for option in APART)]


@pytest.mark.slow
@pytest.mark.extra("export")
@pytest.mark.extra("bulk")
def test_the_pages_about_a_model_can_be_followed(desk):
    for name in FOLLOWED:
        commands = transcript(ROOT / "docs" / "commands" / f"{name}.md")
        assert commands, name
        for command, shown in commands:
            words = [sys.executable, "-m", "fscil", *shlex.split(command)[1:]]
            done = subprocess.run(words, cwd=desk, capture_output=True, text=True)
            refused, unreadable = shown.lstrip().startswith("fscil: error:"), "notes.jpg" in done.stderr
            expected = 2 if refused else 1 if unreadable else 0
            assert done.returncode == expected, f"{name}.md: {command}\n{done.stdout}{done.stderr}"
    code = dict(FENCE.findall((ROOT / "docs" / "commands" / "export.md").read_text(encoding="utf-8")))["python"]
    done = subprocess.run([sys.executable, "-c", code], cwd=desk, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_the_python_of_the_tutorial_and_of_run_works(desk, tmp_path):
    taught = "glyph-photos/new"
    before = f"""
import pathlib
pictures = sorted(pathlib.Path("{taught}").rglob("*.png"))[:3]
more, names = sorted(pathlib.Path("{taught}").rglob("*.png"))[6:8], ["jay", "jay"]
"""
    tutorial = dict(FENCE.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")))["python"]
    tutorial = tutorial.replace('"runes"', repr(str(tmp_path / "runes")))
    run = dict(FENCE.findall((ROOT / "docs" / "commands" / "run.md").read_text(encoding="utf-8")))["python"]
    for code, place in ((before + tutorial, desk), (run, tmp_path)):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
