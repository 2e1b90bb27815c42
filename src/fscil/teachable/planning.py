"""How a base set is learned: whether adapters are trained on it, by which method, and what is held out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fscil import registry
from fscil.backbones.lora import empty_lora
from fscil.data.stream import Task
from fscil.methods.base import Method
from fscil.methods.families.adapter_sets import AdapterSets
from fscil.methods.smp.method import SMP
from fscil.runtime import Runtime
from fscil.strict import build
from fscil.teachable.unknown import KnownSpace

TRAIN_FROM_CLASSES = 10  # a base set below either of these is not trained on:
TRAIN_FROM_PICTURES = 20  # pictures per class on average
TOO_SMALL = f"training starts at {TRAIN_FROM_CLASSES} classes and {TRAIN_FROM_PICTURES} pictures per class"
# DeiT-Tiny on two cores: 720 photos take 2.5 minutes an epoch, and the classifier is no better for it.
ON_A_CPU = "training is left to GPUs: a CPU takes minutes an epoch and gains little; --train always does it here"
TEACHING_VIEWS = 4  # augmented views per picture when a class is taught by MPCC
OF_SMP = ("mpcc", "prototypes", "closed_form")  # heads that smp's own options describe
FROZEN_OPTIONS = ("shrinkage", "correction", "views")  # those that mean something without training
FROZEN_CLASSIFIERS = {
    "closed_form": "the closed form with a strongly shrunken covariance",
    "prototypes": "class prototypes",
    "mpcc": "class prototypes, calibrated when a class is taught",
}


@dataclass(frozen=True)
class Plan:
    """Method, complete options and head. Without training it is a head on the frozen backbone.

    >>> plan = make_plan("smp", classes=60, pictures=30_000, on_gpu=True)
    >>> plan.said(classes=60, training=27_000, held=3_000)
    '60 classes, 30000 pictures: training smp on 27000, 3000 kept for calibration'
    """

    method: str
    options: dict[str, Any]
    trains: bool
    untrained: str  # why nothing is trained, though nobody forbade it
    head: dict[str, Any] = field(default_factory=dict)  # name and options; empty: the method's own

    def said(self, classes: int, training: int, held: int) -> str:
        size = f"{classes} classes, {training + held} pictures"
        if self.trains:
            return f"{size}: training {self.method} on {training}, {held} kept for calibration"
        if self.head:
            classifier = f"the head {registry.head_entry(self.head['name']).title}"
        else:
            classifier = FROZEN_CLASSIFIERS[self.options["calibration"]]
        said = f"{size}: the backbone stays as it is, the classifier is {classifier}"
        return f"{said} ({self.untrained})" if self.untrained else said


def make_plan(
    method: str,
    classes: int,
    pictures: int,
    train: str = "auto",
    head: str | Mapping[str, Any] = "auto",
    options: Mapping[str, Any] | None = None,
    on_gpu: bool = False,
    obstacle: str = "",
) -> Plan:
    """What to do with a base set of this size; the other arguments are those of `fscil.FewShotClassifier`.

    By itself it trains only where that pays: on a GPU, and with enough to learn from. `obstacle` is another reason why
    it should not.
    """
    small = classes < TRAIN_FROM_CLASSES or pictures / classes < TRAIN_FROM_PICTURES
    why_not = TOO_SMALL if small else ON_A_CPU if not on_gpu else obstacle
    trains = train == "always" or (train == "auto" and not why_not)
    untrained = why_not if train == "auto" else ""
    chosen_head = {"name": head} if isinstance(head, str) else dict(head)
    calibration = chosen_head["name"]
    if calibration != "auto" and (len(chosen_head) > 1 or calibration not in OF_SMP or (trains and method != "smp")):
        return _with_head(method if trains else "frozen", options if trains else {}, chosen_head, trains, untrained)
    name = method if trains else "smp" if calibration == "mpcc" else "closed_form"
    entry, cls, chosen = registry.method_entry(name), registry.method_class(name), dict(options or {})
    if not trains:
        chosen = {key: value for key, value in chosen.items() if key in FROZEN_OPTIONS}
        chosen = {"views": TEACHING_VIEWS, "second_centre": "off", **chosen}  # no trained rows to be centres
        if calibration != "auto":
            chosen["calibration"] = calibration
        elif pictures < 2 * classes:  # next to no spread within classes to be seen
            chosen["calibration"] = "prototypes"
    elif name == "smp":
        usual = "mpcc" if on_gpu else "closed_form"
        chosen = {"calibration": usual if calibration == "auto" else calibration, "views": TEACHING_VIEWS, **chosen}
    complete = asdict(build(cls.Options, {**entry.options, **chosen}, "options."))
    return Plan(name, complete, trains, untrained)


def _with_head(
    method: str, options: Mapping[str, Any] | None, head: dict[str, Any], trains: bool, untrained: str
) -> Plan:
    entry, cls = registry.method_entry(method), registry.method_class(method)
    complete = asdict(build(cls.Options, {**entry.options, **(options or {})}, "options."))
    name = head.pop("name")
    options_of_head = build(registry.head_class(name).Options, {**registry.head_entry(name).options, **head}, "head.")
    return Plan(method, complete, trains, untrained, {"name": name, **asdict(options_of_head)})


def choose_held_out(labels: Tensor, share: float, runtime: Runtime) -> Tensor:
    """Marks (n,) a stratified share of the pictures; every class keeps at least half of its own."""
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        own = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(own), generator=runtime.generator("held out", label))
        held[own[order[: min(round(share * len(own)), len(own) // 2)]]] = True
    return held


def fit_frozen(method: Method, task: Task, choose_shrinkage: bool) -> None:
    """No adapters: statistics of the plain backbone's features alone, and from them the closed form's shrinkage."""
    assert isinstance(method, SMP)  # a plan that neither trains nor names a head is one of SMP's configurations
    backbone, device = method.backbone, method.runtime.device
    if choose_shrinkage and method.options.calibration == "closed_form":
        features = method.features(task.images)
        known = KnownSpace.of(features, task.labels.to(features.device), len(task.classes))
        method.options = replace(method.options, shrinkage=known.shrinkage)
        method.head = method.own_head()
    rows, scales = torch.zeros(1, len(task.classes), backbone.dim, device=device), torch.ones(1, device=device)
    method.adopt(AdapterSets(empty_lora(backbone.depth, backbone.dim, device=device), rows, scales), task)
