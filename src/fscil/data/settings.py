"""What can be chosen about the data. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fscil.errors import UserError, nearest

CLASS_ORDERS = ("natural", "seed", "file")
SAMPLERS = ("seeded", "index_files")


@dataclass
class DataConfig:
    """The data part of a run's configuration. `None` means the dataset's own default."""

    root: str | None = None  # folder of the dataset (for `folder` also a CSV file); None: the download cache
    split: str | None = None  # which train/test split: `official`, `80-20`, `pack`, … (docs/datasets.md)
    split_file: str | None = None  # a split manifest (.json), or CODA-Prompt's ImageNet-R lists (.yaml)
    base: int | None = None  # classes of the base task
    way: int | None = None  # new classes per task
    tasks: int | None = None  # few-shot tasks; None: until the classes are used up
    shots: int | None = None  # images per new class
    class_order: str = "natural"  # natural | seed | file
    order_seed: int = 1993  # of class_order `seed`: numpy's RandomState(order_seed).permutation
    order_file: str | None = None  # of class_order `file`: one class name (or number in natural order) per line
    sampler: str = "seeded"  # seeded | index_files
    index_files: str | None = None  # folder with session_1.txt, session_2.txt, …
    shots_file: str | None = None  # JSON ledger of a former run (shots.json): exactly these shots
    store: str = "256"  # full, or the short side images are reduced to once, aspect ratio kept
    skip_bad: bool = False  # leave unreadable images out instead of stopping
    test_fraction: float = 0.2  # of the stratified split
    validation: bool = (
        False  # a stream cut from the base task alone, to choose settings on; the test images stay unseen
    )
    limit: int | None = None  # smoke runs: at most so many images per base class, and test images per class
    download: bool | None = None  # None: only into the cache, when no root is given; True: into root as well

    def __post_init__(self) -> None:
        for field, choices in (("class_order", CLASS_ORDERS), ("sampler", SAMPLERS)):
            value = getattr(self, field)
            if value not in choices:
                raise UserError(f'{field} "{value}" is not one of {", ".join(choices)}.{nearest(value, choices)}')
        for field, least in (("base", 1), ("way", 1), ("tasks", 0), ("shots", 1), ("limit", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise UserError(f"{field} is {value}; it must be at least {least}.")
        if not 0 < self.test_fraction < 1:
            raise UserError(f"test_fraction is {self.test_fraction}; it must lie between 0 and 1.")
        self.store = str(self.store)
        if self.store != "full" and not (self.store.isdecimal() and int(self.store) > 0):
            raise UserError(f'store "{self.store}" is neither "full" nor a number of pixels such as 256.')

    @property
    def short_side(self) -> int | None:
        """Pixels the shorter side of a stored image is reduced to; None keeps images whole."""
        return None if self.store == "full" else int(self.store)


def with_defaults(config: DataConfig, base: int, way: int, shots: int) -> DataConfig:
    """`config` with the dataset's own protocol where it says None."""
    return replace(
        config,
        base=base if config.base is None else config.base,
        way=way if config.way is None else config.way,
        shots=shots if config.shots is None else config.shots,
    )
