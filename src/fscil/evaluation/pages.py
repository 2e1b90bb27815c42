"""HTML pages that need no network to open: templates beside this module, one style sheet, everything escaped."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fscil._version import __version__
from fscil.evaluation.glossary import GLOSSARY, anchor, entry_of

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, **values: Any) -> str:
    """A template of this folder with these values. Texts are escaped; what is markup comes as `markupsafe.Markup`."""
    entries = [{"name": name, "anchor": anchor(name), "meaning": meaning} for name, meaning in GLOSSARY.items()]
    return _templates().get_template(template).render(glossary=entries, version=__version__, **values)


@functools.cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader

    return Environment(loader=PackageLoader("fscil", "evaluation"), autoescape=True, trim_blocks=True)


def heading(title: str) -> dict[str, str]:
    """A column's title, and where on the page it is explained."""
    entry = entry_of(title)
    return {"title": title, "anchor": anchor(entry) if entry else "", "meaning": GLOSSARY[entry] if entry else ""}


def identifier(text: str) -> str:
    """A text as part of an id or a file name: ASCII letters and digits, the rest dashes.

    >>> identifier("hf:birds/north sea")
    'hf-birds-north-sea'
    """
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)
