"""One run: a method on a stream, task by task, evaluated after each on all classes seen, kept in a folder.

The folder (every file is written whole or not at all):

    config.yaml                      everything that was chosen, defaults included
    split.json, shots.json           which classes and images: hash, class names, the few shots
    metrics.jsonl                    a line per session
    predictions/session_T.safetensors   labels, image numbers, top-5 of every test image seen
    checkpoints/session_T.safetensors   what the method has learned; task_T_*.safetensors: progress inside a task
    results.json                     all of the above in figures, and the environment; exists once the run is finished
    accuracy.png                     the accuracy curve
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fscil
from fscil import registry
from fscil._version import __version__
from fscil.backbones.loading import make_backbone
from fscil.backbones.vit import Backbone
from fscil.config import (
    RunConfig,
    differences,
    read_config,
    with_later_settings,
    write_config,
)
from fscil.data.datasets import Dataset, load_dataset
from fscil.data.shots import save_ledger
from fscil.data.stream import Stream, Task, make_stream
from fscil.data.transforms import Transform, make_transform
from fscil.display import LiveDisplay, session_line
from fscil.errors import UserError
from fscil.evaluation import metrics
from fscil.experiments.keeper import RunKeeper
from fscil.experiments.tensorboard import TensorBoard, check_tensorboard, tensorboard
from fscil.files import atomic_write, load_tensors, read_json, save_tensors, write_json
from fscil.runtime import Runtime
from fscil.strict import build

if TYPE_CHECKING:
    from fscil.methods.base import Method


DIAGNOSTICS = "diagnostics.json"  # of a base model on the shelf, as a tensor of bytes


@dataclass(frozen=True)
class Results:
    """A finished run. `sessions` has a dict per session (metrics, time, memory), `summary` what they come to."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    stream: dict[str, Any]
    sessions: list[dict[str, Any]]
    summary: dict[str, Any]
    confusion: list[list[int]]  # of the last session: rows are true classes, columns predictions

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "folder"}


