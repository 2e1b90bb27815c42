"""For `make docs`: examples in docstrings (>>> …) are shown as code, which Markdown would take for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)  # up to the next empty line


class Examples(griffe.Extension):
    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring and "\n--------" not in obj.docstring.value:  # a section Examples is understood as it is
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
