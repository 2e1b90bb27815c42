"""Exported models, each opened by the library it is for, give the answers of the original."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fscil.data.decode import decode_image, picture_array
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.transforms import Transform
from fscil.errors import UserError
from fscil.teachable.estimator import FewShotClassifier
from fscil.teachable.export.onnx import TOLERANCE, Features, export_onnx, scene
from fscil.teachable.export.parts import folded_weights, scorer
from fscil.teachable.export.peft import export_peft
from fscil.teachable.export.pipeline import Preparation, pillow_weights, rounded
from fscil.teachable.export.timm import export_timm
from fscil.teachable.starting import short_side
from made_up_pictures import BACKBONE, pictures

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.estimator.Notice", "ignore::DeprecationWarning")
QUERIES = pictures([*range(5), 10, 30, 31], 2, seed=1)[0]


def fitted(weights, calibration):
    options = dict(epochs=1, rank=2, features_per_class=8, calibration_batch=16, calibration_epochs=1, lr=0.1)
    clf = FewShotClassifier(
        backbone=BACKBONE, weights=weights, train="always", head=calibration, options=options, held_out=0.4
    )
    return clf.fit(*pictures(range(5), 12)).learn(*pictures([10], 4))


@pytest.fixture(scope="module")
def closed_form(weights):
    return fitted(weights, "closed_form")


@pytest.fixture(scope="module")
def mpcc(weights):
    return fitted(weights, "mpcc")


def fitted_chord(weights, head="auto", **options):
    options = dict(epochs=1, rank=2, lr=0.1) | options
    clf = FewShotClassifier(
        "chord", BACKBONE, weights=weights, train="always", head=head, options=options, held_out=0.4
    )
    return clf.fit(*pictures(range(5), 12)).learn(*pictures([10], 4))


@pytest.fixture(scope="module")
def chord(weights):
    return fitted_chord(weights)


def photos(folder):
    """Files as cameras and programs leave them: several sizes, lying on their side, grey, see-through."""
    folder.mkdir()
    rotated = Image.Exif()
    rotated[0x0112] = 6  # orientation: to be shown turned by 90 degrees
    see_through = Image.fromarray(scene(300, 500, 3)).convert("RGBA")
    see_through.putalpha(Image.fromarray(scene(300, 500, 4)).convert("L"))
    Image.fromarray(scene(480, 640, 0)).save(folder / "photo.jpg", quality=90)
    Image.fromarray(scene(480, 640, 1)).save(folder / "turned.jpg", exif=rotated, quality=90)
    Image.fromarray(scene(700, 333, 2)).convert("L").save(folder / "grey.png")
    see_through.save(folder / "see-through.png")
    Image.fromarray(scene(40, 31, 5)).save(folder / "tiny.png")
    Image.fromarray(scene(257, 1999, 6)).save(folder / "wide.webp")
    return sorted(folder.iterdir())


def test_pictures_are_prepared_as_by_predict(closed_form, tmp_path):
    for transform in (closed_form.transform_, Transform(224, resize=256), Transform(32, resize=300)):
        side = short_side(transform)
        prepare = Preparation(transform, side)
        for file in photos(tmp_path / f"{transform.resize}"):
            expected = Pixels(ImageStore.from_list([decode_image(file, short_side=side)]), transform).plain()
            found = prepare(torch.from_numpy(decode_image(file))[None])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=lambda m, f=file: f"{f.name}: {m}")


def test_the_first_step_is_pillows_bit_by_bit():
    for height, width in ((480, 640), (1001, 333), (257, 300)):
        picture = scene(height, width, 0)
        reduced = np.asarray(picture_array(Image.fromarray(picture), 256))
        levels = torch.from_numpy(picture).permute(2, 0, 1).double()
        none = torch.zeros(1, dtype=torch.float64)
        rows, columns = (
            pillow_weights(torch.tensor([float(a)]).double(), torch.tensor([float(b)]).double(), a, none, b)
            for a, b in zip((height, width), reduced.shape[:2])
        )
        found = rounded(rows @ rounded(levels @ columns.T)).permute(1, 2, 0)
        np.testing.assert_array_equal(found.numpy(), reduced)


@pytest.mark.slow
@pytest.mark.extra("export")
def test_an_export_whose_answers_differ_is_not_kept(closed_form, tmp_path):
    clf = copy.copy(closed_form)
    clf.predict_proba = lambda pictures: closed_form.predict_proba(pictures) + 0.01
    with pytest.raises(RuntimeError, match="differs from predict_proba"):
        export_onnx(clf, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_chord_in_one_pass_is_a_timm_model_where_its_scores_are_cosines(weights, chord, tmp_path):
    import timm

    with pytest.raises(UserError, match="not linear in the features.*export to onnx"):
        export_timm(chord, tmp_path / "out")
    with pytest.raises(UserError, match="3 sets of adapters.*export to onnx"):
        export_timm(fitted_chord(weights, "prototypes"), tmp_path / "out")
    cosine = fitted_chord(weights, "prototypes", form="merged")
    model = timm.create_model(f"local-dir:{export_timm(cosine, tmp_path / 'cosine')}", pretrained=True).eval()
    with torch.no_grad():
        best = model(inputs(cosine)).argmax(1)
    assert (best.numpy() == cosine.predict_proba(QUERIES).argmax(1)).all()


def test_modules_for_exports_score_as_the_heads_do(chord, closed_form, mpcc):
    for clf in (chord, closed_form, mpcc):
        features = torch.from_numpy(clf.embed(QUERIES))
        expected = clf.knowledge_.method.logits_from(features)
        torch.testing.assert_close(scorer(clf)(features.double()).float(), expected, atol=1e-2, rtol=1e-3)
    with torch.no_grad():
        found = Features(chord)(inputs(chord))
    torch.testing.assert_close(found, torch.from_numpy(chord.embed(QUERIES)), atol=1e-5, rtol=0)


def inputs(clf):
    return Pixels(ImageStore.from_list(QUERIES), clf.transform_).plain()


def test_folding_changes_the_weights_by_exactly_the_adapters(closed_form):
    plain = closed_form.backbone_.vit.state_dict()
    folded = folded_weights(closed_form)
    changed = [name for name in plain if not torch.equal(plain[name], folded[name])]
    assert changed == [f"blocks.{block}.attn.qkv.weight" for block in range(6)]
    lora = closed_form.knowledge_.method.lora
    delta = folded["blocks.2.attn.qkv.weight"] - plain["blocks.2.attn.qkv.weight"]
    expected = torch.cat([torch.zeros(128, 128), lora.B[2, 0, 0] @ lora.A[2, 0, 0], lora.B[2, 0, 1] @ lora.A[2, 0, 1]])
    torch.testing.assert_close(delta, expected, atol=1e-6, rtol=0)


def test_timm_opens_the_folder_and_agrees(closed_form, mpcc, tmp_path):
    import timm

    for clf, name in ((closed_form, "closed"), (mpcc, "mpcc")):
        model = timm.create_model(f"local-dir:{export_timm(clf, tmp_path / name)}", pretrained=True).eval()
        with torch.no_grad():
            features = model.forward_head(model.forward_features(inputs(clf)), pre_logits=True)
            logits = model(inputs(clf))
        np.testing.assert_allclose(features.numpy(), clf.embed(QUERIES), atol=1e-4)
        expected = clf.predict_proba(QUERIES)
        assert (logits.argmax(1).numpy() == expected.argmax(1)).all()
        if name == "closed":
            np.testing.assert_allclose(logits.softmax(1).numpy(), expected, atol=1e-3)
        assert model.pretrained_cfg["label_names"] == clf.classes_.tolist()
    config = timm.data.resolve_model_data_config(model)
    assert tuple(config["input_size"]) == (3, 48, 48) and tuple(config["mean"]) == (0.0, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.extra("export")
def test_peft_loads_the_adapter_onto_the_hugging_face_vit(closed_form, tmp_path):
    import peft
    import transformers
    from safetensors.torch import load_file

    folder = export_peft(closed_form, tmp_path / "adapter")
    base = transformers.ViTModel.from_pretrained(folder / "base", add_pooling_layer=False).eval()
    with torch.no_grad():
        plain = base(inputs(closed_form)).last_hidden_state[:, 0]
        expected = closed_form.backbone_(inputs(closed_form))
    torch.testing.assert_close(plain, expected, atol=1e-4, rtol=0)
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        features = model(inputs(closed_form)).last_hidden_state[:, 0]
    assert float((features - plain).abs().max()) > 1e-3  # the adapter does something
    np.testing.assert_allclose(features.numpy(), closed_form.embed(QUERIES), atol=1e-4)
    head = load_file(folder / "head.safetensors")
    probabilities = (features @ head["weight"].T + head["bias"]).softmax(1)
    np.testing.assert_allclose(probabilities.numpy(), closed_form.predict_proba(QUERIES), atol=1e-3)


def test_hugging_face_names_are_the_inverse_of_reading_them(closed_form):
    from fscil.backbones.huggingface import from_huggingface, to_huggingface

    vit = closed_form.backbone_.vit
    back = from_huggingface(to_huggingface(vit))
    assert back.keys() == vit.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in vit.state_dict().items())


@pytest.mark.slow
@pytest.mark.extra("export")
@pytest.mark.parametrize("kind", ["closed_form", "mpcc", "chord"])
def test_onnxruntime_gives_the_same_probabilities_and_unknowns(kind, request, tmp_path):
    import onnxruntime

    clf = request.getfixturevalue(kind)
    path = export_onnx(clf, tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]  # one file
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["labels"]) == clf.classes_.tolist()
    strange = np.random.default_rng(0).integers(0, 255, (2, 70, 100, 3), dtype=np.uint8)  # another size, wide
    for images in (np.stack(QUERIES), strange):
        probabilities, unknown = session.run(None, {"pictures": images})
        np.testing.assert_allclose(probabilities, clf.predict_proba(images), atol=TOLERANCE)
        assert (unknown == clf.is_unknown(images)).all()
    assert unknown.any()
    for file in photos(tmp_path / "photos"):  # files through the whole of `predict`
        probabilities, unknown = session.run(None, {"pictures": decode_image(file)[None]})
        np.testing.assert_allclose(probabilities, clf.predict_proba([file]), atol=TOLERANCE, err_msg=file.name)
        assert unknown == clf.is_unknown([file]), file.name


def test_what_cannot_be_exported_says_so(weights, closed_form, tmp_path):
    other = FewShotClassifier(
        "teen", BACKBONE, weights=weights, train="always", options={"epochs": 1}, held_out=0.0
    ).fit(*pictures(range(3), 3))
    with pytest.raises(UserError, match="method teen cannot be exported"):
        export_timm(other, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        export_timm(closed_form, tmp_path / "full")


# ---- targets of other packages ----
def export_names(clf, output):
    """What a package of somebody else might do."""
    output.write_text("\n".join(map(str, clf.classes_)))


def test_another_package_adds_a_target(closed_form, tmp_path, monkeypatch, capsys):
    from fscil import cli
    from fscil.teachable import export

    entry = export.ExportEntry(f"{__name__}:export_names", "the class names, one per line", ".txt")
    point = SimpleNamespace(name="names", load=lambda: entry)
    monkeypatch.setattr(export.metadata, "entry_points", lambda group: [point] if group == "fscil.exports" else [])
    export._third_party.cache_clear()
    try:
        closed_form.save(tmp_path / "birds", embed=True)
        for arguments, status in ((["names"], 0), (["name"], 2)):
            with pytest.raises(SystemExit) as stop:
                cli.main(["export", str(tmp_path / "birds"), "--to", *arguments])
            assert (stop.value.code or 0) == status
    finally:
        export._third_party.cache_clear()
    assert (tmp_path / "birds.txt").read_text().splitlines() == closed_form.classes_.tolist()
    said = capsys.readouterr()
    assert "wrote" in said.out and said.err.count("\n") == 1
    assert 'no export target; there are: timm, peft, onnx, names. Did you mean "names"?' in said.err
