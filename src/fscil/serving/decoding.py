"""Strangers' pictures are decoded in processes of their own, which a deadline and a bound on memory can end.

A few hundred kilobytes can be made to decode for minutes, or into gigabytes. So a picture is judged by its header
first: how many pixels, how many scans (each goes over the whole picture), and how much memory its format and mode take
on the way. What passes is decoded in a worker process; one that takes too long is killed, and the next picture gets a
new one. Nothing is pickled: bytes go in, pixels or a reason come out.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import queue
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from fscil.data.bounded import BLOCKS, blocks_excess, gif_blocks
from fscil.data.decode import DecodeError, decode_image, formats_of, picture_array

SECONDS = 10.0  # for one picture
MEMORY = 380_000_000  # bytes that one picture may take, on top of an idle worker
WORKERS = max(2, min(3, os.cpu_count() or 1))  # pictures at once; with MEMORY, all the memory that decoding takes
SCANS = 100  # passes over one JPEG; cameras write 1, progressive files about 10
SEGMENTS = 2000  # parts of one JPEG, scans and all
PASSED = 1_000_000_000  # pixels that all passes together go over
LARGE = 16_000_000  # pixels: larger pictures leave one worker to the others,
LARGE_WAITING = 8  # and so many of them may wait
BAND = 1_000_000  # pixels of a large picture that are worked on at a time
JPEG = ("JPEG", "MPO")  # Pillow calls one with a second picture in it MPO
ORIENTATION = 0x0112
READY = b"R"
CLOSING = "the server is closing"
TOO_NARROW = "it is too narrow: its longer side may be {:g} times the shorter"

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # in the data of a scan: not an escaped byte, restart or filling
_PIXEL = {"I": 4, "F": 4, "I;16": 2, "I;16B": 2, "I;16L": 2, "1": 1, "L": 1, "P": 1}  # bytes; all other modes 4
_ASK, _PIXELS, _REASON = struct.Struct(">IIfI"), struct.Struct(">II"), struct.Struct(">I")


# ---- in a worker -----------------------------------------------------------------------------------------------------
def decode_bounded(data: bytes, short_side: int, max_pixels: int, aspect: float) -> np.ndarray:
    """`decode_image` for a stranger's picture: refused by its header if it would take too long or too much memory.

    Pictures that are too large for one copy after another are reduced in bands, or by the JPEG decoder itself.
    """
    passes = scans(data)
    if passes > SCANS:
        raise DecodeError(f"image: more than {SCANS} scans")
    check_webp(data, max_pixels)
    if excess := blocks_excess(io.BytesIO(data)):
        raise DecodeError(f"image: {excess}")
    try:
        picture = Image.open(io.BytesIO(data), formats=formats_of(data))
    except Exception:
        return decode_image(data, max_pixels=max_pixels)  # says why
    with picture:
        width, height = picture.size
        if width * height > max_pixels:
            return decode_image(data, max_pixels=max_pixels)
        if passes * width * height > PASSED:
            raise DecodeError(f"image: {passes} scans of {width} x {height} pixels are too many")
        if max(width, height) > aspect * min(width, height):
            raise DecodeError(f"image: {TOO_NARROW.format(aspect)}")
        load, pixels = loading_bytes(picture, passes), width * height
        if load + pixels * _copies(picture) <= MEMORY:
            return decode_image(data, max_pixels=max_pixels, short_side=short_side)
        if picture.format in JPEG and min(width, height) >= 2 * short_side:
            picture.draft(picture.mode, (width // 2, height // 2))
            load = loading_bytes(picture, passes, pixels)
        if load > MEMORY:
            raise DecodeError(f"image: {width} x {height} pixels are too many for {picture.format} of this kind")
        return by_bands(picture, short_side)


def scans(data: bytes) -> int:
    """Scans of a JPEG, not counting those of thumbnails in its header; 0 for other formats.

    >>> file = io.BytesIO()
    >>> Image.new("RGB", (8, 8)).save(file, "JPEG", progressive=True)
    >>> scans(file.getvalue()), scans(b"GIF89a")
    (10, 0)
    """
    found = (at for kind, at in jpeg_segments(data) if kind == 0xDA)
    return sum(1 for _ in itertools.islice(found, SCANS + 1))


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """(kind, where its length stands) of each segment of a JPEG, not of thumbnails inside; other formats have none."""
    at = 2
    for _ in range(SEGMENTS):
        marker = _MARKER.search(data, at) if data.startswith(b"\xff\xd8") else None
        if marker is None or data[marker.end() - 1] == 0xD9:
            return
        yield data[marker.end() - 1], marker.end()
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    raise DecodeError(f"image: more than {SEGMENTS} segments")


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height that the header of a WebP announces."""
    kind, head = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF


