"""The built-in benchmark: characters of many scripts, drawn from the fonts that matplotlib ships.

An image is made in two steps. `glyph_masks` draws every character in every font that really has it (Pillow, once,
tight crop, same scale); `compose` turns masks into pictures: affine and elastic deformation, colours, textured
background, distractor strokes, blur, noise. `compose` is batched torch code that takes all its randomness as an
argument, so the benchmark draws it from NumPy generators keyed by (seed, class, image) and is the same on every
machine, while pretraining draws it on the GPU, a fresh picture every step.

The classes are frozen in `glyph_classes.json`; `scripts/select_glyphs.py` says how they were chosen.

Example:
    >>> images, labels, names = glyph_images("benchmark", "test")
    >>> images.shape, names[labels[0]]
    ((6000, 48, 48, 3), 'U+A786 LATIN CAPITAL LETTER INSULAR T')
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import unicodedata
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fscil.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from PIL.ImageFont import FreeTypeFont

RENDERER_VERSION = 1  # part of the cache key: raise it whenever the same arguments give other pixels
IMAGE_SIZE = 48
MASK_SIZE = 48
MASK_INK = 40  # longest side of a character's ink inside its mask
BASE_CLASSES = 60
PER_CLASS = {"train": 50, "test": 60}

TEXT_FONTS = (
    "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSans-BoldOblique "
    "DejaVuSansMono DejaVuSansMono-Bold DejaVuSansMono-Oblique DejaVuSansMono-BoldOblique "
    "DejaVuSerif DejaVuSerif-Bold DejaVuSerif-Italic DejaVuSerif-BoldItalic "
    "STIXGeneral STIXGeneralBol STIXGeneralItalic STIXGeneralBolIta"
).split()
ASCII_FONTS = "cmr10 cmb10 cmss10 cmti10 cmtt10".split()  # outside ASCII their character maps are TeX's own
FONTS = (*TEXT_FONTS, *ASCII_FONTS)


@dataclass(frozen=True)
class Nuisance:
    """How hard the pictures are. A pair is the range of a uniform draw per image, a number its upper end (from 0)."""

    size: tuple[float, float] = (0.5, 0.85)  # longest side of the ink, as a share of the picture
    rotation: float = 20.0  # degrees, either way
    shear: float = 0.25  # either way
    stretch: float = 0.2  # log of the aspect ratio, either way
    shift: float = 0.10  # of the picture, either way
    elastic: float = 0.05  # of the picture, amplitude of the smooth deformation
    weight: float = 0.15  # thinner or bolder strokes: shift of the mask's threshold
    contrast: tuple[float, float] = (0.15, 0.55)  # grey-level distance of character and background
    tint: float = 0.35  # colour of character and background around their grey level
    texture: float = 0.25  # amplitude of the background's smooth blotches, gradient and stripes
    strokes: int = 4  # distractor strokes, half behind and half across the character
    blur: float = 0.8  # share of the blurred picture mixed in
    noise: float = 0.12  # standard deviation of the pixel noise


# Difficulty of the benchmark and of the pictures its backbones are pretrained on (milder, another domain).
NUISANCE = {
    "benchmark": Nuisance(),
    "pretrain": Nuisance(
        rotation=12.0,
        shear=0.15,
        elastic=0.03,
        contrast=(0.3, 0.75),
        texture=0.15,
        strokes=2,
        blur=0.5,
        noise=0.06,
    ),
}

_FIELDS = 4 * 4 * 2 + 6 * 6 * 3  # coarse random fields: elastic displacement and background blotches
MAX_STROKES = 8
_SCALARS = 32 + 8 * MAX_STROKES
DRAWS = _SCALARS + _FIELDS  # uniform numbers per picture, besides the pixel noise


@functools.cache
def glyph_classes() -> dict[str, list[dict[str, Any]]]:
    """The frozen classes: {"benchmark": [{"code": 1046, "fonts": [...]}, ...], "pretrain": [...]}."""
    classes: dict[str, list[dict[str, Any]]] = json.loads(
        (Path(__file__).parent / "glyph_classes.json").read_text(encoding="utf-8")
    )
    return classes


def class_name(code: int) -> str:
    """Readable class name, like `U+0416 CYRILLIC CAPITAL LETTER ZHE`."""
    return f"U+{code:04X} {unicodedata.name(chr(code))}"


def font_path(name: str) -> Path:
    """File of a font that matplotlib ships, found without importing matplotlib."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise UserError("the glyphs benchmark draws with matplotlib's fonts: pip install matplotlib")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / f"{name}.ttf"


