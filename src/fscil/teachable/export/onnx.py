"""A taught model as one ONNX file, image pipeline and rejection included."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fscil._version import __version__
from fscil.errors import UserError
from fscil.files import atomic_path
from fscil.maths.discriminant import discriminant, shrink
from fscil.teachable.export.parts import folded_weights, represented, scorer
from fscil.teachable.export.pipeline import Preparation
from fscil.teachable.model import Teachable

TOLERANCE = 1e-3  # largest difference of a probability from `predict_proba`, on whole pictures of any size
ROUNDED_TOLERANCE = 0.05  # where `predict_proba` itself computes in bf16, which the file does not
CHECKED_SIZES = ((48, 48), (480, 640), (640, 427), (61, 300), (1024, 768))  # heights and widths


def export_onnx(clf: Teachable, output: str | Path, check: bool = True) -> Path:
    """One ONNX file: pictures uint8 (n, height, width, 3) of any size in, `probabilities` and `unknown` out.

    Resizing, cropping and normalisation are inside. Class names are in the file's metadata under "labels". With
    `check`, the file answers pictures of several sizes with onnxruntime and is kept only if it agrees with
    `clf.predict_proba` of them within `TOLERANCE`.
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
            check_onnx(clf, aside)
    return output


def check_onnx(clf: Teachable, path: Path) -> None:
    """Raises unless the file gives the probabilities of `predict_proba` for pictures of several sizes."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError("checking an ONNX file needs onnxruntime: pip install fscil[export]") from error
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    tolerance = ROUNDED_TOLERANCE if clf.runtime_.dtype == torch.bfloat16 else TOLERANCE
    for count, (height, width) in enumerate(CHECKED_SIZES, 1):
        pictures = [scene(height, width, seed) for seed in range(count)]
        found = session.run(["probabilities"], {"pictures": np.stack(pictures)})[0]
        difference = float(np.abs(found - clf.predict_proba(pictures)).max())
        if not difference <= tolerance:
            raise RuntimeError(
                f"the ONNX file differs from predict_proba by {difference:g}, more than {tolerance:g}, on pictures of "
                f"{width} x {height} pixels; it was not kept"
            )


def scene(height: int, width: int, seed: int) -> np.ndarray:
    """A made-up photo: patches of colour with sharp edges, a slope of light over them, and noise."""
    draw = np.random.default_rng([seed, height, width])
    patches = draw.integers(0, 256, (7, 9, 3)).astype(np.float64)
    rows, columns = np.arange(height) * 7 // height, np.arange(width) * 9 // width
    light = np.linspace(0.6, 1.0, width)[None, :, None]
    levels = patches[rows][:, columns] * light + draw.normal(0, 12, (height, width, 3))
    return levels.clip(0, 255).astype(np.uint8)


class WholeModel(nn.Module):
    """Pictures in, (probabilities, unknown) out: image pipeline, ViT, classifier and rejection in one module."""

    rows: Tensor  # of the score that pictures are rejected by, where they are
    offsets: Tensor
    quadratic: Tensor
    linear: Tensor

    def __init__(self, clf: Teachable):
        super().__init__()
        known = clf.knowledge_.space
        self.prepare = Preparation(clf.transform_, clf.short_side_)
        self.features = Features(clf)
        self.scores = scorer(clf)
        self.temperature, threshold = clf.calibration_["temperature"], clf.calibration_["threshold"]
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
        x = self.features(self.prepare(pictures)).double()
        probabilities = (self.scores(x) / self.temperature).softmax(1)
        if not self.rejects:
            return probabilities.float(), probabilities[:, 0] < 0  # never
        classes, soft = x @ self.rows.T + self.offsets, self.softness
        level = soft * (classes / soft).logsumexp(1) if soft else classes.amax(1)
        excess = level + ((x @ self.quadratic) * x).sum(1) + x @ self.linear
        return probabilities.float(), excess < 0


class Features(nn.Module):
    """The method's features: those of one pass, adapters folded in, or directions under several sets side by side.

    The sets of the latter stay apart from the ViT, whose weights are then in the file once.
    """

    def __init__(self, clf: Teachable):
        super().__init__()
        self.backbone = copy.deepcopy(clf.backbone_.in_float32()).to("cpu", torch.float32)
        spaces = represented(clf).unit_spaces
        self.spaces = copy.deepcopy(spaces).cpu().float() if spaces is not None else None
        if spaces is None:
            self.backbone.vit.load_state_dict(folded_weights(clf))

    def forward(self, images: Tensor) -> Tensor:
        if self.spaces is None:
            return self.backbone(images)
        return self.spaces(self.backbone, images)
