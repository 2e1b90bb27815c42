"""How a few-shot session's time and memory grow with the classes already known (simulated features, d = 768).

    python benchmarks/scale.py --classes 100 1000 10000 --images 30 100 500

MPCC draws its embeddings epoch by epoch while they fit and mini-batch by mini-batch beyond; square roots of covariances
take the smaller exact form. Where they are drawn mini-batch by mini-batch, only `--steps` calibration steps are timed
and scaled to the full session.
"""

from __future__ import annotations

import argparse
from itertools import islice

import torch
from common import environment, peak_gb, seconds
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.heads.embeddings import EPOCH_SET_BYTES, embedding_batches
from fscil.methods.smp.method import SMP, SMPOptions
from fscil.methods.smp.method import method as smp
from fscil.runtime import Runtime

DIM = 768


class Vectors:
    """Stands in for Pixels: its images are features already."""

    index_device = torch.device("cpu")

    def __init__(self, features: torch.Tensor):
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def plain(self, positions=None):
        return self.features if positions is None else self.features[positions.to(self.features.device)]

    def augmented(self, positions, epoch):
        return self.plain(positions) + 0.1 * torch.randn_like(self.plain(positions))


class OnFeatures(SMP):
    def embed(self, images: torch.Tensor) -> torch.Tensor:
        return images


def prepare(classes: int, images: int, calibration: str, runtime: Runtime) -> SMP:
    """A method that already knows `classes` classes of `images` pictures each, with made-up statistics."""
    vit = VisionTransformer(img_size=16, patch_size=16, embed_dim=DIM, depth=1, num_heads=12, num_classes=0)
    method = OnFeatures(Backbone(vit, "features only").prepare(runtime), SMPOptions(calibration=calibration), runtime)
    device = runtime.device
    method.prototypes = torch.randn(classes, DIM, device=device)
    method.rows = nn.functional.normalize(method.prototypes, dim=1)
    method.trained_rows = torch.randn(classes, DIM, device=device) * 0.02
    method.donor = torch.arange(classes, device=device)
    method.class_counts = torch.full((classes,), images, device=device)
    method.tasks_seen = torch.tensor(1)
    method.roots_floor = torch.tensor([1e-3**0.5], dtype=torch.float64)
    if calibration == "closed_form":
        method.pooled = torch.eye(DIM, device=device)
    elif images - 1 < DIM / 2:
        method.roots_basis = torch.empty(classes, DIM, images - 1, device=device)
        for part in method.roots_basis.split(256):
            part.normal_().div_(DIM**0.5)
        method.roots_spread = torch.rand(classes, images - 1, device=device)
    else:
        method.roots_packed = torch.empty(classes, DIM * (DIM + 1) // 2, device=device)
        for part in method.roots_packed.split(256):
            part.normal_().div_(DIM)
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--images", type=int, nargs="+", default=[30, 100, 500])
    parser.add_argument("--steps", type=int, default=1000, help="calibration steps timed at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    runtime = Runtime.make(device=arguments.device, precision="fp32", compile="off")
    print(f"{environment()}; d = {DIM}, 5 new classes of 5 images")
    print(
        "| calibration | known classes | images per class | session s | steps timed | peak GB |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    for calibration in ("mpcc", "closed_form"):
        for images in arguments.images if calibration == "mpcc" else arguments.images[:1]:
            for classes in arguments.classes:
                if arguments.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                method = prepare(classes, images, calibration, runtime)
                labels = torch.arange(classes, classes + 5).repeat_interleave(5)
                task = Task(
                    1, tuple(range(classes, classes + 5)), Vectors(torch.randn(25, DIM, device=runtime.device)), labels
                )
                steps = 5 * (classes + 5)
                by_batch = classes * method.options.features_per_class * DIM * 4 > EPOCH_SET_BYTES
                if calibration == "mpcc" and by_batch and steps > arguments.steps:
                    wanted = arguments.steps
                    smp.embedding_batches = lambda *inputs, each=wanted // 5: islice(embedding_batches(*inputs), each)
                else:
                    wanted = steps
                elapsed = seconds(method.learn, task) * steps / wanted
                smp.embedding_batches = embedding_batches
                print(
                    f"| {calibration} | {classes} | {images} | {elapsed:.2f} | "
                    f"{wanted if calibration == 'mpcc' else '-'} | {peak_gb():.2f} |",
                    flush=True,
                )
                del method


if __name__ == "__main__":
    main()
