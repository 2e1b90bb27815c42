"""The pages can be followed: every command and every block of Python in them is run, or says that it is not run here.

Nothing has to be listed for that: a new block is run with the others of its page, on pictures and runs of the same
names as in the pages, and what it prints must have the shape of what the page shows. Runs are cut short.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pages import PAGES, ROOT, Step, shape, steps_of, unlike

ELSEWHERE = {  # pages that another test takes whole
    "CONTRIBUTING.md": "test_packaging.py: its code is made a package",
    "docs/tutorial.md": "test_notebook.py: follows the notebook that is made of it",
    "docs/commands/list.md": "test_docs.py: to the letter",
}
AFTER = {  # what a page starts from
    "README.md": ["docs/commands/suggest.md", "docs/commands/compare.md"],
    "docs/commands/compare.md": ["docs/commands/run.md"],
    "docs/commands/leaderboard.md": ["docs/commands/compare.md"],
    "docs/commands/report.md": ["docs/commands/compare.md"],
    "docs/commands/reproduce.md": ["docs/commands/compare.md"],
    "docs/commands/verify.md": ["docs/commands/run.md"],
    "docs/commands/learn.md": ["docs/commands/fit.md"],
    **{
        f"docs/commands/{name}.md": ["docs/commands/learn.md"]
        for name in ("app", "evaluate", "export", "forget", "info", "predict", "review", "serve", "suggest")
    },
}
CUT = "--limit 2 --set data.base=6 --set data.way=2".split()  # also a validation stream, which lasts as long as it can
SHORT = [*CUT, "--set", "data.tasks=2"]
PICTURES = """
from pathlib import Path
files = sorted(Path("photos/base").rglob("*.png"))
images, labels = files, [file.parent.name for file in files]
new_images = sorted(Path("photos/new").rglob("*.png"))
new_labels, more_images = [file.parent.name for file in new_images], files[:2]
"""


def runnable(page: Path) -> list[Step]:
    return [step for step in steps_of(page) if not step.not_run]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


FOLLOWED = [page for page in PAGES if runnable(page) and name_of(page) not in ELSEWHERE]


# ---- the rule --------------------------------------------------------------------------------------------------------
def test_what_is_run_elsewhere_and_what_a_page_starts_from_are_pages():
    names = {name_of(page) for page in PAGES if steps_of(page)}
    assert {*ELSEWHERE, *AFTER, *(name for names in AFTER.values() for name in names)} <= names


def test_blocks_are_read_as_a_reader_would(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n```\n$ fscil info a\nsize 3\n\n$ fscil undo a\n```\n```sh\nfscil fit a \\\n  -o b # why\npip install x"
        "\n```\n```\nlearned\n```\n# Two\n*Not run\nhere.*\n```\nfscil push a b\n```\n```python\nx = 1\n```\n# Three\n"
        "```\nfscil list heads\nfscil pull a b # not run here\n```\ntext\n```\nno output of it\n```\n"
    )
    assert [(step.code, step.shown, step.not_run) for step in steps_of(page)] == [
        ("fscil info a", ("size 3",), False),
        ("fscil undo a", (), False),
        ("fscil fit a    -o b # why", ("learned",), False),
        ("fscil push a b", (), True),
        ("x = 1\n", (), True),
        ("fscil list heads", (), False),
        ("fscil pull a b # not run here", (), True),
    ]


def test_lines_are_alike_but_for_what_differs_between_machines():
    assert shape("a.png  U+270D WRITING HAND   99.1 %") == shape("a.png  unknown  (nearest: U+264E LIBRA)")
    assert shape("session 1/8  65 classes  A 65.2  1 min 2 s") == shape("session 2/3   8 classes  A 5.21  0.4 s")
    assert shape("│ 1 │ 65.2 │  – │") == shape("│ 12 │ 5 │")
    assert shape("accuracy 3 %") != shape("error 3 %") and shape("20 classes") != shape("20 pictures")
    assert unlike(("learned 3 classes", "…", "in …, there"), "learned 20 classes\nmore\n", "in a b, there") == []
    assert unlike(("learned 3 classes", "…"), "taught 3 classes\n", "learned no classes\n") == ["learned 3 classes"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_that_is_not_run_can_be_read_and_imports_what_exists(page):
    for step in steps_of(page):
        if step.python and step.not_run:
            for node in ast.walk(ast.parse(step.code)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("fscil"):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


# ---- a folder to follow them in --------------------------------------------------------------------------------------
class Desk:
    """A folder with what the pages start from, and the commands that stay (a server, a watched folder) meanwhile."""

    def __init__(self, root: Path):
        self.root, self.done = root, set()
        self.ports = {number: free_port() for number in ("8000", "7860")}
        self.staying: subprocess.Popen | None = None
        programs = root / ".bin"
        programs.mkdir()
        for name, words in (("fscil", "-m fscil "), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            (programs / name).chmod(0o755)
        (programs / "xdg-open").symlink_to("/bin/true")
        own = {"PATH": f"{programs}:{os.environ['PATH']}", "BROWSER": "true", "FSCIL_CACHE": str(root / ".cache")}
        self.environment = {**os.environ, **own, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "160"}
        (root / "scripts").symlink_to(ROOT / "scripts")

    def shell(self, line: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-c", line], cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=900
        )

    def follow(self, page: Path) -> None:
        name = name_of(page)
        if name in self.done:
            return
        for earlier in AFTER.get(name, ()):
            self.follow(ROOT / earlier)
        self.done.add(name)
        prepare(self.root, page.stem)
        try:
            for step in runnable(page):
                self.take(step)
        finally:
            self.end_staying()

    def take(self, step: Step) -> None:
        if step.python:
            code = step.code.replace("vit_base_patch16_224.augreg_in21k_ft_in1k", "glyph_vit_a")
            code = PICTURES + code if "new_images" in code else code
            done = self.shell(f"python -c {shlex.quote(shortened_python(code))}")
        else:
            line = self.as_here(step)
            before = self.root / "runes"
            if "--purge" in line:  # of the class that was just forgotten, and leaves nothing for the rest of the page
                shutil.copytree(before, self.root / "kept")
                self.shell("fscil undo runes")
            if stays(step):
                return self.stay(line, step)
            done = self.shell(line)
            if "--purge" in line:
                shutil.rmtree(before)
                (self.root / "kept").rename(before)
        told = f"{name_of(step.page)}: {step.code}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == expected_status(step), told
        if "curl" not in step.code:
            assert unlike(step.shown, done.stdout, done.stderr) == [], told
        elif step.shown:
            assert answered(done.stdout) == answered("".join(step.shown)), told

    def as_here(self, step: Step) -> str:
        """The line with ports that are free, without a network, and short."""
        line = step.code.split(" #")[0].strip()
        for number, port in self.ports.items():
            line = line.replace(f":{number}", f":{port}").replace("birds.example.org", "127.0.0.1")
        words = {
            "serve": ["--port", self.ports["8000"]],
            "app": ["--port", self.ports["7860"]],
            "fit": [] if "--backbone" in line else ["--backbone", "glyph_vit_a"],
            "run": SHORT,
            "compare": [] if "runs/" in line else SHORT,
            "reproduce": SHORT,
            "tune": CUT,
            "leaderboard": ["--include-limited"],  # as all runs are here
        }.get(step.command, [])
        if step.command == "run" and ("--resume" in line or "--help" in line):
            words = []
        if "--dataset folder" in line:
            words = ["--limit", "2", "--backbone", "glyph_vit_a", "--set", "options.epochs=1"]
        return " ".join([line, *words])

    def stay(self, line: str, step: Step) -> None:
        """Start what does not end by itself, and wait until it says that it is there."""
        self.end_staying()
        self.staying = subprocess.Popen(
            ["bash", "-c", f"exec {line}"], cwd=self.root, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        said = []
        for text in self.staying.stdout:
            said.append(text)
            if "watching" in text or "http://" in text:
                break
        told = "".join(said)
        assert said and self.staying.poll() is None, f"{step.code}\n{told}"
        assert unlike(step.shown, said[-1], told) == [], told

    def end_staying(self) -> None:
        if self.staying is not None:
            self.staying.send_signal(signal.SIGINT)
            self.staying.communicate(timeout=60)
            self.staying = None


def stays(step: Step) -> bool:
    errs = any(line.startswith("fscil: error:") for line in step.shown)
    return not errs and (step.command in ("serve", "app") or "--watch" in step.code)


def expected_status(step: Step) -> int:
    if any(line.startswith("fscil: error:") for line in step.shown):
        return 2
    return int(any(line.startswith(("fscil: ", "refused:", "left out:", "  failed")) for line in step.shown))


def answered(text: str) -> object:
    """The keys of an answer in JSON, whatever its values; after headers, the status and the body."""
    body = text[text.index("{") :]
    status = re.match(r"HTTP/1.1 \d+", text)
    return status and status[0], keys(json.loads(body))


def keys(value: object) -> object:
    if isinstance(value, dict):
        free = {"classes"}  # named as the taught classes are
        return {key: "…" if key in free else keys(inner) for key, inner in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value else None


def shortened_python(code: str) -> str:
    settings = '{"data.base": 6, "data.way": 2, "data.tasks": 2, '
    return code.replace("fast=True, ", "fast=True, limit=2, ").replace("settings={", f"settings={settings}")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def prepare(root: Path, page: str) -> None:
    """Pictures and folders under the names that a page uses."""
    photos = root / "glyph-photos"

    def copy(source: Path, *names: str) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, root / name, dirs_exist_ok=True) if source.is_dir() else shutil.copy(
                source, root / name
            )

    if not photos.exists():
        subprocess.run([sys.executable, ROOT / "scripts" / "glyph_photos.py", photos], check=True)
        classes = sorted((photos / "base").iterdir())
        hand, libra, sums, clubs = (
            sorted(next((photos / "test").glob(f"* {name}")).iterdir())
            for name in ("WRITING HAND", "LIBRA", "N-ARY SUMMATION", "WHITE CLUB SUIT")
        )
        for folder in classes[:8]:
            for picture in sorted(folder.iterdir())[:6]:
                copy(picture, f"photos/base/{folder.name}/{picture.name}")
        for folder in classes[:5]:
            for picture in sorted(folder.iterdir())[:5]:
                copy(picture, f"few/{folder.name}/{picture.name}")
        copy(photos / "new", "photos/new")
        for number in (1, 2):
            copy(hand[number - 1], f"some/hand{number}.png")
            copy(libra[number - 1], f"some/libra{number}.png", f"unsorted/p{number + 3}.png")
            copy(clubs[number], f"club{number}.png")
            copy(clubs[number + 2], f"more-clubs/{number}.png")
        for number in (1, 2, 3):
            copy(sums[number - 1], f"some/sum{number}.png", f"unsorted/p{number}.png", f"photos/unsorted/{number}.png")
        copy(hand[5], "hand.png", "some.jpg", "inbox/hand.png")
        copy(libra[0], "libra.png")
        for number in range(5):
            copy(sums[6 + number], f"{number + 1}.png")
        for name in ("some/broken.jpg", "photos/broken.jpg", "notes.txt"):
            (root / name).write_text("no picture")
        (root / "secret.txt").write_text("a long password")
        copy(photos / "base", "checked")
        pisces, libra_folder = (next((root / "checked").glob(f"* {name}")) for name in ("PISCES", "LIBRA"))
        for picture in sorted(libra_folder.iterdir())[:3]:
            shutil.move(picture, pisces)
    if page == "datasets":
        shutil.rmtree(root / "photos", ignore_errors=True)
        copy(photos / "base", "photos")
    if page == "suggest":
        shutil.copytree(root / "runes", root / "birds")
    if page == "README":
        shutil.rmtree(root / "birds")
        finished = root / "runs" / "glyphs-smp-seed2023-1"
        copy(finished, "RUNS/one")
        copy(finished, "RUN")
        (root / "RUN" / "results.json").unlink()  # as if it had been stopped at the end
    cells = root / "runs" / "grid" / "cells"
    unfinished, altered = (cells / f"glyphs-smp-seed{seed}-0a1b2c3d" for seed in (2024, 2025))  # as the pages call them
    for stray in (unfinished, altered):
        shutil.rmtree(stray, ignore_errors=True)
    if page == "compare":
        copy(root / "runs" / "glyphs-smp-seed2023-1" / "config.yaml", str(unfinished / "config.yaml"))
    if page == "leaderboard":
        copy(sorted(cells.glob("*smp*"))[0], str(altered))
        metrics = altered / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace("1", "2", 1))
    if page == "verify":
        copy(root / "runs" / "glyphs-smp-seed2023-1", "copied/glyphs-smp-seed2023-1")
        file = root / "copied" / "glyphs-smp-seed2023-1" / "predictions" / "session_1.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.mark.slow
@pytest.mark.extra("app")
@pytest.mark.extra("bulk")
@pytest.mark.extra("export")
@pytest.mark.extra("serve")
@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
def test_a_page_can_be_followed(page, desk):
    desk.follow(page)
