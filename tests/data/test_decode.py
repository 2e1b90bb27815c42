"""Decoding: pictures as a viewer shows them, damage named, the cache whole or absent; downloads and archives."""

import functools
import hashlib
import http.server
import io
import struct
import sys
import tarfile
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from fscil.data.decode import DecodeError, decode_image, decode_store, in_order, picture_array
from fscil.data.downloads import Archive, fetch, unpack
from fscil.errors import UserError


def encoded(picture, format="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width=40, height=30, seed=0):
    """A smooth colour picture, so that lossy formats stay close to it."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def test_sources_and_formats(tmp_path):
    picture = photo()
    expected = np.asarray(picture)
    picture.save(tmp_path / "a.png")
    data = encoded(picture)
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), data, io.BytesIO(data), encoded(picture, "BMP")):
        decoded = decode_image(source)
        assert decoded.dtype == np.uint8 and np.array_equal(decoded, expected)
    assert np.array_equal(decode_image(encoded(picture, "WEBP", lossless=True)), expected)
    assert np.abs(decode_image(encoded(picture, "JPEG", quality=95)).astype(int) - expected).mean() < 4


def test_exif_orientation_is_applied():
    picture = photo()
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees clockwise to show"
    shown = decode_image(encoded(picture, "PNG", exif=exif))
    assert np.array_equal(shown, np.rot90(np.asarray(picture), -1))


def test_transparency_lies_on_white():
    colour = np.zeros((2, 2, 4), np.uint8)
    colour[..., 0] = 200
    colour[..., 3] = [[255, 0], [0, 51]]  # opaque, clear, clear, one fifth
    shown = decode_image(encoded(Image.fromarray(colour)))
    assert shown.tolist() == [[[200, 0, 0], [255, 255, 255]], [[255, 255, 255], [244, 204, 204]]]
    grey = Image.fromarray(np.array([[[10, 255], [10, 0]]], np.uint8), "LA")
    assert decode_image(encoded(grey)).tolist() == [[[10] * 3, [255] * 3]]


def test_palette_with_and_without_transparency():
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.putdata([0, 1])
    assert decode_image(encoded(picture)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert decode_image(encoded(picture, transparency=1)).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_grey_of_one_eight_and_sixteen_bits():
    assert decode_image(encoded(Image.new("1", (2, 2), 1))).tolist() == [[[255] * 3] * 2] * 2
    assert decode_image(encoded(Image.new("L", (1, 1), 77))).tolist() == [[[77] * 3]]
    deep = Image.fromarray(np.array([[0, 257 * 100, 65535]], np.uint16))
    assert decode_image(encoded(deep)).tolist() == [[[0] * 3, [100] * 3, [255] * 3]]


def test_cmyk_jpeg_is_not_inverted():
    picture = Image.new("RGB", (16, 16), (200, 40, 90))
    assert (
        np.abs(decode_image(encoded(picture.convert("CMYK"), "JPEG", quality=95)).astype(int) - [200, 40, 90]).max()
        < 12
    )


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert (decode_image(data) == [255, 0, 0]).all()


@pytest.mark.parametrize(
    ("size", "expected"), [((400, 300), (85, 64)), ((300, 401), (64, 85)), ((64, 90), (64, 90)), ((30, 20), (30, 20))]
)
def test_short_side_keeps_the_aspect_ratio_and_never_enlarges(size, expected):
    decoded = decode_image(encoded(photo(*size)), short_side=64)
    assert decoded.shape == (expected[1], expected[0], 3)
    if size != expected:
        reference = resize(photo(*size), 64, InterpolationMode.BICUBIC, antialias=True)
        assert np.array_equal(decoded, np.asarray(reference))


def bomb(side=60_000):
    """A PNG of a few bytes that claims to hold 3.6 billion pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [12_000, 60_000])
def test_decompression_bombs_are_refused(side):
    with pytest.raises(DecodeError):
        decode_image(bomb(side))


def test_max_pixels():
    data = encoded(photo(40, 30))
    assert decode_image(data, max_pixels=1200).shape == (30, 40, 3)
    with pytest.raises(DecodeError, match="40 x 30 pixels are more than the 1199 allowed"):
        decode_image(data, max_pixels=1199)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a picture",
        encoded(photo(), "JPEG")[:300],
        encoded(photo())[:-200],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",
    ],
    ids=["empty", "text", "cut jpeg", "cut png", "postscript"],
)
def test_damage_is_one_error(data):
    with pytest.raises(DecodeError):
        decode_image(data)


def test_missing_file(tmp_path):
    with pytest.raises(DecodeError, match=r"gone.jpg: no such file"):
        decode_image(tmp_path / "gone.jpg")


