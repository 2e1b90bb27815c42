"""Everything that is written to disk: safetensors and JSON, atomic, with a format version in every file.

A reader never sees half a file: data goes to a hidden file beside the target, is flushed to the disk, and takes the
target's name in one step. Nothing is ever unpickled, so a folder from a stranger is safe to open.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.errors import UserError
from fscil.reading import TEXT_AT_MOST, first_bytes, parse_json, read_text

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
PART = re.compile(r"\..+\.[a-z0-9_]{8}\.part")  # what `atomic_path` writes to
HEADER_AT_MOST = 16 * 2**20  # bytes of names and shapes in a safetensors file; ours have some kB


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends well and vanishes when it does not."""
    path = Path(path)
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        os.close(handle)
        aside = Path(name)
        yield aside
        with open(aside, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(aside, 0o666 & ~_umask())  # mkstemp makes private files; this one gets the permissions of any other
        os.replace(aside, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise UserError(_explain(path, error)) from error
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends well and vanishes when it does not.

    There may be an empty folder of that name already. What a killed process left of an earlier try is removed.
    """
    path = Path(path)
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{glob.escape(path.name[:100])}.{'?' * 8}.part"):
            shutil.rmtree(left, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent))
        yield aside
        aside.chmod(0o777 & ~_umask())
        os.replace(aside, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise UserError(_explain(path, error)) from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def folders_for(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it; of what was made, nothing stays that is empty when the block ends."""
    made = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(_explain(folder, error)) from error
    finally:
        remove_empty(made)


def missing_folders(folder: Path) -> list[Path]:
    """What `mkdir(parents=True)` would make for this folder, the innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders up to the first one that holds something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _umask() -> int:
    """What is not permitted of new files; it cannot be asked for without being set."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can open folders (Windows cannot)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def clear_parts(*folders: Path) -> None:
    """Remove what killed processes left half written in folders of ours. Call it with the folder's lock held."""
    for folder in folders:
        for path in folder.iterdir() if folder.is_dir() else ():
            if PART.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def refuse_links(folder: str | os.PathLike[str], *names: str) -> None:
    """Refuse a folder in which one of these (without names: anything) is a symbolic link: reading or writing it would
    reach another place."""
    folder = Path(folder)
    for path in [folder / name for name in names] or [*folder.glob("*"), *folder.glob("*/*")]:
        if path.is_symlink():
            raise UserError(f'"{path}" is a symbolic link, which a folder of fscil never holds; remove it')


def check_place(path: str | os.PathLike[str]) -> None:
    """Refuse a file or folder that could not be written, before anything is computed for it. Nothing is left behind."""
    path = Path(path)
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not place.is_dir():
        if place != path:
            raise UserError(f'cannot write "{path}": "{place.name}" is a file; choose another folder')
        place = place.absolute().parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(_explain(path, error)) from error


def _explain(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f'cannot write "{path}": the disk is full; free some space or choose another folder'
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f'cannot write "{path}": no permission; choose a folder you may write to'
    return f'cannot write "{path}": {error.strerror or error}'


def atomic_write(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a whole file, or nothing."""
    with atomic_path(path) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any], advice: str = "") -> None:
    """Write a JSON object with the format version first; `advice` is for whoever has more than can be read again."""
    text = (_indented({"format_version": FORMAT_VERSION, **data}) + "\n").encode()
    if len(text) > TEXT_AT_MOST:
        raise UserError(
            f'"{path}" is not written: of its {len(text)} bytes at most {TEXT_AT_MOST} could be read again. {advice}'
        )
    atomic_write(path, text)


def _indented(value: Any, margin: str = "") -> str:
    """JSON that people can read: an entry per line, but a list of plain values (a matrix row, say) in one line."""
    if isinstance(value, Mapping) and value:
        items = [f"{json.dumps(str(key), ensure_ascii=False)}: {_indented(value[key], margin + ' ')}" for key in value]
        return "{\n" + ",\n".join(f"{margin} {item}" for item in items) + f"\n{margin}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        return "[\n" + ",\n".join(f"{margin} {_indented(item, margin + ' ')}" for item in value) + f"\n{margin}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write_json` wrote, without the format version; anything else is a UserError."""
    data = parse_json(read_text(path), path)
    if not isinstance(data, dict):
        raise UserError(f'"{path}" was not written by fscil: it holds no JSON object')
    check_version(path, data.pop("format_version", None))
    return data


def check_version(path: str | os.PathLike[str], version: Any) -> None:
    """Refuse files of another program or of a format this version does not know."""
    if isinstance(version, str) and version.isdecimal():  # a safetensors header has text alone
        version = int(version[:9])
    if not isinstance(version, int) or isinstance(version, bool):
        raise UserError(f'"{path}" was not written by fscil: it carries no format version')
    if version > FORMAT_VERSION:
        raise UserError(
            f'"{path}" has format version {version}; this fscil reads up to {FORMAT_VERSION}. Upgrade fscil to open it'
        )
    if version < 1:
        raise UserError(f'"{path}" has format version {version}, which no fscil ever wrote')


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None
) -> None:
    """Write tensors and a JSON-able `meta` into one safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    header = {"format_version": str(FORMAT_VERSION), "meta": json.dumps(dict(meta or {}))}
    with atomic_path(path) as aside:
        try:
            save_file(_unshared(tensors), aside, metadata=header)
        except SafetensorError as error:  # safetensors wraps the system's error in text of its own
            full = "No space left" in str(error) or "os error 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU copies that own their memory: safetensors refuses two names for one storage."""
    owned, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        owned[name] = tensor
    return owned


def load_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote: (tensors on the CPU, meta)."""
    check_header(path)
    tensors, header = _open_tensors(path)
    check_version(path, header.get("format_version"))
    meta = parse_json(header.get("meta", "{}"), f"{path}, its description")
    if not isinstance(meta, dict):
        raise UserError(f'"{path}" is damaged: its description is no JSON object')
    return tensors, meta


def load_foreign_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of any safetensors file, on the CPU."""
    check_header(path)
    return _open_tensors(path)[0]


def _open_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f'cannot read "{path}": {" ".join(str(error).split())}') from error


def check_header(path: str | os.PathLike[str]) -> None:
    """Refuse what cannot be a safetensors file before a library opens it: it begins with the length of its header."""
    start = first_bytes(path, 8)
    length, size = int.from_bytes(start, "little"), os.path.getsize(path)
    if len(start) < 8 or length > min(size - 8, HEADER_AT_MOST):
        raise UserError(f'cannot read "{path}": it is no safetensors file, or cut short')


def check_finite(tensors: Mapping[str, Tensor], where: object, may_lack: Collection[str] = ()) -> None:
    """Refuse numbers that are none (NaN or infinite), but in those tensors that `may_lack` a value."""
    import torch

    for name, tensor in tensors.items():
        if tensor.is_floating_point() and name not in may_lack and not bool(torch.isfinite(tensor).all()):
            raise UserError(f'{where}: tensor "{name}" holds NaN or infinity')


def digest_file(path: str | os.PathLike[str], algorithm: str = "sha256") -> str:
    """The hash of a file's content, in hexadecimal."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
