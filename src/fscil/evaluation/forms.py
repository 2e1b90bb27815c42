"""The forms of a run's JSON files, declared: what is read from a run folder has them, or is refused by name and key."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from fscil.files import read_json
from fscil.reading import decode, parse_json
from fscil.strict import Between, Count, conform

Percent = Annotated[float, Between(0, 100)] | None  # None where there is nothing to count
Seconds = Annotated[float, Between(0, 1e12)] | None
Averaged = TypedDict("Averaged", {"group": Percent, "class": Percent, "sample": Percent})  # by way of averaging


class _SessionKeys(TypedDict):
    session: Count
    seen: Annotated[int, Between(1, 10**7)]
    accuracy: Annotated[float, Between(0, 100)]
    base: Averaged
    new: Averaged
    hacc: Averaged
    per_class: list[Percent]
    per_task: list[Percent]


class StoredSession(_SessionKeys, total=False):
    """A line of metrics.jsonl."""

    images: Count
    top5: Percent
    base_accuracy: Percent
    new_accuracy: Percent
    fnr: Percent
    fpr: Percent
    seconds: Seconds
    learning_seconds: Seconds
    evaluation_seconds: Seconds
    parts_from_shelf: Count
    peak_memory: Count | None
    peak_gpu_memory: Count | None
    trainable_parameters: Count | None
    stored_images: Count | None
    stored_bytes: Count | None
    diagnostics: dict[str, Any]


class StoredData(TypedDict, total=False):
    base: Count | None
    way: Count | None
    shots: Count | None
    limit: Count | None


class StoredEvaluation(TypedDict, total=False):
    hacc: Literal["group", "class", "sample"]


class StoredHead(TypedDict):
    name: str


class _ConfigKeys(TypedDict):
    method: str
    dataset: str
    seed: Count


class StoredConfig(_ConfigKeys, total=False):
    """What of a stored configuration is read without building it; `config.complete` looks at all of it."""

    backbone: str
    recipe: str | None
    data: StoredData
    transform: dict[str, Any]
    runtime: dict[str, Any]
    evaluation: StoredEvaluation
    options: dict[str, Any]
    head: StoredHead


class _SummaryKeys(TypedDict):
    accuracies: list[Annotated[float, Between(0, 100)]]
    A_avg: Annotated[float, Between(0, 100)]
    A_final: Annotated[float, Between(0, 100)]
    PD: Annotated[float, Between(-100, 100)]
    forgetting: Annotated[float, Between(-100, 100)] | None
    accuracy_matrix: list[list[Percent]]
    base: Averaged
    new: Averaged
    hacc: Averaged


class StoredSummary(_SummaryKeys, total=False):
    A_0: Annotated[float, Between(0, 100)]
    top5: Percent
    base_accuracy: Percent
    new_accuracy: Percent
    fnr: Percent
    fpr: Percent


class _StreamKeys(TypedDict):
    split_hash: str
    base_classes: Count
    way: Annotated[int, Between(1, 10**7)]
    class_names: list[str]


class StoredStream(_StreamKeys, total=False):
    usual: dict[str, Any]


class StoredResults(TypedDict):
    """results.json."""

    config: StoredConfig
    environment: dict[str, Any]
    stream: StoredStream
    sessions: list[StoredSession]
    summary: StoredSummary
    confusion: list[list[int]]


class Configured(TypedDict):
    """What of results.json says which run it is."""

    config: dict[str, Any]


class ListedFile(TypedDict):
    sha256: str
    bytes: Count


class _StoredHashes(TypedDict):
    sha256: str
    files: dict[str, ListedFile]
    progress: list[str]


class StoredHashes(_StoredHashes, total=False):
    """hashes.json."""

    backbone: str


class StoredSplit(TypedDict):
    """split.json: of a manifest or of a stream that was handed over."""

    split_hash: str


def read_split_hash(path: Path) -> str:
    """The hash that names the split of a run, from its split.json."""
    return str(conform(read_json(path), StoredSplit, path)["split_hash"])


def parse_sessions(lines: Iterable[bytes | str], path: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, each checked."""
    texts = (decode(line, path) if isinstance(line, bytes) else line for line in lines)
    return [
        conform(parse_json(text, f"{path}, line {number}"), StoredSession, f"{path}, line {number}")
        for number, text in enumerate(texts, start=1)
    ]
