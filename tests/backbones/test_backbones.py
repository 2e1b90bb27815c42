"""Backbones and adapters against timm's own forward; weights files; families of plain ViTs."""

import copy
import re

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention

from fscil.backbones.attention import attention
from fscil.backbones.huggingface import from_huggingface
from fscil.backbones.loading import load_weights, make_backbone
from fscil.backbones.lora import LoRA, initial_lora, project
from fscil.backbones.vit import Backbone
from fscil.errors import UserError
from fscil.runtime import Runtime
from tiny_world import make_vit


def tiny(**changes):
    return make_vit(**{"img_size": 32, "embed_dim": 24, "depth": 3, **changes}).double().eval()


def random_lora(depth=3, dim=24, rank=4, sets=2):
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(depth, sets, 2, rank, dim, generator=generator, dtype=torch.float64) * 0.3
    return LoRA(A, torch.randn(depth, sets, 2, dim, rank, generator=generator, dtype=torch.float64) * 0.3)


def folded(vit, dense):
    """A plain timm model with ΔW (blocks, 2, d, d) added to its key and value weights."""
    twin = copy.deepcopy(vit)
    for block, delta in zip(twin.blocks, dense, strict=True):
        width = delta.shape[-1]
        with torch.no_grad():
            block.attn.qkv.weight[width : 2 * width] += delta[0]
            block.attn.qkv.weight[2 * width :] += delta[1]
    return twin


IMAGES = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_every_set_equals_timm_with_the_update_folded_into_qkv():
    vit, lora = tiny(), random_lora()
    features = Backbone(copy.deepcopy(vit), "tiny")(IMAGES, lora)
    for number in range(2):
        torch.testing.assert_close(features[number], folded(vit, lora.dense()[:, number])(IMAGES))


def test_zero_adapters_leave_features_alone_and_q_is_never_changed():
    vit = tiny()
    backbone = Backbone(copy.deepcopy(vit), "tiny")
    zero = initial_lora(3, 24, 4, 1, torch.Generator().manual_seed(0), "zeros", torch.float64)
    assert torch.equal(backbone(IMAGES, zero)[0], backbone(IMAGES))
    torch.testing.assert_close(backbone(IMAGES), vit(IMAGES))
    tokens = backbone.embed(IMAGES)
    qkv = backbone.vit.blocks[0].attn.qkv
    adapted, plain = qkv.split(tokens, random_lora(sets=1).layer(0)), qkv.split(tokens)
    assert torch.equal(adapted[0], plain[0])
    assert not torch.allclose(adapted[1], plain[1]) and not torch.allclose(adapted[2], plain[2])


def test_gradients_reach_the_adapters_alone_and_equal_autograd_on_dense_updates():
    vit, lora = tiny(), random_lora(sets=1)
    backbone = Backbone(copy.deepcopy(vit), "tiny")
    backbone(IMAGES, lora).square().sum().backward()
    assert all(p.grad is None for p in backbone.parameters())
    dense = lora.dense()[:, 0].detach().requires_grad_()
    twin = copy.deepcopy(vit).requires_grad_(False)
    weights = {}
    for index, block in enumerate(twin.blocks):
        w = block.attn.qkv.weight
        weights[f"blocks.{index}.attn.qkv.weight"] = w + torch.cat(
            [torch.zeros_like(w[:24]), dense[index, 0], dense[index, 1]]
        )
    features = torch.func.functional_call(twin, weights, IMAGES)
    (gradient,) = torch.autograd.grad(features.square().sum(), dense)
    torch.testing.assert_close(lora.A.grad[:, 0], lora.B.detach()[:, 0].mT @ gradient)
    torch.testing.assert_close(lora.B.grad[:, 0], gradient @ lora.A.detach()[:, 0].mT)


def test_fused_projection_and_its_gradients_equal_the_plain_formula():
    """The operator that GPUs use, checked on the CPU."""
    x, weight, bias = (
        torch.randn(2, 7, 6).double().requires_grad_(),
        torch.randn(18, 6).double(),
        torch.randn(18).double(),
    )
    A, B = torch.randn(2, 2, 3, 6).double().requires_grad_(), torch.randn(2, 2, 6, 3).double().requires_grad_()
    ours, _ = project(x, weight, bias, A, B)
    delta = torch.cat([torch.zeros(2, 6, 6).double(), (B @ A).reshape(2, 12, 6)], 1)
    expected = x @ (weight + delta).mT + bias
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad((y * upstream).sum(), (x, A, B), retain_graph=True) for y in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_checkpointing_and_micro_steps_do_not_change_gradients():
    backbone, lora = Backbone(tiny(), "tiny"), random_lora()
    backbone(IMAGES, lora).square().sum().backward()
    expected = lora.A.grad.clone()
    lora.A.grad = lora.B.grad = None
    backbone.checkpointing = True
    backbone(IMAGES, lora).square().sum().backward()
    torch.testing.assert_close(lora.A.grad, expected)


