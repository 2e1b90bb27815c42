"""Where the backbone's weights of a saved model are, by its head alone, before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

from fscil.errors import UserError
from fscil.files import check_header, digest_file
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


def check_named_weights(path: Path, wanted: str | None) -> None:
    """Refuses a file that a model names as its weights unless it is the one the model was fitted on.

    A model may come from anyone, and so may the path in it: nothing but a regular safetensors file with the SHA-256
    that the model has written down is opened. Models of version 0.1 have none; the backbone's own hash, which is
    compared once the file is read, decides there.
    """
    try:
        check_header(path)
        found = digest_file(path) if wanted is not None else None
    except (UserError, OSError) as error:
        raise UserError(f"the model names weights that cannot be used: {error}; pass --weights FILE.") from error
    if found != wanted:
        raise UserError(f'the weights "{path}" are not those the model was fitted on; pass these with --weights FILE.')


def fetched_weights(name: str) -> Path | None:
    """The file that the Hugging Face hub's cache has of a backbone of timm's, if it does."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(f"timm/{name}", "model.safetensors")
    return Path(found) if isinstance(found, str) else None
