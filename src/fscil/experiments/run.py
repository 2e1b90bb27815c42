"""One run: a method on a stream, task by task, evaluated after each on all classes seen, kept in a folder.

`fscil.experiments.run_folder` says what the folder holds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fscil import registry
from fscil.backbones.vit import Backbone, make_backbone
from fscil.config import IMAGENET_MEAN, IMAGENET_STD, RunConfig, TransformConfig, build
from fscil.data.datasets.all import Dataset, load_dataset
from fscil.data.pixels import Transform
from fscil.data.settings import with_defaults
from fscil.data.stream import Stream, Task, make_stream
from fscil.display import LiveDisplay
from fscil.errors import UserError
from fscil.evaluation import metrics
from fscil.evaluation.results import Results
from fscil.evaluation.sessions import session_line
from fscil.experiments.environment import PeakMemory
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
from fscil.experiments.tensorboard import check_tensorboard, tensorboard
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
    if config.runtime.tensorboard:
        check_tensorboard()
    place = make_runtime(config, display, **dict(runtime or {}))
    folder = same_everywhere(Path(folder) if folder is not None else new_folder(config), place)
    if resume:
        check_unfinished(folder)
    elif place.is_main:
        check_new(folder)

    with own(folder, place.is_main):
        if resume:
            check_intact(folder)
        dataset = load_dataset(config.dataset, config.data) if stream is None else None
        if backbone is None:
            backbone = make_backbone(config.backbone, config.weights, config.transform.size)
        transform = make_transform(config.transform, backbone)
        config = _filled(config, transform, dataset, place)
        usual = {f"data.{name}": getattr(dataset, name) for name in ("base", "way", "shots")} if dataset else {}
        if resume:
            check_same(folder, config)
        if dataset is not None:
            stream = make_stream(dataset, config.data, transform, config.seed, place.device)
        backbone.prepare(place)
        cls = registry.method_class(config.method)
        method: Method = cls(backbone, build(cls.Options, config.options, "options."), place)

        record = RunRecord(folder, config, stream, place, usual)
        if resume:
            record.reopen(method)
        elif place.is_main:
            record.open()
        place.wait()
        if announce and place.is_main:
            _announce(record, backbone, display)
        with tensorboard(record, place):
            _learn_all(method, stream, place, record, config, display, share_base)
        return record.finish(method, backbone, transform)


def _announce(record: RunRecord, backbone: Backbone, display: LiveDisplay) -> None:
    """What is about to happen, and how long it may take."""
    from fscil.experiments.cost import estimate

    config, done = record.config, len(record.sessions)
    display.line(f"{config.method} on {config.dataset}, {config.backbone}, seed {config.seed} -> {record.folder}")
    if done:
        display.line(f"resuming after session {done - 1} of {len(record.stream.tasks) - 1}")
    else:
        display.line(str(estimate(config, record.stream, backbone, record.runtime)))


def _learn_all(
    method: Method,
    stream: Stream,
    runtime: Runtime,
    record: RunRecord,
    config: RunConfig,
    display: LiveDisplay,
    share_base: bool,
) -> None:
    """Every task that is still to be learned: learn, evaluate, write down."""
    cached: torch.Tensor | None = None  # test features, once the backbone stays as it is
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

        seen = stream.seen(task.index)
        positions = (stream.test_labels < seen).nonzero().squeeze(1)
        with torch.no_grad():
            if method.features_fixed:
                if cached is None:
                    cached = method.features(stream.test)
                logits = method.logits_from(cached[positions.to(cached.device)])
            else:
                logits = method.logits(stream.test.select(positions))
        if logits.shape != (len(positions), seen) or logits.isnan().any():
            raise RuntimeError(
                f"{config.method}, task {task.index}: logits {tuple(logits.shape)}; NaN or missing classes"
            )
        top = logits.topk(min(5, seen), dim=1).indices.cpu()
        runtime.synchronize()
        ended = time.perf_counter()

        labels = stream.test_labels[positions].cpu()
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
        }
        record.add(session, method, labels, positions, top)
        display.line(session_line(session, len(stream.tasks) - 1, config.evaluation.hacc))


def _fit_base(method: Method, task: Task, runtime: Runtime, share: bool) -> None:
    """Learn the base task; or, where runs `share` it, take over what one of them learned."""
    if not share:
        method.fit_base(task)
        return
    cls = type(method)
    options = {name: value for name, value in asdict(method.options).items() if name not in method.after_base}
    key = {
        "part": "base model",
        "method": f"{cls.__module__.removesuffix('.method')}:{cls.__qualname__}",  # as before SMP had a folder
        "options": options,
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
            method._diagnostics = json.loads(bytes(state.pop(DIAGNOSTICS).tolist()))
            method.load_state(state)


def _filled(config: RunConfig, transform: Transform, dataset: Dataset | None, runtime: Runtime) -> RunConfig:
    """The configuration with what the dataset and the backbone decide, so that a run folder says everything."""
    return replace(
        config,
        data=with_defaults(config.data, dataset.base, dataset.way, dataset.shots) if dataset else config.data,
        transform=replace(config.transform, size=transform.size, resize=transform.resize),
        runtime=replace(config.runtime, processes=runtime.processes),
    )


def make_runtime(config: RunConfig, display: LiveDisplay, **services: Any) -> Runtime:
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


def make_transform(chosen: TransformConfig, backbone: Backbone) -> Transform:
    """The image pipeline: sizes default to the backbone's, `auto` normalisation is the one that suits it."""
    size = chosen.size or backbone.image_size
    mean, std = {
        "auto": (tuple(backbone.mean), tuple(backbone.std)),
        "none": ((0.0,) * 3, (1.0,) * 3),
        "half": ((0.5,) * 3, (0.5,) * 3),
        "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    }[chosen.normalize]
    resize = chosen.resize or round(size * 256 / 224)
    if resize < size:
        raise UserError(f"transform.resize is {resize}, smaller than the {size} pixels that are cut out of it")
    return Transform(size, chosen.scale, chosen.ratio, chosen.flip, resize, mean, std)
