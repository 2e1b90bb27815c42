"""One run: a method on a stream, task by task, evaluated after each on all classes seen, kept in a folder.

`fscil.experiments.run_folder` says what the folder holds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fscil.backbones.loading import make_backbone
from fscil.backbones.vit import Backbone
from fscil.config import RunConfig
from fscil.data.datasets import load_dataset
from fscil.data.stream import Stream, Task, make_stream
from fscil.data.transforms import Transform, make_transform
from fscil.display import LiveDisplay
from fscil.errors import UserError
from fscil.evaluation import metrics, openset
from fscil.evaluation.results import Results
from fscil.evaluation.sessions import session_line
from fscil.experiments.environment import PeakMemory
from fscil.experiments.modules import module_hashes
from fscil.experiments.run_folder import (
    RunRecord,
    check_intact,
    check_new,
    check_same,
    check_unfinished,
    json_able,
    new_folder,
    own,
    same_everywhere,
)
from fscil.experiments.tracking import trackers_of, tracking
from fscil.methods.making import make_method
from fscil.runtime import Runtime

if TYPE_CHECKING:
    from fscil.methods.base import Method

DIAGNOSTICS = "diagnostics.json"  # of a base model on the shelf, as a tensor of bytes


def run(
    config: RunConfig,
    folder: str | Path | None = None,
    resume: bool = False,
    display: LiveDisplay | None = None,
    stream: Stream | None = None,
    backbone: Backbone | None = None,
    announce: bool = False,
    runtime: Mapping[str, Any] | None = None,
    share_base: bool = False,
) -> Results:
    """Run `config` and keep it in `folder` (a new one under runs/ by default).

    With `resume`, go on where a former call in `folder` stopped; the numbers are those of an uninterrupted run.
    `stream` and `backbone` may be given when several runs share them; `announce` says what is about to
    happen and how much time and memory it may take; `runtime` has services for the Runtime, such as {"shelf": …}.
    With `share_base`, the model after the base task is left on that shelf, and taken from it.
    """
    display = display or LiveDisplay(quiet=True)
    trackers_of(config.runtime)
    place = make_runtime(config, display, **dict(runtime or {}))
    folder = same_everywhere(Path(folder) if folder is not None else new_folder(config), place)
    if resume:
        check_unfinished(folder)
    elif place.is_main:
        check_new(folder)

    with own(folder, place.is_main):
        if resume:
            check_intact(folder)
        parts = assemble(config, place, stream, backbone, check=partial(check_same, folder) if resume else None)
        modules = module_hashes(parts.method, parts.config.dataset)
        record = RunRecord(folder, parts.config, parts.stream, place, parts.usual, modules)
        if resume:
            record.reopen(parts.method)
        elif place.is_main:
            record.open(parts.backbone)
        place.wait()
        if announce and place.is_main:
            _announce(record, parts.backbone, display)
        with tracking(record, place):
            _learn_all(parts, place, record, display, share_base)
        return record.finish(parts.method, parts.backbone, parts.transform)


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    config: RunConfig  # with what the dataset and the backbone decide, so that a run folder says everything
    stream: Stream
    backbone: Backbone
    transform: Transform
    method: Method
    usual: dict[str, int]  # settings that the dataset decides where nobody else does


def assemble(
    config: RunConfig,
    runtime: Runtime,
    stream: Stream | None = None,
    backbone: Backbone | None = None,
    check: Callable[[RunConfig, Backbone], RunConfig] | None = None,
) -> Parts:
    """Data, backbone and method of a run; `check` may refuse or replace the complete configuration before images are
    read."""
    dataset = load_dataset(config.dataset, config.data) if stream is None else None
    if backbone is None:
        backbone = make_backbone(config.backbone, config.weights, config.transform.size)
    transform = make_transform(config.transform, backbone)
    usual = {name: getattr(dataset, name) for name in ("base", "way", "shots")} if dataset else {}
    config = replace(
        config,
        data=dataset.complete(config.data) if dataset else config.data,
        transform=replace(config.transform, size=transform.size, resize=transform.resize),
        runtime=replace(config.runtime, processes=runtime.processes),
    )
    if check is not None:
        config = check(config, backbone)
    if dataset is not None:
        stream = make_stream(dataset, config.data, transform, config.seed, runtime.device)
    assert stream is not None
    backbone.prepare(runtime)
    method = make_method(config.method, config.options, backbone, runtime, config.head)
    return Parts(config, stream, backbone, transform, method, {f"data.{name}": usual[name] for name in usual})


def _announce(record: RunRecord, backbone: Backbone, display: LiveDisplay) -> None:
    """What is about to happen, and how long it may take."""
    from fscil.experiments.cost import estimate

    config, done = record.config, len(record.sessions)
    display.line(f"{config.method} on {config.dataset}, {config.backbone}, seed {config.seed} -> {record.folder}")
    if done:
        display.line(f"resuming after session {done - 1} of {len(record.stream.tasks) - 1}")
    else:
        display.line(f"{len(record.stream.class_names)} classes: {record.stream.protocol}")
        display.line(str(estimate(config, record.stream, backbone, record.runtime)))


def _learn_all(parts: Parts, runtime: Runtime, record: RunRecord, display: LiveDisplay, share_base: bool) -> None:
    """Every task that is still to be learned: learn, evaluate, write down."""
    config, stream, method = parts.config, parts.stream, parts.method
    examination = Examination(config.method, method, stream)
    for task in stream.tasks[len(record.sessions) :]:
        record.keeper.task = task.index
        memory = PeakMemory(runtime)
        began, found = time.perf_counter(), runtime.shelf.hits
        if task.index == 0:
            _fit_base(method, task, runtime, share_base)
        else:
            method.learn(task)
        runtime.synchronize()
        learned = time.perf_counter()

        labels, images, top = examination.after(task)
        runtime.synchronize()
        ended = time.perf_counter()

        seen = stream.seen(task.index)
        count, size = method.stored_images()
        session = {
            "session": task.index,
            **metrics.evaluate_session(labels.numpy(), top.numpy(), stream.base_classes, seen, stream.way),
            "seconds": ended - began,
            "learning_seconds": learned - began,
            "evaluation_seconds": ended - learned,
            "parts_from_shelf": runtime.shelf.hits - found,  # then the times do not count what made them
            **memory.read(),
            "trainable_parameters": method.trainable_parameters(),
            "stored_images": count,
            "stored_bytes": size,
            "diagnostics": method.diagnostics(),
            "code": record.code,
            "open_set": examination.open_set,
        }
        record.add(session, method, labels, images, top)
        display.line(session_line(session, len(stream.tasks) - 1, config.evaluation.hacc))


class Examination:
    """A method's answers on the test images, whose features are computed once if the backbone stays as it is."""

    def __init__(self, name: str, method: Method, stream: Stream):
        self.name, self.method, self.stream = name, method, stream
        self.features: Tensor | None = None
        self.open_set: dict[str, float] | None = None  # how well images of classes not seen yet were told apart

    @torch.no_grad()
    def after(self, task: Task) -> tuple[Tensor, Tensor, Tensor]:
        """Of all test images of the classes seen by now: labels (n,), their numbers (n,), the best classes (n, 5)."""
        method, test, seen = self.method, self.stream.test, self.stream.seen(task.index)
        images = (self.stream.test_labels < seen).nonzero().squeeze(1)
        if method.features_fixed:
            if self.features is None:
                self.features = method.features(test)
            logits = method.logits_from(self.features[images.to(self.features.device)])
        else:
            logits = method.logits(test.select(images))
        if logits.shape != (len(images), seen):
            raise RuntimeError(f"{self.name}, task {task.index}: logits {tuple(logits.shape)} for {seen} classes")
        if logits.isnan().any():
            count = int(logits.isnan().any(1).sum())
            raise UserError(
                f"{self.name}: after task {task.index} the scores of {count} test images are no numbers (NaN). Take a "
                "lower learning rate (--set options.lr=…) or --precision fp32. The last task that went well is kept."
            )
        self.open_set = self._open_set(logits, (self.stream.test_labels >= seen).nonzero().squeeze(1))
        return self.stream.test_labels[images].cpu(), images, logits.topk(min(5, seen), dim=1).indices.cpu()

    def _open_set(self, known: Tensor, later: Tensor) -> dict[str, float] | None:
        """AUROC and FPR@95 of the best class's probability, test images of classes still to come being unknown; None
        where none is to come, and where features move: only fixed ones are there already."""
        if self.features is None or not len(later):
            return None
        return openset.told_apart(known, self.method.logits_from(self.features[later.to(self.features.device)]))


