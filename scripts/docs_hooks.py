"""For `make docs`: pages that live elsewhere in the repository, and links to files that are no pages.

README.md, CONTRIBUTING.md, REPRODUCIBILITY.md and benchmarks/RESULTS.md stay where people look for them; the site shows
them under names of its own. A link from a page to a file of the source becomes plain text: the site has no source.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BORROWED = {  # file of the repository -> page
    "README.md": "index.md",
    "REPRODUCIBILITY.md": "results.md",
    "benchmarks/RESULTS.md": "performance.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    for name, page in BORROWED.items():
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    own = page.file.src_uri
    origin = next((name for name, borrowed in BORROWED.items() if borrowed == own), f"docs/{own}")

    def relink(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        meant = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not (ROOT / meant).exists():
            return found[0]  # mkdocs says so
        inside = BORROWED.get(meant) or (meant.removeprefix("docs/") if meant.startswith("docs/") else None)
        if inside is None or files.get_file_from_path(inside) is None:
            return text
        there = posixpath.relpath(inside, posixpath.dirname(own) or ".")
        return f"[{text}]({there}{'#' + anchor if anchor else ''})"

    parts = FENCE.split(markdown)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(relink, part) for part in parts)
