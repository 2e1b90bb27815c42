"""Models on the Hugging Face hub: what is uploaded is the model folder and a card that says what it is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil._version import __version__
from fscil.errors import UserError
from fscil.teachable.folder import HEAD, Head, ModelFolder, Version
from fscil.text import percent

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def push(path: str | Path, repo: str, private: bool = False, history: bool = False, client: HfApi | None = None) -> str:
    """Uploads a model in one commit and returns its address.

    Only the current version goes along unless `history`: earlier ones may hold classes that were forgotten since, and
    thumbnails stay here as well. The place of a local weights file is never uploaded.
    """
    folder = ModelFolder(path)
    head = folder.read()
    from huggingface_hub import CommitOperationAdd

    client = client or _client()
    with tempfile.TemporaryDirectory() as aside:
        staged = ModelFolder(Path(aside) / "model")
        _stage(folder, head, staged, history)
        names = [HEAD, *staged.read().files]
        files = [CommitOperationAdd(name, str(staged.path / name)) for name in names]
        card = CommitOperationAdd("README.md", model_card(staged.read(), repo).encode())
        try:
            address = client.create_repo(repo, private=private, exist_ok=True)
            stale = [name for name in client.list_repo_files(repo) if _ours(name) and name not in names]
            client.create_commit(
                repo,
                operations=[*files, card, *_deletions(stale)],
                commit_message=f"{len(head.current.record['classes'])} classes, fscil {__version__}",
            )
        except Exception as error:
            raise _explained("push to", repo, error) from error
    return str(address)


def pull(path: str | Path, repo: str, client: HfApi | None = None) -> Path:
    """Downloads a model into a new folder; it appears there only once every hash is right."""
    target = Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f'"{target}" exists already; choose another folder.')
    client = client or _client()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as aside:
        folder = ModelFolder(Path(aside) / "model")
        try:
            client.snapshot_download(repo, local_dir=str(folder.path), allow_patterns=[HEAD, "*.safetensors"])
        except Exception as error:
            raise _explained("pull from", repo, error) from error
        if not folder.exists():
            raise UserError(f'repository "{repo}" holds no model of fscil (no {HEAD}).')
        head = folder.read()
        if head.config["backbone"]["weights"] is not None:
            raise UserError(f'repository "{repo}" names a file of this machine as its weights; it is refused.')
        for name in head.files:
            folder.checked(head, name)
        for extra in folder.path.iterdir():  # the client's own bookkeeping, and whatever else lay there
            if extra.name not in {HEAD, *head.files}:
                shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
        if target.exists():
            target.rmdir()
        folder.path.rename(target)
    return target


def model_card(head: Head, repo: str) -> str:
    """README.md of a repository: what the model knows, how well, and how to use it."""
    record, backbone, facts = head.current.record, head.config["backbone"], head.current.record["calibration"]
    cells = (
        (_cell(info["name"]), info["pictures"], "base" if info["base"] else "taught", info["since"][:10])
        for info in record["classes"]
    )
    rows = "\n".join("| {} | {} | {} | {} |".format(*row) for row in cells)
    stored = record["stored_pictures"]
    keeps = f"{stored} training pictures, " if stored else "no training pictures, only "
    name = repo.rpartition("/")[2]
    base_model = f"base_model: timm/{backbone['name']}\n" if "." in backbone["name"] else ""
    lines = [
        f"Accuracy on {facts['held_out']} held-out pictures of base classes: {percent(facts['held_out_accuracy'])}.",
        f"Pictures of base classes called unknown: {percent(facts['held_out_rejection'])} "
        f"(set at {percent(facts['false_rejection'])}); of taught classes, each left out once: "
        f"{percent(facts['taught_rejection'])}.",
    ]
    return f"""---
library_name: fscil
pipeline_tag: image-classification
{base_model}tags:
- few-shot-learning
- class-incremental-learning
---

# {name}

An image classifier of {len(record["classes"])} classes that can be taught new ones from a few pictures each, made with
fscil {__version__} (method {head.config["method"]}, backbone {backbone["name"]}, weights hash {backbone["hash"]}).

{chr(10).join(lines)}

It holds {keeps}statistics of features and 64-bit fingerprints that notice repeated pictures.

## Use

```
fscil pull {name} {repo}
fscil predict {name} some.jpg
fscil learn {name} --class heron heron1.jpg heron2.jpg
```

## Classes

| class | pictures | origin | since |
|---|---|---|---|
{rows}
"""


def _stage(folder: ModelFolder, head: Head, staged: ModelFolder, history: bool) -> None:
    """A copy fit for others: without local paths and, unless asked for, without earlier versions."""
    versions = folder.copies(head, head.versions if history else head.versions[-1:])
    if not history:
        record, tensors = versions[0].record, dict(versions[0].tensors)
        known = {str(info["name"]): info["pictures"] for info in record["classes"]}
        still = tensors["held.labels"] >= 0  # features of forgotten base classes stay here
        tensors |= {name: tensors[name][still] for name in ("held.labels", "held.features")}
        small_copies = [name for name in tensors if name.startswith("thumbnails.")]
        stored = record["stored_pictures"] - sum(len(tensors[n]) for n in small_copies if n.endswith(".labels"))
        record = {**record, "stored_pictures": stored}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in small_copies}
        versions = [Version({**record, "event": {**record["event"], "action": "push", "classes": known}}, tensors)]
    weights = None
    if head.config["backbone"]["embedded"]:
        from fscil.files import load_tensors
        from fscil.teachable.folder import BACKBONE

        weights = load_tensors(folder.checked(head, BACKBONE))[0]
    config = {**head.config, "backbone": {**head.config["backbone"], "weights": None, "weights_sha256": None}}
    with staged.lock():
        staged.write(config, versions, weights)


def _client() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="fscil", library_version=__version__)


def _ours(name: str) -> bool:
    from fscil.teachable.folder import FILE_NAME

    return bool(FILE_NAME.fullmatch(name))


def _deletions(names: list[str]) -> list[Any]:
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(name) for name in names]


def _explained(action: str, repo: str, error: Exception) -> UserError:
    hint = "check the name, the network, and that you are logged in (hf auth login)"
    return UserError(f'cannot {action} "{repo}": {type(error).__name__}: {error}; {hint}.')


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")