def _fit_base(method: Method, task: Task, runtime: Runtime, share: bool) -> None:
    """Learn the base task; or, where runs `share` it, take over what one of them learned."""
    if not share:
        method.fit_base(task)
        return
    cls = type(method)
    key = {
        "part": "base model",
        "method": f"{cls.__module__.removesuffix('.method')}:{cls.__qualname__}",  # as before SMP had a folder
        "options": method.base_options(),
        "backbone": method.backbone.hash,
        "images": task.images.fingerprint,
        "labels": hashlib.sha256(task.labels.cpu().numpy().tobytes()).hexdigest()[:16],
        "seed": runtime.seed,
        "precision": str(runtime.dtype),
    }
    with runtime.shelf.reserve([key]):
        state = runtime.shelf.get(key)
        if state is None:
            method.fit_base(task)
            facts = torch.frombuffer(bytearray(json.dumps(json_able(method.diagnostics())).encode()), dtype=torch.uint8)
            runtime.shelf.put(key, {**method.state(), DIAGNOSTICS: facts})
        else:
            method.restore_diagnostics(json.loads(bytes(state.pop(DIAGNOSTICS).tolist())))
            method.load_state(state)


def make_runtime(config: RunConfig, display: LiveDisplay, **services: Any) -> Runtime:
    """The runtime that a configuration asks for, with services such as a shelf."""
    chosen = config.runtime
    extra = {} if chosen.eval_batch is None else {"batch_size_eval": chosen.eval_batch}
    return Runtime.make(
        device=chosen.device,
        precision=chosen.precision,
        seed=config.seed,
        compile=chosen.compile,
        micro_batch=chosen.micro_batch,
        checkpointing=chosen.checkpointing,
        display=display,
        **extra,
        **services,
    )