def gif_pixels(data: bytes) -> int:
    """Pixels that Pillow makes of a GIF: of its screen, or of what it takes for the first picture to fit."""
    screen, first = data[6:10], b""
    for block in itertools.islice(gif_blocks(io.BytesIO(data)), BLOCKS):
        first = block if len(block) == 9 else first
    sides = (int.from_bytes(screen[at : at + 2], "little") for at in (0, 2))
    ends = (sum(int.from_bytes(first[at : at + 2], "little") for at in (place, place + 4)) for place in (0, 2))
    return math.prod(max(side, end) for side, end in zip(sides, ends))


def check_webp(data: bytes, max_pixels: int) -> None:
    """Refuses a WebP by its header: merely opening one takes memory for the whole canvas."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return
    width, height = webp_size(data)
    if width * height > max_pixels:
        raise DecodeError(f"image: {width} x {height} pixels are more than the {max_pixels} allowed")
    if 16 * width * height > MEMORY:
        raise DecodeError(f"image: {width} x {height} pixels are too many for WEBP of this kind")


def loading_bytes(picture: Image.Image, passes: int, coefficients: int | None = None) -> int:
    """Memory that Pillow takes to load a picture: measured, see the tests. `coefficients`: pixels before a draft."""
    pixels = picture.width * picture.height
    pixel = _PIXEL.get(picture.mode, 4)
    if picture.format == "WEBP":
        return 16 * pixels  # the canvas four times
    if picture.format == "HEIF":
        return 10 * pixels  # planes, and what they become
    if picture.format == "TIFF":
        return 3 * pixel * pixels  # a strip can be the whole picture, and turning it takes a copy
    if picture.format in JPEG and (passes > 1 or picture.info.get("progressive")):
        return pixel * pixels + 2 * len(picture.getbands()) * (coefficients or pixels)
    return pixel * pixels


def _copies(picture: Image.Image) -> int:
    """Bytes per pixel that `picture_array` takes on the way to RGB."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;"):
        return 40  # several of float64
    if picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info:
        return 20
    return 4 if picture.mode == "RGB" else 8


