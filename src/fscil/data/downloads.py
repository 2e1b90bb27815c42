"""Fetching public archives: with progress, resumed where they stopped, checked, unpacked without trusting them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fscil.errors import UserError
from fscil.files import digest_file

if TYPE_CHECKING:
    from rich.console import Console

CHUNK = 1 << 20
ATTEMPTS = 3
TIMEOUT = 30  # seconds without a byte


@dataclass(frozen=True)
class Archive:
    url: str
    file: str
    md5: str


@functools.lru_cache
def console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def fetch(archive: Archive, folder: str | os.PathLike[str]) -> Path:
    """Download `archive` into `folder`, continuing a former attempt, and return its path once its checksum is right."""
    target = Path(folder) / archive.file
    if target.exists():
        return verify(target, archive)
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _receive(archive.url, part)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError, EOFError, http.client.HTTPException) as error:
                refused = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500
                if attempt == ATTEMPTS or refused:
                    reason = getattr(error, "reason", None) or error
                    raise UserError(f"cannot download {archive.url}: {reason}") from error
        verify(part, archive)
        os.replace(part, target)
    except OSError as error:
        raise UserError(f'cannot write "{target}": {error.strerror or error}') from error
    return target


def _receive(url: str, part: Path) -> None:
    """Append to `part` what it still lacks; EOFError where the connection ends early."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        url, headers={"User-Agent": "fscil"} | ({"Range": f"bytes={have}-"} if have else {})
    )
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send: the part is whole, or the checksum will tell
            return
        raise
    with response:
        if getattr(response, "status", None) != 206:  # the server starts from the beginning
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with (
            Progress(*columns, console=console(), disable=not console().is_terminal) as bar,
            open(part, "ab" if have else "wb") as out,
        ):
            task = bar.add_task(f"downloading {url.rsplit('/', 1)[-1]}", total=total, completed=have)
            while chunk := response.read(CHUNK):
                out.write(chunk)
                have += len(chunk)
                bar.update(task, completed=have)
    if total is not None and have < total:
        raise EOFError(f"the connection ended after {have} of {total} bytes")


def verify(path: Path, archive: Archive) -> Path:
    """`path`, if its checksum is the archive's; a downloaded part that fails is removed, a user's own file stays."""
    found = digest_file(path, "md5")
    if found != archive.md5:
        if path.suffix == ".part":
            path.unlink()
        raise UserError(
            f'"{path}" is damaged or another file: its md5 is {found}, not {archive.md5}; remove it '
            f"and download {archive.url} again"
        )
    return path


def unpack(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Unpack a tar archive into `folder`, all of it or nothing.

    Plain files and folders only, none outside `folder`: an absolute path, a `..` or a link refuses the archive.
    """
    path, folder = Path(path), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as aside:
            status = console().status(f"unpacking {path.name}") if console().is_terminal else contextlib.nullcontext()
            with tarfile.open(path) as tar, status:
                for member in tar:
                    inside = PurePosixPath(member.name)
                    outside = inside.is_absolute() or ".." in inside.parts or "\\" in member.name
                    if outside or not (member.isfile() or member.isdir()):
                        raise UserError(
                            f'"{path}" is refused: it holds "{member.name}", a link or a path out of its folder'
                        )
                    place = Path(aside, *inside.parts)
                    if member.isdir():
                        place.mkdir(parents=True, exist_ok=True)
                        continue
                    place.parent.mkdir(parents=True, exist_ok=True)
                    source = tar.extractfile(member)
                    assert source is not None  # it is a plain file
                    with source, open(place, "wb") as out:
                        shutil.copyfileobj(source, out, CHUNK)
            for item in Path(aside).iterdir():
                if not (folder / item.name).exists():
                    os.replace(item, folder / item.name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f'"{path}" is not a whole tar archive: {error}') from error
    except OSError as error:
        raise UserError(f'cannot unpack "{path}" into "{folder}": {error.strerror or error}') from error
