"""A manifest says which images a benchmark holds, and which of them train and which test. Its hash names the split."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

from fscil.errors import UserError
from fscil.files import FORMAT_VERSION, atomic_write, read_json
from fscil.strict import conform, show

TRAIN, TEST = "train", "test"


class Entry(NamedTuple):
    image: str | int  # path relative to the dataset's root, or position in the official order of its split
    split: str  # train | test
    label: int  # class number in natural order


class _Stored(TypedDict):
    """A manifest's file."""

    dataset: str
    split: str
    class_names: list[str]
    entries: list[list[str | int]]


@dataclass(frozen=True)
class Manifest:
    """The images of a dataset under one split, classes in natural order.

    Entries of one class stand in the order the shot sampler counts them in.
    """

    dataset: str
    split: str
    class_names: tuple[str, ...]
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        names = self.class_names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f'dataset {self.dataset}: two classes are called "{twice}"')
        if len({(entry.image, entry.split) for entry in self.entries}) != len(self.entries):
            raise UserError(f"dataset {self.dataset}: the split {self.split} lists an image twice")
        counts = {TRAIN: [0] * len(names), TEST: [0] * len(names)}
        for entry in self.entries:
            if entry.split not in counts or not 0 <= entry.label < len(names):
                raise UserError(f"dataset {self.dataset}: the split {self.split} has a bad entry {tuple(entry)}")
            counts[entry.split][entry.label] += 1
        if not names:
            raise UserError(f"dataset {self.dataset} has no classes")
        for split, per_class in counts.items():
            empty = [name for name, count in zip(names, per_class) if not count]
            if empty:
                shown = ", ".join(f'"{name}"' for name in empty[:5]) + (", …" if len(empty) > 5 else "")
                raise UserError(
                    f"dataset {self.dataset}, split {self.split}: no {split} images of {len(empty)} of "
                    f"{len(names)} classes "
                    f"({shown}); each class needs at least one training and one test image"
                )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON (sorted keys, no spaces, UTF-8)."""
        canonical = json.dumps(self._as_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def short_hash(self) -> str:
        return self.hash[:12]

    def positions(self, split: str) -> list[list[int]]:
        """For each class, where in `entries` its images of a split are."""
        found: list[list[int]] = [[] for _ in self.class_names]
        for position, entry in enumerate(self.entries):
            if entry.split == split:
                found[entry.label].append(position)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, one image a line."""
        about = {"format_version": FORMAT_VERSION, "kind": "split", "split_hash": self.hash, **self._as_dict()}
        entries = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in about.pop("entries"))
        head = json.dumps(about, ensure_ascii=False)
        atomic_write(path, f'{head[:-1]}, "entries": [\n{entries}\n]}}\n')

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read a saved manifest; the hash it carries must be its own."""
        data = conform(read_json(path), _Stored, path)
        entries = tuple(
            _read_entry(entry, f"{path}: entries[{number}]") for number, entry in enumerate(data["entries"])
        )
        manifest = cls(data["dataset"], data["split"], tuple(data["class_names"]), entries)
        if data.get("split_hash", manifest.hash) != manifest.hash:
            raise UserError(f'"{path}" was changed after it was written: its entries do not match its split_hash')
        return manifest

    def _as_dict(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "split": self.split,
            "class_names": list(self.class_names),
            "entries": [list(entry) for entry in self.entries],
        }


def _read_entry(values: list[str | int], where: str) -> Entry:
    if len(values) == 3:
        image, split, label = values
        if isinstance(split, str) and isinstance(label, int):
            return Entry(image, split, label)
    raise UserError(f"{where} must be [path or number, split, class number], got {show(values)}")


def manifest_of_lists(
    dataset: str,
    split: str,
    class_names: Sequence[str],
    train: Iterable[tuple[str | int, int]],
    test: Iterable[tuple[str | int, int]],
) -> Manifest:
    """A manifest from (image, class number) pairs, kept in the order given."""
    entries = [Entry(image, TRAIN, label) for image, label in train] + [
        Entry(image, TEST, label) for image, label in test
    ]
    return Manifest(dataset, split, tuple(class_names), tuple(entries))


def stratified_split(
    dataset: str, images: Mapping[str, Iterable[str]], test_fraction: float = 0.2, split: str | None = None
) -> Manifest:
    """Split every class by itself, the same way on every machine and for every seed.

    `images` gives each class its relative paths. A class's images are ranked by the SHA-256 of their paths and the
    first `test_fraction` of them (rounded, at least one, never all) test; so neither the order of a folder listing
    nor any random generator matters, and adding a class leaves the others' split alone.
    """
    train, test = [], []
    class_names = sorted(images)
    for label, name in enumerate(class_names):
        paths = sorted(images[name])
        if len(paths) < 2:
            raise UserError(
                f'dataset {dataset}: class "{name}" has {len(paths)} image(s); a split into train and test needs '
                "2 or more"
            )
        count = min(max(int(test_fraction * len(paths) + 0.5), 1), len(paths) - 1)
        chosen = set(sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest())[:count])
        train += [(path, label) for path in paths if path not in chosen]
        test += [(path, label) for path in paths if path in chosen]
    name = split or f"{round(100 * (1 - test_fraction))}-{round(100 * test_fraction)}"
    return manifest_of_lists(dataset, name, class_names, train, test)
