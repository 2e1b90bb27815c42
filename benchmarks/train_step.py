"""Joint SMP base training, image passes per second, against the plain form in the same run.

    python benchmarks/train_step.py                          # ViT-B/16 at 224, batch 48 per stream, one GPU
    python benchmarks/train_step.py --only ours --profile    # where the time goes

A step takes fresh uint8 images through augmentation, both adapter streams, losses and optimiser. 200 steps are timed
after warm-up; compilation is printed apart. "Plain" is two separate eager forwards with additive LoRA modules, as the
released code does, at PyTorch's defaults.
"""

from __future__ import annotations

import argparse
import time

import timm
import torch
from common import environment, made_up_task, peak_gb, synchronize
from torch import nn
from torch.nn import functional as F

from fscil.backbones.vit import Backbone
from fscil.methods.families.adapter_sets import AdapterPlan, AdapterSpec
from fscil.methods.training import Schedule
from fscil.runtime import Display, Runtime


class PlainQKV(nn.Module):
    """The released code's attention input: frozen fused qkv, plus two bias-free linear maps for k and for v."""

    def __init__(self, qkv: nn.Linear, rank: int):
        super().__init__()
        dim = qkv.in_features
        self.qkv = qkv
        self.down = nn.ModuleList([nn.Linear(dim, rank, bias=False) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(rank, dim, bias=False) for _ in range(2)])

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.cat([q, k + self.up[0](self.down[0](x)), v + self.up[1](self.down[1](x))], -1)


class PlainModel(nn.Module):
    def __init__(self, architecture: str, classes: int, rank: int):
        super().__init__()
        self.vit = timm.create_model(architecture, num_classes=0).requires_grad_(False)
        for block in self.vit.blocks:
            block.attn.qkv = PlainQKV(block.attn.qkv, rank)
        self.rows = nn.Parameter(torch.rand(classes, self.vit.num_features) - 0.5)

    def forward(self, images):
        return 16 * F.normalize(self.vit(images), dim=1) @ F.normalize(self.rows, dim=1).T


def measure_plain(arguments, task, autocast: bool, tf32: bool) -> tuple[float, float]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    models = [PlainModel(arguments.backbone, len(task.classes), arguments.rank).cuda() for _ in range(2)]
    trained = [p for m in models for p in m.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=5e-4)
    labels = task.labels.cuda()

    def step(number: int) -> None:
        positions = torch.randint(len(labels), (arguments.batch,))
        images, target = task.images.augmented(positions, number), labels[positions.cuda()]
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            losses = []
            for model, margin in zip(models, (0.0, 0.2), strict=True):
                logits = model(images) - 16 * margin * F.one_hot(target, len(task.classes))
                losses.append(F.cross_entropy(logits, target))
        optimiser.zero_grad()
        sum(losses).backward()
        optimiser.step()

    for number in range(5):
        step(number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(arguments.plain_steps):
        step(number)
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    return elapsed / arguments.plain_steps, elapsed


class EpochClock(Display):
    """Times whole epochs of the library's own loop; the first one pays for compilation and graph capture."""

    def __init__(self):
        self.marks: list[float] = []

    def track(self, iterable, description, total=None):
        for item in iterable:
            if not description.startswith("epoch"):
                synchronize()
                self.marks.append(time.perf_counter())
            yield item
        if not description.startswith("epoch"):
            synchronize()
            self.marks.append(time.perf_counter())


def measure_ours(arguments, task, precision: str, specs: list[AdapterSpec]) -> tuple[float, float]:
    runtime = Runtime.make(device="cuda", precision=precision, compile="off" if arguments.eager else "on")
    runtime.cuda_graphs = not arguments.no_graph
    runtime.display = clock = EpochClock()
    backbone = Backbone(timm.create_model(arguments.backbone, num_classes=0), arguments.backbone).prepare(runtime)
    schedule = Schedule(3, arguments.batch, 0.01, 5e-4)
    if arguments.profile:
        from torch.profiler import ProfilerActivity, profile

        brief = AdapterPlan(tuple(specs), arguments.rank, "sparse", Schedule(1, arguments.batch, 0.01))
        brief.train(backbone, task, runtime)
        few = made_up_task(60, arguments.batch * 30 // 60, device="cuda")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            brief.train(backbone, few, runtime)
        print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70))
        return float("nan"), float("nan")
    AdapterPlan(tuple(specs), arguments.rank, "sparse", schedule).train(backbone, task, runtime)
    first, *timed = [b - a for a, b in zip(clock.marks[:-1], clock.marks[1:], strict=True)]
    best = min(timed)
    return best / (len(task.labels) // arguments.batch), first - best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plain-steps", type=int, default=40)
    parser.add_argument("--only", choices=["ours", "plain"])
    parser.add_argument("--fp32", action="store_true", help="ours in fp32 too")
    parser.add_argument("--eager", action="store_true", help="ours without torch.compile")
    parser.add_argument("--no-graph", action="store_true", help="ours without CUDA graphs")
    parser.add_argument("--sdpa", choices=["auto", "flash", "cudnn"], default="auto")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.sdpa != "auto":
        torch.backends.cuda.enable_cudnn_sdp(arguments.sdpa == "cudnn")
        torch.backends.cuda.enable_flash_sdp(arguments.sdpa == "flash")
    classes = 60
    task = made_up_task(classes, arguments.batch * arguments.steps // classes)
    specs = [AdapterSpec(0.0), AdapterSpec(0.2)]
    rows = []
    if arguments.only != "plain":
        for precision in ("bf16", "fp32") if arguments.fp32 else ("bf16",):
            torch.cuda.reset_peak_memory_stats()
            step, extra = measure_ours(arguments, task, precision, specs)
            rows.append((f"fscil, {precision}", step, extra, peak_gb()))
    if arguments.only != "ours":
        for name, autocast, tf32 in (
            ("plain, eager fp32", False, False),
            ("plain, eager TF32", False, True),
            ("plain, bf16 autocast", True, False),
        ):
            torch.cuda.reset_peak_memory_stats()
            step, _ = measure_plain(arguments, task, autocast, tf32)
            rows.append((name, step, 0.0, peak_gb()))
    base = next((r[1] for r in rows if r[0] == "plain, eager fp32"), float("nan"))
    print(f"{environment()}; {arguments.backbone}, batch {arguments.batch} per stream, two streams")
    print(
        "| form | ms/step | image passes/s | × plain fp32 | compile + capture s | peak GB |\n|---|---|---|---|---|---|"
    )
    for name, step, extra, memory in rows:
        print(
            f"| {name} | {1000 * step:.2f} | {2 * arguments.batch / step:.0f} | {base / step:.2f} | "
            f"{extra:.1f} | {memory:.1f} |"
        )


if __name__ == "__main__":
    main()
