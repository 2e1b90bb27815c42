"""A taught model for other libraries: plain timm weights, a peft adapter for the Hugging Face ViT, or one ONNX file.

All of them hold the model as SMP leaves it: a plain ViT whose key and value projections carry the merged adapters, and
a classifier on its features. Folded into the projections, the adapters cost nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from fscil._version import __version__
from fscil.backbones.huggingface import to_huggingface
from fscil.backbones.loading import GLYPH_VITS
from fscil.backbones.vit import Backbone
from fscil.data.pixels import resampling_matrix
from fscil.errors import UserError
from fscil.files import atomic_path, atomic_write, write_json
from fscil.maths.discriminant import discriminant, shrink
from fscil.methods.smp.method import SMP
from fscil.teachable.model import Teachable

TOLERANCE = 1e-3  # largest difference of a probability between torch and onnxruntime


def export_timm(clf: Teachable, output: str | Path) -> Path:
    """A folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`: folded weights and a linear head.

    With the closed form, softmax of the model's output is `predict_proba`. With prototypes or MPCC, whose logits are
    cosines, the best class is the same but the probabilities are not, because a linear head cannot divide by ‖f‖.
    """
    method, output = _smp(clf), _new_folder(output)
    weight, bias = linear_head(clf)
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
    _write_tensors(output / "model.safetensors", tensors)
    atomic_write(output / "config.json", json.dumps(config, ensure_ascii=False, indent=1))
    _describe(clf, output)
    return output


def export_peft(clf: Teachable, output: str | Path, base: bool = True) -> Path:
    """An adapter for `peft.PeftModel.from_pretrained(vit, FOLDER)`, with vit a `transformers.ViTModel`.

    Rank-2r LoRA on the key and value projections with lora_alpha = r, so its scale is one. `base` writes the backbone
    in Hugging Face's format to FOLDER/base. `head.safetensors` has the linear classifier on the class token (see
    export_timm). Module names are those of the transformers version installed here.
    """
    method = _smp(clf)
    vit = _plain_vit(clf.backbone_)
    names = _attention_names()
    output = _new_folder(output)
    lora = method.lora
    rank = lora.rank or 1  # an untrained model has no adapters; peft wants at least rank one
    A, B = (tensor.detach().float().cpu() for tensor in (lora.A, lora.B))
    if lora.rank == 0:
        A, B = A.new_zeros(*A.shape[:3], 1, A.shape[4]), B.new_zeros(*B.shape[:4], 1)
    tensors = {}
    for block in range(lora.depth):
        for part, name in enumerate(names):
            module = f"base_model.model.{name(block)}"
            tensors[f"{module}.lora_A.weight"] = A[block, 0, part]
            tensors[f"{module}.lora_B.weight"] = B[block, 0, part]
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": "base" if base else clf.backbone_.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [name(0).rpartition(".")[2] for name in names],
    }
    weight, bias = linear_head(clf)
    _write_tensors(output / "adapter_model.safetensors", tensors)
    atomic_write(output / "adapter_config.json", json.dumps(config, indent=1))
    _write_tensors(output / "head.safetensors", {"weight": weight, "bias": bias})
    if base:
        _write_tensors(output / "base" / "model.safetensors", to_huggingface(vit))
        atomic_write(output / "base" / "config.json", json.dumps(_huggingface_config(vit), indent=1))
    _describe(clf, output)
    return output


def export_onnx(clf: Teachable, output: str | Path, check: bool = True) -> Path:
    """One ONNX file: pictures uint8 (n, height, width, 3) of any size in, `probabilities` and `unknown` out.

    Resizing, cropping and normalisation are inside. Class names are in the file's metadata under "labels".
    """
    try:
        import onnx
        import onnxscript  # noqa: F401  (what torch's exporter writes with)
    except ImportError as error:
        raise UserError(f"exporting to ONNX needs {error.name}: pip install fscil[export]") from error
    output = Path(output)
    if output.is_dir() or output.exists():
        raise UserError(f'--output "{output}" exists already; choose another file.')
    module = WholeModel(clf).eval()
    size = max(8, clf.transform_.size)
    example = torch.randint(0, 256, (2, size + 3, size + 5, 3), dtype=torch.uint8)
    dynamic = {0: torch.export.Dim("pictures"), 1: torch.export.Dim("height"), 2: torch.export.Dim("width")}
    with torch.no_grad():
        program = torch.onnx.export(
            module,
            (example,),
            input_names=["pictures"],
            output_names=["probabilities", "unknown"],
            dynamic_shapes={"pictures": dynamic},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    model = program.model_proto
    facts = {"labels": json.dumps([str(label) for label in clf.classes_], ensure_ascii=False), "fscil": __version__}
    onnx.helper.set_model_props(model, facts)
    onnx.checker.check_model(model)
    with atomic_path(output) as aside:
        aside.write_bytes(model.SerializeToString())
    if check:
        _check_onnx(module, output, size)
    return output


def _check_onnx(module: nn.Module, path: Path, size: int) -> None:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError("checking an ONNX file needs onnxruntime: pip install fscil[export]") from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    for count, height, width in ((1, size, size), (3, 2 * size + 1, size // 2 + 1)):
        pictures = torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator)
        with torch.no_grad():
            expected = module(pictures)[0]
        found = torch.from_numpy(session.run(["probabilities"], {"pictures": pictures.numpy()})[0])
        difference = float((found - expected).abs().max())
        if not difference <= TOLERANCE:
            path.unlink()
            raise RuntimeError(f"onnxruntime differs from torch by {difference:g}, more than {TOLERANCE:g}")


class WholeModel(nn.Module):
    """Pictures in, (probabilities, unknown) out: image pipeline, folded ViT, classifier and rejection in one module."""

    def __init__(self, clf: Teachable):
        super().__init__()
        method, known = _smp(clf), clf.knowledge_.space
        backbone = copy.deepcopy(clf.backbone_.in_float32()).to("cpu", torch.float32)
        backbone.vit.load_state_dict(folded_weights(clf))
        self.backbone, self.transform = backbone, clf.transform_
        for name, values in (("mean", clf.transform_.mean), ("std", clf.transform_.std)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1))
        self.temperature, threshold = clf.calibration_["temperature"], clf.calibration_["threshold"]
        self.unit = method.options.calibration != "closed_form" or method.options.closed_form_features == "unit"
        weight, bias = classifier(method)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.rejects = threshold is not None and known is not None
        if self.rejects:
            # score = max_c (x Wᵀ + b)_c + xᵀ Q x + x l + k, see KnownSpace.scores
            within, total = (shrink(t.double().cpu(), known.shrinkage) for t in (known.within, known.total))
            inverse, background = torch.linalg.inv(within), torch.linalg.inv(total)
            centre = known.centre.double().cpu()
            means, counts = known.means.double().cpu(), known.counts.cpu()
            rows, offsets = discriminant(means, counts, known.within.double().cpu(), known.shrinkage)
            share, self.softness = known.background, known.softness
            constant = share * 0.5 * centre @ background @ centre - threshold
            self.register_buffer("rows", rows)
            self.register_buffer("offsets", offsets + constant)
            self.register_buffer("quadratic", share * 0.5 * (background - inverse))
            self.register_buffer("linear", -share * background @ centre)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        x = self.backbone(self.prepare(pictures)).double()
        directions = F.normalize(x, dim=1) if self.unit else x
        probabilities = ((directions @ self.weight.T + self.bias) / self.temperature).softmax(1)
        if not self.rejects:
            return probabilities.float(), probabilities[:, 0] < 0  # never
        classes, soft = x @ self.rows.T + self.offsets, self.softness
        level = soft * (classes / soft).logsumexp(1) if soft else classes.amax(1)
        excess = level + ((x @ self.quadratic) * x).sum(1) + x @ self.linear
        return probabilities.float(), excess < 0

    def prepare(self, pictures: Tensor) -> Tensor:
        """The test transform (Resize bicubic, CenterCrop, normalise) of pictures of one size, as in data/pixels.py."""
        levels = pictures.permute(0, 3, 1, 2).float()
        height, width = levels.shape[2], levels.shape[3]
        sides = [torch.arange(side, dtype=torch.float64)[-1:] + 1 for side in (height, width)]  # as tensors
        short = torch.minimum(*sides)
        rows, columns = (self.matrix(side, number, short) for side, number in zip(sides, (height, width)))
        levels = (levels @ columns.transpose(1, 2).unsqueeze(1)).clamp(0, 255)
        levels = (rows.unsqueeze(1) @ levels).clamp(0, 255)
        return (levels / 255 - self.mean) / self.std

    def matrix(self, side: Tensor, number: int, short: Tensor) -> Tensor:
        resize, size = self.transform.resize, self.transform.size
        resized = torch.where(side == short, torch.full_like(side, resize), torch.floor(resize * side / short))
        skip = torch.round((resized - size) / 2)
        values = (torch.zeros_like(side), side), (resized, skip)
        (start, length), (out_length, skip) = (tuple(value.float() for value in group) for group in values)
        return resampling_matrix(start, length, number, out_length, skip, size, "bicubic")


# ---- parts ----------------------------------------------------------------------------------------------------------


def folded_weights(clf: Teachable) -> dict[str, Tensor]:
    """The ViT's weights in float32 with ΔW = B A added to the key and value rows of every qkv."""
    method, width = _smp(clf), clf.backbone_.heads * clf.backbone_.head_dim
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
    weight, bias = classifier(_smp(clf))
    temperature = clf.calibration_["temperature"]
    return (weight / temperature).float(), (bias / temperature).float()


def _smp(clf: Teachable) -> SMP:
    clf._check_fitted()
    if not isinstance(clf.knowledge_.method, SMP):
        raise UserError(
            f"method {clf.config_['method']} cannot be exported: only smp and its relatives are a plain ViT with a "
            "classifier on top."
        )
    return clf.knowledge_.method


def _new_folder(path: str | Path) -> Path:
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f'--output "{path}" exists already; choose another folder.')
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """safetensors as other libraries write them: {"format": "pt"} as the only metadata."""
    atomic_write(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"}))


def _describe(clf: Teachable, output: Path) -> None:
    """What a user of the exported files has to know: class names, image pipeline, calibration."""
    facts = {
        "classes": [str(label) for label in clf.classes_],
        "transform": asdict(clf.transform_),
        "calibration": clf.calibration_,
        "backbone": clf.config_["backbone"]["name"],
    }
    write_json(output / "fscil.json", facts)


def _attention_names() -> list[Callable[[int], str]]:
    """Names of the key and value projections of a block, as the installed transformers calls them."""
    try:
        from transformers import ViTConfig, ViTModel
    except ImportError as error:
        raise UserError("exporting to peft needs transformers: pip install fscil[export]") from error
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8)
    tiny = ViTModel(ViTConfig(patch_size=8, **sizes), add_pooling_layer=False)
    modules = [name for name, _ in tiny.named_modules()]
    found = [next(m for m in modules if m.endswith(ends)) for ends in ((".key", ".k_proj"), (".value", ".v_proj"))]
    return [lambda block, name=name: name.replace(".0.", f".{block}.", 1) for name in found]


def _plain_vit(backbone: Backbone) -> nn.Module:
    """The timm model, if Hugging Face's ViT computes the same."""
    vit = backbone.in_float32().vit
    block = vit.blocks[0]
    plain = (
        backbone.token_pooled
        and vit.num_prefix_tokens == 1
        and isinstance(vit.norm_pre, nn.Identity)
        and isinstance(vit.fc_norm, nn.Identity)
        and isinstance(block.ls1, nn.Identity)
        and isinstance(block.attn.q_norm, nn.Identity)
        and isinstance(block.mlp.act, nn.GELU)
        and not vit.no_embed_class
    )
    if not plain:
        raise UserError(
            f'backbone "{backbone.name}" has no counterpart in Hugging Face\'s ViT; export to timm or onnx.'
        )
    return vit


def _huggingface_config(vit: nn.Module) -> dict[str, Any]:
    block = vit.blocks[0]
    return {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": vit.num_features,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": block.attn.num_heads,
        "intermediate_size": block.mlp.fc1.out_features,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": block.norm1.eps,
        "image_size": vit.patch_embed.img_size[0],
        "patch_size": vit.patch_embed.patch_size[0],
        "num_channels": 3,
        "qkv_bias": block.attn.qkv.bias is not None,
    }
