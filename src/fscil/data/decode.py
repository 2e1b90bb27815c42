"""Pictures from files: decoded once, defensively and in parallel, into a flat uint8 store with a cache on disk."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fscil.data.bounded import blocks_excess
from fscil.errors import UserError
from fscil.files import atomic_path, load_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from fscil.data.pixels import ImageStore

    Index = tuple[Tensor, Tensor, list[str]]  # sizes and positions of the readable images, the others

S = TypeVar("S")
T = TypeVar("T")

MAX_PIXELS = 89_478_485  # a 256 MiB picture of 24 bits; also where Pillow begins to warn
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
HEIF = ("HEIF",)  # what telephones write; read with pillow-heif
HEIF_BRANDS = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"))
SUFFIXES = frozenset((".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif"))
SHOWN = 50  # unreadable images that an error names


class DecodeError(UserError):
    """One picture that cannot be read."""


def decode_image(
    source: str | os.PathLike[str] | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS, short_side: int | None = None
) -> np.ndarray:
    """A picture as uint8 (height, width, 3), whatever its mode: the way a viewer shows it.

    The camera's orientation is applied, transparency lies on white, 16-bit grey is reduced to 8, of an animation the
    first frame counts. With `short_side`, a larger picture is reduced to it (bicubic, antialiased; aspect ratio
    kept), never enlarged. Raises `DecodeError` for a file that is missing, damaged, cut short, of an unknown format,
    or larger than `max_pixels`.
    """
    name = str(source) if isinstance(source, str | os.PathLike) else "image"
    try:
        formats = _checked(source)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats) as picture:
            if picture.width * picture.height > max_pixels:
                raise DecodeError(
                    f"{name}: {picture.width} x {picture.height} pixels are more than the {max_pixels} allowed"
                )
            picture.load()  # raises where the data end early
            return picture_array(picture, short_side)
    except DecodeError as error:
        raise DecodeError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    except MemoryError:
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, met before the size can be asked for
        raise DecodeError(f"{name}: more pixels than the {max_pixels} allowed") from None
    except FileNotFoundError:
        raise DecodeError(f"{name}: no such file") from None
    except UnidentifiedImageError:
        raise DecodeError(f"{name}: not a picture of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise DecodeError(f"{name}: {error or type(error).__name__}") from error


def formats_of(head: bytes) -> tuple[str, ...]:
    """The formats that a file with these first bytes may have; HEIF needs an extra, which is named where it is missing.

    >>> formats_of(b"\\x89PNG") == FORMATS
    True
    """
    if head[4:8] != b"ftyp" or head[8:12] not in HEIF_BRANDS:
        return FORMATS
    try:
        import pillow_heif
    except ImportError:
        raise DecodeError('HEIC pictures need pillow-heif: pip install "fscil[heic]"') from None
    pillow_heif.register_heif_opener()
    return HEIF


def _checked(source: str | os.PathLike[str] | bytes | BinaryIO) -> tuple[str, ...]:
    """The formats that a picture may have, if it does not hold too much beside its pixels."""
    with contextlib.ExitStack() as stack:
        if isinstance(source, bytes):
            file: BinaryIO = io.BytesIO(source)
        else:
            if isinstance(source, str | os.PathLike) and not stat.S_ISREG(os.stat(source).st_mode):
                raise DecodeError("no regular file")  # opening a pipe waits for somebody to write
            file = stack.enter_context(open(source, "rb")) if isinstance(source, str | os.PathLike) else source
        head = file.read(12)
        file.seek(-len(head), os.SEEK_CUR)
        if excess := blocks_excess(file):
            raise DecodeError(excess)
        return formats_of(head)


def picture_array(picture: Image.Image, short_side: int | None = None) -> np.ndarray:
    """An open Pillow picture as uint8 (height, width, 3), upright and on white, reduced to `short_side` if larger."""
    with contextlib.suppress(Exception):  # a damaged EXIF block costs the orientation, not the picture
        picture = ImageOps.exif_transpose(picture)
    return np.array(_reduced(_as_rgb(picture), short_side))


def _as_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB":
        return picture
    if (
        picture.mode.startswith("I") or picture.mode == "F"
    ):  # deep greys, which Pillow's own conversion would clip at 255
        levels = np.asarray(picture).astype(np.float64)
        levels = levels / 257 if picture.mode != "F" else levels * (255 if levels.max(initial=0) <= 1 else 1)
        return Image.fromarray(np.clip(np.rint(levels), 0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode in ("LA", "La", "RGBa", "PA", "RGBA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")


def _reduced(picture: Image.Image, short_side: int | None) -> Image.Image:
    width, height = picture.size
    short = min(width, height)
    if short_side is None or short <= short_side:
        return picture
    # The longer side rounds down, as torchvision's Resize does.
    size = [short_side if side == short else int(short_side * side / short) for side in (width, height)]
    return resized(picture, size[0], size[1])


def resized(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Bicubic, across and then down. Asked for both at once, Pillow rounds to levels in between and from version 13 on
    takes whichever order is cheaper, so that levels would depend on its version."""
    across = picture.resize((width, picture.height), Image.Resampling.BICUBIC)
    return across.resize((width, height), Image.Resampling.BICUBIC)


