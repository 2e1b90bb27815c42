"""Pictures made to take minutes or gigabytes are refused or ended, and nothing else suffers."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from fscil.data.decode import DecodeError, decode_image
from fscil.serving import decoding
from fscil.serving.decoding import Decoders, decode_bounded, scans

ALLOWED = dict(short_side=256, max_pixels=60_000_000, aspect=5.0)


def encoded(picture: Image.Image | np.ndarray, kind: str, **options) -> bytes:
    file = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(file, kind, **options)
    return file.getvalue()


def many_scans(side: int, count: int) -> bytes:
    """A progressive JPEG of one colour whose last scan is there `count` times more."""
    data = encoded(Image.new("L", (side, side)), "JPEG", progressive=True)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[start:end] * count + data[end:]


def in_gif(extension: bytes) -> bytes:
    """A small GIF with something more before its picture."""
    data = encoded(Image.new("1", (8, 8)), "GIF")
    start = data.index(b",\0\0\0\0")
    return data[:start] + extension + data[start:]


def scene(width: int, height: int) -> np.ndarray:
    """A picture with something to see at every scale."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x // 40 + y // 40) % 2 * 200], 2).astype(np.uint8)


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_scans_are_counted_where_they_are_scans():
    assert scans(encoded(Image.new("RGB", (16, 16)), "JPEG")) == 1
    assert scans(many_scans(16, 40)) == 40 + scans(encoded(Image.new("L", (16, 16)), "JPEG", progressive=True))
    thumbnail = b"Exif\0\0" + encoded(Image.new("RGB", (8, 8)), "JPEG", progressive=True)
    assert scans(encoded(Image.new("RGB", (16, 16)), "JPEG", exif=thumbnail)) == 1
    assert scans(b"\xff\xd8\xff") == scans(b"\xff\xd8\xff\xda") - 1 == scans(b"") == 0


@pytest.mark.parametrize(
    "data, message",
    [
        (lambda: many_scans(16, 5000), "more than 100 scans"),
        (lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * 3000 + many_scans(16, 1)[2:], "more than 2000 segments"),
        (lambda: many_scans(7000, 60), r"\d+ scans of 7000 x 7000 pixels are too many"),
        (lambda: encoded(Image.new("RGB", (7700, 7700)), "JPEG", progressive=True), "too many for JPEG of this kind"),
        (
            lambda: encoded(
                Image.new("RGB", (7700, 7700)),
                "MPO",
                save_all=True,
                append_images=[Image.new("L", (8, 8))],
                progressive=True,
            ),
            "too many for MPO of this kind",
        ),
        (lambda: in_gif(b"!\xfe" + b"\1x" * 20_000 + b"\0"), "more than 10000 blocks before the picture"),
        (lambda: encoded(Image.new("RGB", (7000, 7000)), "WEBP", lossless=True), "too many for WEBP of this kind"),
        (lambda: encoded(Image.new("1", (9000, 9000)), "PNG"), "9000 x 9000 pixels are more than the 60000000"),
        (lambda: encoded(Image.new("1", (9000, 90)), "PNG"), "too narrow"),
        (lambda: b"nonsense", "not a picture of a known format"),
        (lambda: encoded(Image.new("RGB", (99, 99)), "PNG")[:-40], "truncated|Truncated|broken"),
    ],
)
def test_bombs_are_refused_by_their_header(data, message):
    with pytest.raises(DecodeError, match=message):
        decode_bounded(data(), **ALLOWED)


def test_a_webp_is_judged_before_it_is_opened(monkeypatch):
    for options in ({"lossless": True}, {}, {"lossless": True, "exif": b"Exif\0\0"}):
        data = encoded(Image.new("RGB", (300, 200)), "WEBP", **options)
        decoding.check_webp(data, 60_000)
        with pytest.raises(DecodeError, match="300 x 200 pixels are more than the 59999 allowed"):
            decoding.check_webp(data, 59_999)


