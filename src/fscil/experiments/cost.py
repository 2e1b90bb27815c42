"""How long a run will take and how much memory it needs, told before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fscil import registry
from fscil.methods.cost import Estimate, estimate_passes
from fscil.methods.sizes import Sizes
from fscil.strict import build

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.config import RunConfig
    from fscil.data.stream import Stream
    from fscil.runtime import Runtime


def estimate(config: RunConfig, stream: Stream, backbone: Backbone, runtime: Runtime) -> Estimate:
    """The cost of a whole run, as its method counts it."""
    cls = registry.method_class(config.method)
    options: Any = build(cls.Options, config.options, "options.")
    passes, plan = count_passes(config, stream), cls.adapter_plan(options)
    sets = 1 if plan is None else len(plan.specs)  # adapter sets that pass side by side
    images = stream.tasks[0].images
    batch = min(runtime.micro_batch or getattr(options, "batch_size", 48), len(images))
    return estimate_passes(passes, images, sets, batch, stream.base_classes, backbone, runtime)


def count_passes(config: RunConfig, stream: Stream) -> float:
    """Images that a whole run sends through the backbone, in forward passes, as its method and a chosen head count."""
    cls, sizes = registry.method_class(config.method), Sizes.of(stream)
    return cls.passes(build(cls.Options, config.options, "options."), sizes) + _head_passes(config.head, sizes)


def _head_passes(head: Mapping[str, Any], sizes: Sizes) -> float:
    """Augmented views that a chosen head asks for."""
    if not head:
        return 0
    cls = registry.head_class(head["name"])
    options: Any = build(cls.Options, {key: value for key, value in head.items() if key != "name"}, "head.")
    tasks = zip(sizes.later, sizes.classes[1:], strict=True)
    return sum(images * cls.views_per_shot(options, max(1, images // classes)) for images, classes in tasks)
