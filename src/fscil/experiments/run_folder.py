"""The folder of a run: what is written when, how it is read back, and what may not be done to it.

Every file is written whole or not at all:

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
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fscil.config import RunConfig, differences, read_config, write_config
from fscil.data.shots import save_ledger
from fscil.errors import UserError
from fscil.evaluation import metrics
from fscil.evaluation.results import Results
from fscil.experiments.environment import environment
from fscil.experiments.keeper import RunKeeper
from fscil.files import atomic_write, load_tensors, read_json, save_tensors, write_json

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.data.stream import Stream
    from fscil.data.transforms import Transform
    from fscil.experiments.tensorboard import TensorBoard
    from fscil.methods.base import Method
    from fscil.runtime import Runtime


class RunRecord:
    """The run folder: what is written when, and how it is read back."""

    def __init__(self, folder: Path, config: RunConfig, stream: Stream, runtime: Runtime, usual: Mapping[str, int]):
        self.folder, self.config, self.stream, self.runtime = folder, config, stream, runtime
        self.usual = dict(usual)  # settings that the dataset decides where nobody else does
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
            "about": json_able(stream.about),
        }

    def reopen(self, method: Method) -> None:
        """Go back to the last task that was finished: its checkpoint is written after its line in metrics.jsonl."""
        before = read_json(self.folder / "split.json").get("split_hash")
        if before != self.stream.split_hash:
            now = self.stream.split_hash
            raise UserError(f'"{self.folder}" was run on split {before}, the data here give {now}; use the same data')
        if read_json(self.folder / "shots.json")["tasks"] != json_able(self.stream.shots):
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
        self.sessions.append(json_able(session))  # what a resumed run would read back
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
            stream={**self.describe_split(), "usual": self.usual},
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


def json_able(value: Any) -> Any:
    """What JSON reads back as: tuples are lists, and a loss that is not a number is null."""
    if isinstance(value, Mapping):
        return {str(key): json_able(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_able(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- which folder ---------------------------------------------------------------------------------------------------


def new_folder(config: RunConfig, under: str | Path = "runs") -> Path:
    """runs/glyphs-smp-seed2023-1, counting up."""
    stem = f"{config.dataset}-{config.method}-seed{config.seed}"
    number = 1
    while (Path(under) / f"{stem}-{number}").exists():
        number += 1
    return Path(under) / f"{stem}-{number}"


def same_everywhere(folder: Path, runtime: Runtime) -> Path:
    """The main process's choice, so that several processes do not count up past one another."""
    if runtime.processes == 1:
        return folder
    from accelerate.utils import broadcast_object_list

    return Path(broadcast_object_list([str(folder)])[0])


def check_new(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f'--output "{folder}" is a file; name a folder that does not exist yet')
    if folder.is_dir() and any(folder.iterdir()):
        is_run = (folder / "config.yaml").exists()
        hint = f"go on with it: fscil run --resume {folder}" if is_run else "name another folder"
        raise UserError(f'--output "{folder}" is not empty; {hint}')


def check_unfinished(folder: Path) -> None:
    if not (folder / "config.yaml").is_file():
        raise UserError(f'--resume "{folder}": not a run folder (no config.yaml in it)')
    if (folder / "results.json").exists():
        read_json(folder / "results.json")  # of another format version? then that is what to say
        raise UserError(f'--resume "{folder}": this run is finished; its results are in {folder / "results.json"}')


def check_same(folder: Path, config: RunConfig) -> None:
    changed = differences(read_config(folder / "config.yaml"), config)
    if changed:
        raise UserError(f'--resume "{folder}": it holds a run of another configuration ({"; ".join(changed[:3])})')


@contextlib.contextmanager
def own(folder: Path, is_main: bool) -> Iterator[None]:
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
