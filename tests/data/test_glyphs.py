"""The built-in benchmark: reproducible, no class twice, no character that its font lacks, no two that look alike."""

import itertools
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from fscil.data import glyphs
from fscil.errors import UserError

CLASSES = glyphs.glyph_classes()
EVERY = CLASSES["benchmark"] + CLASSES["pretrain"]
PARTS = ("benchmark", "pretrain")


def draw(part, split, seed, per_class):
    return glyphs.render(glyphs.glyph_classes()[part], split, seed, per_class, glyphs.NUISANCE[part])


@pytest.fixture
def few_classes(monkeypatch):
    """Five classes per part, so that drawing is quick; each picture depends on its class and number alone."""
    few = {part: CLASSES[part][:5] for part in PARTS}
    monkeypatch.setattr(glyphs, "glyph_classes", lambda: few)


def test_the_frozen_classes_are_enough_and_disjoint():
    codes = {part: [entry["code"] for entry in CLASSES[part]] for part in PARTS}
    assert len(codes["benchmark"]) == 100
    assert len(codes["pretrain"]) >= 150
    together = codes["benchmark"] + codes["pretrain"]
    assert len(set(together)) == len(together)
    assert len({glyphs.class_name(code) for code in together}) == len(together)
    assert glyphs.PER_CLASS["test"] >= 50 and glyphs.PER_CLASS["train"] >= 20
    assert glyphs.class_name(0x416) == "U+0416 CYRILLIC CAPITAL LETTER ZHE"


def test_no_class_is_another_in_other_case_or_normal_form():
    """Upper and lower case of one letter may both be classes only if no two share a compatibility form."""
    forms = [unicodedata.normalize("NFKC", chr(entry["code"])) for entry in EVERY]
    assert len(set(forms)) == len(forms)


def test_every_font_has_its_characters():
    maps = {font: set(TTFont(glyphs.font_path(font)).getBestCmap()) for font in glyphs.FONTS}
    for entry in EVERY:
        assert len(set(entry["fonts"])) == len(entry["fonts"]) >= 4
        for font in entry["fonts"]:
            assert entry["code"] in maps[font], f"{font} lacks {glyphs.class_name(entry['code'])}"


def test_no_blank_and_no_placeholder_drawing():
    for font in glyphs.FONTS:
        placeholder = glyphs.glyph_mask(0x10FFFF, font)  # not a character: what the font shows for one it lacks
        for entry in EVERY:
            if font in entry["fonts"]:
                mask = glyphs.glyph_mask(entry["code"], font)
                assert (mask > 127).sum() >= 60, f"{glyphs.class_name(entry['code'])} is blank in {font}"
                assert (mask != placeholder).any()


def draw_binary(code: int, font: str, side: int = 32) -> np.ndarray:
    """A character as bool (side, side), drawn by Pillow alone: tight crop, longest side fills the square."""
    typeface = ImageFont.truetype(str(glyphs.font_path(font)), 120)
    canvas = Image.new("L", (400, 400))
    ImageDraw.Draw(canvas).text((200, 200), chr(code), font=typeface, fill=255, anchor="mm" if code < 0x80 else None)
    return normalise(canvas, side)


def normalise(canvas: Image.Image, side: int) -> np.ndarray:
    ink = canvas.crop(canvas.getbbox())
    scale = side / max(ink.size)
    ink = ink.resize(tuple(max(round(length * scale), 1) for length in ink.size), Image.Resampling.BOX)
    square = Image.new("L", (side, side))
    square.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return np.asarray(square) > 100


