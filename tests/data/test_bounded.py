"""Pictures that are small on disk and in pixels, and dear in what they hold beside them."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from fscil.data.bounded import blocks_excess
from fscil.data.decode import DecodeError, decode_image

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)


def encoded(kind: str, **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, kind, **options)
    return file.getvalue()


def directory(entries: int, size: int, orientation: int = 6) -> bytes:
    """Entries of so many bytes, which are the same bytes each time; the second says how to turn the picture."""
    table = [struct.pack("<HHII", 1000 + number, 7, size, 8) for number in range(entries)]
    table.insert(1, struct.pack("<HHII", 0x0112, 3, 1, orientation))
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(table)) + b"".join(table) + bytes(4)
    return head + bytes(max(0, size + 8 - len(head)))


def in_jpeg(block: bytes) -> bytes:
    data, parts = encoded("JPEG"), [b"Exif\0\0" + block[at : at + 60_000] for at in range(0, len(block), 60_000)]
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part for part in parts)
    return (
        b"\xff\xd8" + segments + data[data.index(b"\xff\xdb") :]
    )  # without JFIF's own density Pillow reads it at once


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def in_png(*chunks: bytes) -> bytes:
    data = encoded("PNG")
    return data[:33] + b"".join(chunks) + data[33:]


def as_tiff(entries: int, size: int) -> bytes:
    """A picture that is opened by its own directory, whose further entries share their bytes."""
    data = encoded("TIFF")
    at = int.from_bytes(data[4:8], "little")
    own = int.from_bytes(data[at : at + 2], "little")
    table = data[at + 2 : at + 2 + 12 * own] + directory(entries, 0)[10:-4]
    place = len(data) + size
    return data[:4] + struct.pack("<I", place) + data[8:] + bytes(size) + struct.pack("<H", own + entries + 1) + table


def raw_profile(block: bytes) -> bytes:
    return chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 8\n" + block.hex().encode()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "data",
    [
        in_jpeg(directory(1000, 60_000)),
        in_jpeg(directory(80, 900_000)),
        in_png(chunk(b"eXIf", directory(80, 1_000_000))),
        in_png(raw_profile(directory(1000, 60_000))),
        encoded("WEBP", exif=directory(80, 1_000_000)),
        as_tiff(80, 1_000_000),
    ],
    ids=("jpeg", "jpeg of many segments", "png", "png as text", "webp", "tiff"),
)
def test_entries_that_share_their_bytes_do_not_fill_the_memory(data):
    tracemalloc.start()
    try:
        decode_image(data)
    except DecodeError:
        pass  # a TIFF cannot do without its directory
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20_000_000  # all of them together are 60 million and more


@pytest.mark.parametrize("data", [in_jpeg(directory(1, 60_000)), in_png(chunk(b"eXIf", directory(1, 60_000)))])
def test_honest_directories_are_read(data):
    assert decode_image(data).shape == (30, 20, 3)  # turned, so the second of the two entries was found


def in_gif(extension: bytes) -> bytes:
    data = encoded("GIF")
    start = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:start] + extension + data[start:]


def test_blocks_without_end_are_refused_before_they_are_read(tmp_path):
    for data, message in (
        (in_png(chunk(b"tRNx") * 30_000), "more than 10361 chunks"),
        (in_gif(b"!\xfe\1x\0" * 20_000), "more than 10000 blocks before the picture"),
        (in_gif(b"!\xfe" + b"\1x" * 20_000 + b"\0"), "more than 10000 blocks before the picture"),
    ):
        (tmp_path / "picture").write_bytes(data)
        for source in (data, io.BytesIO(data), tmp_path / "picture"):
            with pytest.raises(DecodeError, match=message):
                decode_image(source)


def test_honest_blocks_are_read():
    frames = [Image.fromarray(np.roll(PIXELS, step, 0)) for step in range(40)]
    animation = encoded("GIF", save_all=True, append_images=frames, comment="c" * 5000)
    for data in (animation, in_png(chunk(b"tEXt", b"a\0b") * 5000), encoded("JPEG"), encoded("BMP"), b"GIF89a", b""):
        assert blocks_excess(io.BytesIO(data)) == ""
    assert decode_image(animation).shape == decode_image(in_png(chunk(b"tEXt", b"a\0b") * 50)).shape == (20, 30, 3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.timeout(20)
def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for source in (tmp_path / "a.png", "/dev/zero", tmp_path):
        with pytest.raises(DecodeError, match="no regular file"):
            decode_image(source)
