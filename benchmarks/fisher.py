"""Exact per-sample Fisher of both adapter sets: one batched pass against the batch-of-one loop, in the same run.

python benchmarks/fisher.py            # ViT-B/16 at 224 on one GPU
"""

from __future__ import annotations

import argparse

import timm
import torch
from common import environment, made_up_task, peak_gb, seconds
from torch.nn import functional as F

from fscil.backbones.lora import LoRA
from fscil.backbones.vit import Backbone
from fscil.data.stream import Task
from fscil.maths.fisher import block_norms
from fscil.maths.margins import cosine
from fscil.maths.merging import merge_weights
from fscil.methods.families.adapter_sets import AdapterSets, fisher_information
from fscil.runtime import Runtime


def loop_fisher(backbone: Backbone, streams: AdapterSets, task: Task, device: str) -> torch.Tensor:
    """Sum over images of the squared gradient of dense ΔW leaves, one image and one set at a time, by autograd."""
    sets = streams.lora.sets
    total = torch.zeros(backbone.depth, sets, 2, backbone.dim, backbone.dim, device=device)
    labels, width = task.labels.to(device), backbone.dim
    for chosen in range(sets):
        dense = streams.lora.select(chosen).dense()[:, 0].clone().requires_grad_(True)  # (L, 2, d, d)
        for position in range(len(labels)):
            tokens = backbone.embed(task.images.plain([position]))
            for index, block in enumerate(backbone.vit.blocks):
                attn, x = block.attn, block.norm1(tokens)
                q, k, v = attn.qkv(x).split(width, -1)
                k, v = k + x @ dense[index, 0].T, v + x @ dense[index, 1].T
                q, k, v = (t.view(1, -1, attn.num_heads, width // attn.num_heads).transpose(1, 2) for t in (q, k, v))
                mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
                tokens = tokens + attn.proj(mixed)
                tokens = tokens + block.mlp(block.norm2(tokens))
            logits = 16 * cosine(backbone.pool(tokens), streams.rows[chosen])
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels[position : position + 1]), dense)
            total[:, chosen] += gradient**2
    return total / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="vit_base_patch16_224")
    parser.add_argument("--images", type=int, default=960, help="images of the batched passes")
    parser.add_argument(
        "--loop-images", type=int, default=96, help="images of the loop, and of the comparison of values"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, batch = arguments.device, 48
    vit = timm.create_model(arguments.backbone, num_classes=0)
    depth, dim = len(vit.blocks), vit.num_features
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(depth, 2, 2, *shape, generator=generator) * 0.02 for shape in ((10, dim), (dim, 10)))
    rows = torch.randn(2, 60, dim, generator=generator)
    streams = AdapterSets(
        LoRA(A, B).to(device).requires_grad_(False), rows.to(device), torch.full((2,), 16.0, device=device)
    )
    many = made_up_task(60, arguments.images // 60, device=device, size=vit.patch_embed.img_size[0])
    few = Task(0, many.classes, many.images.select(range(arguments.loop_images)), many.labels[: arguments.loop_images])
    results, weights = {}, {}
    for precision in ("fp32", "bf16"):
        runtime = Runtime.make(device=device, precision=precision)
        backbone = Backbone(timm.create_model(arguments.backbone, num_classes=0), arguments.backbone)
        backbone.vit.load_state_dict(vit.state_dict())
        backbone.prepare(runtime)
        fisher = fisher_information(backbone, streams, few, batch, "sample", runtime)  # warm-up and values
        results[precision] = seconds(fisher_information, backbone, streams, many, batch, "sample", runtime) / len(
            many.labels
        )
        weights[precision] = merge_weights(block_norms(fisher))
        if precision == "fp32":
            naive = loop_fisher(backbone, streams, few, device)
            results["loop"] = seconds(loop_fisher, backbone, streams, few, device) / len(few.labels)
            error = float((fisher - naive).norm() / naive.norm())
    drift = float((weights["bf16"] - weights["fp32"]).abs().max())
    print(f"{environment()}; {arguments.backbone}; peak {peak_gb():.1f} GB")
    print("| form | ms per image, both sets | × loop |\n|---|---|---|")
    for name, key in (("batch-of-one loop, fp32", "loop"), ("batched, fp32", "fp32"), ("batched, bf16 passes", "bf16")):
        print(f"| {name} | {1000 * results[key]:.3f} | {results['loop'] / results[key]:.1f} |")
    print(
        f"relative difference of fp32 and loop {error:.2e}; largest change of a merge weight by bf16 passes {drift:.5f}"
    )


if __name__ == "__main__":
    main()
