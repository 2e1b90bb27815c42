"""The plain ViT is timm's, bit for bit, and opening a saved model needs no timm."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

from fscil.backbones.loading import plain_backbone
from fscil.backbones.lora import initial_lora
from fscil.backbones.plain_vit import PlainShape, shape_of
from fscil.backbones.vit import Backbone
from made_up_pictures import write_folders
from tiny_world import make_vit

NAMES = ("deit_tiny_patch16_224", "vit_tiny_patch16_224", "vit_small_patch16_224")


@pytest.mark.parametrize("changes", [{}, {"depth": 3, "num_heads": 4}, {"img_size": 24, "mlp_ratio": 2.0}])
def test_it_computes_what_timm_does_bit_by_bit(changes, tmp_path):
    vit = make_vit(strong=True, **changes).eval()
    shape = shape_of(vit)
    file = tmp_path / "weights.safetensors"
    save_file(vit.state_dict(), file)
    images = torch.randn(3, 3, shape.img_size, shape.img_size)
    with torch.no_grad():
        plain = vit.forward_head(vit.forward_features(images), pre_logits=True)  # timm's own way through it
    theirs, ours = Backbone(vit, "tiny"), plain_backbone("tiny", shape, file)
    assert ours.hash == theirs.hash and list(ours.vit.state_dict()) == list(theirs.vit.state_dict())
    lora = initial_lora(ours.depth, ours.dim, 2, 2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
        assert torch.equal(ours(images, lora), theirs(images, lora))
        torch.testing.assert_close(ours(images), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_shape_of_published_vits(name):
    with torch.device("meta"):
        vit = timm.create_model(name, num_classes=0)
    shape = shape_of(vit)
    assert (shape.embed_dim, shape.depth, shape.num_heads) == (vit.embed_dim, 12, vit.blocks[0].attn.num_heads)
    assert shape.mlp_dim == 4 * vit.embed_dim and shape.img_size == 224


@pytest.mark.parametrize(
    "name", ["vit_small_patch14_dinov2", "vit_base_patch16_clip_quickgelu_224", "vit_tiny_patch16_siglip_gap_224"]
)
def test_less_plain_ones_are_left_to_timm(name):
    found = timm.list_models(name)
    if not found:
        name = next(other for other in timm.list_models("vit_*siglip_gap*"))
    with torch.device("meta"):
        assert shape_of(timm.create_model(name, num_classes=0)) is None


def test_changes_that_no_tensor_shows_are_noticed():
    assert shape_of(make_vit()) is not None
    for change in (dict(global_pool="avg", fc_norm=False), dict(act_layer="gelu_tanh"), dict(act_layer="relu")):
        assert shape_of(make_vit(**change)) is None
    with pytest.raises(TypeError):
        PlainShape(16)


def test_recognising_imports_no_timm(tmp_path):
    """Neither the package's own backbone nor a plain one of timm's that is fitted by name."""
    from fscil.teachable.estimator import FewShotClassifier

    base = write_folders(tmp_path / "base", range(2), 3)
    with torch.random.fork_rng():
        vit = timm.create_model("deit_tiny_patch16_224", num_classes=0)
    save_file(vit.state_dict(), tmp_path / "deit.safetensors")
    expected = {}
    for backbone, weights in (("glyph_vit_a", None), ("deit_tiny_patch16_224.fb_in1k", tmp_path / "deit.safetensors")):
        with pytest.warns(UserWarning, match="stays as it is"):
            clf = FewShotClassifier(backbone=backbone, weights=weights, device="cpu").fit(base)
        clf.save(tmp_path / backbone)
        expected[backbone] = clf.predict_proba([next(base.rglob("*.png"))]).tolist()
    code = """
import json, sys
from fscil.teachable.model import Teachable
picture, *models = sys.argv[1:]
found = [Teachable.load(model, device="cpu").predict_proba([picture]).tolist() for model in models]
print(json.dumps([found, sorted({"timm", "torchvision", "sklearn", "torch._dynamo"} & set(sys.modules))]))
"""
    arguments = [str(next(base.rglob("*.png"))), *(str(tmp_path / name) for name in expected)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    found, imported = json.loads(done.stdout)
    assert found == list(expected.values())  # the same bits
    assert imported == []
