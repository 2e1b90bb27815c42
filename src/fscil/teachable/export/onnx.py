"""A taught model as one ONNX file, image pipeline and rejection included."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fscil._version import __version__
from fscil.data.pixels import resampling_matrix
from fscil.errors import UserError
from fscil.files import atomic_path
from fscil.maths.discriminant import discriminant, shrink
from fscil.teachable.export.parts import classifier, folded_weights
from fscil.teachable.model import Teachable

TOLERANCE = 1e-3  # largest difference of a probability between torch and onnxruntime


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
    assert program is not None  # it is with dynamo=True
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

    mean: Tensor  # of the channels, and their deviation
    std: Tensor
    weight: Tensor
    bias: Tensor
    rows: Tensor  # of the score that pictures are rejected by, where they are
    offsets: Tensor
    quadratic: Tensor
    linear: Tensor

    def __init__(self, clf: Teachable):
        super().__init__()
        known = clf.knowledge_.space
        backbone = copy.deepcopy(clf.backbone_.in_float32()).to("cpu", torch.float32)
        backbone.vit.load_state_dict(folded_weights(clf))
        self.backbone, self.transform = backbone, clf.transform_
        for name, values in (("mean", clf.transform_.mean), ("std", clf.transform_.std)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1))
        self.temperature, threshold = clf.calibration_["temperature"], clf.calibration_["threshold"]
        weight, bias, self.unit = classifier(clf)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.rejects = False
        if threshold is not None and known is not None:
            self.rejects = True
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
