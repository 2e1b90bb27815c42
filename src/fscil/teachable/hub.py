"""Models on the Hugging Face hub: what is uploaded is the model folder and a card that says what it is."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil._version import __version__
from fscil.errors import UserError
from fscil.files import check_place, folders_for
from fscil.teachable.folder import HEAD, Head, ModelFolder, Version
from fscil.text import percent

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What is fetched of a stranger's model at most; a ViT-L in float32 has 1.2 GB.
HEAD_BYTES = 50_000_000
FILE_BYTES = 8_000_000_000
MODEL_BYTES = 16_000_000_000
FULL_COMMIT = re.compile(r"[0-9a-f]{40}")


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


def pull(path: str | Path, repo: str, revision: str | None = None, client: HfApi | None = None) -> str:
    """Downloads a model into a new folder; it appears there only once every hash is right. Returns the commit.

    The head comes first: what it does not name, or names in another size than the hub has it, is not fetched. An empty
    folder is filled, not replaced: it may be the one somebody is in, or a disk of its own.
    """
    target = Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f'"{target}" exists already; choose another folder.')
    check_place(target)
    client = client or _client()
    there = target.exists()
    beside = target if there else target.parent
    with folders_for(beside), tempfile.TemporaryDirectory(dir=beside, prefix=f".{target.name}.") as aside:
        folder = ModelFolder(Path(aside) / "model")
        try:
            commit, sizes = _offered(client, repo, revision)
            _check_sizes(repo, {HEAD: sizes.get(HEAD)}, HEAD_BYTES)
            _fetch(client, repo, HEAD, commit, folder.path)
            head = folder.read()
            if head.config["backbone"]["weights"] is not None:
                raise UserError(f'repository "{repo}" names a file of this machine as its weights; it is refused.')
            _check_sizes(repo, {name: sizes.get(name) for name in head.files}, FILE_BYTES)
            for name, entry in head.files.items():
                if sizes[name] != entry["bytes"]:
                    raise UserError(
                        f'"{name}" in repository "{repo}" has {sizes[name]} bytes, {HEAD} says {entry["bytes"]}; '
                        "ask who uploaded it to push again."
                    )
            for name in head.files:
                _fetch(client, repo, name, commit, folder.path)
                folder.checked(head, name)
        except UserError:
            raise
        except Exception as error:
            raise _explained("pull from", repo, error) from error
        for extra in folder.path.iterdir():  # the client's own bookkeeping
            if extra.name not in {HEAD, *head.files}:
                shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
        if there:
            for name in (*head.files, HEAD):  # the head last: without it this is no model
                (folder.path / name).rename(target / name)
        else:
            folder.path.rename(target)
    return commit


def _offered(client: HfApi, repo: str, revision: str | None) -> tuple[str, dict[str, int | None]]:
    """The commit that a revision is now, and the sizes of its files: everything is then taken from that one commit."""
    info = client.model_info(repo, revision=revision, files_metadata=True)
    if info.sha is None or (revision is not None and FULL_COMMIT.fullmatch(revision) and info.sha != revision):
        raise UserError(f'repository "{repo}" answers with commit {info.sha} for --revision {revision}.')
    return info.sha, {file.rfilename: file.size for file in info.siblings or []}


def _check_sizes(repo: str, sizes: Mapping[str, int | None], most: int) -> None:
    """Refuses files that are missing, of unknown size, or larger than anybody's model, alone or together."""
    for name, size in sizes.items():
        if size is None:
            what = "holds no model of fscil" if name == HEAD else "is not whole"
            raise UserError(f'repository "{repo}" {what} (no {name}); check the name and --revision.')
        if size > most:
            raise UserError(f'"{name}" in repository "{repo}" has {size} bytes; at most {most} are fetched.')
    if (total := sum(size or 0 for size in sizes.values())) > MODEL_BYTES:
        raise UserError(f'the model in repository "{repo}" has {total} bytes; at most {MODEL_BYTES} are fetched.')


def _fetch(client: HfApi, repo: str, name: str, commit: str, folder: Path) -> None:
    client.hf_hub_download(repo, name, revision=commit, local_dir=str(folder))


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
