"""A dataset cut into a base task and few-shot tasks, reproducibly: class order, sessions, shots, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fscil.config import DataConfig
from fscil.data.datasets import Dataset
from fscil.data.manifests import TEST, TRAIN, Manifest
from fscil.data.pixels import ImageStore, Pixels
from fscil.data.shots import Ledger, Pools, index_file_shots, ledger_shots, seeded_shots
from fscil.data.transforms import Transform
from fscil.errors import UserError, nearest
from fscil.reading import read_text

if TYPE_CHECKING:
    from fscil.data.shots import Image

VALIDATION_BASE = 2 / 3  # of the base classes stay base classes in a validation stream; the others arrive few-shot
VALIDATION_TEST = 0.2  # of their training images are tested on


@dataclass(frozen=True)
class Task:
    """What arrives at once. Labels number classes by order of arrival, so the base task's are 0 … base − 1.

    >>> pictures = ImageStore.from_array(np.zeros((4, 8, 8, 3), np.uint8))
    >>> task = Task(0, (0, 1), Pixels(pictures, Transform(size=8, resize=8), seed=0), torch.tensor([0, 0, 1, 1]))
    >>> tuple(task.images.plain(torch.arange(4)).shape)
    (4, 3, 8, 8)
    """

    index: int  # 0: the base task
    classes: tuple[int, ...]  # labels that are new in this task
    images: Pixels
    labels: Tensor  # int64 (n,)


@dataclass
class Stream:
    """The base task, the few-shot tasks, and the test images of all their classes.

    >>> from fscil.data.datasets import load_dataset
    >>> config = DataConfig(base=4, way=2, tasks=1, shots=5, limit=2)
    >>> stream = make_stream(load_dataset("glyphs", config), config, Transform(size=32, resize=32), seed=0)
    >>> [(task.classes, len(task.images)) for task in stream.tasks], stream.seen(1), len(stream.test)
    ([((0, 1, 2, 3), 8), ((4, 5), 10)], 6, 12)
    """

    name: str
    class_names: list[str]  # in order of arrival
    tasks: list[Task]
    test: Pixels
    test_labels: Tensor  # int64, same numbering as the tasks'
    base_classes: int
    way: int
    split_hash: str
    shots: Ledger  # task -> class name -> images, as the manifest names them
    manifest: Manifest | None = None
    about: dict[str, Any] = field(
        default_factory=dict
    )  # how it was cut (JSON-able): class order, sizes, limit, images left out

    def seen(self, task: int) -> int:
        """How many classes are known after `task`."""
        return self.tasks[task].classes[-1] + 1

    @property
    def protocol(self) -> str:
        """Its tasks in a few words: "60 + 8 x (5-way 5-shot)"; a last task may be smaller."""
        later = [len(task.classes) for task in self.tasks[1:]]
        if not later:
            return f"{self.base_classes} at once"
        shots = len(self.tasks[1].images) // later[0]
        whole = later.count(later[0])
        rest = [str(classes) for classes in later[whole:]]
        return " + ".join([str(self.base_classes), f"{whole} x ({later[0]}-way {shots}-shot)", *rest])

    def __len__(self) -> int:
        return len(self.tasks)


def session_sizes(n_classes: int, base: int, way: int, tasks: int | None = None) -> list[int]:
    """Classes per task: base, then `way` at a time while they last, then the remainder; or just `tasks` tasks.

    >>> session_sizes(100, 60, 5), session_sizes(10, 5, 2), session_sizes(10, 5, 2, tasks=1)
    ([60, 5, 5, 5, 5, 5, 5, 5, 5], [5, 2, 2, 1], [5, 2])
    """
    if base < 1 or way < 1 or (tasks is not None and tasks < 0):
        raise UserError(f"base is {base}, way {way}, tasks {tasks}: base and way must be at least 1, tasks at least 0")
    if base > n_classes:
        raise UserError(
            f"base is {base}, but the dataset has only {n_classes} classes; choose a base of at most {n_classes}"
        )
    if tasks is not None:
        if base + way * tasks > n_classes:
            raise UserError(
                f"base {base} + way {way} x tasks {tasks} = {base + way * tasks} classes, but the dataset has "
                f"{n_classes}; "
                f"at most {(n_classes - base) // way} such tasks fit"
            )
        return [base] + [way] * tasks
    whole, rest = divmod(n_classes - base, way)
    return [base] + [way] * whole + ([rest] if rest else [])


def class_order(config: DataConfig, class_names: Sequence[str]) -> list[int]:
    """Class numbers (natural order) in order of arrival."""
    if config.class_order == "seed":  # as LAMDA-PILOT shuffles: the legacy generator, seed 1993 by convention
        shuffled: list[int] = np.random.RandomState(config.order_seed).permutation(len(class_names)).tolist()
        return shuffled
    if config.class_order == "natural":
        return list(range(len(class_names)))
    if not config.order_file:
        raise UserError("class_order file needs order_file: one class name (or number in natural order) per line")
    path = Path(config.order_file).expanduser()
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    number = {str(label): label for label in range(len(class_names))}
    number.update({name: label for label, name in enumerate(class_names)})
    for line in lines:
        if line not in number:
            raise UserError(f'order_file "{path}": the dataset has no class "{line}".{nearest(line, class_names)}')
    order = [number[line] for line in lines]
    if len(set(order)) != len(order):
        twice = next(name for name in lines if [number[line] for line in lines].count(number[name]) > 1)
        raise UserError(f'order_file "{path}" lists class "{twice}" twice')
    return order


def make_stream(
    dataset: Dataset, config: DataConfig, transform: Transform, seed: int, device: torch.device | str = "cpu"
) -> Stream:
    """Cut a dataset into tasks and read the images they need: base, shots and test images, each held once.

    `seed` decides the shots and, with the image's number, the augmentation; it does not change classes or split.
    """
    manifest = dataset.manifest
    config = dataset.complete(config)
    order = class_order(config, manifest.class_names)
    of_class, test_of_class = manifest.positions(TRAIN), manifest.positions(TEST)
    if config.validation:
        config, order = _for_validation(config, order)
        of_class, test_of_class = _hold_out(of_class)
    assert config.base is not None and config.way is not None
    sizes = session_sizes(len(order), config.base, config.way, config.tasks)
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    order = order[: starts[-1]]
    label_of = {number: label for label, number in enumerate(order)}
    names = [manifest.class_names[number] for number in order]

    pools = {
        task: {
            names[label]: [manifest.entries[at].image for at in of_class[order[label]]] for label in range(start, stop)
        }
        for task, (start, stop) in enumerate(zip(starts, starts[1:]))
    }
    base_images, ledger = _choose_shots(config, pools, seed)
    of_base = [of_class[number] for number in order[: sizes[0]]]
    if base_images is not None:
        listed = set(base_images)
        of_base = [[at for at in images if manifest.entries[at].image in listed] for images in of_base]
    base_positions = [at for images in of_base for at in _first(images, config.limit)]
    position = {manifest.entries[at].image: at for images in of_class for at in images}
    shot_positions = {
        task: [position[image] for images in classes.values() for image in images] for task, classes in ledger.items()
    }
    test_positions = [at for number in order for at in _first(test_of_class[number], config.limit)]

    def labels(positions: Sequence[int]) -> Tensor:
        return torch.tensor([label_of[manifest.entries[at].label] for at in positions], dtype=torch.int64)

    def pixels(positions: Sequence[int]) -> tuple[Pixels, list[int]]:
        store, kept = dataset.store(positions)
        return Pixels(_beside(store, device), transform, seed, device=device), kept

    base, base_kept = pixels(base_positions)
    tasks = [Task(0, tuple(range(sizes[0])), base, labels(base_kept))]
    all_shots = [at for task in sorted(shot_positions) for at in shot_positions[task]]
    row: dict[int, int] = {}  # of the shots' store, by position in the manifest
    if all_shots:
        shots, shots_kept = pixels(all_shots)
        row = {at: number for number, at in enumerate(shots_kept)}
        for task in sorted(shot_positions):
            chosen = [at for at in shot_positions[task] if at in row]
            images = shots.select([row[at] for at in chosen])
            tasks.append(Task(task, tuple(range(starts[task], starts[task + 1])), images, labels(chosen)))
    test, test_kept = pixels(test_positions)

    wanted = base_positions + all_shots + test_positions
    skipped = sorted(str(manifest.entries[at].image) for at in set(wanted) - {*base_kept, *row, *test_kept})
    test_labels = labels(test_kept)
    if skipped:
        _every_class_left(tasks, test_labels, names)
        ledger = {
            task: {name: [image for image in images if position[image] in row] for name, images in classes.items()}
            for task, classes in ledger.items()
        }
    about = {
        "split": manifest.split,
        "class_order": config.class_order if config.class_order != "seed" else f"seed {config.order_seed}",
        "sizes": sizes,
        "sampler": "shots_file" if config.shots_file else config.sampler,
        "shots": config.shots,
        "limit": config.limit,
        "validation": config.validation,
        "base_images": len(base_kept),
        "test_images": len(test_kept),
        "skipped": skipped,
    }
    return Stream(
        dataset.name, names, tasks, test, test_labels, sizes[0], config.way, manifest.hash, ledger, manifest, about
    )


def _for_validation(config: DataConfig, order: list[int]) -> tuple[DataConfig, list[int]]:
    """The base classes alone, most of them as base classes again and the others as few-shot tasks."""
    if config.shots_file or config.sampler == "index_files":
        raise UserError("validation draws its own shots; leave out shots_file and sampler index_files")
    whole, way = config.base, config.way
    assert whole is not None and way is not None
    session_sizes(len(order), whole, way, config.tasks)  # complains in terms of the real stream
    base = config.validation_base or round(whole * VALIDATION_BASE)
    if whole < 2:
        raise UserError(f"validation needs at least 2 base classes to play new ones, base is {whole}")
    if not 0 < base < whole:
        raise UserError(f"validation_base is {base}; of {whole} base classes between 1 and {whole - 1} may stay ones")
    chosen = order[:whole]
    if config.validation_draw:
        drawn = np.random.default_rng([2023, config.validation_draw]).permutation(whole)
        chosen = [chosen[at] for at in drawn]
    return replace(config, base=base, way=min(way, whole - base), tasks=None), chosen


def _hold_out(of_class: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """(training, test) positions by class: a fifth of each class's training images, the same in every run."""
    kept, tested = [], []
    for label, positions in enumerate(of_class):
        drawn = np.random.default_rng([2023, label]).permutation(len(positions))
        count = min(max(1, round(VALIDATION_TEST * len(positions))), len(positions) - 1) if len(positions) else 0
        chosen = {positions[at] for at in drawn[:count]}
        kept.append([at for at in positions if at not in chosen])
        tested.append([at for at in positions if at in chosen])
    return kept, tested


