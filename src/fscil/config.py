"""The configuration of a run: dataclasses, strict keys, checked values, and how layers are put on one another.

    dataclass defaults <- the method's registry entry <- recipe (<- its `fast:` block) <- --set a.b=c <- explicit flags

>>> config = resolve(dataset="glyphs", method="smp", settings=["options.epochs=3", "transform.scale=[0.5, 1]"])
>>> config.options["epochs"], config.transform.scale
(3, (0.5, 1.0))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import yaml

from fscil import recipes, registry
from fscil.data.settings import DataConfig
from fscil.errors import UserError, nearest
from fscil.files import FORMAT_VERSION, atomic_write, check_version

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        _require(self.size is None or self.size > 0, "size", self.size, "a positive number of pixels")
        _require(self.resize is None or self.resize > 0, "resize", self.resize, "a positive number of pixels")
        _require(0 < self.scale[0] <= self.scale[1] <= 1, "scale", self.scale, "low <= high within (0, 1]")
        _require(0 < self.ratio[0] <= self.ratio[1], "ratio", self.ratio, "positive, low <= high")
        _require(0 <= self.flip <= 1, "flip", self.flip, "a probability")


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
    keep: Literal["ends", "all"] = "ends"  # which checkpoints stay: after the base and the last task, or after each

    def __post_init__(self) -> None:
        for name in ("eval_batch", "micro_batch"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "positive")


@dataclass(frozen=True)
class EvaluationConfig:
    hacc: Literal["group", "class", "sample"] = "group"  # averaging behind the HAcc that tables show (all are stored)


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run."""

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

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")

    def to_dict(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    def fingerprint(self) -> str:
        """Identity of what is computed: two configurations with the same one give the same numbers."""
        content = {key: value for key, value in flatten(self.to_dict()).items() if _matters(key)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    items: dict[str, Any] = {}
    for key, value in values.items():
        items.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return items


def _matters(key: str) -> bool:
    """Whether a setting can change results: not where data lies, not where it is computed, not how it is shown."""
    return key.split(".")[0] not in ("recipe", "runtime", "evaluation") and key not in ("data.root", "data.download")


def _require(condition: bool, name: str, value: Any, meaning: str) -> None:
    if not condition:
        raise UserError(f"{name} must be {meaning}, got {_show(value)}")


def _plain(value: Any) -> Any:
    """Only what YAML and JSON can say: tuples become lists, enums their values, paths text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _show(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


# ---- strict construction -------------------------------------------------------------------------------------------


def build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Make the dataclass `cls` from a mapping: unknown keys and values of a wrong type are errors that name the key."""
    if not isinstance(values, Mapping):
        raise UserError(f'"{prefix.rstrip(".")}" must be a mapping of settings, got {_show(values)}')
    hints = typing.get_type_hints(cls)
    known = [item.name for item in dataclasses.fields(cls) if item.init]
    converted = {}
    for key, value in values.items():
        if key not in known:
            raise UserError(unknown_key(f"{prefix}{key}", [f"{prefix}{name}" for name in known]))
        converted[key] = _convert(value, hints[key], f"{prefix}{key}")
    try:
        return cls(**converted)
    except UserError as error:
        raise UserError(f"{prefix}{error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{prefix.rstrip('.') or cls.__name__}: {error}") from error


def unknown_key(key: str, known: Sequence[str]) -> str:
    last = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    hint = f' Did you mean "{same[0]}"?' if same else nearest(key, known)
    return f'unknown key "{key}".{hint}'


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as type `hint`, or a UserError. YAML reads 1e-3 as text, so text that is a number counts as one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments, key)
    if origin is Literal:
        if isinstance(value, bool) and {"on", "off"} <= set(arguments):  # YAML reads on and off as truth values
            value = "on" if value else "off"
        if value not in arguments or isinstance(value, bool) != any(isinstance(a, bool) for a in arguments):
            raise UserError(_not_a_choice(key, value, arguments))
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = [item.value for item in hint]
        if value not in choices and not isinstance(value, hint):
            raise UserError(_not_a_choice(key, value, choices))
        return hint(value)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, f"{key}.")
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif hint is str and isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    elif hint in (bool, type(None)) and isinstance(value, hint):
        return value
    elif hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    elif hint is dict or origin is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif origin in (tuple, list) and isinstance(value, (list, tuple)):
        if origin is list or arguments[-1] is Ellipsis:
            kinds = [arguments[0]] * len(value)
        else:
            kinds = list(arguments)
        if len(kinds) == len(value):
            return origin(_convert(item, kind, f"{key}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds)))
    raise UserError(f'"{key}" must be {_describe(hint)}, got {_show(value)}')


def _convert_union(value: Any, choices: Sequence[Any], key: str) -> Any:
    failures = []
    for choice in choices:
        try:
            return _convert(value, choice, key)
        except UserError as error:
            failures.append(error)
    useful = [f for f, choice in zip(failures, choices) if typing.get_origin(choice) is Literal]
    if useful:
        raise useful[0]
    expected = " or ".join(_describe(choice) for choice in choices)
    raise UserError(f'"{key}" must be {expected}, got {_show(value)}')


def _not_a_choice(key: str, value: Any, choices: Iterable[Any]) -> str:
    listed = ", ".join(str(choice) for choice in choices)
    return f'"{key}" must be one of {listed}; got {_show(value)}.{nearest(str(value), map(str, choices))}'


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) in (tuple, list):
        arguments = typing.get_args(hint)
        return f"a list of {'numbers' if len(arguments) < 2 or arguments[-1] is Ellipsis else len(arguments)}"
    return str(getattr(hint, "__name__", hint))


# ---- layers --------------------------------------------------------------------------------------------------------


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings on top of one another; the later wins."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def parse_setting(text: str) -> dict[str, Any]:
    """ "a.b=c" as {"a": {"b": c}}, the value read as YAML.

    >>> parse_setting("options.views=8")
    {'options': {'views': 8}}
    """
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f'--set "{text}": write it as key=value, for example --set options.epochs=5')
    try:
        parsed = yaml.safe_load(value) if value.strip() else None
    except yaml.YAMLError as error:
        raise UserError(f'--set "{text}": the value is not valid YAML ({" ".join(str(error).split())})') from error
    for part in reversed(parts):
        parsed = {part: parsed}
    return parsed