def by_bands(picture: Image.Image, short_side: int) -> np.ndarray:
    """`picture_array` of a large picture, reduced by a whole factor a few rows at a time before anything else."""
    picture.load()
    width, height = picture.size
    factor = max(1, min(width, height) // (2 * short_side))
    reduced = Image.new("RGB", (-(-width // factor), -(-height // factor)))
    rows = factor * max(1, BAND // (width * factor))
    bands = [(0, top, width, min(height, top + rows)) for top in range(0, height, rows)]
    unit = picture.mode == "F" and max(float(np.asarray(picture.crop(box)).max()) for box in bands) <= 1
    for box in bands:
        reduced.paste(_band(picture.crop(box), unit).reduce(factor), (0, box[1] // factor))
    short = min(width, height)
    if short > short_side:  # to the size, and seen through the frame, that the whole picture would have had
        size = [short_side if side == short else int(short_side * side / short) for side in (width, height)]
        frame = (0, 0, width / factor, height / factor)
        reduced = reduced.resize(size, Image.Resampling.BICUBIC, box=frame)
    if (turned := picture.getexif().get(ORIENTATION)) is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = turned
        reduced.info["exif"] = exif.tobytes()
    return picture_array(reduced)


def _band(band: Image.Image, unit: bool) -> Image.Image:
    """A band as RGB. Floats are levels of 0 to 1 (`unit`) or to 255, which only the whole picture tells."""
    if band.mode == "F":
        levels = np.clip(np.rint(np.asarray(band) * (255 if unit else 1)), 0, 255).astype(np.uint8)
        return Image.fromarray(levels).convert("RGB")
    band.info = {key: value for key, value in band.info.items() if key == "transparency"}  # turned at the end
    return Image.fromarray(picture_array(band))


def work(source: BinaryIO, target: BinaryIO) -> None:
    """Answers one question after another until there is no more."""
    Image.init()
    _bound_memory()
    target.write(READY)
    target.flush()
    while len(head := source.read(_ASK.size)) == _ASK.size:
        short_side, max_pixels, aspect, size = _ASK.unpack(head)
        try:
            array = decode_bounded(source.read(size), short_side, max_pixels, aspect)
            target.write(b"P" + _PIXELS.pack(*array.shape[:2]) + array.tobytes())
        except Exception as error:
            reason = "it takes too much memory" if isinstance(error, MemoryError) else str(error)
            text = (reason or type(error).__name__).removeprefix("image: ").encode("utf-8", "replace")
            target.write(b"E" + _REASON.pack(len(text)) + text)
        target.flush()


def _bound_memory() -> None:
    """What the header did not tell is ended by the system, where it can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY + 40_000_000,) * 2)


def work_announced(data: bytes) -> int:
    """Pixels to go over, by a glance at the header; a format that does not tell at a glance counts as large.

    >>> file = io.BytesIO()
    >>> Image.new("RGB", (30, 20)).save(file, "PNG")
    >>> work_announced(file.getvalue())
    600
    """
    if data.startswith(b"\x89PNG"):
        return int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")
    if data.startswith(b"GIF8"):
        return gif_pixels(data)
    if data.startswith(b"RIFF"):
        return math.prod(webp_size(data))
    for kind, at in jpeg_segments(data):
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the frame, which says its size
            pixels = int.from_bytes(data[at + 3 : at + 5], "big") * int.from_bytes(data[at + 5 : at + 7], "big")
            return pixels * max(1, scans(data) // 4)  # a few scans cost little more than one
    return LARGE + 1


# ---- in the server ---------------------------------------------------------------------------------------------------
class Worker:
    """One process that decodes; it takes a moment until it can."""

    def __init__(self) -> None:
        code = "import sys; from fscil.serving.decoding import work; work(sys.stdin.buffer, sys.stdout.buffer)"
        here = str(Path(__file__).parents[2])
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([here, *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **alone},
            start_new_session=True,  # Ctrl-C is for the server, which ends its workers
        )
        assert self.process.stdin is not None and isinstance(self.process.stdout, io.BufferedReader)  # pipes
        self.questions, self.answers = self.process.stdin, self.process.stdout
        self.ready = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, question: bytes, seconds: float) -> np.ndarray:
        """Pixels, or a DecodeError that says why not; EOFError if the process has ended, TimeoutError if it had to."""
        self.ready = self.ready or self.read(1) == READY  # its start, on a busy machine, is not the picture's fault
        late = threading.Timer(seconds, self.process.kill)
        late.daemon = True
        late.start()
        try:
            self.questions.write(question)
            self.questions.flush()
            if self.read(1) == b"P":
                height, width = _PIXELS.unpack(self.read(_PIXELS.size))
                return np.frombuffer(self.read(height * width * 3), np.uint8).reshape(height, width, 3)
            (size,) = _REASON.unpack(self.read(_REASON.size))
            raise DecodeError(self.read(size).decode("utf-8"))
        except (EOFError, OSError):
            if late.finished.is_set():
                raise TimeoutError from None
            raise
        finally:
            late.cancel()

    def read(self, size: int) -> bytearray:
        data = bytearray(size)
        if self.answers.readinto(data) < size:
            raise EOFError
        return data

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.answers.close()
        with contextlib.suppress(OSError):
            self.questions.close()


class Decoders:
    """A few worker processes, started when they are needed. `close` ends them in the midst of whatever they do."""

    def __init__(self, workers: int = WORKERS, seconds: float = SECONDS):
        self.seconds, self.closed = seconds, False
        self._workers: list[Worker | None] = [None] * workers
        self._idle: queue.LifoQueue[int] = queue.LifoQueue()  # places in that list
        for place in reversed(range(workers)):
            self._idle.put(place)
        self._large, self._waiting = threading.Semaphore(max(1, workers - 1)), threading.Semaphore(LARGE_WAITING)

    def start(self) -> Decoders:
        """Starts all of them at once, so that the first pictures need not wait."""
        self._workers = [worker or Worker() for worker in self._workers]
        return self

    def decode(self, data: bytes, short_side: int, max_pixels: int, aspect: float) -> np.ndarray:
        """The picture as uint8 (height, width, 3), its shorter side reduced to `short_side`; waits for a worker."""
        question = _ASK.pack(short_side, max_pixels, aspect, len(data)) + data
        if work_announced(data) <= LARGE:
            return self._ask(question)
        if not self._waiting.acquire(blocking=False):
            raise DecodeError("too many large pictures wait already; try again in a moment")
        try:
            with self._large:
                return self._ask(question)
        finally:
            self._waiting.release()

    def _ask(self, question: bytes) -> np.ndarray:
        place = self._idle.get()
        try:
            if self.closed:
                raise DecodeError(CLOSING)
            worker = self._workers[place]
            if worker is None or not worker.alive:
                worker = self._workers[place] = Worker()
            try:
                return worker.ask(question, self.seconds)
            except (EOFError, OSError) as error:
                worker.end()
                reason = "it takes too long to open" if isinstance(error, TimeoutError) else "it cannot be decoded"
                raise DecodeError(CLOSING if self.closed else reason) from None
        finally:
            self._idle.put(place)

    def close(self) -> None:
        self.closed = True
        for worker in filter(None, self._workers):
            worker.process.kill()

    def __del__(self) -> None:
        self.close()