def test_blocks_in_pieces_equal_the_whole():
    backbone, lora = Backbone(tiny(), "tiny"), random_lora(sets=1)
    tokens = backbone.blocks(backbone.embed(IMAGES), 0, 2, lora=lora)
    whole = backbone.pool(backbone.blocks(tokens, 2, lora=lora))
    torch.testing.assert_close(whole, backbone(IMAGES, lora)[0])


FAMILIES = {
    "deit": {},
    "dino (patch 4)": {"patch_size": 4},
    "dinov2: registers and LayerScale": {"reg_tokens": 2, "init_values": 0.1, "no_embed_class": True},
    "clip: pre-norm": {"pre_norm": True, "act_layer": "quick_gelu", "norm_layer": torch.nn.LayerNorm},
    "siglip: attention pooling, no class token": {"class_token": False, "global_pool": "map"},
    "mean pooling": {"global_pool": "avg"},
    "qk-norm": {"qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_plain_vits_work_with_adapters(family):
    vit = tiny(**FAMILIES[family])
    lora = random_lora()
    features = Backbone(copy.deepcopy(vit), family)(IMAGES, lora)
    for number in range(2):
        torch.testing.assert_close(features[number], folded(vit, lora.dense()[:, number])(IMAGES))


def test_initial_sets_are_identical_and_sparse():
    lora = initial_lora(12, 768, 10, 2, torch.Generator().manual_seed(0)).requires_grad_(False)
    assert torch.equal(lora.A[:, 0], lora.A[:, 1]) and torch.equal(lora.B[:, 0], lora.B[:, 1])
    assert sum(p.numel() for p in lora.parameters()) == 737_280
    assert ((lora.B != 0).sum(3) <= 1).all() and (lora.B != 0).sum() > 0.95 * 12 * 2 * 2 * 10
    assert lora.A.abs().max() <= 768**-0.5
    assert float(lora.A.std()) == pytest.approx(768**-0.5 / 3**0.5, rel=0.01)
    assert float(lora.B[lora.B != 0].std()) == pytest.approx(0.01, rel=0.15)


def test_resolved_weights_are_those_of_the_tag_asked_for(tmp_path):
    save_file(
        {k: v.clone() for k, v in timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict().items()},
        tmp_path / "w",
    )
    backbone = make_backbone("vit_tiny_patch16_224.augreg_in21k_ft_in1k", weights=tmp_path / "w")
    assert backbone.vit.pretrained_cfg["tag"] == "augreg_in21k_ft_in1k"
    assert (backbone.mean, backbone.std) == ((0.0,) * 3, (1.0,) * 3)  # AugReg ViTs are fed [0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [("vit_bas_patch16_224.augreg_in21k", "vit_base_patch16_224"), ("vit_base_patch16_224", "augreg_in21k_ft_in1k"),
     ("vit_base_patch16_224.augreg_in21", "augreg_in21k"), ("resnet18.a1_in1k", "not a plain ViT")],
)  # fmt: skip
def test_unknown_backbones_are_named_with_the_nearest(name, message):
    with pytest.raises(UserError, match=message):
        make_backbone(name, pretrained=name != "resnet18.a1_in1k")


