"""The form of model.json, declared: what is read from a model folder has it, or is refused by name and key."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from fscil.strict import Between, Count

Share = Annotated[float, Between(0, 1)] | None
Side = Annotated[int, Between(1, 8192)]  # pixels
Seed = Annotated[int, Between(0, 2**32 - 1)]


class _BackboneKeys(TypedDict):
    name: str
    hash: str
    image_size: Side
    weights: str | None  # a file of this machine
    embedded: bool


class StoredBackbone(_BackboneKeys, total=False):
    weights_sha256: str | None  # of that file; not in models of version 0.1


Level = Annotated[float, Between(-1e6, 1e6)]  # of pixels: (pixel - level) / spread stays a number in float32
Spread = Annotated[float, Between(1e-6, 1e6)]


class StoredTransform(TypedDict):
    """What of a Transform could do harm; the rest is checked when it is built."""

    size: Side
    resize: Side
    mean: list[Level]
    std: list[Spread]


class StoredParameters(TypedDict):
    held_out: Annotated[float, Between(0, 1)]
    false_rejection: Annotated[float, Between(0, 1)]
    unknown: str | None
    skip_bad: bool
    thumbnails: Count


class _ConfigKeys(TypedDict):
    method: str
    options: dict[str, Any]  # built by the method's own Options
    backbone: StoredBackbone
    transform: StoredTransform
    trained: bool
    seed: Seed
    parameters: StoredParameters


class StoredConfig(_ConfigKeys, total=False):
    head: dict[str, Any]


class _EventKeys(TypedDict):
    action: str
    when: str
    classes: dict[str, Count]
    known: Count


class StoredEvent(_EventKeys, total=False):
    held_out_accuracy: Share
    held_out_rejection: Share
    taught_rejection: Share


class StoredClass(TypedDict):
    name: str | int
    pictures: Count
    base: bool
    since: str


class StoredCalibration(TypedDict):
    temperature: Annotated[float, Between(1e-9, 1e9)]
    threshold: float | None
    score: str
    false_rejection: Annotated[float, Between(0, 1)]
    held_out: Count
    held_out_accuracy: Share
    held_out_rejection: Share
    taught_rejection: Share


class StoredRecord(TypedDict):
    event: StoredEvent
    classes: list[StoredClass]
    calibration: StoredCalibration
    stored_pictures: Count


class StoredVersion(TypedDict):
    record: StoredRecord
    tensors: dict[str, str]  # tensor -> file


class StoredFile(TypedDict):
    sha256: str
    bytes: Count


class StoredModel(TypedDict):
    """model.json, less the format version and its own hash."""

    config: StoredConfig
    versions: list[StoredVersion]
    files: dict[str, StoredFile]
    revision: str
