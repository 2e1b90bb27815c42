"""What a user can choose: methods, heads, datasets, backbones. Looked up by name, imported only when used.

Another package adds its own through entry points, without touching this one:

    [project.entry-points."fscil.methods"]
    mine = "my_package:ENTRY"          # a MethodEntry
    [project.entry-points."fscil.heads"]
    nearest = "my_package:NEAREST"     # a HeadEntry
    [project.entry-points."fscil.datasets"]
    birds = "my_package:BIRDS"         # a DatasetEntry
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fscil.errors import UserError, nearest

if TYPE_CHECKING:
    from fscil.heads.base import Head
    from fscil.methods.base import Method


@dataclass(frozen=True)
class MethodEntry:
    """A method under a name: the class that does it, and the options that make it this variant of the class.

    >>> MethodEntry("fscil.methods.smp.method:SMP", "Small SMP", "SMP of rank 2", {"rank": 2}, family="smp").options
    {'rank': 2}
    """

    target: str  # "module:Class"
    title: str  # as in the paper's tables
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)  # over the defaults of Class.Options
    family: str | None = None  # the method whose recipe applies when this one has none of its own


@dataclass(frozen=True)
class HeadEntry:
    """A head under a name: what turns fixed features into a classifier.

    >>> HeadEntry("my_package.euclidean:Euclidean", "Euclidean", "nearest class mean; costs nothing").title
    'Euclidean'
    """

    target: str  # "module:Class"
    title: str  # as in tables
    summary: str  # what it is, what it costs, what it is good for: one sentence
    options: Mapping[str, Any] = field(default_factory=dict)  # over the defaults of Class.Options


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset under a name.

    >>> DatasetEntry("Leaves", "60 + 8 x 5", "deit_tiny_patch16_224.fb_in1k", "my_package.data:leaves").title
    'Leaves'
    """

    title: str
    summary: str
    backbone: str  # what a run uses when none is named
    target: str  # "module:function" from DataConfig to Dataset


@dataclass(frozen=True)
class BackboneEntry:
    """A backbone that is known to work; any other plain timm ViT can be named as "arch.tag"."""

    summary: str


ENTRY_KINDS = {"fscil.methods": MethodEntry, "fscil.heads": HeadEntry, "fscil.datasets": DatasetEntry}

SHIPPED_BACKBONES = ("glyph_vit_a", "glyph_vit_b")  # with the package, weights included
PAPER_BACKBONE = "vit_base_patch16_224.augreg_in21k_ft_in1k"
CPU_BACKBONE = "deit_tiny_patch16_224.fb_in1k"  # a fifteenth of its arithmetic

_SMP = "fscil.methods.smp.method:SMP"
# One LoRA set, cosine head whose scale is learned from 1, no margin, prototypes (methods: baseline of the ablations).
_BASELINE = {
    "adapters": "one",
    "margin": 0.0,
    "scale": 1.0,
    "learnable_scale": True,
    "calibration": "prototypes",
    "calibration_margin": 0.2,
}
_SINGLE = {"adapters": "one", "calibration": "prototypes"}


def _comparator(
    file: str, cls: str, title: str, summary: str, family: str | None = None, **options: Any
) -> MethodEntry:
    return MethodEntry(f"fscil.methods.{file}:{cls}", title, summary, options, family)


