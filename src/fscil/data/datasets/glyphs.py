"""The built-in benchmark: 100 characters that the package draws itself."""

from __future__ import annotations

from fscil.config import DataConfig
from fscil.data import cache_dir
from fscil.data.datasets.common import Dataset, array_dataset, no_split_choice
from fscil.data.manifests import TEST, TRAIN, manifest_of_lists


def glyphs(config: DataConfig) -> Dataset:
    """The built-in benchmark: 100 characters, drawn and cached on first use."""
    from fscil.data.glyphs import RENDERER_VERSION, glyph_images

    no_split_choice("glyphs", config)
    drawn = {split: glyph_images("benchmark", split, cache=cache_dir()) for split in (TRAIN, TEST)}
    pairs = [enumerate(drawn[split][1].tolist()) for split in (TRAIN, TEST)]
    manifest = manifest_of_lists("glyphs", f"drawn-{RENDERER_VERSION}", drawn[TRAIN][2], *pairs)
    return array_dataset(manifest, {split: drawn[split][0] for split in drawn}, base=60, way=5)