def test_weights_of_another_architecture_are_refused(tmp_path):
    vit = tiny()
    save_file({k: v.clone() for k, v in tiny(depth=2).state_dict().items()}, tmp_path / "shallow.safetensors")
    with pytest.raises(UserError, match="another architecture.*blocks.2"):
        load_weights(vit, tmp_path / "shallow.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="not a readable safetensors"):
        load_weights(vit, tmp_path / "broken.safetensors")
    with pytest.raises(UserError, match="does not exist"):
        load_weights(vit, tmp_path / "absent.safetensors")


INNER_NAMES = {
    "attention.output.dense": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def test_hugging_face_names_load_into_timm(tmp_path):
    vit = tiny().float()
    state = vit.state_dict()
    named = {"vit.embeddings.cls_token": state["cls_token"], "vit.embeddings.position_embeddings": state["pos_embed"]}
    for kind in ("weight", "bias"):
        named[f"vit.embeddings.patch_embeddings.projection.{kind}"] = state[f"patch_embed.proj.{kind}"]
        named[f"vit.layernorm.{kind}"] = state[f"norm.{kind}"]
        for i in range(3):
            theirs, ours = f"vit.encoder.layer.{i}", f"blocks.{i}"
            q, k, v = state[f"{ours}.attn.qkv.{kind}"].chunk(3)
            for part, value in (("query", q), ("key", k), ("value", v)):
                named[f"{theirs}.attention.attention.{part}.{kind}"] = value.clone()
            for a, b in INNER_NAMES.items():
                named[f"{theirs}.{a}.{kind}"] = state[f"{ours}.{b}.{kind}"]
    assert set(from_huggingface(named)) == set(state)
    save_file({k: v.clone().contiguous() for k, v in named.items()}, tmp_path / "hf.safetensors")
    other = tiny(seed=1).float()
    load_weights(other, tmp_path / "hf.safetensors")
    torch.testing.assert_close(other(IMAGES.float()), vit(IMAGES.float()))


def test_lower_precision_keeps_the_unrounded_weights():
    vit = tiny().float()
    exact = copy.deepcopy(vit.state_dict())
    backbone = Backbone(vit, "tiny").prepare(Runtime(dtype=torch.bfloat16))
    backbone.prepare(Runtime(dtype=torch.bfloat16))
    assert backbone.dtype == torch.bfloat16
    for key, value in backbone.in_float32().vit.state_dict().items():
        assert torch.equal(value, exact[key])
    twin = backbone.trainable_copy()
    assert all(p.requires_grad for p in twin.parameters()) and twin.dtype == torch.float32
    assert not any(p.requires_grad for p in backbone.parameters())


@pytest.mark.parametrize("name", ["glyph_vit_a", "glyph_vit_b"])
def test_shipped_backbones_load(name):
    backbone = make_backbone(name)
    assert (backbone.dim, backbone.depth, backbone.image_size) == (128, 6, 48)
    assert backbone.vit.pos_embed.shape[1] == 37
    assert backbone(torch.rand(2, 3, 48, 48)).shape == (2, 128)
    with pytest.raises(UserError, match=f'transform.size is 32, but backbone "{name}" takes 48 pixels only'):
        make_backbone(name, image_size=32)


@pytest.mark.parametrize(
    "name, said",
    [
        ("deit_tiny", 'not a timm model. Did you mean "deit_tiny_patch16_224.fb_in1k"?'),
        ("vit_base", 'not a timm model. Did you mean "vit_base_patch16_224.augreg_in21k_ft_in1k"?'),
        ("resnet50.a1_in1k", "is not a plain ViT, and only those can be used here"),
        ("davit_tiny.msft_in1k", "is not a plain ViT, and only those can be used here"),
    ],
)
def test_names_that_are_no_backbone_get_advice_that_helps(name, said):
    with pytest.raises(UserError, match=re.escape(said)):
        make_backbone(name)


@pytest.mark.parametrize("queries", [1, 37])
def test_attention_in_bf16_is_as_near_to_float64_as_pytorchs_kernel_and_so_are_its_gradients(queries):
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(3, 2, count, 16, generator=generator).bfloat16() for count in (queries, 37, 37)]
    towards = torch.randn(3, 2, queries, 16, generator=generator).bfloat16()

    def results(function, dtype):
        leaves = [part.to(dtype, copy=True).requires_grad_() for part in parts]
        out = function(*leaves, scale=0.25)
        out.backward(towards.to(dtype))
        return [out.detach().double(), *(leaf.grad.double() for leaf in leaves)]

    def written_out(q, k, v, scale):
        return torch.einsum("bhnt,bhtd->bhnd", torch.einsum("bhnd,bhtd->bhnt", q, k).mul(scale).softmax(-1), v)

    exact = results(written_out, torch.float64)
    own, fused = results(attention, torch.bfloat16), results(scaled_dot_product_attention, torch.bfloat16)
    for true, ours, theirs in zip(exact, own, fused, strict=True):
        assert (ours - true).norm() <= max(2 * (theirs - true).norm(), 0.01 * true.norm())
    for true, ours in zip(exact, results(attention, torch.float64), strict=True):
        torch.testing.assert_close(ours, true)
