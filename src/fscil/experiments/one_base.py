"""Many heads on one trained base: a representation learns the base task once, then every head learns the few-shot tasks
of every draw of the shots from its features. Nothing is trained twice.

Draw 0 is the protocol's own, so its figures are those of `fscil run --method M --head H`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fscil import registry
from fscil.backbones.loading import make_backbone
from fscil.backbones.vit import Backbone
from fscil.config import DataConfig, RunConfig
from fscil.data.datasets import load_dataset
from fscil.data.datasets.common import Dataset
from fscil.data.stream import Stream, make_stream
from fscil.data.transforms import make_transform
from fscil.errors import UserError
from fscil.evaluation import metrics, openset
from fscil.heads.base import Head, Lesson
from fscil.methods.making import make_head, make_method
from fscil.methods.represented import Headed, Represented
from fscil.runtime import Runtime
from fscil.strict import build

APART = 1000  # between the seeds of two draws


@dataclass(frozen=True)
class Draws:
    """A backbone, and streams that differ in their few-shot tasks alone: the base task is the first's."""

    backbone: Backbone
    streams: Sequence[Stream]
    tested: Stream  # one with all their classes, whose test images serve every stream

    @classmethod
    def make(
        cls,
        config: RunConfig,
        count: int,
        runtime: Runtime,
        dataset: Dataset | None = None,
        protocols: Sequence[Mapping[str, Any]] = ({},),
    ) -> Draws:
        """`count` streams for each protocol, one protocol after the other. A protocol is what it changes in
        `config.data`, as {"shots": 1}: the first nothing. Of all streams but the very first only the shots are read,
        and the test images of the one with most classes."""
        dataset = dataset or load_dataset(config.dataset, config.data)
        backbone = make_backbone(config.backbone, config.weights, config.transform.size).prepare(runtime)
        transform, data = make_transform(config.transform, backbone), dataset.complete(config.data)

        def cut(protocol: Mapping[str, Any], draw: int = 0) -> Stream:
            own = build(DataConfig, {**asdict(data), **protocol}, "data.")
            return make_stream(dataset, own, transform, config.seed + APART * draw, runtime.device)

        streams: list[Stream] = []
        for protocol in protocols:
            for draw in range(count):
                streams.append(cut({**protocol, "limit": 1} if streams else protocol, draw))
        widest = max(range(len(streams)), key=lambda number: len(streams[number].class_names))
        return cls(backbone, streams, cut(protocols[widest // count]) if widest else streams[0])


class OneBase:
    """A method after its base task, as heads see it: lessons of every draw and the features of the test images."""

    def __init__(self, method: Represented, draws: Draws):
        self.method, self.draws = method, draws
        method.fit_base(self.stream.tasks[0])
        self.base = replace(method.lesson(self.stream.tasks[0]), number=0)
        self.tests = method.features(draws.tested.test)
        self.lessons = [self._lessons(stream) for stream in draws.streams]

    @property
    def stream(self) -> Stream:
        return self.draws.streams[0]

    def _lessons(self, stream: Stream) -> list[Lesson]:
        """The lessons of a draw, the base task's first; afterwards the method knows the base task alone again."""
        method, lessons = self.method, [self.base]
        for task in stream.tasks[1:]:
            method.count_classes(task)
            lessons.append(method.lesson(task))
        method.class_counts = method.class_counts[: stream.base_classes]
        method.tasks_seen = torch.ones_like(method.tasks_seen)
        return lessons

    def examine(self, head: Head, stream: int = 0) -> dict[str, Any]:
        """All sessions of a fresh head on a stream, by number, and what they come to, as results.json has them."""
        sessions = []
        for number, lesson in enumerate(self.lessons[stream]):
            (head.fit if number == 0 else head.teach)(lesson)
            sessions.append(self._session(head, self.draws.streams[stream], number))
        return {"sessions": sessions, "summary": metrics.summarise(sessions)}

    @torch.no_grad()
    def _session(self, head: Head, stream: Stream, number: int) -> dict[str, Any]:
        labels, seen = self.draws.tested.test_labels, stream.seen(number)
        known = (labels < seen).to(self.tests.device)
        to_come = (labels < len(stream.class_names)).to(self.tests.device) & ~known
        scores = head.scores(self.tests[known])
        top, true = scores.topk(min(5, seen), 1).indices.cpu().numpy(), labels[known.cpu()].numpy()
        told = openset.told_apart(scores, head.scores(self.tests[to_come])) if bool(to_come.any()) else None
        measured = metrics.evaluate_session(true, top, stream.base_classes, seen, stream.way)
        return {"session": number, **measured, "open_set": told}


def represented(name: str, options: Mapping[str, Any], backbone: Backbone, runtime: Runtime) -> Represented:
    """A method ready for heads of any kind; its own head is there as well."""
    if not registry.method_class(name).features_fixed:
        raise UserError(f"--method {name}: its features move after the base task, so heads cannot share them")
    method = make_method(name, options, backbone, runtime)
    if isinstance(method, Represented):
        return method
    return Headed(method, make_head({"name": "prototypes"}, method.feature_dim, runtime))


def fresh_head(method: Represented, name: str = "own", options: Mapping[str, Any] | None = None) -> Head:
    """A head that has learned nothing: by name, or `own`, the method's; with these options changed."""
    chosen = dict(options or {})
    if name != "own":
        return make_head({"name": name, **chosen}, method.feature_dim, method.runtime)
    own = method.head.twin()
    if chosen:
        own.options = build(type(own.options), {**asdict(own.options), **chosen}, "head.")
    return own


def train_together(methods: Sequence[Represented], stream: Stream) -> None:
    """The adapter sets of all methods that are trained alike, in one pass; they end up on the runtime's shelf."""
    inner = [method.inner if isinstance(method, Headed) else method for method in methods]
    plans = [plan for method in inner if (plan := method.adapter_plan(method.options)) is not None]
    for kind in dict.fromkeys((plan.rank, plan.init, plan.schedule) for plan in plans):
        alike = [plan for plan in plans if (plan.rank, plan.init, plan.schedule) == kind]
        specs = tuple(dict.fromkeys(spec for plan in alike for spec in plan.specs))
        replace(alike[0], specs=specs).train(inner[0].backbone, stream.tasks[0], inner[0].runtime)
