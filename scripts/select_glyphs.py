"""Choose the classes of the glyphs benchmark: characters of which no two look alike, and write them to the package.

Every character that enough of matplotlib's fonts really have is drawn in each of them, cropped tight and brought to
the same scale. A character is taken if no character taken before resembles it in any pair of fonts, at any of 24
rotations, mirrored or not. Two drawings resemble each other if, slightly blurred, they correlate too highly, or if
nearly all ink of each lies within a pixel of the other's ink (which also catches thin outlines).

    python scripts/select_glyphs.py --sheet sheet.png      # a few minutes on one core; writes glyph_classes.json
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fontTools.ttLib import TTFont
from PIL import Image

import fscil
from fscil.data.glyphs import ASCII_FONTS, FONTS, MASK_INK, font_path, glyph_mask

SIDE = 24  # side of the drawings compared
MIN_FONTS = 4
MAX_CORRELATION = 0.895
MAX_OVERLAP = 0.975  # share of the ink within a pixel of the other's, the smaller of the two directions
ASPECT_TOLERANCE = 0.4  # drawings whose log aspect ratios differ less are compared stretched to a square, too
BENCHMARK = 100
SEED = 7
CATEGORIES = {"Lu", "Ll", "Lo", "Nd", "Sm", "So", "Sc", "Po"}
# Blocks that hold one shape in many arrangements (dots, lines, tiles), or other blocks' letters in another style.
SKIPPED_BLOCKS = (
    (0x2500, 0x259F),  # box drawing and blocks
    (0x2800, 0x28FF),  # Braille
    (0x268A, 0x268F),  # monograms, digrams
    (0x2630, 0x2637),  # trigrams
    (0x2680, 0x2685),  # dice
    (0x4DC0, 0x4DFF),  # hexagrams
    (0xFB1D, 0xFDFF),  # presentation forms
    (0xFE70, 0xFEFF),
    (0x1D300, 0x1D7FF),  # tetragrams, mathematical alphabets
    (0x1F030, 0x1F0FF),  # dominoes, playing cards
    (0x1F600, 0x1F64F),  # faces
    (0x1400, 0x167F),  # Canadian syllabics: turned and dotted copies of a few shapes
    (0xA4D0, 0xA4FF),  # Lisu: turned Latin capitals
    (0x2056, 0x205E),  # dot punctuation
    (0x2234, 0x223B),  # dots and lines
    (0x22EE, 0x22F1),
    (0x2336, 0x2395),  # APL
    (0x25F0, 0x25F7),  # quadrants
    (0x2673, 0x267D),  # recycling symbols
    (0x2794, 0x27BE),  # shaded and shadowed arrows
    (0x2900, 0x2BFF),  # supplemental arrows and operators
)
# Letters made from another letter.
SKIPPED_WORDS = ("WITH", "SMALL CAPITAL", "TURNED", "REVERSED", "SIDEWAYS")
# Left out after looking at the drawings: outline or filled twins, variants of a character that stays, slivers.
SKIPPED = {
    int(code, 16)
    for code in """
    014A 0189 021C 0296 0370 0376 03DA 043A 0475 050A 056F 05E0 0609 060A 0631 0664 0E87 10A5 10BE 10C4 2030 2031
    2035 2036 224E 224F 228A 228B 228F 2299 229A 22C6 2306 2314 25AF 25D5 25E0 2606 2609 2614 2624 2629 265D 2690
    2695 26A3 26A4 26A7 26A8 26A9 2701 2703 2704 2719 2727 2729 2736 2740 2D06 2D13 2D18 A656 10302
    """.split()
}
# Taken out of the choice at the end: alike to the eye, though not to the measures.
REMOVED = {
    int(code, 16)
    for code in """
    0185 01A7 02A4 0435 0452 0463 046D 04A1 006B 06A4 06F6 1D16 21C7 21EC 21EE 2222 22E8 22F5 25ED 25F8 2612 263C
    26C1 2730 27E0 A667 A73D 1030B 10316 1031D 05E4 2258 25CE 25D4 25EB 260C A726 10BF 2717
    """.split()
}


def candidates() -> dict[int, list[str]]:
    """Code -> fonts that have it, for characters that could be classes."""
    fonts_of: dict[int, list[str]] = {}
    for font in FONTS:
        for code in TTFont(font_path(font)).getBestCmap():
            if font not in ASCII_FONTS or code < 0x80:
                fonts_of.setdefault(code, []).append(font)

    def eligible(code: int, fonts: list[str]) -> bool:
        character = chr(code)
        return (
            len(fonts) >= MIN_FONTS
            and unicodedata.category(character) in CATEGORIES
            and not unicodedata.decomposition(character)  # accents, ligatures, circled and styled letters
            and not (character.isalpha() and any(word in unicodedata.name(character) for word in SKIPPED_WORDS))
            and not any(low <= code <= high for low, high in SKIPPED_BLOCKS)
            and code not in SKIPPED
        )

    return {code: fonts for code, fonts in sorted(fonts_of.items()) if eligible(code, fonts)}


def is_drawable(mask: np.ndarray) -> bool:
    """Neither blank nor a sliver nor a solid block: its shape can be told at any angle."""
    ys, xs = np.nonzero(mask > 127)
    if len(ys) == 0:
        return False
    height, width = np.ptp(ys) + 1, np.ptp(xs) + 1
    return min(height, width) >= 0.4 * MASK_INK and (mask > 127).sum() < 0.75 * height * width


def rotated(drawings: torch.Tensor, degrees: float) -> torch.Tensor:
    """Drawings (G, H, W) turned about their centre."""
    angle = np.deg2rad(degrees)
    turn = torch.tensor([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0]], dtype=torch.float32)
    grid = F.affine_grid(turn.expand(len(drawings), 2, 3), (len(drawings), 1, *drawings.shape[1:]), align_corners=False)
    return F.grid_sample(drawings[:, None], grid, align_corners=False)[:, 0]


def poses(drawings: torch.Tensor) -> torch.Tensor:
    """(G, H, W) -> (G, 48, H, W): every 15 degrees, and the mirror image every 15 degrees."""
    quarter = torch.stack([rotated(drawings, angle) for angle in range(0, 90, 15)], dim=1)
    turns = torch.cat([quarter.rot90(k, (2, 3)) for k in range(4)], dim=1)
    return torch.cat([turns, turns.flip(3)], dim=1)


def crops(drawings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Crop each drawing tight again (a turn changes its box) and scale to SIDE: (G, 1, SIDE, SIDE) with the aspect
    ratio kept, the same stretched to a square, and the log of the ratio (G,)."""
    big = drawings.shape[-1]
    ink, index = drawings > 0.3, torch.arange(big)
    spans = []
    for hit in (ink.any(dim=2), ink.any(dim=1)):  # rows, columns
        low, high = torch.where(hit, index, big).amin(1), torch.where(hit, index, -1).amax(1)
        spans.append(((low + high + 1) / big - 1, (high - low + 1).clamp(min=1) / big))
    (centre_y, half_y), (centre_x, half_x) = spans
    longest = torch.maximum(half_x, half_y)

    def crop(half_x: torch.Tensor, half_y: torch.Tensor) -> torch.Tensor:
        margin, zeros = SIDE / (SIDE - 4), torch.zeros_like(half_x)
        theta = torch.stack([half_x * margin, zeros, centre_x, zeros, half_y * margin, centre_y], 1).view(-1, 2, 3)
        grid = F.affine_grid(theta, (len(drawings), 1, 2 * SIDE, 2 * SIDE), align_corners=False)
        return F.avg_pool2d(F.grid_sample(drawings[:, None], grid, align_corners=False), 2)

    return crop(longest, longest), crop(half_x, half_y), (half_x / half_y).log()


