"""What `fit` will cost, and where a training that was stopped goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fscil import registry
from fscil.backbones.vit import Backbone
from fscil.data.picture_files import Label
from fscil.data.pixels import Pixels
from fscil.files import load_tensors, save_tensors
from fscil.methods.cost import Estimate, estimate_passes
from fscil.methods.sizes import Sizes
from fscil.runtime import Keeper, Runtime
from fscil.strict import build
from fscil.teachable.planning import Plan, make_plan
from fscil.text import size

if TYPE_CHECKING:
    from fscil.teachable.model import Teachable

WORTH_SAYING = 200  # passes: below, measuring would take longer than the work


def estimate_fit(plan: Plan, images: Pixels, classes: int, backbone: Backbone, runtime: Runtime) -> Estimate | None:
    """Time and memory of learning the base classes by this plan; None where it is a matter of seconds."""
    cls, count = registry.method_class(plan.method), len(images)
    options: Any = build(cls.Options, plan.options, "options.")
    sizes = Sizes(images=(count,), classes=(classes,), tests=(0,))
    passes = cls.passes(options, sizes) if plan.trains else float(count)
    if passes < WORTH_SAYING:
        return None
    adapters = cls.adapter_plan(options) if plan.trains else None
    batch = min(getattr(options, "batch_size", 48), count) if plan.trains else 0
    sets = len(adapters.specs) if adapters is not None else 1
    found = estimate_passes(passes, images, sets, batch, classes, backbone, runtime)
    return replace(found, advice="choose a smaller --backbone, or --train never")


def choose_plan(
    clf: Teachable, images: Pixels, classes: int, backbone: Backbone, runtime: Runtime
) -> tuple[Plan, Estimate | None]:
    """What to do with a base set, and what that costs; training that does not fit into memory is not begun unasked."""
    on_gpu = runtime.device.type == "cuda"
    asked = clf.method, classes, len(images), clf.train, clf.head, clf.options
    plan = make_plan(*asked, on_gpu=on_gpu)
    cost = estimate_fit(plan, images, classes, backbone, runtime)
    if plan.trains and clf.train == "auto" and cost is not None and not cost.fits:
        needed, free = size(cost.memory), size(cost.available)
        obstacle = f"training needs {needed} of memory and {free} are free; --train always tries it"
        plan = make_plan(*asked, on_gpu=on_gpu, obstacle=obstacle)
        cost = estimate_fit(plan, images, classes, backbone, runtime)
    return plan, cost


@contextlib.contextmanager
def keeping(
    folder: str | os.PathLike | None,
    runtime: Runtime,
    config: Mapping[str, Any],
    pictures: Tensor,
    labels: Sequence[Label],
) -> Iterator[None]:
    """Within the block, training keeps its progress in `folder`, if there is one; what ends well is not kept."""
    if folder is None:
        yield
        return
    usual, runtime.keeper = runtime.keeper, (keeper := FitKeeper(Path(folder), config, pictures, labels))
    try:
        yield
        keeper.clear()
    finally:
        runtime.keeper = usual


class FitKeeper(Keeper):
    """Keeps the progress of `fit` in a folder, so that the same call goes on where it was stopped."""

    def __init__(self, folder: Path, config: Mapping[str, Any], pictures: Tensor, labels: Sequence[Label]):
        self.folder = folder
        described = json.dumps([config, pictures.tolist(), labels], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()  # another fit does not pick it up

    def load(self, stage: str) -> dict[str, Tensor] | None:
        if not self.path(stage).is_file():
            return None
        tensors, meta = load_tensors(self.path(stage))
        return tensors if meta.get("fingerprint") == self.fingerprint else None

    def save(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        save_tensors(self.path(stage), tensors, {"fingerprint": self.fingerprint, "stage": stage})

    def path(self, stage: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', stage)}.safetensors"

    def clear(self) -> None:
        """The model is there; how it came about is not needed any more."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