def resolve(
    method: str | None = None,
    dataset: str | None = None,
    recipe: str | None = None,
    settings: Sequence[str] = (),
    fast: bool = False,
    **flags: Any,
) -> RunConfig:
    """The complete configuration of a run. `flags` are top-level keys or nested mappings; None means not given."""
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
    merged = merge(*layers, set_layer, explicit)
    return complete(merged)


def complete(values: Mapping[str, Any]) -> RunConfig:
    """Check a nested mapping against RunConfig and the method's Options, and fill in every default."""
    options = registry.method_class(values.get("method", RunConfig.method)).Options
    known = known_keys() + known_keys(options, "options.")
    for key in flatten(values):
        if key not in known and not any(name.startswith(f"{key}.") for name in known):
            raise UserError(unknown_key(key, known))
    config = build(RunConfig, values)
    registry.dataset_entry(config.dataset)
    filled = build(options, config.options, "options.")
    return dataclasses.replace(config, options=_plain(dataclasses.asdict(filled)))


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
    method = values.get("method", RunConfig.method)
    earlier = getattr(registry.method_class(method).Options, "earlier", {})
    return merge({"options": earlier}, values)


def known_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    """All keys below a dataclass, dotted; a method's own options come on top, as options.NAME."""
    keys: list[str] = []
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            keys += known_keys(hint, f"{prefix}{item.name}.")
        elif cls is not RunConfig or item.name != "options":
            keys.append(prefix + item.name)
    return keys


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What differs between two configurations, one "key: old -> new" each; only what can change results."""
    before, after = flatten(old.to_dict()), flatten(new.to_dict())
    return [
        f"{key}: {_show(before.get(key))} -> {_show(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and _matters(key)
    ]


# ---- files ---------------------------------------------------------------------------------------------------------


def write_config(path: str | Path, config: RunConfig) -> None:
    text = yaml.safe_dump({"format_version": FORMAT_VERSION, **config.to_dict()}, sort_keys=False, allow_unicode=True)
    atomic_write(path, text)


def read_config(path: str | Path) -> RunConfig:
    """Read a run's config.yaml, as strictly as any recipe."""
    values = recipes.read_yaml(path)
    check_version(path, values.pop("format_version", None))
    try:
        return complete(as_made(values))
    except UserError as error:
        raise UserError(f'"{path}": {error}') from error