def load_results(folder: str | Path) -> Results:
    """Read a finished run's results.json."""
    folder = Path(folder)
    if not (folder / "results.json").is_file():
        reason = "is not finished" if (folder / "config.yaml").is_file() else "is not a run folder"
        raise UserError(f'"{folder}" {reason}: it has no results.json')
    content = read_json(folder / "results.json")
    try:
        return Results(folder, **{**content, "config": with_later_settings(content["config"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f'"{folder / "results.json"}" was not written by fscil ({error})') from error


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
    folder = _same_everywhere(Path(folder) if folder is not None else new_folder(config), place)
    if resume:
        _check_unfinished(folder)
    elif place.is_main:
        _check_new(folder)

    with _own(folder, place.is_main):
        dataset = load_dataset(config.dataset, config.data) if stream is None else None
        if backbone is None:
            backbone = make_backbone(config.backbone, config.weights, config.transform.size)
        transform = make_transform(config.transform, backbone)
        config = _filled(config, transform, dataset, place)
        if resume:
            _check_same(folder, config)
        if dataset is not None:
            stream = make_stream(dataset, config.data, transform, config.seed, place.device)
        backbone.prepare(place)
        cls = registry.method_class(config.method)
        method: Method = cls(backbone, build(cls.Options, config.options, "options."), place)

        record = RunRecord(folder, config, stream, place)
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
            facts = torch.frombuffer(
                bytearray(json.dumps(_json_able(method.diagnostics())).encode()), dtype=torch.uint8
            )
            runtime.shelf.put(key, {**method.state(), DIAGNOSTICS: facts})
        else:
            method._diagnostics = json.loads(bytes(state.pop(DIAGNOSTICS).tolist()))
            method.load_state(state)


class RunRecord:
    """The run folder: what is written when, and how it is read back."""

    def __init__(self, folder: Path, config: RunConfig, stream: Stream, runtime: Runtime):
        self.folder, self.config, self.stream, self.runtime = folder, config, stream, runtime
        self.sessions: list[dict[str, Any]] = []
        self.scalars: TensorBoard | None = None
        self.keeper = RunKeeper(folder / "checkpoints", config.fingerprint(), writes=runtime.is_main)
        runtime.keeper = self.keeper

    def open(self) -> None:
        """Start a new folder; if that fails, leave nothing in it. The configuration comes last: it makes it a run."""
        try:
            if self.stream.manifest is None:
                write_json(self.folder / "split.json", self.describe_split())
            else:
                self.stream.manifest.save(self.folder / "split.json")
            save_ledger(self.folder / "shots.json", self.stream.shots, split_hash=self.stream.split_hash)
            write_config(self.folder / "config.yaml", self.config)
        except BaseException:
            for name in ("split.json", "shots.json", "config.yaml"):
                (self.folder / name).unlink(missing_ok=True)
            raise

    def describe_split(self) -> dict[str, Any]:
        stream = self.stream
        return {
            "dataset": stream.name,
            "split_hash": stream.split_hash,
            "base_classes": stream.base_classes,
            "way": stream.way,
            "classes_seen": [stream.seen(task.index) for task in stream.tasks],
            "training_images": [len(task.images) for task in stream.tasks],
            "test_images": len(stream.test),
            "class_names": list(stream.class_names),
            "about": _json_able(stream.about),
        }

    def reopen(self, method: Method) -> None:
        """Go back to the last task that was finished: its checkpoint is written after its line in metrics.jsonl."""
        before = read_json(self.folder / "split.json").get("split_hash")
        if before != self.stream.split_hash:
            now = self.stream.split_hash
            raise UserError(f'"{self.folder}" was run on split {before}, the data here give {now}; use the same data')
        if read_json(self.folder / "shots.json")["tasks"] != _json_able(self.stream.shots):
            raise UserError(f'"{self.folder}" has other shots than the data here give; use the same data')
        numbers = [int(path.stem.split("_")[1]) for path in self.checkpoint(0).parent.glob("session_*.safetensors")]
        if not numbers:
            return
        last = max(numbers)
        tensors, meta = load_tensors(self.checkpoint(last))
        if meta.get("fingerprint") != self.config.fingerprint():
            raise UserError(f'"{self.checkpoint(last)}" belongs to a run of another configuration')
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.sessions = [json.loads(line) for line in lines[: last + 1]]
        method.load_state(tensors)

    def checkpoint(self, session: int) -> Path:
        return self.folder / "checkpoints" / f"session_{session}.safetensors"

    def add(
        self, session: dict[str, Any], method: Method, labels: torch.Tensor, images: torch.Tensor, top: torch.Tensor
    ) -> None:
        """Write a session down. The checkpoint comes last: whoever finds it finds the rest as well."""
        number = session["session"]
        self.sessions.append(_json_able(session))  # what a resumed run would read back
        if self.runtime.is_main:
            meta = {"session": number, "seen": session["seen"], "fingerprint": self.config.fingerprint()}
            predictions = {"labels": labels, "images": images, "top": top}
            save_tensors(
                self.folder / "predictions" / f"session_{number}.safetensors",
                {key: value.to(torch.int32) for key, value in predictions.items()},
                meta,
            )
            lines = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in self.sessions)
            atomic_write(self.folder / "metrics.jsonl", lines)
            save_tensors(self.checkpoint(number), method.state(), meta)
            self.keeper.clear()
            if self.scalars is not None:
                self.scalars.session(session)
            if self.config.runtime.keep == "ends" and number > 1:
                self.checkpoint(number - 1).unlink(missing_ok=True)
        self.runtime.wait()

    def finish(self, method: Method, backbone: Backbone, transform: Transform) -> Results:
        seen = self.sessions[-1]["seen"]
        predictions, _ = load_tensors(self.folder / "predictions" / f"session_{len(self.sessions) - 1}.safetensors")
        confusion = metrics.confusion(predictions["labels"].numpy(), predictions["top"][:, 0].numpy(), seen)
        results = Results(
            folder=self.folder,
            config=self.config.to_dict(),
            environment={
                **environment(self.runtime),
                "backbone": {
                    "name": backbone.name,
                    "hash": backbone.hash,
                    "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
                    "mean": list(transform.mean),
                    "std": list(transform.std),
                    "size": transform.size,
                    "resize": transform.resize,
                },
            },
            stream=self.describe_split(),
            sessions=self.sessions,
            summary=metrics.summarise(self.sessions),
            confusion=confusion.tolist(),
        )
        if self.runtime.is_main:
            from fscil.evaluation.figures import accuracy_curve

            atomic_write(self.folder / "accuracy.png", accuracy_curve(results.to_dict()).rendered("png"))
            write_json(self.folder / "results.json", results.to_dict())
        self.runtime.wait()
        return results


def _filled(config: RunConfig, transform: Transform, dataset: Dataset | None, runtime: Runtime) -> RunConfig:
    """The configuration with what the dataset and the backbone decide, so that a run folder says everything."""
    return replace(
        config,
        data=dataset.complete(config.data) if dataset else config.data,
        transform=replace(config.transform, size=transform.size, resize=transform.resize),
        runtime=replace(config.runtime, processes=runtime.processes),
    )


def _json_able(value: Any) -> Any:
    """What JSON reads back as: tuples are lists, and a loss that is not a number is null."""
    if isinstance(value, Mapping):
        return {str(key): _json_able(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_able(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- parts of a run ------------------------------------------------------------------------------------------------


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


class PeakMemory:
    """Most memory used since this object was made: of the process, and of the GPU where there is one."""

    def __init__(self, runtime: Runtime):
        self.device = runtime.device
        with contextlib.suppress(OSError):  # Linux only; elsewhere the peak is that of the whole process life
            Path("/proc/self/clear_refs").write_text("5")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> dict[str, int | None]:
        gpu = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {"peak_memory": self._process(), "peak_gpu_memory": gpu}

    @staticmethod
    def _process() -> int:
        with contextlib.suppress(OSError, AttributeError):
            return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        import psutil

        return psutil.Process().memory_info().rss


def environment(runtime: Runtime) -> dict[str, Any]:
    """What the numbers were computed with."""
    on_gpu = runtime.device.type == "cuda"
    return {
        "fscil": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in ("torch", "torchvision", "timm", "numpy", "safetensors")},
        "device": torch.cuda.get_device_name(runtime.device) if on_gpu else runtime.device.type,
        "precision": str(runtime.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processes": runtime.processes,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str | None:
    """The git commit of the source, when the package runs from a checkout; "+" marks uncommitted changes."""
    here = Path(fscil.__file__).resolve().parent
    if here.parent.name != "src":
        return None
    try:
        commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "--", "."])
        outputs = [
            subprocess.run(["git", "-C", here, *command], capture_output=True, text=True, timeout=10, check=True).stdout
            for command in commands
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return outputs[0].strip() + ("+" if outputs[1].strip() else "")


# ---- folders -------------------------------------------------------------------------------------------------------


def new_folder(config: RunConfig, under: str | Path = "runs") -> Path:
    """runs/glyphs-smp-seed2023-1, counting up."""
    stem = f"{config.dataset}-{config.method}-seed{config.seed}"
    number = 1
    while (Path(under) / f"{stem}-{number}").exists():
        number += 1
    return Path(under) / f"{stem}-{number}"


def _same_everywhere(folder: Path, runtime: Runtime) -> Path:
    """The main process's choice, so that several processes do not count up past one another."""
    if runtime.processes == 1:
        return folder
    from accelerate.utils import broadcast_object_list

    return Path(broadcast_object_list([str(folder)])[0])


def _check_new(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f'--output "{folder}" is a file; name a folder that does not exist yet')
    if folder.is_dir() and any(folder.iterdir()):
        is_run = (folder / "config.yaml").exists()
        hint = f"go on with it: fscil run --resume {folder}" if is_run else "name another folder"
        raise UserError(f'--output "{folder}" is not empty; {hint}')


def _check_unfinished(folder: Path) -> None:
    if not (folder / "config.yaml").is_file():
        raise UserError(f'--resume "{folder}": not a run folder (no config.yaml in it)')
    if (folder / "results.json").exists():
        read_json(folder / "results.json")  # of another format version? then that is what to say
        raise UserError(f'--resume "{folder}": this run is finished; its results are in {folder / "results.json"}')


def _check_same(folder: Path, config: RunConfig) -> None:
    changed = differences(read_config(folder / "config.yaml"), config)
    if changed:
        raise UserError(f'--resume "{folder}": it holds a run of another configuration ({"; ".join(changed[:3])})')


@contextlib.contextmanager
def _own(folder: Path, is_main: bool) -> Iterator[None]:
    """Keep a second process from writing into the same run."""
    if not is_main:
        yield
        return
    from filelock import FileLock, Timeout

    created = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError(f'"{folder}" is in use by another process; wait for it or name another folder') from None
    except OSError as error:
        raise UserError(f'cannot write "{folder}": {error.strerror or error}') from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / ".lock").unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):
            for place in created:
                place.rmdir()  # only when nothing came of it: a folder with anything in it stays