def _choose_shots(config: DataConfig, pools: Pools, seed: int) -> tuple[list[Image] | None, Ledger]:
    """(images of the base task, None for all of them; ledger of the few-shot tasks)."""
    new = {task: classes for task, classes in pools.items() if task > 0}
    if config.shots_file:
        return None, ledger_shots(config.shots_file, new)
    if config.sampler == "index_files":
        if not config.index_files:
            raise UserError("sampler index_files needs index_files: the folder with session_1.txt, session_2.txt, …")
        return index_file_shots(config.index_files, pools)
    assert config.shots is not None
    return None, seeded_shots(new, config.shots, seed)


def _first(items: Sequence[int], limit: int | None) -> Sequence[int]:
    return items if limit is None else items[:limit]


def _beside(store: ImageStore, device: torch.device | str) -> ImageStore:
    """The store on the GPU when it takes at most a quarter of the free memory there, else where it is."""
    device = torch.device(device)
    if device.type != "cuda":
        return store
    free, _ = torch.cuda.mem_get_info(device)
    return store.to(device) if store.nbytes <= free // 4 else store


def _every_class_left(tasks: Sequence[Task], test_labels: Tensor, names: Sequence[str]) -> None:
    trained = {int(label) for task in tasks for label in task.labels.unique()}
    tested = {int(label) for label in test_labels.unique()}
    for label, name in enumerate(names):
        if label not in trained or label not in tested:
            kind = "training" if label not in trained else "test"
            raise UserError(
                f'without the unreadable images, class "{name}" has no {kind} image left; repair or replace them'
            )
