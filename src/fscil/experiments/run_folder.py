"""The folder of a run: what is written when, how it is read back, and what may not be done to it.

Every file is written whole or not at all:

    config.yaml                      everything that was chosen, defaults included
    split.json, shots.json           which classes and images: hash, class names, the few shots
    metrics.jsonl                    a line per session
    predictions/session_T.safetensors   labels, image numbers, top-5 of every test image seen
    checkpoints/session_T.safetensors   what the method has learned; task_T_*.safetensors: progress inside a task
    hashes.json                      SHA-256 of every file, and the hash of the backbone's weights; replaced after each
                                     session, and decides which are done
    results.json                     all of the above in figures, and the environment; exists once the run is finished
    accuracy.png                     the accuracy curve
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fscil.config import RunConfig, differences, read_config, write_config
from fscil.data.shots import read_shots, save_ledger
from fscil.errors import UserError
from fscil.evaluation import metrics
from fscil.evaluation.forms import parse_sessions, read_split_hash
from fscil.evaluation.hashes import HASHES, METRICS, RESULTS, RunHashes
from fscil.evaluation.results import Results
from fscil.experiments.cost import count_passes
from fscil.experiments.environment import environment
from fscil.experiments.keeper import RunKeeper
from fscil.experiments.leftovers import LOCK, check_began, clear, never_began
from fscil.experiments.modules import combined
from fscil.files import (
    atomic_path,
    atomic_write,
    check_finite,
    digest_file,
    load_tensors,
    read_json,
    refuse_links,
    save_tensors,
    write_json,
)
from fscil.reading import read_text
from fscil.runtime import Keeper, Runtime
from fscil.text import file_name

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.data.stream import Stream
    from fscil.data.transforms import Transform
    from fscil.experiments.tracking import Tracking
    from fscil.methods.base import Method


class RunRecord:
    """The run folder: what is written when, and how it is read back."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        stream: Stream,
        runtime: Runtime,
        usual: Mapping[str, int],
        modules: Mapping[str, str],
    ):
        self.folder, self.config, self.stream, self.runtime = folder, config, stream, runtime
        self.usual = dict(usual)  # settings that the dataset decides where nobody else does
        self.modules = dict(modules)  # hashes of the code
        self.code = combined(modules)  # kept with every session: a run may be resumed with other code
        self.lines: list[str] = []  # of metrics.jsonl
        self.sessions: list[dict[str, Any]] = []
        self.scalars: Tracking | None = None
        self.hashes: RunHashes | None = None  # of a run that began before there were any: None to its end
        self.keeper = HashedKeeper(self)
        runtime.keeper = self.keeper

    def open(self, backbone: Backbone) -> None:
        """Start a new folder; if that fails, leave nothing in it. The configuration comes last: it makes it a run."""
        self.hashes = RunHashes(self.folder, backbone=backbone.hash)
        try:
            if self.stream.manifest is None:
                write_json(self.folder / "split.json", self.describe_split())
            else:
                self.stream.manifest.save(self.folder / "split.json")
            ledger = self.folder / "shots.json"
            save_ledger(ledger, self.stream.shots, split_hash=self.stream.split_hash, hashes=HASHES)
            self._list(self.folder / "split.json", ledger)
            with self._listed("config.yaml") as aside:
                write_config(aside, self.config)
        except BaseException:
            for name in ("split.json", "shots.json", HASHES, "config.yaml"):
                (self.folder / name).unlink(missing_ok=True)
            raise

    def _list(self, *paths: Path) -> None:
        if self.hashes is not None:
            for path in paths:
                self.hashes.add(path)

    @contextlib.contextmanager
    def _listed(self, name: str) -> Iterator[Path]:
        """A path to write to, which is in hashes.json by the time it becomes the file `name`."""
        with atomic_path(self.folder / name) as aside:
            yield aside
            if self.hashes is not None:
                self.hashes.add(aside, name)
                self.hashes.write()

    def describe_split(self) -> dict[str, Any]:
        """The stream in figures, for results.json."""
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
        """Go back to the last task that was finished: the last that hashes.json lists; in a run that began before there
        were hashes, the last with a checkpoint, which was written after its line in metrics.jsonl."""
        before = read_split_hash(self.folder / "split.json")
        if before != self.stream.split_hash:
            now = self.stream.split_hash
            raise UserError(f'"{self.folder}" was run on split {before}, the data here give {now}; use the same data')
        if read_shots(self.folder / "shots.json")["tasks"] != json_able(self.stream.shots):
            raise UserError(f'"{self.folder}" has other shots than the data here give; use the same data')
        self.hashes = RunHashes.read(self.folder)
        self.lines = self._unhashed_lines() if self.hashes is None else self.hashes.lines()
        self.sessions = parse_sessions(self.lines, self.folder / METRICS)
        if self.hashes is not None and self.runtime.is_main:
            self._forget_the_end()
        if not self.lines:
            return
        last = self.checkpoint(len(self.lines) - 1)
        tensors, meta = load_tensors(last)
        if meta.get("fingerprint") not in self.config.fingerprints():
            raise UserError(f'"{last}" belongs to a run of another configuration')
        check_finite(tensors, f'"{last}"')
        try:
            method.load_state(tensors)
            if method.features_fixed:  # shapes that do not fit one another show here, not after a task
                method.logits_from(torch.zeros(1, method.feature_dim, device=self.runtime.device))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise UserError(f'"{last}" does not fit method {self.config.method}: {error}') from error
        if method.seen != self.sessions[-1]["seen"]:
            raise UserError(f'"{last}" knows {method.seen} classes, {METRICS} says {self.sessions[-1]["seen"]}')
        method.restore_diagnostics(self.sessions[-1].get("diagnostics") or {})  # a task may add none of its own

    def _unhashed_lines(self) -> list[str]:
        numbers = [int(path.stem.split("_")[1]) for path in self.checkpoint(0).parent.glob("session_*.safetensors")]
        if not numbers:
            return []
        path, wanted = self.folder / METRICS, max(numbers) + 1
        lines = read_text(path).splitlines()[:wanted] if path.is_file() else []
        if len(lines) < wanted:
            raise UserError(
                f'"{path}" has {len(lines)} lines, but session {wanted - 1} was done. Restore it from a copy.'
            )
        return lines

    def _forget_the_end(self) -> None:
        """What follows the last session is made again, so it is listed no longer; nor is there more than is listed."""
        assert self.hashes is not None
        self.hashes.remove(self.folder / RESULTS, self.folder / "accuracy.png", *self.folder.glob("tensorboard/*"))
        self.hashes.write()
        for path in self.checkpoint(0).parent.glob("*.safetensors"):
            kind, number, *_ = path.stem.split("_")
            listed = path.relative_to(self.folder).as_posix() in self.hashes.files
            if (kind == "session" and not listed) or (kind == "task" and int(number) < len(self.lines)):
                path.unlink()

    def checkpoint(self, session: int) -> Path:
        return self.folder / "checkpoints" / f"session_{session}.safetensors"

    def predictions(self, session: int) -> Path:
        return self.folder / "predictions" / f"session_{session}.safetensors"

    def add(
        self, session: dict[str, Any], method: Method, labels: torch.Tensor, images: torch.Tensor, top: torch.Tensor
    ) -> None:
        """Write a session down. The list of files comes last: whoever finds a session in it finds its files as well."""
        number = session["session"]
        check_finite(method.state(), f"{self.config.method} after task {number}")
        self.sessions.append(json_able(session))  # what a resumed run would read back
        self.lines.append(json.dumps(self.sessions[-1], ensure_ascii=False, allow_nan=False))
        if self.runtime.is_main:
            meta = {"session": number, "seen": session["seen"], "fingerprint": self.config.fingerprint()}
            predictions = {"labels": labels, "images": images, "top": top}
            save_tensors(
                self.predictions(number), {key: value.to(torch.int32) for key, value in predictions.items()}, meta
            )
            atomic_write(self.folder / METRICS, "".join(f"{line}\n" for line in self.lines))
            save_tensors(self.checkpoint(number), method.state(), meta)
            stale = [self.checkpoint(number - 1)] if self.config.runtime.keep == "ends" and number > 1 else []
            if self.hashes is not None:
                self._list(self.predictions(number), self.folder / METRICS, self.checkpoint(number))
                self.hashes.remove(*stale)
                self.hashes.progress.clear()
                self.hashes.write()
            self.keeper.clear()
            for path in stale:
                path.unlink(missing_ok=True)
            if self.scalars is not None:
                self.scalars.session(session)
        self.runtime.wait()

    def finish(self, method: Method, backbone: Backbone, transform: Transform) -> Results:
        """Write the curve and the results, which make the run a finished one."""
        seen = self.sessions[-1]["seen"]
        predictions, _ = load_tensors(self.predictions(len(self.sessions) - 1))
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
                "modules": self.modules,
                "passes": round(count_passes(self.config, self.stream)),
            },
            stream={**self.describe_split(), "usual": self.usual},
            sessions=self.sessions,
            summary=metrics.summarise(self.sessions),
            confusion=confusion.tolist(),
            hashed=self.hashes is not None,
        )
        if self.runtime.is_main:
            from fscil.evaluation.figures import accuracy_curve

            curve = self.folder / "accuracy.png"
            atomic_write(curve, accuracy_curve(results.to_dict()).rendered("png"))
            self._list(curve, *sorted(self.folder.glob("tensorboard/*")))
            with self._listed(RESULTS) as aside:
                write_json(aside, results.to_dict())
        self.runtime.wait()
        return results


