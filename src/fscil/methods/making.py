"""A method by name, with its options and, where one is chosen, another head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fscil import registry
from fscil.backbones.vit import Backbone
from fscil.heads.base import Head
from fscil.methods.base import Method
from fscil.methods.represented import Headed, Represented
from fscil.runtime import Runtime
from fscil.strict import build


def make_method(
    name: str,
    options: Mapping[str, Any],
    backbone: Backbone,
    runtime: Runtime,
    head: Mapping[str, Any] | None = None,
) -> Method:
    """A method ready to learn. `head` is {"name": …, and its options}; None or empty leaves the method its own."""
    cls = registry.method_class(name)
    chosen = build(cls.Options, options, "options.")
    if not head:
        return cls(backbone, chosen, runtime)
    if issubclass(cls, Represented):
        return cls(backbone, chosen, runtime, make_head(head, cls.dim_of(backbone, chosen), runtime))
    inner = cls(backbone, chosen, runtime)
    return Headed(inner, make_head(head, inner.feature_dim, runtime))


def make_head(head: Mapping[str, Any], dim: int, runtime: Runtime) -> Head:
    """The head of {"name": …, and its options} for features of `dim` numbers."""
    cls = registry.head_class(head["name"])
    options = {**registry.head_entry(head["name"]).options, **head}
    options.pop("name")
    return cls(dim, build(cls.Options, options, "head."), runtime)
