"""The documentation: commands and options in it exist, and the site is built whole and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fscil.cli import app
from pages import FENCE, PAGES, ROOT

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