class HashedKeeper(RunKeeper, Keeper):
    """Progress inside a task, whose damage is noticed: a file carries the hash of its tensors, the list its name."""

    DIGEST = "sha256"  # in a file, as a tensor of bytes

    def __init__(self, record: RunRecord):
        config, writes = record.config, record.runtime.is_main
        super().__init__(record.folder / "checkpoints", config.fingerprint(), writes, config.fingerprints())
        self.record = record

    def save(self, stage: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self.writes:
            return
        super().save(stage, {**tensors, self.DIGEST: digest_tensors(tensors)})
        hashes, name = self.record.hashes, self.path(stage).relative_to(self.record.folder).as_posix()
        if hashes is not None and name not in hashes.progress:
            hashes.progress.add(name)
            hashes.write()

    def load(self, stage: str) -> dict[str, torch.Tensor] | None:
        tensors = super().load(stage)
        digest = tensors.pop(self.DIGEST, None) if tensors else None
        if tensors and digest is not None and not torch.equal(digest, digest_tensors(tensors)):
            raise UserError(
                f'"{self.path(stage)}" was altered or damaged: its SHA-256 does not match what is written in it. '
                "Remove it to learn the task from its beginning."
            )
        return tensors


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """SHA-256 of names, types, shapes and values, as a tensor of 32 bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


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
    stem = f"{file_name(config.dataset)}-{config.method}-seed{config.seed}"
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
    """Refuse to start a run where something else is."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f'--output "{folder}" is a file; name a folder that does not exist yet')
    if folder.is_dir() and not never_began(folder):
        is_run = (folder / "config.yaml").exists()
        hint = f"go on with it: fscil run --resume {folder}" if is_run else "name another folder"
        raise UserError(f'--output "{folder}" is not empty; {hint}')


def check_unfinished(folder: Path) -> None:
    """Refuse to go on with what is no run, or a finished one."""
    check_began(folder)
    if (folder / "results.json").exists():
        read_json(folder / "results.json")  # of another format version? then that is what to say
        raise UserError(f'--resume "{folder}": this run is finished; its results are in {folder / "results.json"}')


def check_intact(folder: Path) -> None:
    """Notice damage before anything is computed from it."""
    hashes = RunHashes.read(folder)
    if hashes is not None:
        hashes.check(resuming=True)


def check_same(folder: Path, config: RunConfig, backbone: Backbone) -> RunConfig:
    """The configuration to go on with: the run's own also where its weights lie elsewhere now, for the folder, its
    checkpoints and other runs know it by that."""
    stored, hashes = read_config(folder / "config.yaml"), RunHashes.read(folder)
    known = hashes.backbone if hashes is not None else None
    if known not in (None, backbone.hash):
        raise UserError(
            f'--resume "{folder}": the run began on weights of backbone "{backbone.name}" with the hash {known}, those '
            f"here have {backbone.hash}; name the same file with --weights"
        )
    if known is not None or _same_content(stored.weights, config.weights):
        config = replace(config, weights=stored.weights)
    changed = differences(stored, config)
    if changed:
        raise UserError(f'--resume "{folder}": it holds a run of another configuration ({"; ".join(changed[:3])})')
    return config


def _same_content(one: str | None, other: str | None) -> bool:
    """Whether two files are there and equal."""
    files = [Path(name).expanduser() for name in (one, other) if name is not None]
    return len(files) == 2 and all(map(Path.is_file, files)) and digest_file(files[0]) == digest_file(files[1])


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
        refuse_links(folder)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError(f'"{folder}" is in use by another process; wait for it or name another folder') from None
    except OSError as error:
        raise UserError(f'cannot write "{folder}": {error.strerror or error}') from error
    try:
        clear(folder)
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):
            for place in created:
                place.rmdir()  # only when nothing came of it: a folder with anything in it stays
