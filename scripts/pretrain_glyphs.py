"""Pretrain the two backbones of the glyphs benchmark on its pretraining classes (none of them in the benchmark).

`glyph_vit_a` learns to classify: cross-entropy with label smoothing over the pretraining classes.
`glyph_vit_b` never sees a label: instance discrimination, where every drawing (one character in one font) is its own
class and pictures of it must be told from pictures of all other drawings; the head is thrown away.

Every step draws fresh pictures from the characters' masks on the device (`fscil.data.glyphs.compose` with the nuisance
of the pretraining part: deformation, colours, background, strokes, blur, noise), so no picture is seen twice and the
renderer is the augmentation. The masks can be drawn beforehand where matplotlib and Pillow are:

    python scripts/pretrain_glyphs.py --draw masks.safetensors
    python scripts/pretrain_glyphs.py --masks masks.safetensors --out src/fscil/backbones/weights  # torch, timm, numpy

Side by side on one H200 both take 83 s; on a CPU use few --steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fscil.data.glyphs import (
    BASE_CLASSES,
    DRAWS,
    IMAGE_SIZE,
    NUISANCE,
    RENDERER_VERSION,
    compose,
    glyph_classes,
    glyph_masks,
)
from fscil.files import atomic_write

ARCHITECTURE = dict(img_size=IMAGE_SIZE, patch_size=8, embed_dim=128, depth=6, num_heads=4, num_classes=0)
EVALUATION_BATCH = 512
OBJECTIVES = {
    "glyph_vit_a": "supervised: cross-entropy over the pretraining classes, label smoothing 0.1",
    "glyph_vit_b": "self-supervised: instance discrimination of drawings (one character in one font), no labels",
}


class Artist:
    """Draws fresh pictures of one part's characters on a device, from a seeded generator."""

    def __init__(self, masks: Tensor, owner: Tensor, part: str, device: torch.device, seed: int):
        self.masks, self.owner, self.nuisance = masks.to(device), owner.to(device), NUISANCE[part]
        self.counts = self.owner.bincount()  # drawings per class; those of a class are contiguous
        self.first = self.counts.cumsum(0) - self.counts
        self.classes = len(self.counts)
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.masks.device)

    def drawings_of(self, labels: Tensor) -> Tensor:
        """A random drawing of each class in `labels`."""
        return self.first[labels] + (self.uniform(len(labels)) * self.counts[labels]).long()

    def pictures(self, drawings: Tensor) -> Tensor:
        """Pictures (B, 3, 48, 48) in [0, 1] of the given drawings."""
        shape = (len(drawings), 3, IMAGE_SIZE, IMAGE_SIZE)
        noise = torch.randn(shape, generator=self.generator, device=self.masks.device)
        with torch.autocast(self.masks.device.type, enabled=False):  # the renderer draws in float32
            return compose(self.masks[drawings].float() / 255, self.uniform(len(drawings), DRAWS), noise, self.nuisance)

    def labelled(self, per_class: int, classes: int | None = None) -> tuple[Tensor, Tensor]:
        """`per_class` pictures of each of the first `classes` classes, with labels."""
        labels = torch.arange(classes or self.classes, device=self.masks.device).repeat_interleave(per_class)
        return torch.cat([self.pictures(self.drawings_of(part)) for part in labels.split(EVALUATION_BATCH)]), labels


def supervised_loss(artist: Artist, vit: nn.Module, head: nn.Module, batch: int) -> Tensor:
    labels = (artist.uniform(batch) * artist.classes).long()
    return F.cross_entropy(head(vit(artist.pictures(artist.drawings_of(labels)))).float(), labels, label_smoothing=0.1)


def instance_loss(artist: Artist, vit: nn.Module, head: nn.Module, batch: int) -> Tensor:
    """Every drawing is its own class (Dosovitskiy et al., 2014): the renderer's nuisance is what the features
    ignore."""
    drawings = (artist.uniform(batch) * len(artist.masks)).long()
    return F.cross_entropy(head(vit(artist.pictures(drawings))).float(), drawings)


@torch.no_grad()
def embed(vit: nn.Module, pictures: Tensor) -> Tensor:
    return torch.cat([vit(part).float() for part in pictures.split(EVALUATION_BATCH)])


