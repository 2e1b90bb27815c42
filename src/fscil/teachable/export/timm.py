"""A taught model as plain timm weights."""

from __future__ import annotations

import json
from pathlib import Path

from fscil.backbones.loading import GLYPH_VITS
from fscil.files import atomic_write
from fscil.teachable.export.parts import describe, folded_weights, linear_head, new_folder, represented, write_tensors
from fscil.teachable.model import Teachable


def export_timm(clf: Teachable, output: str | Path) -> Path:
    """A folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`: folded weights and a linear head.

    With the closed form, softmax of the model's output is `predict_proba`. With prototypes or MPCC, whose logits are
    cosines, the best class is the same but the probabilities are not, because a linear head cannot divide by ‖f‖.
    """
    method, (weight, bias) = represented(clf), linear_head(clf)
    tensors = {**folded_weights(clf), "head.weight": weight, "head.bias": bias}
    name, image_size = clf.backbone_.name, clf.backbone_.image_size
    glyph = GLYPH_VITS.get(name)  # not an architecture of timm's: a small one of the same kind, with other sizes
    architecture, _, tag = name.partition(".")
    transform, count = clf.transform_, len(clf.classes_)
    config = {
        "architecture": "vit_tiny_patch16_224" if glyph else architecture,
        "num_classes": count,
        "num_features": method.backbone.dim,
        "label_names": [str(label) for label in clf.classes_],
        "model_args": glyph or {"img_size": image_size},
        "pretrained_cfg": {
            "tag": tag,
            "input_size": [3, image_size, image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": transform.size / transform.resize,
            "crop_mode": "center",
            "mean": list(transform.mean),
            "std": list(transform.std),
            "num_classes": count,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    with new_folder(output) as folder:
        write_tensors(folder / "model.safetensors", tensors)
        atomic_write(folder / "config.json", json.dumps(config, ensure_ascii=False, indent=1))
        describe(clf, folder)
    return Path(output)
