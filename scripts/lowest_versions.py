"""Writes constraints/lowest.txt: every direct dependency at the lowest version that pyproject.toml allows.

python scripts/lowest_versions.py
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lowest(project: dict) -> list[str]:
    """`name==floor` of each requirement, extras included.

    >>> lowest({"dependencies": ["b>=2.1"], "optional-dependencies": {"dev": ["a>=1.0,<2", "me[all]"]}, "name": "me"})
    ['a==1.0', 'b==2.1']
    """
    optional = project["optional-dependencies"].values()
    asked = [line for lines in (project["dependencies"], *optional) for line in lines]
    pairs = [re.fullmatch(r"([\w.-]+)>=([\w.]+).*", line) for line in asked if not line.startswith(project["name"])]
    return sorted(f"{pair[1]}=={pair[2]}" for pair in pairs)


if __name__ == "__main__":
    pins = lowest(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])
    note = (
        "# The lowest versions that pyproject.toml allows, by scripts/lowest_versions.py. For all extras but `app`:\n"
        "# gradio itself asks for a newer fastapi and huggingface_hub.\n"
    )
    (ROOT / "constraints" / "lowest.txt").write_text(note + "\n".join(pins) + "\n", encoding="utf-8")
