"""Power cuts and failing disks at every file operation: after each the folder is usable and nothing is lost.

python tests/faulting.py                              # every operation of every scenario, three faults each
python tests/faulting.py --scenario run --record faults.jsonl     # goes on where it was stopped

A scenario is a change of a folder in a world small enough for a second. It is done once to count its file operations
below the folder (opening to write, renaming, removing, making folders, flushing), and then once for each of them with a
fault just before it:

    kill     the process ends at once (SIGKILL)
    enospc   the disk is full from here on: everything that would take space fails
    eio      this one operation fails

Then `repair` does what a person would do next, the same command again, and the outcome must be that of a change which
nothing disturbed, bit for bit. Processes are forked, so that torch is imported once.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fscil.errors import UserError

FAULTS = ("kill", "enospc", "eio")
TAKE_SPACE = {"open", "os.mkdir", "os.rename", "fsync", "save"}
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.link", "os.symlink"}
UNUSABLE = 3  # exit status of a child in which something other than a UserError was raised


# ---- faults --------------------------------------------------------------------------------------------------------


class Disk:
    """Counts the file operations of this process below a folder; the one numbered `at` meets the fault."""

    def __init__(self, folder: Path, fault: str = "", at: int = 0):
        self.below, self.fault, self.at = str(folder), fault, at
        self.count = 0
        self.active = True

    def install(self) -> None:
        import safetensors.torch

        sys.addaudithook(self.hook)
        fsync, save = os.fsync, safetensors.torch.save_file

        def flushed(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            self.before("fsync", os.readlink(f"/proc/self/fd/{number}"))
            fsync(handle)

        def saved(tensors: Any, filename: Any, metadata: Any = None) -> None:  # writes beyond Python's sight
            self.before("save", os.fspath(filename))
            save(tensors, filename, metadata)

        os.fsync, safetensors.torch.save_file = flushed, saved

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            if writes or (mode is None and isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
                self.before(event, path)
        elif event in CHANGES:
            self.before(event, arguments[0])

    def before(self, event: str, path: Any) -> None:
        if not self.active or not isinstance(path, (str, bytes, os.PathLike)):
            return
        if not os.path.abspath(os.fsdecode(path)).startswith(self.below):
            return
        self.count += 1
        if self.fault == "kill" and self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "enospc" and self.count >= self.at and event in TAKE_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))
        if self.fault == "readonly":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fsdecode(path))
        if self.fault == "eio" and self.count == self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fsdecode(path))


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """(exit status, what `work` returned) of a child: −9 where it was killed, 2 for a UserError, 3 for all else."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status, answer = 0, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = work()
        except UserError as error:
            status, answer = 2, str(error)
        except BaseException:
            status, answer = UNUSABLE, traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), json.loads(text) if text else None


# ---- scenarios -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Path], None]  # what was there before
    change: Callable[[Path], None]
    repair: Callable[[Path], None]  # what a person does after a fault
    outcome: Callable[[Path], Any]  # JSON-able


def digest(folder: Path, *patterns: str) -> dict[str, Any]:
    """Tensors of a folder's files, by content: headers may differ."""
    import hashlib

    from safetensors.torch import load_file

    return {
        f"{path.name} {name}": hashlib.sha256(tensor.contiguous().flatten().view(dtype_of_bytes()).numpy()).hexdigest()
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        for name, tensor in sorted(load_file(path).items())
    }


def dtype_of_bytes() -> Any:
    import torch

    return torch.uint8


# a run of the method `probe`, fresh and resumed


def import_all() -> None:
    """What every child needs, once."""
    import torch

    import fscil.data.glyphs
    import fscil.evaluation.figures
    import fscil.experiments.jobs
    import fscil.experiments.shelf
    import fscil.teachable.export.timm
    import fscil.teachable.model  # noqa: F401
    import probe_world  # noqa: F401
    from fscil import registry
    from fuzzing import backbone

    torch.set_num_threads(1)
    backbone()
    fscil.data.glyphs.glyph_classes()
    registry.METHODS["probe"] = registry.MethodEntry("probe_world:Probe", "probe", "for tests")