def descriptors(small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For drawings (G, 1, SIDE, SIDE): blurred, centred, unit norm; ink; ink grown by a pixel. Each (G, SIDE^2)."""
    kernel = (torch.tensor([1.0, 2.0, 1.0]) / 4).view(1, 1, 1, 3)
    blurred = F.conv2d(F.conv2d(small, kernel, padding=(0, 1)), kernel.mT, padding=(1, 0)).flatten(1)
    ink = (2 * small).clamp(max=1)  # a stroke thinner than a pixel is ink as well
    grown = F.max_pool2d(ink, 3, stride=1, padding=1)
    return F.normalize(blurred - blurred.mean(1, keepdim=True), dim=1), ink.flatten(1), grown.flatten(1)


def alike(first: tuple, second: tuple) -> torch.Tensor:
    """Descriptors of G and of H drawings -> bool (G, H)."""
    correlation = first[0] @ second[0].T
    overlap = torch.minimum(
        first[1] @ second[2].T / first[1].sum(1, keepdim=True), first[2] @ second[1].T / second[1].sum(1)
    )
    return (correlation > MAX_CORRELATION) | (overlap > MAX_OVERLAP)


def select_classes() -> list[dict]:
    """The characters taken, one after the other: [{"code": ..., "fonts": [...]}, ...]."""
    rng = np.random.default_rng(SEED)
    fonts_of = candidates()
    # Letters before symbols, those that more fonts have before others, in random order among equals.
    order = sorted(fonts_of, key=lambda code: (not chr(code).isalpha(), -min(len(fonts_of[code]), 8), rng.random()))
    placeholders = [glyph_mask(0x10FFFF, font) for font in FONTS]
    taken: list[dict] = []
    known: list[tuple[torch.Tensor, ...]] = []  # per character taken: descriptors kept and stretched, log aspect
    for code in order:
        drawn = [glyph_mask(code, font) for font in fonts_of[code]]
        if not all(is_drawable(mask) for mask in drawn):
            continue
        if any((mask == placeholder).all() for mask in drawn for placeholder in placeholders):
            continue
        masks = torch.from_numpy(np.stack(drawn)).float() / 255
        kept, stretched, aspect = crops(poses(F.pad(masks, (8,) * 4)).flatten(0, 1))
        if known:
            *others, other_aspect = (torch.cat(column) for column in zip(*known, strict=True))
            if alike(descriptors(kept), others[:3]).any():
                continue
            similar_aspect = (aspect[:, None] - other_aspect).abs() < ASPECT_TOLERANCE
            if (alike(descriptors(stretched), others[3:]) & similar_aspect).any():
                continue
        taken.append({"code": code, "fonts": fonts_of[code]})
        kept, stretched, aspect = crops(masks)
        known.append((*descriptors(kept), *descriptors(stretched), aspect))
        if len(taken) % 50 == 0:
            print(f"{len(taken)} classes, U+{code:04X}", flush=True)
    return [entry for entry in taken if entry["code"] not in REMOVED]


def contact_sheet(entries: list[dict], path: Path, columns: int = 20) -> None:
    """One drawing per class (a random font of its own), rows of `columns`."""
    rng = np.random.default_rng(0)
    tiles = [255 - glyph_mask(entry["code"], rng.choice(entry["fonts"])) for entry in entries]
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    rows = [np.concatenate(tiles[i : i + columns], axis=1) for i in range(0, len(tiles), columns)]
    Image.fromarray(np.concatenate(rows)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(fscil.__file__).parent / "data" / "glyph_classes.json")
    parser.add_argument("--sheet", type=Path, help="also write a contact sheet (PNG)")
    arguments = parser.parse_args()
    taken = select_classes()
    shuffled = np.random.default_rng(SEED).permutation(len(taken))
    entries = [taken[i] for i in shuffled]
    parts = {"benchmark": entries[:BENCHMARK], "pretrain": entries[BENCHMARK:]}
    lines = [
        f' "{part}": [\n' + ",\n".join("  " + json.dumps(entry) for entry in chosen) + "\n ]"
        for part, chosen in parts.items()
    ]
    arguments.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(taken)} classes")
    if arguments.sheet:
        contact_sheet(entries, arguments.sheet)


if __name__ == "__main__":
    main()