def test_in_order_keeps_the_order():
    assert list(in_order(lambda x: x * x, range(100), workers=3)) == [x * x for x in range(100)]


@pytest.fixture
def album(tmp_path):
    """Six pictures of different sizes."""
    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.png")
        photo(10 + 7 * number, 20, number).save(files[-1])
    return files


@pytest.mark.parametrize("map_above", [None, 0], ids=["in memory", "mapped"])
def test_store_holds_every_image(album, tmp_path, map_above):
    store, kept = decode_store(album, tmp_path / "cache" / "pixels", map_above=map_above, workers=2)
    assert kept == list(range(6)) == list(range(len(store)))
    for number, file in enumerate(album):
        assert np.array_equal(store.image(number).numpy(), np.asarray(Image.open(file)))


def test_store_reads_its_cache_and_notices_a_damaged_one(album, tmp_path):
    cache = tmp_path / "pixels"
    first, _ = decode_store(album, cache)
    originals = [file.read_bytes() for file in album]
    for file in album:
        file.write_bytes(b"no longer needed")
    again, _ = decode_store(album, cache)
    assert torch.equal(first.flat, again.flat) and torch.equal(first.sizes, again.sizes)
    for file, data in zip(album, originals):
        file.write_bytes(data)
    (tmp_path / "pixels.bin").write_bytes(b"short")
    repaired, _ = decode_store(album, cache)
    assert torch.equal(first.flat, repaired.flat)
    (tmp_path / "pixels.safetensors").write_bytes(b"garbage")
    repaired, _ = decode_store(album, cache)
    assert torch.equal(first.flat, repaired.flat)


@pytest.mark.parametrize("cached", [False, True])
def test_unreadable_images_are_all_named_or_left_out(album, tmp_path, cached):
    album[1].write_bytes(album[1].read_bytes()[:-60])
    album[4].write_bytes(b"text")
    cache = tmp_path / "pixels"
    if cached:
        decode_store(album, cache, skip_bad=True)
    with pytest.raises(UserError, match=r"2 of 6 images.*--skip-bad.*1\.png.*4\.png") as caught:
        decode_store(album, cache)
    assert "0.png" not in str(caught.value) and "\n" not in str(caught.value)
    store, kept = decode_store(album, cache, skip_bad=True)
    assert kept == [0, 2, 3, 5]
    assert np.array_equal(store.image(1).numpy(), np.asarray(Image.open(album[2])))