def run_fresh(folder: Path) -> None:
    import probe_world

    probe_world.run(folder / "run")


def run_stopped(folder: Path) -> None:
    import probe_world

    probe_world.Probe.stop_at = (1, 0)
    try:
        probe_world.run(folder / "run")
    except probe_world.Stop:
        probe_world.Probe.stop_at = None


def run_resumed(folder: Path) -> None:
    import probe_world

    probe_world.run(folder / "run", resume=True)


def run_repaired(folder: Path) -> None:
    """`fscil run --resume`, or the first command again where it was stopped before it began."""
    place = folder / "run"
    if (place / "results.json").exists():
        return
    (run_resumed if (place / "config.yaml").exists() else run_fresh)(folder)


def run_outcome(folder: Path) -> Any:
    import probe_world
    from fscil.evaluation.results import load_results

    results = load_results(folder / "run")
    sessions, confusion = probe_world.numbers(results)
    left = sorted(path.name for path in (folder / "run").rglob("*") if path.name.endswith(".part"))
    tensors = digest(folder / "run", "checkpoints/*.safetensors", "predictions/*.safetensors")
    return {"sessions": sessions, "confusion": confusion, "tensors": tensors, "left": left}


# a grid of one cell


def grid_job(folder: Path) -> Any:
    from fscil.config import resolve
    from fscil.experiments.grid import plan

    small = ["data.base=4", "data.way=2", "data.tasks=1", "data.shots=2", "options.epochs=1"]
    return plan(
        folder / "grid", [resolve("teen", "glyphs", settings=small, data={"limit": 2}, runtime={"device": "cpu"})]
    )[-1]


def compare(folder: Path) -> None:
    from fscil.experiments.jobs import run_job

    said = run_job(grid_job(folder).to_dict())
    if said["state"] != "done":
        raise UserError(said.get("error", said["state"]))


def compare_outcome(folder: Path) -> Any:
    from fscil.evaluation.results import load_results
    from fscil.experiments.grid import is_done

    job = grid_job(folder)
    assert is_done(job)
    results = load_results(job.folder)
    left = sorted(path.name for path in job.folder.rglob("*") if path.name.endswith(".part"))
    return {"accuracies": results.summary["accuracies"], "confusion": results.confusion, "left": left,
            "tensors": digest(job.folder, "checkpoints/*.safetensors", "predictions/*.safetensors")}  # fmt: skip


# a teachable model


def opened(folder: Path) -> Any:
    from fscil.teachable.model import Teachable
    from fuzzing import backbone

    return Teachable.load(folder / "model", backbone=backbone(), device="cpu")


def fit(folder: Path) -> None:
    from fscil.teachable.model import Teachable
    from fuzzing import backbone
    from made_up_pictures import pictures

    if not (folder / "model" / "model.json").exists():  # as the command asks before it begins
        Teachable(backbone=backbone(), device="cpu").fit(*pictures(range(3), 3)).save(folder / "model")


def taught(folder: Path) -> None:
    fit(folder)
    learn(folder)


def learn(folder: Path) -> None:
    from made_up_pictures import pictures

    clf = opened(folder)
    if "class 10" not in clf.classes_:
        with clf.editing():
            clf.learn(*pictures([10], 2))


def forget(folder: Path) -> None:
    clf = opened(folder)
    if "class 1" in clf.classes_:
        with clf.editing():
            clf.forget("class 1")


def undo(folder: Path) -> None:
    clf = opened(folder)
    if "class 10" in clf.classes_:
        with clf.editing():
            clf.undo()


def model_outcome(folder: Path) -> Any:
    from made_up_pictures import pictures

    clf = opened(folder)
    answers = clf.predict_proba(pictures([0, 1, 10], 1)[0])
    files = sorted(path.name for path in (folder / "model").iterdir() if path.name != ".lock")
    return {"names": clf.classes_.tolist(), "answers": answers.tolist(), "files": len(files),
            "actions": [event["action"] for event in clf.history_]}  # fmt: skip


def export(folder: Path) -> None:
    from fscil.teachable.export import exporter

    if not (folder / "out").exists():
        exporter("timm")(opened(folder), folder / "out")