@functools.cache
def _load_font(name: str, size: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(str(font_path(name)), size, layout_engine=ImageFont.Layout.BASIC)


def glyph_mask(code: int, font: str) -> np.ndarray:
    """One character as uint8 (MASK_SIZE, MASK_SIZE): ink 255, cropped tight, longest side MASK_INK, centred.

    A blank character gives an all-zero mask.
    """
    from PIL import Image, ImageDraw

    from fscil.data.decode import resized

    typeface, text = _load_font(font, 96), chr(code)
    left, top, right, bottom = cast("tuple[int, int, int, int]", typeface.getbbox(text))
    canvas = Image.new("L", (max(right - left, 1) + 8, max(bottom - top, 1) + 8))
    ImageDraw.Draw(canvas).text((4 - left, 4 - top), text, font=typeface, fill=255)
    mask = Image.new("L", (MASK_SIZE, MASK_SIZE))
    box = canvas.getbbox()
    if box is None:
        return np.asarray(mask)
    ink = canvas.crop(box)
    scale = MASK_INK / max(ink.size)
    width, height = (max(round(side * scale), 1) for side in ink.size)
    mask.paste(resized(ink, width, height), ((MASK_SIZE - width) // 2, (MASK_SIZE - height) // 2))
    return np.asarray(mask)


def glyph_masks(classes: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """All masks of classes, one after the other: uint8 (G, MASK_SIZE, MASK_SIZE), and whose each is, int64 (G,)."""
    masks = [glyph_mask(entry["code"], font) for entry in classes for font in entry["fonts"]]
    owner = np.repeat(np.arange(len(classes)), [len(entry["fonts"]) for entry in classes])
    return np.stack(masks), owner


def compose(masks: torch.Tensor, draws: torch.Tensor, noise: torch.Tensor, nuisance: Nuisance) -> torch.Tensor:
    """Pictures float32 (B, 3, 48, 48) in [0, 1] from masks (B, 48, 48) in [0, 1], uniform draws (B, DRAWS) and
    standard normal noise (B, 3, 48, 48). Every picture depends on its own row alone."""
    import torch
    import torch.nn.functional as F

    count, size = len(masks), IMAGE_SIZE
    scalars, fields = draws.split([_SCALARS, _FIELDS], dim=1)
    columns = iter(scalars.unbind(1))

    def uniform(low: float, high: float) -> torch.Tensor:  # (B, 1, 1)
        drawn: torch.Tensor = low + (high - low) * next(columns)
        return drawn[:, None, None]

    def either(limit: float) -> torch.Tensor:
        return uniform(-limit, limit)

    def smooth(field: torch.Tensor) -> torch.Tensor:  # coarse (B, C, k, k) in [0, 1) -> (B, C, 48, 48) in [-1, 1]
        return F.interpolate(2 * field - 1, size=(size, size), mode="bicubic", align_corners=True)

    axis = (torch.arange(size, device=masks.device, dtype=masks.dtype) + 0.5) * 2 / size - 1
    y, x = axis[:, None].expand(1, size, size), axis[None, :].expand(1, size, size)  # picture is [-1, 1] squared

    # Where does each pixel come from in the mask? Inverse of: stretch, shear, rotate, scale, shift, deform.
    warp = smooth(fields[:, :32].reshape(count, 2, 4, 4)) * (2 * nuisance.elastic)
    u, v = x - either(2 * nuisance.shift) + warp[:, 0], y - either(2 * nuisance.shift) + warp[:, 1]
    angle, shear, stretch = either(np.deg2rad(nuisance.rotation)), either(nuisance.shear), either(nuisance.stretch)
    zoom = uniform(*nuisance.size) * (MASK_SIZE / MASK_INK)
    u, v = (u * angle.cos() + v * angle.sin()) / zoom, (v * angle.cos() - u * angle.sin()) / zoom
    grid = torch.stack([(u - shear * v) * (stretch / 2).exp(), v * (-stretch / 2).exp()], dim=-1)
    ink = F.grid_sample(masks[:, None], grid, mode="bilinear", padding_mode="zeros", align_corners=False)[:, 0]
    ink = ((ink - 0.5 + either(nuisance.weight)) * 1.6 + 0.5).clamp(0, 1)

    # Colours: a grey level for the background, the character lighter or darker by the contrast, both tinted.
    contrast = uniform(*nuisance.contrast)
    paper = uniform(0.0, 1.0) * (1 - contrast)
    flip = uniform(0.0, 1.0) < 0.5
    paper, pen = torch.where(flip, paper + contrast, paper), torch.where(flip, paper, paper + contrast)

    def colour(grey: torch.Tensor, tint: float) -> torch.Tensor:  # (B, 3, 1, 1), mean over channels = grey
        offset = torch.stack([either(tint / 2) for _ in range(3)], dim=1)
        return grey[:, None] + offset - offset.mean(dim=1, keepdim=True)

    background, foreground = colour(paper, nuisance.tint), colour(pen, nuisance.tint)

    # Background: blotches, a gradient and stripes.
    direction, frequency, phase = uniform(0, 2 * np.pi), uniform(2.0, 14.0), uniform(0, 2 * np.pi)
    along = x * direction.cos() + y * direction.sin()
    stripes = (along * frequency + phase).sin() * uniform(0, nuisance.texture / 2)
    gradient = along * either(nuisance.texture / 2)
    blotches = smooth(fields[:, 32:].reshape(count, 3, 6, 6)) * uniform(0, nuisance.texture)[:, None]
    picture = background + blotches + (stripes + gradient)[:, None]

    # Distractor strokes: segments with soft edges, grey level anywhere between paper and pen and a little beyond.
    def add_strokes(picture: torch.Tensor, strokes: int) -> torch.Tensor:
        for _ in range(strokes):
            x0, y0, turn, length = uniform(-1, 1), uniform(-1, 1), uniform(0, 2 * np.pi), uniform(0.3, 1.4)
            width, shade, shown = uniform(0.02, 0.09), uniform(-0.2, 1.2), uniform(0, 1) < 0.6
            dx, dy = turn.cos(), turn.sin()
            t = ((x - x0) * dx + (y - y0) * dy).minimum(length).clamp(min=0)
            distance = ((x - x0 - t * dx) ** 2 + (y - y0 - t * dy) ** 2).sqrt()
            alpha = (((width - distance) * (size / 2) + 0.5).clamp(0, 1) * shown)[:, None]
            picture = torch.lerp(picture, background + shade[:, None] * (foreground - background), alpha)
        return picture

    picture = add_strokes(picture, nuisance.strokes - nuisance.strokes // 2)
    picture = torch.lerp(picture, foreground + 0.3 * blotches, ink[:, None])
    picture = add_strokes(picture, nuisance.strokes // 2)

    kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=masks.device, dtype=masks.dtype) / 16  # sigma 1
    padded = F.pad(picture, (2, 2, 2, 2), mode="replicate").flatten(0, 1)[:, None]
    blurred = F.conv2d(F.conv2d(padded, kernel.view(1, 1, 1, 5)), kernel.view(1, 1, 5, 1)).view_as(picture)
    picture = torch.lerp(picture, blurred, uniform(0, nuisance.blur)[:, None])
    return (picture + noise * uniform(0, nuisance.noise)[:, None]).clamp(0, 1)


def render(
    classes: list[dict[str, Any]], split: str, seed: int, per_class: int, nuisance: Nuisance
) -> tuple[np.ndarray, np.ndarray]:
    """Draw some classes: uint8 images (N, 48, 48, 3), class after class, and int64 labels (N,)."""
    import torch

    masks, owner = glyph_masks(classes)
    first = np.searchsorted(owner, np.arange(len(classes)))
    split_number = list(PER_CLASS).index(split)
    images = np.empty((len(classes) * per_class, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for label, entry in enumerate(classes):
        picks = np.empty(per_class, dtype=np.int64)
        draws = np.empty((per_class, DRAWS), dtype=np.float32)
        noise = np.empty((per_class, 3, IMAGE_SIZE, IMAGE_SIZE), dtype=np.float32)
        for i in range(per_class):
            rng = np.random.default_rng([RENDERER_VERSION, seed, split_number, entry["code"], i])
            picks[i] = first[label] + rng.integers(len(entry["fonts"]))
            rng.random(dtype=np.float32, out=draws[i])
            rng.standard_normal(dtype=np.float32, out=noise[i])
        ink = torch.from_numpy(masks[picks]).float() / 255
        pictures = compose(ink, torch.from_numpy(draws), torch.from_numpy(noise), nuisance)
        block = (pictures * 255).round().byte().permute(0, 2, 3, 1)
        images[label * per_class : (label + 1) * per_class] = block.numpy()
    return images, np.repeat(np.arange(len(classes)), per_class)


def glyph_images(
    part: str, split: str, seed: int = 0, per_class: int | None = None, cache: Path | None = None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images uint8 (N, 48, 48, 3), labels int64 (N,) and class names of the built-in benchmark or its pretraining set.

    Arguments:
        part: `benchmark` (100 classes) or `pretrain` (classes that share nothing with them).
        split: `train` or `test`.
        per_class: images per class; None gives 50 for training and 60 for testing. More images extend the same list.
        cache: folder for the drawn images; None means $FSCIL_CACHE, else `fscil` in the user's cache folder.
    """
    from safetensors.numpy import load, save

    from fscil.data import cache_dir
    from fscil.files import atomic_write

    for argument, value, choices in (("part", part, NUISANCE), ("split", split, PER_CLASS)):
        if value not in choices:
            raise UserError(f'{argument}="{value}" is not one of {", ".join(choices)}.{nearest(value, choices)}')
    per_class = PER_CLASS[split] if per_class is None else per_class
    if per_class < 1 or seed < 0:
        raise UserError(f"per_class={per_class} must be at least 1 and seed={seed} at least 0")
    classes = glyph_classes()[part]
    recipe = {
        "renderer": RENDERER_VERSION,
        "libraries": [metadata.version(name) for name in ("matplotlib", "pillow")],  # the fonts and who draws them
        "nuisance": asdict(NUISANCE[part]),
        "classes": classes,
        "request": [part, split, seed, per_class],
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:20]
    path = (cache or cache_dir()) / "glyphs" / f"{part}-{split}-{key}.safetensors"
    try:
        kept = load(path.read_bytes())
        images, labels = kept["images"], kept["labels"]
    except Exception:  # absent or damaged: draw again
        images, labels = render(classes, split, seed, per_class, NUISANCE[part])
        atomic_write(path, save({"images": images, "labels": labels}))
    return images, labels, [class_name(entry["code"]) for entry in classes]