METHODS: dict[str, MethodEntry] = {
    "smp": MethodEntry(_SMP, "SMP", "two adapter sets merged by Fisher weights, margin-penalty calibration"),
    "baseline": MethodEntry(_SMP, "Baseline", "one adapter set, learnable scale, prototypes", _BASELINE),
    "single_m0": MethodEntry(
        _SMP, "Single, m = 0", "one adapter set without margin, prototypes", {**_SINGLE, "margin": 0.0}, "smp"
    ),
    "single_m02": MethodEntry(
        _SMP, "Single, m = 0.2", "one adapter set with margin, prototypes", {**_SINGLE, "margin": 0.2}, "smp"
    ),
    "miam": MethodEntry(_SMP, "+MIAM", "merged adapters, prototypes", {"calibration": "prototypes"}, "smp"),
    "mpcc": MethodEntry(
        _SMP, "+MPCC", "the baseline's adapters, margin calibration", {**_BASELINE, "calibration": "mpcc"}, "smp"
    ),
    "smp_no_margin": MethodEntry(
        _SMP, "SMP, calibration m = 0", "SMP whose calibration has no margin", {"calibration_margin": 0.0}, "smp"
    ),
    "smp_average": MethodEntry(
        _SMP, "SMP, plain average", "SMP with plain averaging of the adapters", {"merge": "average"}, "smp"
    ),
    "closed_form": MethodEntry(
        _SMP, "MIAM + closed form", "merged adapters, training-free calibration", {"calibration": "closed_form"}, "smp"
    ),
    "chord": MethodEntry(
        "fscil.methods.chord:Chord",
        "CHORD",
        "adapter sets of opposite margins and the frozen features side by side, one corrected discriminant",
    ),
    "frozen": MethodEntry("fscil.methods.frozen:Frozen", "Frozen", "the backbone as it is, with a head of choice"),
    "simplecil": MethodEntry("fscil.methods.frozen:Frozen", "SimpleCIL", "frozen features, prototypes"),
    "aper": MethodEntry(
        "fscil.methods.aper:APER", "APER", "frozen and adapted features side by side, prototypes", family="baseline"
    ),
    "icarl": _comparator("icarl", "ICaRL", "iCaRL", "full fine-tuning, stored exemplars, distillation, nearest mean"),
    "icarl_linear": _comparator(
        "icarl", "ICaRL", "iCaRL, linear head", "iCaRL, its linear head scores", "icarl", classifier="linear"
    ),
    "foster": _comparator("foster", "FOSTER", "FOSTER", "boosting with a second backbone, then compression; exemplars"),
    "foster_student": _comparator(
        "foster", "FOSTER", "FOSTER, student", "FOSTER, its compressed model scores", "foster", evaluated="student"
    ),
    "cec": _comparator("cec", "CEC", "CEC", "graph-attention classifier trained on pseudo-incremental episodes"),
    "fact": _comparator("fact", "FACT", "FACT", "virtual prototypes and manifold mixup reserve room for new classes"),
    "teen": _comparator("teen", "TEEN", "TEEN", "new prototypes pulled towards similar base prototypes"),
    "l2p": _comparator("l2p", "L2P", "L2P", "a pool of input prompts chosen by key lookup"),
    "dualprompt": _comparator("dualprompt", "DualPrompt", "DualP", "general and expert prefix prompts"),
    "coda": _comparator("coda", "CodaPrompt", "CodaP", "prefix prompts as weighted sums of components"),
    "l2p_plus": _comparator("l2p", "L2P", "L2P+", "L2P with prototypes as classifier", prototypes=True),
    "dualp_plus": _comparator(
        "dualprompt", "DualPrompt", "DualP+", "DualPrompt with prototypes as classifier", prototypes=True
    ),
    "codap_plus": _comparator(
        "coda", "CodaPrompt", "CodaP+", "CODA-Prompt with prototypes as classifier", prototypes=True
    ),
    "clom": _comparator("clom", "CLOM", "CLOM", "negative margin on the embedding, positive on a mapped one"),
    "asp": _comparator("asp", "ASP", "ASP", "attention-aware self-adaptive prompts"),
    "adbs": _comparator("adbs", "ADBS", "ADBS", "adaptive decision boundaries: one learned scale per class"),
}

