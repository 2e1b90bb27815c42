"""What exports share: the folded ViT and the classifier as plain tensors, and the files beside them.

Exports hold the model as SMP leaves it: a plain ViT whose key and value projections carry the merged adapters, and a
classifier on its features. Folded into the projections, the adapters cost nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from fscil.errors import UserError
from fscil.files import atomic_write, write_json
from fscil.maths.discriminant import discriminant
from fscil.methods.smp.method import SMP
from fscil.teachable.model import Teachable


def folded_weights(clf: Teachable) -> dict[str, Tensor]:
    """The ViT's weights in float32 with ΔW = B A added to the key and value rows of every qkv."""
    method, width = smp_of(clf), clf.backbone_.heads * clf.backbone_.head_dim
    tensors = {
        name: value.detach().float().cpu().clone()
        for name, value in clf.backbone_.in_float32().vit.state_dict().items()
    }
    if method.lora.rank:
        update = method.lora.dense()[:, 0].detach().float().cpu()  # (blocks, 2, d, d)
        for block, delta in enumerate(update):
            tensors[f"blocks.{block}.attn.qkv.weight"][width:] += delta.flatten(0, 1)
    return tensors


def classifier(method: SMP) -> tuple[Tensor, Tensor]:
    """Weights and biases, in float64, of the logits on features (closed form) or on their directions (cosine)."""
    o = method.options
    if o.calibration == "closed_form":
        pooled, means = method.pooled.double().cpu(), method.prototypes.double().cpu()
        return discriminant(means, method.class_counts.cpu(), pooled, o.shrinkage, o.correction)
    rows = o.calibration_scale * F.normalize(method.rows.double().cpu(), dim=1)
    return rows, rows.new_zeros(len(rows))


def linear_head(clf: Teachable) -> tuple[Tensor, Tensor]:
    """The classifier as a linear layer on raw features, temperature included."""
    weight, bias = classifier(smp_of(clf))
    temperature = clf.calibration_["temperature"]
    return (weight / temperature).float(), (bias / temperature).float()


def smp_of(clf: Teachable) -> SMP:
    """The method of a fitted model, if it can be exported."""
    clf.check_fitted()
    if not isinstance(clf.knowledge_.method, SMP):
        raise UserError(
            f"method {clf.config_['method']} cannot be exported: only smp and its relatives are a plain ViT with a "
            "classifier on top."
        )
    return clf.knowledge_.method


def new_folder(path: str | Path) -> Path:
    """An empty folder, made if need be; one that holds something is refused."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f'--output "{path}" exists already; choose another folder.')
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """safetensors as other libraries write them: {"format": "pt"} as the only metadata."""
    atomic_write(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}))


def describe(clf: Teachable, output: Path) -> None:
    """What a user of the exported files has to know: class names, image pipeline, calibration."""
    facts = {
        "classes": [str(label) for label in clf.classes_],
        "transform": asdict(clf.transform_),
        "calibration": clf.calibration_,
        "backbone": clf.config_["backbone"]["name"],
    }
    write_json(output / "fscil.json", facts)
