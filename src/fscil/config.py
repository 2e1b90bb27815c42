"""The configuration of a run: what can be chosen, and how layers of choices are put on one another.

    dataclass defaults <- the method's registry entry <- recipe (<- its `fast:` block) <- --set a.b=c <- explicit flags

>>> config = resolve(dataset="glyphs", method="smp", settings=["options.epochs=3", "transform.scale=[0.5, 1]"])
>>> config.options["epochs"], config.transform.scale
(3, (0.5, 1.0))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from fscil import recipes, registry
from fscil.errors import UserError, nearest
from fscil.files import FORMAT_VERSION, atomic_write, check_version
from fscil.reading import read_yaml
from fscil.strict import build, flatten, merge, parse_setting, plain, require, show, types_of, unknown_key

CLASS_ORDERS = ("natural", "seed", "file")
SAMPLERS = ("seeded", "index_files")


@dataclass
class DataConfig:
    """The data part of a run's configuration. `None` means the dataset's own default."""

    root: str | None = None  # folder of the dataset (for `folder` also a CSV file); None: the download cache
    split: str | None = None  # which train/test split: `official`, `80-20`, `pack`, … (docs/datasets.md)
    split_file: str | None = None  # a split manifest (.json), or CODA-Prompt's ImageNet-R lists (.yaml)
    base: int | None = None  # classes of the base task
    way: int | None = None  # new classes per task
    tasks: int | None = None  # few-shot tasks; None: until the classes are used up
    shots: int | None = None  # images per new class
    class_order: str = "natural"  # natural | seed | file
    order_seed: int = 1993  # of class_order `seed`: numpy's RandomState(order_seed).permutation
    order_file: str | None = None  # of class_order `file`: one class name (or number in natural order) per line
    sampler: str = "seeded"  # seeded | index_files
    index_files: str | None = None  # folder with session_1.txt, session_2.txt, …
    shots_file: str | None = None  # JSON ledger of a former run (shots.json): exactly these shots
    store: str = "256"  # full, or the short side images are reduced to once, aspect ratio kept
    skip_bad: bool = False  # leave unreadable images out instead of stopping
    image_column: str | None = None  # of a table of images (hf:…); None: the one that holds images
    label_column: str | None = None  # of a table of images (hf:…); None: the one that holds class labels
    test_fraction: float = 0.2  # of the stratified split
    validation: bool = False  # a stream cut from the base task alone, to choose settings on; test images stay unseen
    validation_base: int | None = None  # base classes that stay base classes there; None: two thirds of them
    validation_draw: int = 0  # which ones: 0 the first of the class order, otherwise the seed of another choice
    limit: int | None = None  # smoke runs: at most so many images per base class, and test images per class
    download: bool | None = None  # None: only into the cache, when no root is given; True: into root as well

    def __post_init__(self) -> None:
        for name, choices in (("class_order", CLASS_ORDERS), ("sampler", SAMPLERS)):
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f'{name} "{value}" is not one of {", ".join(choices)}.{nearest(value, choices)}')
        for name, key, reader in (("order_file", "class_order", "file"), ("index_files", "sampler", "index_files")):
            file = getattr(self, name)
            if file and getattr(self, key) != reader:
                raise UserError(f'{name} "{file}" is read with data.{key}={reader} alone; set that as well.')
        for name, least in (("base", 1), ("way", 1), ("tasks", 0), ("shots", 1), ("limit", 1), ("validation_base", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}.")
        if not 0 < self.test_fraction < 1:
            raise UserError(f"test_fraction is {self.test_fraction}; it must lie between 0 and 1.")
        self.store = str(self.store)
        if self.store != "full" and not (self.store.isdecimal() and int(self.store) > 0):
            raise UserError(f'store "{self.store}" is neither "full" nor a number of pixels such as 256.')

    @property
    def short_side(self) -> int | None:
        """Pixels the shorter side of a stored image is reduced to; None keeps images whole."""
        return None if self.store == "full" else int(self.store)


@dataclass(frozen=True)
class TransformConfig:
    """Augmentation in training (random crop, flip) and the plain transform in testing (resize, centre crop)."""

    size: int | None = None  # pixels the network sees; None: the backbone's own
    scale: tuple[float, float] = (0.05, 1.0)  # area of the random crop, as a share of the image
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # aspect ratio of the random crop
    flip: float = 0.5  # probability of a horizontal flip
    resize: int | None = None  # short side before the centre crop; None: size x 256/224
    normalize: Literal["auto", "none", "half", "imagenet"] = "auto"  # auto: what suits the backbone

    def __post_init__(self) -> None:
        require(self.size is None or self.size > 0, "size", self.size, "a positive number of pixels")
        require(self.resize is None or self.resize > 0, "resize", self.resize, "a positive number of pixels")
        require(0 < self.scale[0] <= self.scale[1] <= 1, "scale", self.scale, "low <= high within (0, 1]")
        require(0 < self.ratio[0] <= self.ratio[1], "ratio", self.ratio, "positive, low <= high")
        require(0 <= self.flip <= 1, "flip", self.flip, "a probability")


@dataclass(frozen=True)
class RuntimeConfig:
    """Where and how a run computes. Nothing here is meant to change results beyond rounding."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"  # auto: bf16 on GPUs that have it, else fp32
    compile: Literal["auto", "on", "off"] = "auto"
    eval_batch: int | None = None  # images per forward pass outside training; None: chosen for the device
    micro_batch: int | None = None  # split every training batch into pieces of this size, for small GPUs
    checkpointing: bool = False  # recompute activations in the backward pass: slower, far less memory
    processes: int = 1  # how many processes took part (recorded; set by `accelerate launch`)
    tensorboard: bool = False  # write loss and metrics for TensorBoard into the run folder
    trackers: str = ""  # others that get them, with commas: wandb, mlflow
    keep: Literal["ends", "all"] = "ends"  # which checkpoints stay: after the base and the last task, or after each

    def __post_init__(self) -> None:
        for name in ("eval_batch", "micro_batch"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "positive")