HEADS: dict[str, HeadEntry] = {
    "prototypes": HeadEntry(
        "fscil.heads.prototypes:Prototypes",
        "prototypes",
        "class means compared by cosine; costs nothing, the safe choice when classes have one or two images each",
    ),
    "mpcc": HeadEntry(
        "fscil.heads.mpcc:MPCC",
        "MPCC",
        "SMP's: prototypes trained under a margin on real and Gaussian features; seconds per task, keeps base accuracy",
    ),
    "closed_form": HeadEntry(
        "fscil.heads.closed_form:ClosedForm",
        "closed form",
        "shrunken linear discriminant with a correction for few images; no training, exact adding and forgetting",
    ),
    "plda": HeadEntry(
        "fscil.heads.plda:PLDA",
        "PLDA",
        "Gaussian class means with their posterior integrated out; no training, nothing to set for few images",
    ),
    "fecam": HeadEntry(
        "fscil.heads.fecam:FeCAM",
        "FeCAM",
        "a covariance for every class; no training, d² numbers per class, wants many images of each",
    ),
    "c_fecam": HeadEntry(
        "fscil.heads.c_fecam:CFeCAM",
        "C-FeCAM",
        "FeCAM whose new classes borrow from similar base classes; made for five shots",
    ),
    "ranpac": HeadEntry(
        "fscil.heads.ranpac:RanPAC",
        "RanPAC",
        "ridge regression on 10,000 random features, as released: strong with equal classes, not with five shots",
    ),
    "ranpac_balanced": HeadEntry(
        "fscil.heads.ranpac:RanPAC",
        "RanPAC, balanced",
        "RanPAC with every class weighing the same; 10,000 x 10,000 to solve for in each task",
        {"form": "balanced"},
    ),
    "c_ranpac": HeadEntry(
        "fscil.heads.c_ranpac:CRanPAC",
        "C-RanPAC",
        "RanPAC on 800 draws of each new class, calibrated by base classes; slow, its authors' best",
    ),
    "klda": HeadEntry(
        "fscil.heads.klda:KLDA",
        "KLDA",
        "an ensemble of discriminants on 5,000 random Fourier features, not shrunk; slow, wants many images",
    ),
    "slca": HeadEntry(
        "fscil.heads.slca:SLCA",
        "SLCA++ alignment",
        "a linear classifier trained on Gaussian draws of all classes; MPCC's ancestor, seconds per task",
    ),
}


def _dataset(file: str, title: str, summary: str, backbone: str = PAPER_BACKBONE) -> DatasetEntry:
    return DatasetEntry(title, summary, backbone, f"fscil.data.datasets.{file}:{file}")


DATASETS: dict[str, DatasetEntry] = {
    "glyphs": _dataset(
        "glyphs", "Glyphs", "built-in: 100 characters drawn by the package, 60 + 8 x 5", backbone="glyph_vit_a"
    ),
    "cifar100": _dataset("cifar100", "CIFAR100", "60 + 8 x (5-way 5-shot)"),
    "imagenet_r": _dataset("imagenet_r", "ImageNet-R", "100 + 10 x (10-way 5-shot)"),
    "cub200": _dataset("cub200", "CUB200", "100 + 10 x (10-way 5-shot)"),
    "mini_imagenet": _dataset("mini_imagenet", "miniImageNet", "60 + 8 x (5-way 5-shot)"),
    "tiny_imagenet": _dataset("tiny_imagenet", "Tiny ImageNet", "100 + 10 x (10-way 5-shot)"),
    "folder": _dataset("folder", "Folder", "your own: a directory of class folders, or a CSV of path,label"),
}

# Datasets by "family:name"; the target is a function of DataConfig and that name.
FAMILIES: dict[str, DatasetEntry] = {
    "torchvision": DatasetEntry(
        "torchvision",
        "torchvision:Flowers102 and any other of its classification datasets with train and test images",
        PAPER_BACKBONE,
        "fscil.data.datasets.from_torchvision:from_torchvision",
    ),
    "hf": DatasetEntry(
        "Hugging Face",
        "hf:ORG/NAME, hf:ORG/NAME:SUBSET or hf:./FOLDER: a table of images and labels (fscil[hf])",
        PAPER_BACKBONE,
        "fscil.data.datasets.from_hub:from_hub",
    ),
}

BACKBONES: dict[str, BackboneEntry] = {
    "glyph_vit_a": BackboneEntry("small ViT that ships with the package, pretrained on other glyphs"),
    "glyph_vit_b": BackboneEntry("a second small ViT, pretrained differently"),
    PAPER_BACKBONE: BackboneEntry("ViT-B/16, ImageNet-21k then 1k: the paper's backbone"),
    "vit_base_patch16_224.augreg_in21k": BackboneEntry("ViT-B/16, ImageNet-21k: the paper's second backbone"),
    CPU_BACKBONE: BackboneEntry("DeiT-Tiny, ImageNet-1k: practical on a CPU"),
    "vit_small_patch14_dinov2.lvd142m": BackboneEntry("DINOv2 ViT-S/14, self-supervised"),
    "vit_base_patch16_clip_224.openai": BackboneEntry("CLIP ViT-B/16 image tower"),
}