# ---- what is reduced on the way --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [(1201, 800), (800, 1201)])
@pytest.mark.parametrize(
    "kind, change, options",
    [
        ("JPEG", lambda a: Image.fromarray(a), {"quality": 95}),
        ("JPEG", lambda a: Image.fromarray(a), {"quality": 95, "turned": 6}),
        ("JPEG", lambda a: Image.fromarray(a).convert("CMYK"), {"quality": 95}),
        (
            "MPO",
            lambda a: Image.fromarray(a),
            {"quality": 95, "save_all": True, "append_images": [Image.new("L", (9, 9))]},
        ),
        ("PNG", lambda a: Image.fromarray(a), {}),
        ("PNG", lambda a: Image.fromarray(np.dstack([a, a[..., 2] // 2 + 100])), {}),
        ("PNG", lambda a: Image.fromarray(a).quantize(64), {"transparency": 3}),
        ("PNG", lambda a: Image.fromarray(a[..., 0].astype(np.uint16) * 257), {"turned": 8}),
        ("TIFF", lambda a: Image.fromarray((a[..., 2] / 255).astype(np.float32)), {}),
        ("TIFF", lambda a: Image.fromarray(a[..., 0].astype(np.float32)), {}),
        ("TIFF", lambda a: Image.fromarray(a), {"turned": 5}),
        ("WEBP", lambda a: Image.fromarray(a), {"quality": 95}),
    ],
)
def test_a_large_picture_is_the_same_reduced_in_bands(kind, change, options, size, monkeypatch):
    """With less memory allowed, every kind of picture takes the way of the large ones."""
    turned = options.pop("turned", None) if (options := dict(options)) else None
    if turned is not None:
        options["exif"] = Image.Exif()
        options["exif"][decoding.ORIENTATION] = turned
    data = encoded(change(scene(*size)), kind, **options)
    expected = decode_image(data, short_side=100)
    with Image.open(io.BytesIO(data)) as picture:
        monkeypatch.setattr(decoding, "MEMORY", decoding.loading_bytes(picture, 1) + 1000)
    monkeypatch.setattr(decoding, "BAND", 50_000)
    found = decode_bounded(data, **{**ALLOWED, "short_side": 100})
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 3 and np.abs(found.astype(int) - expected).max() < 60


MEASURE = """
import sys
from PIL import Image
from fscil.serving.decoding import decode_bounded
Image.init()
data = open(sys.argv[1], "rb").read()
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
try:
    decode_bounded(data, 256, 60_000_000, 5.0)
except ValueError as error:
    print(error, file=sys.stderr)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("megapixels", [9, 15, 23, 31, 53, 59])
@pytest.mark.parametrize(
    "kind, mode, options",
    [
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("MPO", "RGB", {"progressive": True, "save_all": True, "append_images": [Image.new("L", (9, 9))]}),
        ("PNG", "RGBA", {}),
        ("PNG", "I;16", {}),
        ("TIFF", "F", {"compression": "tiff_lzw", "tiffinfo": {278: 100_000}}),
        ("TIFF", "RGB", {"compression": "tiff_lzw", "tiffinfo": {278: 100_000, 274: 6}}),
        ("WEBP", "RGBA", {"lossless": True}),
    ],
)
def test_no_accepted_picture_takes_more_than_400_megabytes(kind, mode, options, megapixels, tmp_path):
    side = int((megapixels * 1e6) ** 0.5)
    deep = {"I;16": np.uint16, "F": np.float32}.get(mode)
    picture = Image.fromarray(np.zeros((side, side), deep)) if deep else Image.new(mode, (side, side))
    (tmp_path / "picture").write_bytes(encoded(picture, kind, **options))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "picture")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 400_000_000, done.stderr


# ---- the processes ---------------------------------------------------------------------------------------------------
def test_workers_answer_as_the_decoder_does_and_outlive_bad_pictures():
    decoders, picture = Decoders(workers=1), scene(640, 480)
    np.testing.assert_array_equal(
        decoders.decode(encoded(picture, "PNG"), **ALLOWED), decode_image(encoded(picture, "PNG"), short_side=256)
    )
    (worker,) = decoders._workers
    with pytest.raises(DecodeError, match="^not a picture of a known format"):
        decoders.decode(b"nonsense", **ALLOWED)
    assert decoders.decode(encoded(picture, "JPEG"), **ALLOWED).shape == (256, 341, 3)
    assert decoders._workers == [worker]
    decoders.close()
    worker.process.wait(10)
    with pytest.raises(DecodeError, match="closing"):
        decoders.decode(encoded(picture, "PNG"), **ALLOWED)


def test_what_takes_too_long_is_killed_and_the_others_are_answered():
    decoders, slow = Decoders(workers=2, seconds=60), encoded(Image.new("RGBA", (7000, 7000)), "PNG")
    small = encoded(scene(64, 48), "PNG")
    decoders.decode(small, **ALLOWED)
    decoders.seconds = 0.2
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(decoders.decode, slow, **ALLOWED)
        assert [decoders.decode(small, **ALLOWED).shape for _ in range(20)] == [(48, 64, 3)] * 20
        with pytest.raises(DecodeError, match="takes too long to open"):
            bomb.result()
    decoders.seconds = 60
    assert decoders.decode(small, **ALLOWED).shape == (48, 64, 3)  # by a new process
    decoders.close()


def test_large_pictures_wait_for_one_another_and_not_for_long():
    large = encoded(Image.new("1", (5000, 5000)), "PNG")
    assert decoding.work_announced(large) == 25_000_000
    for kind in ("JPEG", "GIF", "WEBP", "PNG"):
        assert decoding.work_announced(encoded(Image.new("RGB", (31, 17)), kind)) == 31 * 17
    off_screen = bytearray(encoded(Image.new("L", (310, 170)), "GIF"))
    off_screen[6:10] = b"\1\0\1\0"  # a screen of one pixel, which Pillow enlarges for the picture
    assert decoding.work_announced(bytes(off_screen)) == 310 * 170
    assert decoding.work_announced(many_scans(64, 50)) > 12 * 64 * 64
    thumbnail = b"Exif\0\0" + encoded(Image.new("RGB", (8, 8)), "JPEG")
    assert decoding.work_announced(encoded(Image.new("RGB", (310, 170)), "JPEG", exif=thumbnail)) == 310 * 170
    assert decoding.work_announced(b"II*\0") > decoding.LARGE
    decoders, small = Decoders(workers=2), encoded(scene(64, 48), "PNG")
    decoders._large.acquire()  # one that takes its time
    with ThreadPoolExecutor(decoding.LARGE_WAITING) as pool:
        waiting = [pool.submit(decoders.decode, large, **ALLOWED) for _ in range(decoding.LARGE_WAITING)]
        while decoders._waiting.acquire(blocking=False):
            decoders._waiting.release()
        with pytest.raises(DecodeError, match="too many large pictures"):
            decoders.decode(large, **ALLOWED)
        assert decoders.decode(small, **ALLOWED).shape == (48, 64, 3)
        decoders._large.release()
        assert {found.result().shape for found in waiting} == {(256, 256, 3)}
    decoders.close()


def test_closing_ends_what_is_being_decoded():
    decoders, slow = Decoders(workers=1), encoded(Image.new("RGBA", (7000, 7000)), "PNG")
    threading.Timer(0.5, decoders.close).start()
    with pytest.raises(DecodeError, match="closing"):
        for _ in range(100):
            decoders.decode(slow, **ALLOWED)
