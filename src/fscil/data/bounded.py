"""What a picture's file holds beside its pixels, bounded before Pillow reads it.

Pillow keeps every entry of an EXIF or TIFF directory, and entries that share their bytes make gigabytes of a small
file; it reads millions of empty chunks of a PNG one by one, and appends each block of a GIF's comment to a copy of
those before it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import BinaryIO

from PIL import TiffImagePlugin

BLOCKS = 10_000  # chunks of a PNG, or blocks before the picture of a GIF
CHUNK = 1000  # bytes; a large PNG may have a chunk more for each so many of them


def blocks_excess(file: BinaryIO) -> str:
    """What of the blocks of a PNG or GIF is too much, or ""; the file stands where it stood afterwards.

    >>> import io
    >>> blocks_excess(io.BytesIO(b"\\x89PNG\\r\\n\\x1a\\n" + bytes(12) * 20_000))
    'more than 10240 chunks'
    """
    here, size = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(here)
    head = file.read(13)
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            file.seek(here + 8)
            most = BLOCKS + (size - here) // CHUNK
            return f"more than {most} chunks" if _more_than(most, png_chunks(file)) else ""
        if head.startswith((b"GIF87a", b"GIF89a")):
            file.seek(here)
            return f"more than {BLOCKS} blocks before the picture" if _more_than(BLOCKS, gif_blocks(file)) else ""
        return ""
    finally:
        file.seek(here)


def _more_than(most: int, blocks: Iterator[object]) -> bool:
    return any(number >= most for number, _ in enumerate(blocks))


def png_chunks(file: BinaryIO) -> Iterator[bytes]:
    """The kinds of the chunks, one after the other."""
    while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        yield head[4:]
        file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)


def gif_blocks(file: BinaryIO) -> Iterator[bytes]:
    """What stands before the first picture of a GIF: blocks of extensions, and last the picture's descriptor."""
    flags = file.read(13)[10:11]
    if flags and flags[0] & 0x80:
        file.seek(3 << (flags[0] & 7) + 1, os.SEEK_CUR)  # the palette
    while kind := file.read(1):
        if kind == b",":
            yield file.read(9)
            return
        if kind == b"!":
            file.seek(1, os.SEEK_CUR)
            while (length := file.read(1)) not in (b"", b"\0"):
                yield length
                file.seek(length[0], os.SEEK_CUR)
        yield kind


class _Sparing:
    """A file of which a directory can be read, but not much more than what is there."""

    def __init__(self, file: BinaryIO):
        here = file.tell()
        self.file, self.left = file, 2 * file.seek(0, os.SEEK_END)
        self.seek, self.tell = file.seek, file.tell
        file.seek(here)

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(min(size, self.left) if size >= 0 else self.left)
        self.left -= len(data)
        return data


def bound_directories() -> None:
    """From now on Pillow reads of each directory at most twice the bytes that its file has. The rest it takes for cut
    off, which may cost a photo its orientation, or make a TIFF unreadable."""
    kind = TiffImagePlugin.ImageFileDirectory_v2
    load = kind.load
    if getattr(load, "sparing", False):
        return

    @functools.wraps(load)
    def sparing(self: TiffImagePlugin.ImageFileDirectory_v2, file: BinaryIO) -> None:
        load(self, _Sparing(file))  # type: ignore[arg-type]

    sparing.sparing = True  # type: ignore[attr-defined]
    kind.load = sparing  # type: ignore[method-assign, assignment]


bound_directories()