def test_interrupted_decoding_leaves_nothing_behind(album, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fscil.data.decode.decode_image", stop)
    with pytest.raises(KeyboardInterrupt):
        decode_store(album, tmp_path / "cache" / "pixels")
    assert list((tmp_path / "cache").iterdir()) == []


# ---- downloads and archives ------------------------------------------------------------------------------------------


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves one file and honours `Range: bytes=N-`; `cut` ends the first answers after so many bytes."""

    def __init__(self, content, cuts, seen, *args):
        self.content, self.cuts, self.seen = content, cuts, seen
        super().__init__(*args)

    def do_GET(self):
        asked = self.headers.get("Range")
        self.seen.append(asked)
        if self.path != "/data.tar":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if asked and start >= len(self.content):
            self.send_error(416)
            return
        body = self.content[start:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    content, cuts, seen = bytes(range(256)) * 9000, [], []
    handler = functools.partial(RangeHandler, content, cuts, seen)
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", content, cuts, seen
    httpd.shutdown()
    httpd.server_close()


def archive_of(url, content):
    return Archive(url, "data.tar", hashlib.md5(content).hexdigest())


def test_download(server, tmp_path):
    url, content, _, seen = server
    archive = archive_of(f"{url}/data.tar", content)
    assert fetch(archive, tmp_path / "new").read_bytes() == content
    fetch(archive, tmp_path / "new")
    assert seen == [None]  # a whole file is not fetched again
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.tar"]


def test_download_goes_on_where_it_stopped(server, tmp_path):
    url, content, cuts, seen = server
    (tmp_path / "data.tar.part").write_bytes(content[:1000])
    cuts.append(50_000)  # and the connection breaks once more on the way
    assert fetch(archive_of(f"{url}/data.tar", content), tmp_path).read_bytes() == content
    assert seen == ["bytes=1000-", "bytes=51000-"]


def test_download_of_a_part_that_is_whole_already(server, tmp_path):
    url, content, _, _ = server
    (tmp_path / "data.tar.part").write_bytes(content)
    assert fetch(archive_of(f"{url}/data.tar", content), tmp_path).read_bytes() == content


def test_wrong_checksum_is_refused(server, tmp_path):
    url, content, _, _ = server
    with pytest.raises(UserError, match="md5"):
        fetch(archive_of(f"{url}/data.tar", b"something else"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_download_failures_are_one_line(server, tmp_path):
    url, content, _, seen = server
    with pytest.raises(UserError, match="cannot download .*absent.tar: Not Found"):
        fetch(archive_of(f"{url}/absent.tar", content), tmp_path)
    assert len(seen) == 1  # a refusal is not asked again
    with pytest.raises(UserError, match="cannot download"):
        fetch(archive_of((tmp_path / "absent.tar").as_uri(), content), tmp_path)


def test_download_from_a_file_url(tmp_path):
    (tmp_path / "source.tar").write_bytes(b"content")
    archive = archive_of((tmp_path / "source.tar").as_uri(), b"content")
    (tmp_path / "data.tar.part").write_bytes(b"stale")
    assert fetch(archive, tmp_path).read_bytes() == b"content"


def tar_with(path, **members):
    with tarfile.open(path, "w:gz") as tar:
        for member in members.values():
            name, kind, target = (*member, None)[:3] if isinstance(member, tuple) else (member, tarfile.REGTYPE, None)
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target or ""
            info.size = 5 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"hello") if kind == tarfile.REGTYPE else None)
    return path


def test_unpack(tmp_path):
    path = tar_with(tmp_path / "a.tgz", a=("data", tarfile.DIRTYPE), b="data/x/y.txt", c="./data/z.txt")
    unpack(path, tmp_path / "out")
    files = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert files == ["data/x/y.txt", "data/z.txt"]
    assert (tmp_path / "out/data/x/y.txt").read_bytes() == b"hello"


@pytest.mark.parametrize(
    "member",
    [
        "../outside.txt",
        "data/../../outside.txt",
        "/tmp/outside.txt",
        "..\\outside.txt",
        ("data/link", tarfile.SYMTYPE, "/etc/passwd"),
        ("data/link", tarfile.LNKTYPE, "../outside"),
        ("data/pipe", tarfile.FIFOTYPE),
    ],
    ids=str,
)
def test_hostile_archives_are_refused_whole(tmp_path, member):
    path = tar_with(tmp_path / "bad.tgz", a="data/good.txt", b=member)
    with pytest.raises(UserError, match="refused"):
        unpack(path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.tgz", "out"]


@pytest.mark.parametrize("content", [b"", b"plain text", None], ids=["empty", "text", "cut"])
def test_damaged_archives(tmp_path, content):
    path = tar_with(tmp_path / "a.tgz", a="data/x.txt")
    path.write_bytes(path.read_bytes()[:60] if content is None else content)
    with pytest.raises(UserError, match="a.tgz"):
        unpack(path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# ---- HEIC ------------------------------------------------------------------------------------------------------------
@pytest.mark.extra("heic")
def test_heic_is_read_as_other_formats_are(tmp_path):
    import pillow_heif

    pillow_heif.register_heif_opener()
    array = np.kron(np.random.default_rng(0).integers(0, 255, (6, 8, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    for file in (tmp_path / "photo.heic", tmp_path / "misnamed.jpg"):
        Image.fromarray(array).save(file, format="HEIF", quality=95)
        got = decode_image(file)
        assert got.shape == array.shape and np.abs(got.astype(int) - array).mean() < 12
        for source in (file.read_bytes(), io.BytesIO(file.read_bytes())):
            assert np.array_equal(decode_image(source), got)
    assert min(decode_image(tmp_path / "photo.heic", short_side=48).shape[:2]) == 48
    with pytest.raises(DecodeError, match="more than the 100 allowed"):
        decode_image(tmp_path / "photo.heic", max_pixels=100)
    with pytest.raises(DecodeError):
        decode_image((tmp_path / "photo.heic").read_bytes()[:200])


def test_a_missing_extra_for_heic_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    file = tmp_path / "photo.heic"
    file.write_bytes(b"\x00\x00\x00\x1cftypheic" + bytes(100))
    with pytest.raises(DecodeError, match=r'photo.heic: HEIC pictures need pillow-heif: pip install "fscil\[heic\]"'):
        decode_image(file)


def test_a_reduction_goes_across_and_then_down_whatever_the_version_of_pillow():
    """One axis at a time there is no order to choose; for wide pictures all versions go across first as well."""
    levels = np.random.default_rng(0).integers(0, 256, (90, 400, 3), dtype=np.uint8)
    wide = Image.fromarray(levels)
    at_once = np.asarray(wide.resize((133, 30), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(picture_array(wide, 30), at_once)
    tall = wide.transpose(Image.Transpose.TRANSPOSE)
    across = tall.resize((30, 400), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(picture_array(tall, 30), across.resize((30, 133), Image.Resampling.BICUBIC))