@dataclass(frozen=True)
class EvaluationConfig:
    hacc: Literal["group", "class", "sample"] = "group"  # averaging behind the HAcc that tables show (all are stored)


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run. `resolve` makes a complete one.

    >>> config = RunConfig(seed=7, options={"rank": 4})
    >>> config.method, config.fingerprint() == RunConfig(seed=8, options={"rank": 4}).fingerprint()
    ('smp', False)
    """

    method: str = "smp"
    dataset: str = "glyphs"
    backbone: str = "glyph_vit_a"
    weights: str | None = None  # a local safetensors file instead of the backbone's published weights
    seed: int = 2023
    recipe: str | None = None  # where the settings came from; "+fast" when reduced
    data: DataConfig = field(default_factory=DataConfig)
    transform: TransformConfig = field(default_factory=TransformConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    options: dict[str, Any] = field(default_factory=dict)  # of the method, complete
    head: dict[str, Any] = field(default_factory=dict)  # name and options of another head; empty: the method's own

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")

    def to_dict(self) -> dict[str, Any]:
        values = plain(dataclasses.asdict(self))
        # written down only where they are chosen, so that older runs are the same run
        if not self.head:
            del values["head"]
        for key in ("image_column", "label_column", "validation_base", "validation_draw"):
            if not values["data"][key]:
                del values["data"][key]
        return values

    def fingerprint(self) -> str:
        """Identity of what is computed: two configurations with the same one give the same numbers."""
        content = {key: value for key, value in flatten(self.to_dict()).items() if _matters(key)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def fingerprints(self) -> tuple[str, ...]:
        """Those under which the same run may be kept: its own, and that from before some of its options were there."""
        earlier = plain(earlier_options(self.method))
        known = {key: value for key, value in self.options.items() if key not in earlier or value != earlier[key]}
        return tuple({self.fingerprint(), dataclasses.replace(self, options=known).fingerprint()})


def _matters(key: str) -> bool:
    """Whether a setting can change results: not where data lies, not where it is computed, not how it is shown."""
    return key.split(".")[0] not in ("recipe", "runtime", "evaluation") and key not in ("data.root", "data.download")


# ---- layers --------------------------------------------------------------------------------------------------------


def resolve(
    method: str | None = None,
    dataset: str | None = None,
    recipe: str | None = None,
    settings: Sequence[str] = (),
    fast: bool = False,
    **flags: Any,
) -> RunConfig:
    """The complete configuration of a run. `flags` are top-level keys or nested mappings; None means not given.

    >>> config = resolve("smp", "glyphs", settings=["options.rank=4"], data={"limit": 5})
    >>> config.backbone, config.options["rank"], config.data.limit
    ('glyph_vit_a', 4, 5)
    """
    explicit = {
        key: value for key, value in {"method": method, "dataset": dataset, **flags}.items() if value is not None
    }
    set_layer = merge(*(parse_setting(text) for text in settings))
    chosen = recipes.load(recipe) if recipe else None
    named = merge({"method": "smp", "dataset": "glyphs"}, chosen.values if chosen else {}, set_layer, explicit)
    entry, dataset_entry = registry.method_entry(named["method"]), registry.dataset_entry(named["dataset"])
    if chosen is None:
        chosen = recipes.find(named["dataset"], named["method"], entry.family)
    layers: list[Mapping[str, Any]] = [{"backbone": dataset_entry.backbone}]
    if chosen is None:
        layers.append({"options": entry.options})
    else:
        # A recipe written for this very method may override the entry; one written for a relative may not.
        own = chosen.values.get("method") == named["method"]
        written = [chosen.values, chosen.fast] if fast else [chosen.values]
        layers += [{"options": entry.options}, *written] if own else [*written, {"options": entry.options}]
        layers.append({"recipe": chosen.name + ("+fast" if fast and chosen.fast else "")})
    config = complete(merge(*layers, set_layer, explicit))
    if config.data.shots_file and config.data.sampler == "index_files":  # of a stored run the ledger counted
        raise UserError(
            f'--shots-file (data.shots_file) "{config.data.shots_file}" and data.sampler=index_files each say which '
            "images are learned from; leave --shots-file out, or --set data.sampler=seeded"
        )
    return config


def refuse_tasks_of_validation(config: RunConfig, *given: Mapping[str, Any]) -> None:
    """Refuse `data.tasks` that somebody gives for a validation stream, which lasts until its classes are used up."""
    tasks = flatten(merge(*given)).get("data.tasks")
    if config.data.validation and tasks is not None:
        raise UserError(
            f"data.tasks={tasks} has no effect on a validation stream, which lasts until the base classes are used up; "
            "leave it out, or cut the stream by data.validation_base and data.way"
        )


def complete(values: Mapping[str, Any]) -> RunConfig:
    """Check a nested mapping against RunConfig and the method's Options, and fill in every default."""
    options = registry.method_class(values.get("method", RunConfig.method)).Options
    known = known_keys() + known_keys(options, "options.")
    head = values.get("head") or {}
    if not isinstance(head, Mapping):
        raise UserError(f'"head" must be a mapping of settings, got {show(head)}')
    head = dict(head)
    if head:
        if "name" not in head:
            raise UserError(f"head.{next(iter(head))} is set, but no head is chosen; add --head NAME (head.name)")
        head_options = registry.head_class(head["name"]).Options
        known += ["head.name", *known_keys(head_options, "head.")]
    for key in flatten(values):
        if key not in known and not any(name.startswith(f"{key}.") for name in known):
            raise UserError(unknown_key(key, known))
    config = build(RunConfig, values)
    registry.dataset_entry(config.dataset)
    filled = plain(dataclasses.asdict(build(options, config.options, "options.")))
    if head:
        chosen = {**registry.head_entry(name := head.pop("name")).options, **head}
        head = {"name": name, **plain(dataclasses.asdict(build(head_options, chosen, "head.")))}
    return dataclasses.replace(config, options=filled, head=head)


