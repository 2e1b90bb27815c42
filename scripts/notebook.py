"""Makes docs/tutorial.ipynb of docs/tutorial.md: the part about glyphs, a cell for every command, with its output.

    python scripts/notebook.py           # after every change of the page

The page is the source; tests/test_notebook.py fails when the notebook is not what this makes of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "docs" / "tutorial.ipynb"
END = "## The same on a folder of photos"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
START = """\
import os
import tempfile
from pathlib import Path

os.environ["SCRIPTS"] = str(Path("../scripts").resolve())  # this notebook lies in docs/
os.chdir(tempfile.mkdtemp())  # everything below is written there"""


def make_notebook(page: str) -> dict[str, Any]:
    """The notebook of a page: text between blocks as it is, code as cells, shown output as theirs."""
    page = page[: page.index(END)]
    cells: list[dict[str, Any]] = []
    add(cells, "code", START)
    place = 0
    for fence in FENCE.finditer(page):
        if text := page[place : fence.start()].strip():
            add(cells, "markdown", text)
        place = fence.end()
        language, block = fence.groups()
        if language == "python":
            add(cells, "code", block.strip())
        elif block.startswith("$ "):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                add(cells, "code", shell(command), output)
        elif re.match("(fscil|python) ", block):
            for command in block.strip().split("\n"):
                add(cells, "code", shell(command))
        else:  # what the command before it printed
            cells[-1]["outputs"] = printed(block)
    if text := page[place:].strip():
        add(cells, "markdown", text)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def shell(command: str) -> str:
    return "!" + command.replace("python scripts/", 'python "$SCRIPTS"/')


def add(cells: list[dict[str, Any]], kind: str, source: str, output: str = "") -> None:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines(source)}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": printed(output)}
    cells.append(cell)


def printed(output: str) -> list[dict[str, Any]]:
    return [{"name": "stdout", "output_type": "stream", "text": lines(output)}] if output else []


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    notebook = make_notebook(SOURCE.read_text(encoding="utf-8"))
    NOTEBOOK.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