def in_order(function: Callable[[S], T], items: Iterable[S], workers: int | None = None) -> Iterator[T]:
    """`map(function, items)` over threads: results in order, only a few ahead of the consumer."""
    workers = workers or min(32, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) >= 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def decode_store(
    files: Sequence[S],
    cache: str | os.PathLike[str],
    *,
    short_side: int | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    map_above: int | None = None,
    names: Sequence[str] | None = None,
    decode: Callable[[S, int | None], np.ndarray] | None = None,
) -> tuple[ImageStore, list[int]]:
    """(store of the readable images, their positions in `files`), decoded into `cache` unless it is there already.

    The pixels go to `<cache>.bin` as they are decoded, so memory does not grow; `<cache>.safetensors` is the index
    and, written last, the sign that the pixels are whole. A store larger than `map_above` bytes (half of the
    machine's memory) is mapped from the file, not read. `names` are how errors call the files; what is no file but
    can be turned into a picture brings `decode`, from it and the short side.
    """
    pixels_path, index_path = Path(f"{cache}.bin"), Path(f"{cache}.safetensors")
    index = _read_index(pixels_path, index_path, len(files))
    if index is None:
        called = names or [str(file) for file in files]
        index = _decode_to_disk(files, called, pixels_path, index_path, short_side, workers, decode or _decode_file)
    sizes, kept, bad = index
    if bad and not skip_bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UserError(
            f"{len(bad)} of {len(files)} images cannot be read (repair or remove them, or leave them out with "
            "--skip-bad): "
            f"{'; '.join(bad[:SHOWN])}{more}"
        )
    return _open_store(pixels_path, sizes, map_above), kept.tolist()


def _read_index(pixels_path: Path, index_path: Path, count: int) -> Index | None:
    """(sizes, kept, bad) of a whole cache, or None."""
    import torch

    try:
        tensors, meta = load_tensors(index_path)
        sizes, kept, bad = tensors["sizes"], tensors["kept"], list(meta["bad"])
        if {sizes.dtype, kept.dtype} != {torch.int64} or sizes.shape != (len(kept), 2) or kept.ndim != 1:
            return None
        if (sizes < 1).any() or not set(kept.tolist()) <= set(range(count)) or not all(isinstance(s, str) for s in bad):
            return None
        whole = len(kept) + len(bad) == count and pixels_path.stat().st_size == int(sizes.prod(1).sum()) * 3
        return (sizes, kept, bad) if whole else None
    except (UserError, KeyError, TypeError, OSError):  # absent, damaged or of another version: decode again
        return None


def _decode_file(file: Any, short_side: int | None) -> np.ndarray:
    return decode_image(file, short_side=short_side)


def _decode_to_disk(
    files: Sequence[S],
    names: Sequence[str],
    pixels_path: Path,
    index_path: Path,
    short_side: int | None,
    workers: int | None,
    decode: Callable[[S, int | None], np.ndarray],
) -> Index:
    import torch

    def attempt(job: tuple[S, str]) -> np.ndarray | str:
        file, name = job
        try:
            return decode(file, short_side)
        except DecodeError as error:
            return f"{name} ({str(error).removeprefix(f'{file}: ')})"

    Image.init()  # all decoders, before threads ask for them
    sizes: list[tuple[int, ...]] = []
    kept: list[int] = []
    bad: list[str] = []
    with atomic_path(pixels_path) as aside, open(aside, "wb") as out:
        index_path.unlink(missing_ok=True)
        decoded = in_order(attempt, zip(files, names), workers)
        for position, result in enumerate(_progress(decoded, len(files), "decoding images")):
            if isinstance(result, str):
                bad.append(result)
                continue
            out.write(result.data)
            sizes.append(result.shape[:2])
            kept.append(position)
    index = torch.tensor(sizes, dtype=torch.int64).view(-1, 2), torch.tensor(kept, dtype=torch.int64), bad
    save_tensors(
        index_path, {"sizes": index[0], "kept": index[1]}, {"kind": "pixels", "bad": bad, "short_side": short_side}
    )
    return index


def _open_store(path: Path, sizes: Tensor, map_above: int | None) -> ImageStore:
    import psutil
    import torch

    from fscil.data.pixels import ImageStore

    lengths = sizes.prod(1) * 3
    total = int(lengths.sum())
    map_above = psutil.virtual_memory().total // 2 if map_above is None else map_above
    if total > map_above:
        flat = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8)  # private: never written back
    else:
        flat = torch.from_numpy(np.fromfile(path, np.uint8))
    return ImageStore(flat, lengths.cumsum(0) - lengths, sizes)


def _progress(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    from rich.progress import track

    from fscil.data.downloads import console

    yield from track(items, description, total=total, console=console(), disable=not console().is_terminal)