def all_poses(drawing: np.ndarray) -> list[np.ndarray]:
    """The eight flips and quarter turns, each also tilted by 10 degrees either way."""
    side = len(drawing)
    padded = Image.fromarray(np.pad(drawing, side // 2).astype(np.uint8) * 255)
    tilted = [
        normalise(padded.rotate(angle, Image.Resampling.BILINEAR), side) if angle else drawing for angle in (-10, 0, 10)
    ]
    return [np.rot90(pose, turn)[:, ::step] for pose in tilted for turn in range(4) for step in (1, -1)]


def highest_overlap(codes: list[int], font: str) -> np.ndarray:
    """(n, n): intersection over union of two characters' ink, the best over all poses of the first and shifts by a
    pixel (a flip of an odd box moves it by one, which alone would hide thin strokes' overlap)."""
    drawn = [draw_binary(code, font) for code in codes]
    flat = np.stack([np.pad(drawing, 1).ravel() for drawing in drawn]).astype(np.float32)
    posed = np.stack([[np.pad(pose, 1) for pose in all_poses(drawing)] for drawing in drawn])
    best = np.zeros((len(codes), len(codes)), dtype=np.float32)
    for pose, down, right in itertools.product(range(posed.shape[1]), (-1, 0, 1), (-1, 0, 1)):
        turned = np.roll(posed[:, pose], (down, right), axis=(1, 2)).reshape(len(codes), -1).astype(np.float32)
        shared = turned @ flat.T
        best = np.maximum(best, shared / (turned.sum(1)[:, None] + flat.sum(1) - shared))
    best = np.maximum(best, best.T)
    np.fill_diagonal(best, 0)
    return best


LOOKS_ALIKE = 0.75  # intersection over union; every pair of TWINS lies above
TWINS = ["AА", "OΟ", "oO", "sS", "bd", "pq", "bq", "69", "nu", "<>", "→↑", "⊂⊃", "∧∨", "xX", "zZ", "ϽC"]


@pytest.mark.parametrize("pair", TWINS)
def test_the_comparison_knows_twins(pair):
    """The measure used below calls homoglyphs, case pairs, mirror images and turned characters alike."""
    assert highest_overlap([ord(c) for c in pair], "DejaVuSans")[0, 1] > LOOKS_ALIKE


@pytest.mark.parametrize("font", glyphs.FONTS)
def test_no_two_classes_look_alike(font):
    """Every pair of classes that share a font, pretraining included."""
    codes = [entry["code"] for entry in EVERY if font in entry["fonts"]]
    overlap = highest_overlap(codes, font)
    alike = [
        f"{glyphs.class_name(codes[i])} / {glyphs.class_name(codes[j])}: {overlap[i, j]:.2f}"
        for i, j in itertools.combinations(range(len(codes)), 2)
        if overlap[i, j] > LOOKS_ALIKE
    ]
    assert not alike, "\n".join(alike)


@pytest.mark.usefixtures("few_classes")
def test_a_seed_fixes_every_byte():
    first, labels = draw("benchmark", "train", 0, 4)
    again, _ = draw("benchmark", "train", 0, 4)
    other, _ = draw("benchmark", "train", 1, 4)
    assert first.shape == (20, 48, 48, 3) and first.dtype == np.uint8
    assert labels.tolist() == [c for c in range(5) for _ in range(4)]
    np.testing.assert_array_equal(first, again)
    assert all((a != b).mean() > 0.5 for a, b in zip(first, other))


@pytest.mark.usefixtures("few_classes")
def test_more_images_extend_the_same_list():
    few, _ = draw("benchmark", "test", 0, 2)
    more, _ = draw("benchmark", "test", 0, 5)
    close = np.abs(few.reshape(5, 2, -1).astype(int) - more.reshape(5, 5, -1)[:, :2].astype(int))
    assert close.max() <= 1  # batched arithmetic may round a level apart


@pytest.mark.usefixtures("few_classes")
def test_no_picture_is_in_two_places():
    pictures = [draw(part, split, 0, 5)[0] for part, split in itertools.product(PARTS, ("train", "test"))]
    together = np.concatenate(pictures).reshape(100, -1)
    assert len(np.unique(together, axis=0)) == 100


@pytest.mark.usefixtures("few_classes")
def test_a_plain_picture_shows_its_character():
    """Without nuisance the picture is the mask, scaled: same ink as an independent resize by Pillow."""
    import torch

    plain = glyphs.Nuisance((0.8, 0.8), 0, 0, 0, 0, 0, 0, (0.8, 0.8), 0, 0, 0, 0, 0)
    masks, _ = glyphs.glyph_masks(glyphs.glyph_classes()["benchmark"])
    ink = torch.from_numpy(masks[:12].copy()).float() / 255
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(12, glyphs.DRAWS, generator=generator)
    pictures = glyphs.compose(ink, draws, torch.zeros(12, 3, 48, 48), plain)
    for mask, picture in zip(masks, pictures):
        side = round(48 * 0.8 * 48 / 40)  # the mask's own side in the picture
        scaled = np.asarray(Image.fromarray(mask).resize((side, side), Image.Resampling.BILINEAR)) / 255
        expected = np.zeros((48, 48))
        start = (48 - side) // 2
        expected[start : start + side, start : start + side] = scaled
        seen = np.abs(picture[0].numpy() - picture[0, 0, 0].item()) / 0.8
        assert np.corrcoef(seen.ravel(), expected.ravel())[0, 1] > 0.95


@pytest.mark.usefixtures("few_classes")
def test_the_cache_gives_back_the_same_and_heals(tmp_path, monkeypatch):
    images, labels, names = glyphs.glyph_images("benchmark", "test", per_class=3, cache=tmp_path)
    (kept,) = (tmp_path / "glyphs").iterdir()
    drawn = []
    real = glyphs.render
    monkeypatch.setattr(glyphs, "render", lambda *arguments: drawn.append(1) or real(*arguments))
    for _ in range(2):
        again = glyphs.glyph_images("benchmark", "test", per_class=3, cache=tmp_path)
        np.testing.assert_array_equal(again[0], images)
        np.testing.assert_array_equal(again[1], labels)
        assert again[2] == names and names[0].startswith("U+")
    assert not drawn
    kept.write_bytes(kept.read_bytes()[:1000])  # a damaged file is drawn again, not believed
    np.testing.assert_array_equal(glyphs.glyph_images("benchmark", "test", per_class=3, cache=tmp_path)[0], images)
    assert drawn == [1]
    monkeypatch.setattr(glyphs, "RENDERER_VERSION", glyphs.RENDERER_VERSION + 1)
    glyphs.glyph_images("benchmark", "test", per_class=3, cache=tmp_path)
    assert drawn == [1, 1] and len(list((tmp_path / "glyphs").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("bench", "test"), "benchmark"), (("benchmark", "tset"), "test"), (("benchmark", "test", -1), "seed")],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        glyphs.glyph_images(*arguments)


def test_further_letters_are_none_of_ours_and_every_font_has_them(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from further_glyphs import choose

    letters = choose(0) + choose(80)
    codes = {entry["code"] for entry in letters}
    assert len(letters) == len(codes) == 160
    assert codes.isdisjoint(entry["code"] for entry in EVERY)
    maps = {font: TTFont(glyphs.font_path(font)).getBestCmap() for font in glyphs.FONTS}
    assert all(entry["code"] in maps[font] for entry in letters for font in entry["fonts"])