@functools.cache
def _third_party(group: str) -> dict[str, Any]:
    return {point.name: _offered(point) for point in metadata.entry_points(group=group)}


def _offered(point: metadata.EntryPoint) -> Any:
    """The entry that another package offers; the package is named where that is none."""
    kind = ENTRY_KINDS[point.group]
    try:
        entry = point.load()
    except Exception as error:  # importing a package runs its code, which raises what it likes
        wrong = f"cannot be loaded ({type(error).__name__}: {error})"
    else:
        if isinstance(entry, kind):
            return entry
        wrong = f"is a {type(entry).__name__}, not a {kind.__name__}"
    package = point.dist.name if point.dist else point.module
    raise UserError(f'"{point.name}" ({point.value}) of {point.group} {wrong}; repair or uninstall "{package}"')


def methods() -> dict[str, MethodEntry]:
    """All methods that can be run here, those of other packages included.

    >>> methods()["mpcc"].title
    '+MPCC'
    """
    present = {name: entry for name, entry in METHODS.items() if _exists(entry.target)}
    return {**present, **_third_party("fscil.methods")}


def heads() -> dict[str, HeadEntry]:
    """All heads by name, those of other packages included.

    >>> heads()["mpcc"].title
    'MPCC'
    """
    return {**HEADS, **_third_party("fscil.heads")}


def datasets() -> dict[str, DatasetEntry]:
    """All datasets by name, those of other packages included.

    >>> datasets()["glyphs"].backbone
    'glyph_vit_a'
    """
    return {**DATASETS, **_third_party("fscil.datasets")}


def backbones() -> dict[str, BackboneEntry]:
    """Backbones known to work by name; any other plain ViT of timm can be named as "arch.tag".

    >>> "glyph_vit_a" in backbones()
    True
    """
    return dict(BACKBONES)


@functools.cache
def _exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


def method_entry(name: str) -> MethodEntry:
    return _lookup("method", name, methods())


def head_entry(name: str) -> HeadEntry:
    return _lookup("head", name, heads())


def dataset_entry(name: str) -> DatasetEntry:
    """A dataset by name; of a family ("hf:ORG/NAME"), the family's with the name as title."""
    family, _, member = name.partition(":") if isinstance(name, str) else ("", "", "")
    if member and family in FAMILIES:
        return replace(FAMILIES[family], title=member)
    return _lookup("dataset", name, {**datasets(), **{f"{family}:NAME": entry for family, entry in FAMILIES.items()}})


def _lookup(kind: str, name: str, entries: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in entries:
        hint = _of_another_kind(kind, str(name)) or nearest(name, entries)
        raise UserError(f'unknown {kind} "{name}".{hint} See: fscil list {kind}s')
    return entries[name]


def _of_another_kind(kind: str, name: str) -> str:
    """What to say of a name that is none of this kind, but of another, or a folder."""
    if kind == "dataset" and os.path.isdir(name):
        return f" For pictures of your own: --dataset folder --data-root {shlex.quote(name)}."
    others: dict[str, Callable[[], Mapping[str, Any]]] = {"method": methods, "head": heads, "dataset": datasets}
    found = [other for other, names in others.items() if other != kind and name in names()]
    return f" It is a {found[0]}: --{found[0]} {name}." if found else ""


def load_target(target: str) -> Any:
    """Import "module:name"."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f'"{target}" cannot be loaded ({error}); repair or reinstall its package') from error


def method_class(name: str) -> type[Method]:
    """The class of a method, imported (this is where torch comes in)."""
    cls: type[Method] = load_target(method_entry(name).target)
    return cls


def head_class(name: str) -> type[Head]:
    """The class of a head, imported."""
    cls: type[Head] = load_target(head_entry(name).target)
    return cls