def export_outcome(folder: Path) -> Any:
    left = sorted(path.name for path in folder.iterdir())
    return {"tensors": digest(folder, "out/*.safetensors"), "files": sorted(os.listdir(folder / "out")), "left": left}


def nothing(folder: Path) -> None:
    pass


SCENARIOS = {
    "run": Scenario(nothing, run_fresh, run_repaired, run_outcome),
    "resume": Scenario(run_stopped, run_resumed, run_repaired, run_outcome),
    "compare": Scenario(nothing, compare, compare, compare_outcome),
    "fit": Scenario(nothing, fit, fit, model_outcome),
    "learn": Scenario(fit, learn, learn, model_outcome),
    "forget": Scenario(fit, forget, forget, model_outcome),
    "undo": Scenario(taught, undo, undo, model_outcome),
    "export": Scenario(fit, export, export, export_outcome),
}


# ---- points --------------------------------------------------------------------------------------------------------


class Bench:
    """One scenario: its beginning, its undisturbed outcome, and how many operations it has."""

    def __init__(self, name: str, place: Path):
        self.scenario, self.start = SCENARIOS[name], place / name / "start"
        self.start.mkdir(parents=True)
        import_all()
        self._child("prepare", lambda: self.scenario.prepare(self.start))
        folder = self._copy()
        self.operations = self._child("count", lambda: self._disturbed(folder, "", 0))
        self.expected = self._child("outcome", lambda: self.scenario.outcome(folder))

    def _copy(self) -> Path:
        folder = self.start.parent / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.start, folder)
        return folder

    def _child(self, what: str, work: Callable[[], Any]) -> Any:
        status, answer = forked(work)
        assert status == 0, f"{what}: {answer}"
        return answer

    def _disturbed(self, folder: Path, fault: str, at: int) -> int:
        disk = Disk(folder, fault, at)
        disk.install()
        self.scenario.change(folder)
        return disk.count

    def problem(self, fault: str, at: int) -> str:
        """What a fault before operation `at` (from 1) does that it should not, or ""."""
        folder = self._copy()
        status, said = forked(lambda: self._disturbed(folder, fault, at))
        if status == UNUSABLE and "OSError" not in said.strip().splitlines()[-1]:
            return f"not one line: {said}"
        status, said = forked(lambda: self.scenario.repair(folder))
        if status != 0:
            return f"cannot go on: {said}"
        status, found = forked(lambda: self.scenario.outcome(folder))
        if status != 0:
            return f"cannot be read: {found}"
        wrong = [key for key in self.expected if found[key] != self.expected[key]]
        return f"another outcome: {wrong[0]}: {str(found[wrong[0]])[:300]}" if wrong else ""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--scenario", action="append", choices=SCENARIOS)
    arguments.add_argument("--fault", action="append", choices=FAULTS)
    arguments.add_argument("--every", type=int, default=1, help="only each so many-th operation")
    arguments.add_argument("--record", type=Path, help="a line per point; those in it are not tried again")
    given = arguments.parse_args()
    done: dict[tuple[str, str, int], str] = {}
    if given.record and given.record.exists():
        for line in given.record.read_text().splitlines():
            name, fault, at, said = json.loads(line)
            done[name, fault, at] = said
    failed = 0
    print("| scenario | operations | points | findings | seconds |\n|---|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for name in given.scenario or SCENARIOS:
            began, bench, points, found = time.monotonic(), Bench(name, Path(place)), 0, 0
            for fault in given.fault or FAULTS:
                for at in range(1, bench.operations + 1, given.every):
                    if (name, fault, at) not in done:
                        done[name, fault, at] = bench.problem(fault, at)
                        if given.record:
                            with given.record.open("a") as file:
                                file.write(json.dumps([name, fault, at, done[name, fault, at]]) + "\n")
                    points += 1
                    if done[name, fault, at]:
                        found += 1
                        print(f"{name}, {fault} before operation {at}: {done[name, fault, at]}", file=sys.stderr)
            failed += found
            seconds = time.monotonic() - began
            print(f"| {name} | {bench.operations} | {points} | {found} | {seconds:.0f} |", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
