"""Whether a run is what it says: files, split, shots, every metric recomputed, and a session learned again.

Hashes show damage. Predictions that were made up, with metrics and hashes to suit, pass everything but `learn_again`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fscil.config import RunConfig, as_made, complete, differences, read_config
from fscil.data.manifests import TEST, TRAIN, Manifest
from fscil.data.shots import Ledger, load_ledger, read_shots, seeded_shots
from fscil.display import LiveDisplay
from fscil.errors import UserError
from fscil.evaluation import metrics
from fscil.evaluation.forms import StoredResults, parse_sessions, read_split_hash
from fscil.evaluation.hashes import METRICS, RESULTS, RunHashes
from fscil.evaluation.versions import modules_of
from fscil.experiments.environment import environment
from fscil.experiments.modules import combined, module_hashes
from fscil.experiments.run import Examination, Parts, assemble, make_runtime
from fscil.experiments.run_folder import json_able
from fscil.files import load_tensors, read_json, refuse_links
from fscil.reading import read_text
from fscil.strict import conform

if TYPE_CHECKING:
    from fscil.backbones.vit import Backbone
    from fscil.data.stream import Stream
    from fscil.runtime import Runtime

TOLERATED = 0.02  # of the predictions may differ on another machine, which rounds otherwise
PLACE = ("cpu", "torch", "device", "precision", "threads", "processes")  # what must be the same for the same bits
MODULES_NAMED = 3  # where more of the code differs, the others are counted


@dataclass(frozen=True)
class Check:
    """How one check ended."""

    name: str
    state: str  # "ok", "failed", or "left out" where there is nothing to check
    text: str


class Failed(Exception):
    """What a check found."""


class LeftOut(Exception):
    """Why a check cannot be made."""


def verify(folder: str | Path) -> Iterator[Check]:
    """All checks that need nothing but the run folder."""
    stored = StoredRun(Path(folder))
    for name, check in CHECKS.items():
        yield checked(name, partial(check, stored))


def checked(name: str, check: Callable[[], str]) -> Check:
    """Make a check; what cannot be read has failed it."""
    try:
        return Check(name, "ok", check())
    except LeftOut as reason:
        return Check(name, "left out", str(reason))
    except (Failed, UserError) as problem:
        return Check(name, "failed", " ".join(str(problem).split()))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return Check(name, "failed", f"not readable: {type(error).__name__} {error}")


class StoredRun:
    """What a run folder holds, read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not any((folder / name).is_file() for name in ("config.yaml", RESULTS)):
            raise UserError(f'"{folder}" is not a run folder (no config.yaml in it)')

    @cached_property
    def config(self) -> RunConfig:
        return read_config(self.folder / "config.yaml")

    @cached_property
    def sessions(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that count."""
        hashes = RunHashes.read(self.folder)
        path = self.folder / METRICS
        if hashes is None or hashes.finished:
            lines = read_text(path).splitlines() if path.is_file() else []
        else:
            lines = hashes.lines()  # a killed process may have left one more
        if not lines:
            raise LeftOut("no session is done yet")
        return parse_sessions(lines, path)

    @cached_property
    def results(self) -> dict[str, Any]:
        if not (self.folder / RESULTS).is_file():
            raise LeftOut("the run is not finished")
        results: dict[str, Any] = conform(read_json(self.folder / RESULTS), StoredResults, self.folder / RESULTS)
        return results

    @cached_property
    def split(self) -> Manifest:
        if "entries" not in read_json(self.folder / "split.json"):
            raise LeftOut("the run was given a stream of its own, without a list of images")
        return Manifest.load(self.folder / "split.json")

    @cached_property
    def shots(self) -> Ledger:
        return load_ledger(self.folder / "shots.json") if self.few_shot else {}

    @property
    def few_shot(self) -> bool:
        return bool(read_shots(self.folder / "shots.json")["tasks"])

    def tensors(self, part: str, session: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return load_tensors(self.folder / part / f"session_{session}.safetensors")

    def checkpoints(self) -> list[int]:
        return sorted(int(path.stem.split("_")[1]) for path in self.folder.glob("checkpoints/session_*.safetensors"))

    def classes(self) -> list[list[str]]:
        """Names of the classes of each task, in order of arrival."""
        names, base, way = (self.results["stream"][key] for key in ("class_names", "base_classes", "way"))
        return [names[low:high] for low, high in metrics.task_bounds(base, len(names), way)]


# ---- from the folder alone -----------------------------------------------------------------------------------------


def _files(run: StoredRun) -> str:
    refuse_links(run.folder)
    hashes = RunHashes.read(run.folder)
    if hashes is None:
        raise LeftOut("unhashed: a run from before there were hashes")
    problems = [problem for _, problem in hashes.compared() if problem]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise Failed(problems[0] + more)
    return f"{len(hashes.files)} files are as hashes.json lists them"


def _settings(run: StoredRun) -> str:
    stored = complete(as_made(run.results["config"]))
    changed = differences(run.config, stored)
    if run.config.recipe != stored.recipe:  # says whether the run was a quick look
        changed.append(f"recipe: {run.config.recipe} -> {stored.recipe}")
    if changed:
        raise Failed(f"config.yaml and results.json differ ({changed[0]})")
    parts = [("predictions", t) for t in range(len(run.sessions))] + [("checkpoints", t) for t in run.checkpoints()]
    marks = {run.tensors(*part)[1].get("fingerprint") for part in parts}
    if not marks <= {*run.config.fingerprints()}:  # two where a run of 0.1 was finished by a later version
        raise Failed("predictions or checkpoints were not made under the settings that config.yaml has")
    return f"config.yaml, results.json and {len(parts)} files of predictions and checkpoints agree"


def _split(run: StoredRun) -> str:
    stored = {
        "split.json": read_split_hash(run.folder / "split.json"),
        "shots.json": read_shots(run.folder / "shots.json")["split_hash"],
    }
    if (run.folder / RESULTS).is_file():
        stored["results.json"] = run.results["stream"]["split_hash"]
    if len(set(stored.values())) > 1:
        raise Failed(f"{', '.join(stored)} name different splits")
    manifest = run.split  # reads every entry, and refuses a list that does not have the hash it carries
    return f"{len(manifest.entries):,} images of {len(manifest.class_names)} classes, hash {manifest.short_hash}"


def _shots(run: StoredRun) -> str:
    if not run.few_shot:
        raise LeftOut("the run has no few-shot task")
    manifest, data, classes = run.split, run.config.data, run.classes()
    images: dict[str, list] = {
        name: [manifest.entries[at].image for at in positions]
        for name, positions in zip(manifest.class_names, manifest.positions(TRAIN))
    }
    for task, ledger in run.shots.items():
        if list(ledger) != classes[task]:
            raise Failed(f"task {task} brings other classes than the shots are of")
        for name, listed in ledger.items():
            if not set(listed) <= set(images[name]) or len(set(listed)) < len(listed):
                raise Failed(f'task {task}: a shot of "{name}" is listed twice, or is none of its training images')
    counts = {task: sum(map(len, ledger.values())) for task, ledger in run.shots.items()}
    for task, count in counts.items():
        if (said := run.results["stream"]["training_images"][task]) != count:
            raise Failed(f"task {task} has {count} shots, results.json says {said}")
    count = sum(counts.values())
    skipped = run.results["stream"]["about"].get("skipped")
    if data.sampler != "seeded" or data.shots_file or data.validation or skipped or data.shots is None:
        return f"{count} training images of their classes"
    pools = {task: {name: images[name] for name in names} for task, names in enumerate(classes) if task}
    if seeded_shots(pools, data.shots, run.config.seed) != run.shots:
        raise Failed(f"not the shots that seed {run.config.seed} draws")
    return f"{count} training images of their classes, as seed {run.config.seed} draws them"


def _predictions(run: StoredRun) -> str:
    """Every session answers for the same test images: all that the split has of the classes seen."""
    sessions, known = run.sessions, np.zeros(0, dtype=np.int64)
    for number in reversed(range(len(sessions))):
        tensors, _ = run.tensors("predictions", number)
        labels, images = (tensors[key].numpy().astype(np.int64) for key in ("labels", "images"))
        if number == len(sessions) - 1:
            known = labels
            if not (images == np.arange(len(images))).all():
                raise Failed(f"session {number} leaves test images out")
        if not (images == np.flatnonzero(known < sessions[number]["seen"])).all() or (labels != known[images]).any():
            raise Failed(f"session {number} was not tested on all test images of the classes seen")
    counts = np.bincount(known)
    wanted = _test_counts(run)
    if wanted is not None and counts.tolist() != wanted[: len(counts)]:
        raise Failed("the test images are not those of the split")
    return f"{len(sessions)} sessions, tested on all of {len(known):,} test images as their classes arrive"


def _test_counts(run: StoredRun) -> list[int] | None:
    """Test images of each class by the split, in order of arrival; None where only the data could tell."""
    data = run.config.data
    if not (run.folder / RESULTS).is_file() or "entries" not in read_json(run.folder / "split.json"):
        return None
    if data.validation or run.results["stream"]["about"].get("skipped"):
        return None
    of_class = dict(zip(run.split.class_names, map(len, run.split.positions(TEST))))
    return [min(of_class[name], data.limit or of_class[name]) for names in run.classes() for name in names]


def _metrics(run: StoredRun) -> str:
    stream, compared = _stream_facts(run), 0
    for number, session in enumerate(run.sessions):
        tensors, _ = run.tensors("predictions", number)
        labels, top = tensors["labels"].numpy(), tensors["top"].numpy()
        again = metrics.evaluate_session(labels, top, stream["base_classes"], session["seen"], stream["way"])
        for key in again.keys() & session.keys():
            if not _same(again[key], session[key]):
                said = _told(session[key], again[key])
                raise Failed(f"session {number}: {key} is {said}")
            compared += 1
    return f"{compared} metrics of {len(run.sessions)} sessions follow from their predictions"


def _told(stored: Any, again: Any) -> str:
    numbers = _is_number(stored) and _is_number(again)
    return f"{stored:.4f}, its predictions give {again:.4f}" if numbers else "not what its predictions give"


def _stream_facts(run: StoredRun) -> Mapping[str, int]:
    """Base classes and classes per task: from the results, or from what an unfinished run has."""
    if (run.folder / RESULTS).is_file():
        return run.results["stream"]
    base, *later = [session["seen"] for session in run.sessions]
    return {"base_classes": base, "way": later[0] - base if later else _way_to_come(run, base)}


def _way_to_come(run: StoredRun, base: int) -> int:
    """Classes per task of a run that stopped after the base task."""
    data, split = run.config.data, read_json(run.folder / "split.json")
    way = split.get("way", data.way)  # a stream that the run was given names its own
    if way is None:
        raise LeftOut("classes per task are not known before the first few-shot task")
    if data.validation and data.base is not None:  # there few-shot classes are base classes that were set apart
        way = min(way, data.base - base)
    return int(way)


def _results(run: StoredRun) -> str:
    results, sessions = run.results, run.sessions
    if results["sessions"] != sessions:
        raise Failed("the sessions of results.json are not those of metrics.jsonl")
    summary = metrics.summarise(sessions)
    wrong = [key for key in summary if key in results["summary"] and not _same(summary[key], results["summary"][key])]
    if wrong:
        raise Failed(f"{wrong[0]} in the summary does not follow from the sessions")
    tensors, _ = run.tensors("predictions", len(sessions) - 1)
    counts = metrics.confusion(tensors["labels"].numpy(), tensors["top"][:, 0].numpy(), sessions[-1]["seen"])
    if counts.tolist() != results["confusion"]:
        raise Failed("the confusion matrix is not that of the last predictions")
    facts = {"classes_seen": [session["seen"] for session in sessions], "test_images": len(tensors["labels"])}
    for key, value in facts.items():
        if results["stream"][key] != value:
            raise Failed(f"{key} in results.json are not those of its sessions")
    return f"A_avg {summary['A_avg']:.2f} and {len(summary) - 1} more follow from the sessions"


CHECKS: dict[str, Callable[[StoredRun], str]] = {
    "files": _files,
    "settings": _settings,
    "split": _split,
    "shots": _shots,
    "predictions": _predictions,
    "metrics": _metrics,
    "results": _results,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """Equal up to the last digits of a float, which numpy may sum in another order."""
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


# ---- learning a session again --------------------------------------------------------------------------------------


def learn_again(
    folder: str | Path,
    session: int | None = None,
    display: LiveDisplay | None = None,
    stream: Stream | None = None,
    backbone: Backbone | None = None,
    **places: Any,
) -> Check:
    """Learn a few-shot session again from the checkpoint before it, and compare what comes out with what is stored:
    bit for bit on the same CPU and torch, else the best class of every test image. Nothing is written.

    Without a `session` it is the first, and the check is left out where there is none yet. `places` say where things
    are now: data_root, weights, device. `stream` and `backbone` may be given as to `run`.
    """
    run = StoredRun(Path(folder))
    if session is not None:
        _refuse_session(run, session)

    def compare() -> str:
        number = session or _first_few_shot(run)
        config = _elsewhere(run.config, **places)
        runtime = make_runtime(config, display or LiveDisplay(quiet=True))
        parts = assemble(config, runtime, stream, backbone)
        _same_start(run, parts)
        parts.method.load_state(run.tensors("checkpoints", number - 1)[0])
        task = parts.stream.tasks[number]
        parts.method.learn(task)
        labels, images, top = Examination(config.method, parts.method, parts.stream).after(task)
        stored, _ = run.tensors("predictions", number)
        if not torch.equal(labels.int(), stored["labels"]) or not torch.equal(images.cpu().int(), stored["images"]):
            raise Failed("the test images here are not those of the run")
        state = run.tensors("checkpoints", number)[0] if number in run.checkpoints() else {}
        learned = {name: tensor.cpu() for name, tensor in parts.method.state().items()}
        altered = [name for name in state if name not in learned or not torch.equal(state[name], learned[name])]
        modules = module_hashes(parts.method, config.dataset)
        verdict = _verdict(
            top.int(), stored["top"], len(state), altered, _moved(run, runtime), _other_code(run, number, modules)
        )
        return f"session {number}, learned again: {verdict}"

    return checked("again", compare)


def _first_few_shot(run: StoredRun) -> int:
    """The first few-shot session, if it was done."""
    if not run.few_shot:
        raise LeftOut("the run has no few-shot task")
    if len(run.sessions) < 2:
        raise LeftOut("no few-shot session is done yet")
    return 1


def _refuse_session(run: StoredRun, session: int) -> None:
    """Refuse a --session that was not done, or whose start was not kept."""
    try:
        last = len(run.sessions) - 1
    except LeftOut:
        last = 0
    if not 1 <= session <= last:
        known = f"the few-shot sessions 1 to {last}" if last else "no few-shot session; leave --session out"
        raise UserError(f'--session {session}: "{run.folder}" has {known}')
    if session - 1 not in run.checkpoints():
        kept = ", ".join(map(str, run.checkpoints()))
        raise UserError(
            f"--session {session} starts from the checkpoint of session {session - 1}; this run kept {kept} "
            "(runtime.keep=all keeps all)"
        )


def _elsewhere(config: RunConfig, data_root: Any = None, weights: Any = None, device: str | None = None) -> RunConfig:
    data = config.data if data_root is None else replace(config.data, root=str(data_root))
    runtime = config.runtime if device is None else replace(config.runtime, device=device)
    return replace(config, data=data, runtime=runtime, weights=config.weights if weights is None else str(weights))


def _same_start(run: StoredRun, parts: Parts) -> None:
    """The data and the backbone here are those of the run."""
    if parts.stream.split_hash != read_split_hash(run.folder / "split.json"):
        raise Failed("the data here are another split than the run's")
    if json_able(parts.stream.shots) != read_shots(run.folder / "shots.json")["tasks"]:
        raise Failed("the data here give other shots than the run's")
    if (run.folder / RESULTS).is_file():
        known = run.results["environment"]["backbone"]["hash"]
    else:
        hashes = RunHashes.read(run.folder)
        known = hashes.backbone if hashes is not None else None
    if known not in (None, parts.backbone.hash):
        raise Failed("the backbone here has other weights than the run's")


def _moved(run: StoredRun, runtime: Runtime) -> list[str]:
    """Why the same bits cannot be expected here: another machine or torch, or a GPU; empty where they can."""
    if runtime.device.type != "cpu":
        return [f"on {runtime.device.type}, which need not repeat itself bit by bit"]
    now, then = environment(runtime), run.results["environment"] if (run.folder / RESULTS).is_file() else {}
    return [f"{key} {now[key]} instead of {then.get(key, 'unknown')}" for key in PLACE if now[key] != then.get(key)]


def _other_code(run: StoredRun, session: int, modules: Mapping[str, str]) -> str:
    """Which modules are not those that made the session; empty where none is, or where that is not known."""
    code = run.sessions[session].get("code")
    if code in (None, combined(modules)):
        return ""
    then = modules_of(run.results) if (run.folder / RESULTS).is_file() else {}
    if combined(then) != code:  # not told, or those of a later session of a run that was resumed
        return "other code than the session's"
    changed = sorted(name for name in modules.keys() | then.keys() if modules.get(name) != then.get(name))
    rest = f" and {len(changed) - MODULES_NAMED} more" if len(changed) > MODULES_NAMED else ""
    return f"other code than the session's in {', '.join(changed[:MODULES_NAMED])}{rest}"


def _verdict(
    top: Tensor, stored: Tensor, tensors: int, altered: Sequence[str], moved: Sequence[str], other_code: str
) -> str:
    """What to say of new and stored predictions, and of so many tensors of a checkpoint of which some are altered."""
    if torch.equal(top, stored) and not altered:
        return f"{len(top):,} predictions" + (f" and {tensors} tensors" if tensors else "") + " are bitwise the same"
    differ = int((top[:, 0] != stored[:, 0]).sum())
    said = f"{differ:,} of {len(top):,} predictions differ ({100 * differ / len(top):.2f} %)"
    if not moved:
        said += f", and so does the learned {altered[0]}" if altered else ""
        raise Failed(f"{said}; {other_code}" if other_code else f"{said}, on the same CPU and torch")
    said += f"; {', '.join([*moved, *([other_code] if other_code else [])])}"
    if differ > TOLERATED * len(top):
        raise Failed(f"{said}; rounding explains {TOLERATED:.0%} at most")
    return said
