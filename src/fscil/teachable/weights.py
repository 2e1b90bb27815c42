"""Where the backbone's weights of a saved model are, by its head alone, before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

from fscil.errors import UserError
from fscil.registry import SHIPPED_BACKBONES
from fscil.teachable.folder import BACKBONE, Head, ModelFolder


def find_weights(folder: ModelFolder, head: Head, given: str | os.PathLike | None = None) -> Path | None:
    """The file with the weights: the one given, the embedded one, or the one the model was fitted with.

    None: those that ship with the package, or those published under the backbone's name. A file that is neither where
    it was nor was ever fetched by name is an error that says where it was.
    """
    chosen = head.config["backbone"]
    if given is not None:
        if not Path(given).expanduser().is_file():
            raise UserError(f'--weights "{given}" does not exist.')
        return Path(given).expanduser()
    if chosen["embedded"]:
        return folder.path / BACKBONE
    if chosen["weights"] and Path(chosen["weights"]).is_file():
        return Path(chosen["weights"])
    if chosen["weights"] and chosen["name"] not in SHIPPED_BACKBONES and fetched_weights(chosen["name"]) is None:
        raise UserError(
            f'the weights of backbone "{chosen["name"]}" that model "{folder.path}" was fitted on were in '
            f'"{chosen["weights"]}", which is not there any more; say where they are with --weights FILE.'
        )
    return None


def fetched_weights(name: str) -> Path | None:
    """The file that the Hugging Face hub's cache has of a backbone of timm's, if it does."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(f"timm/{name}", "model.safetensors")
    return Path(found) if isinstance(found, str) else None