def prototype_accuracy(vit: nn.Module, artist: Artist, shots: int, classes: int | None = None) -> float:
    """Nearest class mean by cosine: means of `shots` pictures per class, accuracy on 50 others per class."""
    pictures, labels = artist.labelled(shots, classes)
    prototypes = F.normalize(F.normalize(embed(vit, pictures), dim=1).unflatten(0, (-1, shots)).mean(1), dim=1)
    pictures, labels = artist.labelled(50, classes)
    return ((embed(vit, pictures) @ prototypes.T).argmax(1) == labels).float().mean().item()


def pretrain(
    name: str, make_artist: Callable[[str, int], Artist], arguments: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, dict]:
    """Train one backbone; returns it with the record of how it was made."""
    torch.manual_seed(arguments.seed)
    artist = make_artist("pretrain", arguments.seed)
    vit = VisionTransformer(**ARCHITECTURE).to(device)
    width = ARCHITECTURE["embed_dim"]
    if name == "glyph_vit_a":
        head, loss_of = nn.Linear(width, artist.classes), supervised_loss
    else:
        head, loss_of = nn.Linear(width, len(artist.masks)), instance_loss
    head = head.to(device)
    parameters = [*vit.parameters(), *head.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.lr, total_steps=arguments.steps, pct_start=0.05, cycle_momentum=False
    )
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    start = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        with half:
            loss = loss_of(artist, vit, head, arguments.batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % max(arguments.steps // 10, 1) == 0:
            print(f"{name} step {step} loss {loss.item():.3f} {time.perf_counter() - start:.1f} s", flush=True)
    seconds = time.perf_counter() - start

    vit.eval()
    unseen = make_artist("pretrain", arguments.seed + 1)
    benchmark = make_artist("benchmark", arguments.seed + 2)
    accuracy = {
        "pretraining classes, prototypes of 50": prototype_accuracy(vit, unseen, 50),
        f"benchmark, {BASE_CLASSES} base classes, prototypes of 50": prototype_accuracy(
            vit, benchmark, 50, BASE_CLASSES
        ),
        "benchmark, 100 classes, prototypes of 5": prototype_accuracy(vit, benchmark, 5),
    }
    if name == "glyph_vit_a":
        pictures, labels = unseen.labelled(50)
        with torch.no_grad():
            accuracy["pretraining classes, own head"] = (
                (head(embed(vit, pictures)).argmax(1) == labels).float().mean().item()
            )
    for what, value in accuracy.items():
        print(f"{name} {what}: {100 * value:.1f} %")
    record = {
        "format": "timm VisionTransformer, float16",
        "architecture": json.dumps(ARCHITECTURE),
        "input": "RGB in [0, 1], no mean or standard deviation",
        "objective": OBJECTIVES[name],
        "data": f"glyphs renderer {RENDERER_VERSION}, {artist.classes} pretraining classes, fresh pictures every step",
        "optimisation": f"AdamW, lr {arguments.lr}, weight decay 0.05, one cycle, {arguments.steps} steps of "
        f"{arguments.batch} pictures, seed {arguments.seed}, {seconds:.0f} s on {device_name(device)}",
        "accuracy": json.dumps({what: round(value, 4) for what, value in accuracy.items()}),
        "licence": "Apache-2.0",
    }
    return vit, record


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def draw_masks() -> dict[str, Tensor]:
    """Masks and their classes of both parts; the benchmark's serve the printed figures alone."""
    tensors = {}
    for part in NUISANCE:
        masks, owner = glyph_masks(glyph_classes()[part])
        tensors[f"{part}.masks"], tensors[f"{part}.owner"] = torch.from_numpy(masks), torch.from_numpy(owner)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw the masks into FILE")
    parser.add_argument("--masks", type=Path, metavar="FILE", help="masks drawn before; otherwise they are drawn now")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for NAME.safetensors")
    parser.add_argument("--names", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=1024, help="pictures per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=2023)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.draw:
        atomic_write(arguments.draw, save(draw_masks()))
        return
    tensors = load_file(arguments.masks) if arguments.masks else draw_masks()
    device = torch.device(arguments.device)

    def make_artist(part: str, seed: int) -> Artist:
        return Artist(tensors[f"{part}.masks"], tensors[f"{part}.owner"], part, device, seed)

    for name in arguments.names:
        vit, record = pretrain(name, make_artist, arguments, device)
        weights = {key: value.half().cpu().contiguous() for key, value in vit.state_dict().items()}
        atomic_write(arguments.out / f"{name}.safetensors", save(weights, record))


if __name__ == "__main__":
    main()
