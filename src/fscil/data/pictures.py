"""Pictures as people have them (files, folders, Pillow images, arrays, tensors, datasets) in one uint8 store."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fscil.data.decode import SHOWN, DecodeError, decode_image, decode_store, in_order, picture_array
from fscil.data.picture_files import Label, files_in, label_name, labelled_files
from fscil.data.pixels import ImageStore
from fscil.errors import UserError

AT_ONCE = 128  # pictures decoded together when a long row of them is recognised
DISK_FROM = 4000  # files: more are decoded into a cache on disk, so that memory does not grow with them


@dataclass
class Pictures:
    """Decoded pictures: their positions in what was given, a fingerprint of each, and what could not be read."""

    store: ImageStore
    kept: list[int]
    fingerprints: Tensor  # int64 (n,): equal for equal pixels
    bad: dict[int, str]  # position -> reason
    names: list[str] = field(default_factory=list)  # what to call each, where that is known

    def __len__(self) -> int:
        return len(self.kept)


def pair(X: Any, y: Any = None) -> tuple[Sequence[Any], list[Label]]:
    """(pictures, labels) from two sequences, a folder of class folders, a CSV file, or a dataset of pairs."""
    if y is None and isinstance(X, (str, os.PathLike)):
        X, y = labelled_files(X)
    elif y is None and isinstance(X, torch.utils.data.Dataset):
        pairs = _items(X)
        if not all(isinstance(item, (tuple, list)) and len(item) == 2 for item in pairs):
            raise UserError("a dataset without y must yield (picture, label) pairs.")
        names = getattr(X, "classes", None)  # torchvision's datasets number their classes and keep the names apart
        X, labels = [item[0] for item in pairs], [item[1] for item in pairs]
        y = [names[int(label)] if names is not None else _plain(label) for label in labels]
    if y is None:
        raise UserError("labels are missing: pass y, a folder of class folders, or a dataset of pairs.")
    pictures, labels = listed(X), [_named(label, position) for position, label in enumerate(y)]
    if len(pictures) != len(labels):
        raise UserError(f"there are {len(pictures)} pictures but {len(labels)} labels.")
    if not labels:
        raise UserError("no pictures were given.")
    if len({type(label) for label in labels}) > 1:
        labels = [str(label) for label in labels]
    return pictures, labels


def _named(label: Any, position: int) -> Label:
    label = _plain(label)
    of_pandas = type(label).__name__ in ("NAType", "NaTType")
    if label is None or of_pandas or (isinstance(label, float) and math.isnan(label)):
        raise UserError(f"the label at position {position} is missing ({label}); give it, or leave that picture out.")
    return label_name(label)


def _plain(label: Any) -> Any:
    return label.item() if isinstance(label, (np.generic, Tensor)) else label


def listed(X: Any) -> Sequence[Any]:
    """Pictures as a sequence: a single one is a list of one; a dataset may yield pictures or pairs."""
    if isinstance(X, torch.utils.data.Dataset):
        return [item[0] if isinstance(item, (tuple, list)) else item for item in _items(X)]
    if isinstance(X, (str, os.PathLike)):
        path = Path(X)
        return files_in(path) if path.is_dir() else [path]
    if isinstance(X, Image.Image) or (isinstance(X, (np.ndarray, Tensor)) and X.ndim in (2, 3) and _is_number(X)):
        return [X]
    if isinstance(X, (np.ndarray, Tensor)) and X.ndim not in (1, 4):
        raise UserError(f"pictures of shape {tuple(X.shape)}: give (n, height, width, 3), or (n, 3, height, width).")
    if isinstance(X, np.ndarray) and X.ndim == 1:
        return list(X.tolist())
    return cast("Sequence[Any]", X if isinstance(X, Sequence | np.ndarray | Tensor) else list(X))


def _items(dataset: Any) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


def _is_number(X: Any) -> bool:
    return isinstance(X, Tensor) or X.dtype.kind in "uifb"


def decode(item: Any, short_side: int | None = None) -> np.ndarray:
    """One picture of any kind as uint8 (height, width, 3)."""
    if isinstance(item, (str, os.PathLike, bytes)):
        return decode_image(item, short_side=short_side)
    if isinstance(item, Image.Image):
        return picture_array(item, short_side)
    if isinstance(item, (np.ndarray, Tensor)):
        return picture_array(Image.fromarray(_levels(item)), short_side)
    raise UserError(f"a {type(item).__name__} is not a picture; give paths, Pillow images, arrays or tensors.")


def _levels(item: np.ndarray | Tensor) -> np.ndarray:
    """uint8 (height, width[, 3 or 4]) of an array or tensor, channels first or last, bytes or floats in [0, 1]."""
    array = item.detach().cpu().numpy() if isinstance(item, Tensor) else np.asarray(item)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    elif array.ndim == 3 and isinstance(item, Tensor) and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)  # a tensor whose width is 1, 3 or 4: torch's order wins
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise UserError(f"an array of shape {tuple(item.shape)} is not a picture: give (height, width, 3).")
    if array.dtype == np.uint16:
        return (array / 257).round().astype(np.uint8)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < -1e-3 or array.max() > 1 + 1e-3:
            raise UserError("a picture of floats must lie within [0, 1]; pass it before normalisation.")
        return (array.clip(0, 1) * 255).round().astype(np.uint8)
    if array.dtype != np.uint8 and (array.min() < 0 or array.max() > 255):
        raise UserError(f"a picture of {array.dtype} must lie within 0 and 255.")
    return np.ascontiguousarray(array.astype(np.uint8))


def name_of(item: Any, position: int) -> str:
    return str(item) if isinstance(item, (str, os.PathLike)) else f"picture {position}"


def read_pictures(X: Sequence[Any], short_side: int, skip_bad: bool = False, cache: Path | None = None) -> Pictures:
    """Decodes all pictures. Those that cannot be read are an error that names them, or are left out with `skip_bad`."""
    if cache is not None and len(X) >= DISK_FROM and all(isinstance(item, (str, os.PathLike)) for item in X):
        return _read_through_disk(X, short_side, skip_bad, cache)
    arrays, kept, bad = [], [], {}
    for position, result in enumerate(_attempts(X, short_side)):
        if isinstance(result, str):
            bad[position] = result
        else:
            arrays.append(result)
            kept.append(position)
    if bad and not skip_bad:
        refuse(X, bad)
    return Pictures(ImageStore.from_list(arrays), kept, _fingerprints(arrays), bad)


def batches(X: Sequence[Any], short_side: int, size: int = AT_ONCE) -> Iterator[Pictures]:
    """`read_pictures` a few at a time, so that memory does not grow; unreadable ones are only named in `bad`."""
    for start in range(0, len(X), size):
        part = read_pictures(X[start : start + size], short_side, skip_bad=True)
        part.kept = [start + position for position in part.kept]
        part.bad = {start + position: reason for position, reason in part.bad.items()}
        yield part


def refuse(X: Sequence[Any], bad: Mapping[int, str]) -> None:
    named = [f"{name_of(X[position], position)} ({reason})" for position, reason in bad.items()]
    more = f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    raise UserError(
        f"{len(named)} of {len(X)} pictures cannot be read (repair or remove them, or leave them out with --skip-bad "
        f"or skip_bad=True): {'; '.join(named[:SHOWN])}{more}"
    )


def _attempts(X: Sequence[Any], short_side: int) -> Iterable[np.ndarray | str]:
    def attempt(item: Any) -> np.ndarray | str:
        try:
            return decode(item, short_side)
        except DecodeError as error:
            return str(error).removeprefix(f"{item}: ").removeprefix("image: ")
        except UserError as error:
            return str(error)

    Image.init()  # all decoders, before threads ask for them
    return in_order(attempt, X)


def _read_through_disk(X: Sequence[Any], short_side: int, skip_bad: bool, cache: Path) -> Pictures:
    stamps = [(str(Path(item).resolve()), os.path.getsize(item), os.stat(item).st_mtime_ns) for item in X]
    digest = hashlib.sha256(repr((short_side, stamps)).encode()).hexdigest()[:16]
    store, kept = decode_store(list(X), cache / f"pictures-{digest}", short_side=short_side, skip_bad=skip_bad)
    left_out = {position: "left out" for position in sorted(set(range(len(X))) - set(kept))}
    return Pictures(store, kept, _fingerprints(store.image(i).numpy() for i in range(len(store))), left_out)


def _fingerprints(arrays: Iterable[np.ndarray]) -> Tensor:
    def one(array: np.ndarray) -> int:
        digest = hashlib.sha256(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array).data)
        return int.from_bytes(digest.digest()[:8], "little", signed=True)

    return torch.tensor([one(array) for array in arrays], dtype=torch.int64)


def repeated(
    fingerprints: Tensor, labels: Sequence[Label], known: dict[int, set[Label]]
) -> tuple[list[int], list[str]]:
    """(positions to keep, what to say): a picture given twice for one class counts once, in two classes it is named.

    `known` holds the classes that each fingerprint was taught as before.
    """
    keep, twice, torn = [], 0, []
    seen = {fingerprint: set(classes) for fingerprint, classes in known.items()}
    for position, (fingerprint, label) in enumerate(zip(fingerprints.tolist(), labels)):
        classes = seen.setdefault(fingerprint, set())
        if label in classes:
            twice += 1
            continue
        if classes:
            torn.append(f'"{label}" and "{next(iter(classes))}"')
        classes.add(label)
        keep.append(position)
    notes = [f"{twice} of {len(labels)} pictures repeat another of their class and count once"] if twice else []
    pairs = ", ".join(itertools.islice(dict.fromkeys(torn), 5))
    are = "picture is" if len(torn) == 1 else "pictures are"
    return keep, notes + ([f"{len(torn)} {are} given for two classes ({pairs}): check them"] if torn else [])
