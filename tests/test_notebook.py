"""The notebook is what the script makes of the tutorial, and its cells can be run from the first to the last."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path

import pytest

from pages import ROOT, unlike
from test_pages import Desk

SPEC = importlib.util.spec_from_file_location("notebook", ROOT / "scripts" / "notebook.py")
notebook = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebook)


def test_the_notebook_is_made_of_the_page():
    stored = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))
    assert stored == notebook.make_notebook(notebook.SOURCE.read_text(encoding="utf-8")), "python scripts/notebook.py"


def test_cells_of_a_page():
    page = "# T\ntext\n```\nfscil a\nfscil b\n```\n```\nsaid\n```\n```\n$ fscil c\nx\ny\n```\n```python\n1\n```\nend\n"
    start, *cells = notebook.make_notebook(page + notebook.END + "\n```\nfscil d\n```\n")["cells"]
    assert "tempfile" in "".join(start["source"])
    assert ["".join(cell["source"]) for cell in cells] == ["# T\ntext", "!fscil a", "!fscil b", "!fscil c", "1", "end"]
    assert [cell["outputs"][0]["text"] if cell.get("outputs") else [] for cell in cells] == [
        [], [], ["said\n"], ["x\n", "y\n"], [], []
    ]  # fmt: skip


@pytest.mark.slow
def test_the_cells_run_one_after_the_other(tmp_path, monkeypatch):
    """Without a kernel: cells are either one command or plain Python, and Jupyter would bring forty packages."""
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the first cell goes into a folder there
    monkeypatch.setenv("SCRIPTS", "")  # and sets this
    desk, names = Desk(tmp_path), {}
    for cell in json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            continue
        if not source.startswith("!"):
            exec(source, names)
            continue
        desk.root = Path.cwd()
        done = desk.shell(f'export SCRIPTS="{os.environ["SCRIPTS"]}"; {source[1:]}')
        shown = tuple(line for output in cell["outputs"] for line in "".join(output["text"]).split("\n") if line)
        refused = any(line.startswith("fscil: error:") for line in shown)
        assert done.returncode == (2 if refused else 0), f"{source}\n{done.stderr}"
        assert unlike(shown, done.stdout, done.stderr) == [], source