def with_later_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """An older run's configuration with the settings that came after it, so that it equals that of a later run which
    does the same; as it is where this version does not know the method or a setting."""
    try:
        return complete(as_made(values)).to_dict()
    except UserError:
        return dict(values)


def as_made(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration with options that were not there yet at what the method did then.

    That is the default of an option, unless the method's Options name it under `earlier`.
    """
    return merge({"options": earlier_options(values.get("method", RunConfig.method))}, values)


def earlier_options(method: str) -> dict[str, Any]:
    """Options of a method that came after version 0.1.0, and what it did before."""
    return getattr(registry.method_class(method).Options, "earlier", {})


def known_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    """All keys below a dataclass, dotted; a method's own options come on top, as options.NAME."""
    keys: list[str] = []
    hints = types_of(cls)
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += known_keys(hint, f"{prefix}{item.name}.")
        elif cls is not RunConfig or item.name not in ("options", "head"):
            keys.append(prefix + item.name)
    return keys


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What differs between two configurations, one "key: old -> new" each; only what can change results."""
    before, after = flatten(old.to_dict()), flatten(new.to_dict())
    return [
        f"{key}: {show(before.get(key))} -> {show(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and _matters(key)
    ]


# ---- files ---------------------------------------------------------------------------------------------------------


def write_config(path: str | Path, config: RunConfig) -> None:
    text = yaml.safe_dump({"format_version": FORMAT_VERSION, **config.to_dict()}, sort_keys=False, allow_unicode=True)
    atomic_write(path, text)


def read_config(path: str | Path) -> RunConfig:
    """Read a run's config.yaml, as strictly as any recipe."""
    values = read_yaml(path)
    check_version(path, values.pop("format_version", None))
    try:
        return complete(as_made(values))
    except UserError as error:
        raise UserError(f'"{path}": {error}') from error
