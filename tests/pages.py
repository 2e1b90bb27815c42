"""The commands and the Python of the pages, what a page shows of their output, and what shape a line has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", ROOT / "CONTRIBUTING.md"])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
NOT_RUN = re.compile(r"\bnot run here\b", re.IGNORECASE)
COMMAND = re.compile(r"(fscil|python|curl|openssl) ")  # others (pip, make, docker) are for setting up


@dataclass(frozen=True)
class Step:
    """A command line or a block of Python, and the lines that the page shows below it."""

    page: Path
    code: str
    shown: tuple[str, ...] = ()
    python: bool = False
    not_run: bool = False  # the page says so, in the section before the block or in a comment

    @property
    def command(self) -> str:
        """`predict` of `fscil predict …`; empty for anything else."""
        return self.code.split()[1] if self.code.startswith("fscil ") else ""


def steps_of(page: Path) -> list[Step]:
    """What a page asks its reader to run, in order.

    A block is a transcript (`$ ` before each command, its output below), a list of commands, whose output may be the
    block that follows at once, or Python.
    """
    text = page.read_text(encoding="utf-8")
    found: list[Step] = []
    waiting = -1  # where a block that shows output of the last command would have to begin
    for fence in FENCE.finditer(text):
        language, block = fence[1], fence[2].replace("\\\n", " ")
        headings = [heading.end() for heading in HEADING.finditer(FENCE.sub(lambda f: " " * len(f[0]), text))]
        section = text[max([end for end in headings if end < fence.start()], default=0) : fence.start()]
        not_run = bool(NOT_RUN.search(" ".join(FENCE.sub("", section).split())))
        lines = block.rstrip("\n").split("\n")
        if language == "python":
            found.append(Step(page, block, python=True, not_run=not_run))
        elif language not in ("", "sh"):
            continue
        elif lines[0].startswith("$ "):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.rstrip("\n").partition("\n")
                found.append(Step(page, command, tuple(filter(None, output.split("\n"))), not_run=not_run))
        elif commands := [line for line in lines if COMMAND.match(line)]:
            found += [Step(page, line, not_run=not_run or bool(NOT_RUN.search(line))) for line in commands]
            waiting = fence.end() + 1
        elif fence.start() == waiting:
            last = found.pop()
            found.append(Step(page, last.code, tuple(filter(None, lines)), not_run=last.not_run))
    return [step for step in found if step.python or COMMAND.match(step.code)]


# ---- what is printed -------------------------------------------------------------------------------------------------
SHAPES = (  # what differs between machines, days and sizes of an example, and what stands for it
    (r"[┏┳┓┡╇┩└┴┘┃│━─]+", " "),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\dZ?", "WHEN"),
    (r"U\+[0-9A-F]{4}(?: [A-Z]\b(?!')|(?: [A-Z-]{2,}))+|white club|writing hand", "CLASS"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,}\b[…+]?", "HASH"),
    (r"\bp\d+\.png", "PICTURE"),
    (r"-seed\d+", "-SEED"),
    (r"(best by \w+): [^;]+;", r"\1: SETTING;"),
    (r".*\blimited to .*|.*\binstead of .*|^\*? ?Limited to .*", "LIMITS"),
    (r"(?<=[\w)])\*", ""),  # the mark of a run that was cut short
    (r"(?<![\w.])[+−-]?\d[\d,.]*", "#"),
    (r"–", "#"),
    (r"# ± #|\[#, #\]|[<>]#", "#"),
    (r"(?:# h )?(?:# min )?# s\b|# min\b", "SPAN"),
    (r"# (?:bytes|kB|MB|GB)", "SIZE"),
    (r"unknown, (?:like no other|one of # that look alike \(group #\))|CLASS \(# %\) or CLASS\?", "WORTH"),
    (r"unknown\s+\(nearest: CLASS\)|CLASS\s+# %(?! or)", "ANSWER"),  # which of them is the model's affair
    (r"(?:CLASS|unknown),#,(?:True|False)", "ANSWER"),
    (r"\b(?:true|false)\b", "BOOLEAN"),
    (r"\b(class|picture|run|job|change|file|page)(?:e?s)?\b", r"\1"),
    (r"(# job), # of them already done", r"\1"),  # by another page
    (r"\s+", " "),
    (r"#(?: #)+", "#"),
)


def shape(line: str) -> str:
    for pattern, placeholder in SHAPES:
        line = re.sub(pattern, placeholder, line)
    return line.strip()


def unlike(shown: tuple[str, ...], stdout: str, stderr: str = "") -> list[str]:
    """Lines that a page shows and nobody prints, neither as results nor as progress and notes.

    `…` stands for any text within a line, and on a line of its own for any lines. What else is printed need not be
    shown: notes depend on the pictures.
    """
    said = [shape(line) for line in (*stdout.splitlines(), *stderr.splitlines())]
    patterns = {line: ".*".join(map(re.escape, shape(line).split("…"))) for line in shown if line.strip() != "…"}
    return [line for line, pattern in patterns.items() if not any(re.fullmatch(pattern, text) for text in said)]
