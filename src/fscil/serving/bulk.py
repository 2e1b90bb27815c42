"""Recognise very many pictures: from folders, lists or URLs into numbered Parquet files, on one machine or many.

    results.parquet/               a Parquet dataset: pandas.read_parquet reads the whole folder
      _ledger.parquet              which picture belongs to which part, written before the first answer
      part-000000.parquet          answers: file, label, confidence, unknown, error, top

The ledger fixes what each part holds, and a part appears whole or not at all. So whatever is killed, a worker, this
process or a machine, the same command does what is missing: a part that two processes happen to do is the same file
twice over. Pictures that are new at the source since then become further parts.
"""

from __future__ import annotations

import codecs
import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fscil.data.decode import SUFFIXES
from fscil.data.picture_files import files_in, table_rows
from fscil.data.pictures import AT_ONCE
from fscil.errors import UserError, nearest
from fscil.files import atomic_write, digest_file
from fscil.reading import TABLE_AT_MOST
from fscil.teachable.folder import HEAD

if TYPE_CHECKING:
    import pyarrow as pa

    from fscil.teachable.model import Teachable
    from fscil.teachable.recognition import Recognition

MAX_BYTES = 200 * 2**20  # of one picture that is fetched
PART = 1024  # pictures in one file of answers: a few seconds of work on a CPU, lost at most when a worker is killed
LEDGER = "_ledger.parquet"  # readers of Parquet folders pass over names that begin with _


# ---- where pictures come from ----------------------------------------------------------------------------------------


def pictures_at(source: str) -> list[str]:
    """Paths or URLs of the pictures of a source, sorted: a folder, a list (.txt: one a line, .csv), a URL of either.

    Whatever fsspec reads can be named: s3://bucket/photos, gs://…, hf://datasets/…, http://host/folder/.
    """
    if source.endswith((".txt", ".csv")):
        return _listed(source)
    if "://" not in source:
        path = Path(source).expanduser()
        found = [str(file) for file in files_in(path)] if path.is_dir() else [str(path)] if path.is_file() else []
    else:
        filesystem, inside = _filesystem(source)
        with _told(source):
            found = [filesystem.unstrip_protocol(name) for name in filesystem.find(inside)]
            found = [name for name in found if Path(name).suffix.lower() in SUFFIXES]
            if not found:
                filesystem.ls(inside)  # `find` passes over what cannot be reached; this says why
    if not found:
        raise UserError(f'"{source}" holds no pictures; name a folder, a list (.txt, .csv) or a URL of pictures.')
    return sorted(set(found))


def _listed(source: str) -> list[str]:
    text = _read(source, TABLE_AT_MOST).removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    if source.endswith(".txt"):
        names = [line.strip() for line in text.splitlines()]
    else:
        names = [row["path"] for row in table_rows(text, source, needed=["path"])]
    found = sorted({name for name in names if name})
    if not found:
        raise UserError(f'"{source}" names no pictures.')
    return found


def _filesystem(url: str) -> tuple[Any, str]:
    """What reads and writes a URL, and the path inside it."""
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError:
        raise UserError(f'"{url}" is a URL, which needs fsspec; pip install "fscil[bulk]"') from None
    if url.startswith(("file://", "local://")):  # a name on this machine may hold "::", which chains URLs elsewhere
        return LocalFileSystem(), str(LocalFileSystem._strip_protocol(url))
    try:
        filesystem, inside = url_to_fs(url)
    except (ImportError, ValueError) as error:  # an unknown protocol, or one whose package is not installed
        raise UserError(f'"{url}" cannot be opened: {error}') from error
    return filesystem, str(inside)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """What goes wrong on the way, in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each file system of fsspec has errors of its own
        raise UserError(
            f'"{url}" cannot be reached: {" ".join(str(error).split())[:200] or type(error).__name__}'
        ) from error


def _read(source: str, limit: int | None = MAX_BYTES) -> bytes:
    """The content of a file or URL; more than `limit` bytes are an error."""
    try:
        if "://" in source:
            filesystem, inside = _filesystem(source)
            with _told(source), filesystem.open(inside, "rb") as file:
                data: bytes = file.read() if limit is None else file.read(limit + 1)
        else:
            with open(source, "rb") as file:
                data = file.read() if limit is None else file.read(limit + 1)
    except OSError as error:
        raise UserError(f'"{source}" cannot be read: {error.strerror or error}') from error
    if limit is not None and len(data) > limit:
        raise UserError(f'"{source}" has more than {limit // 2**20} MB')
    return data


# ---- where answers go ------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError('--out writes Parquet, which needs pyarrow; pip install "fscil[bulk]"') from None
    return pyarrow


@dataclass(frozen=True)
class Part:
    """A numbered share of the pictures."""

    number: int
    files: list[str]

    @property
    def name(self) -> str:
        return f"part-{self.number:06d}.parquet"


@dataclass(frozen=True)
class Output:
    """The folder of answers, at a path or URL."""

    where: str

    def names(self) -> set[str]:
        """The files that are there."""
        if "://" not in self.where:
            folder = Path(self.where)
            if folder.exists() and not folder.is_dir():
                raise UserError(f'--out "{self.where}" is a file; answers go into a folder of Parquet files.')
            return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        filesystem, inside = _filesystem(self.where)
        with _told(self.where):
            there = filesystem.ls(inside, detail=False) if filesystem.exists(inside) else []
        return {str(name).rstrip("/").rpartition("/")[2] for name in there}

    def path(self, name: str) -> str:
        return f"{self.where.rstrip('/')}/{name}"

    def write(self, name: str, table: pa.Table) -> None:
        """Whole or not at all: beside its place and renamed on a disk; in one request where objects are stored."""
        buffer = io.BytesIO()
        _pyarrow().parquet.write_table(table, buffer)
        if "://" not in self.where:
            atomic_write(Path(self.where, name), buffer.getvalue())
            return
        filesystem, inside = _filesystem(self.where)
        with _told(self.where):
            filesystem.makedirs(inside, exist_ok=True)
            filesystem.pipe_file(f"{inside.rstrip('/')}/{name}", buffer.getvalue())

    def read(self, name: str) -> pa.Table:
        content = io.BytesIO(_read(self.path(name), TABLE_AT_MOST))
        try:
            # In this thread alone: one of pyarrow's that lets go of `content` while Python ends aborts the process.
            table = _pyarrow().parquet.ParquetFile(content, pre_buffer=False).read(use_threads=False)
            table.validate(full=True)  # text that is no UTF-8 would show later,
            table.rename_columns(table.schema.names)  # and so would names that are none
            return table
        except (_pyarrow().ArrowException, OSError, UnicodeDecodeError) as error:
            said = " ".join(str(error).split())[:200]
            raise UserError(f'"{self.path(name)}" is damaged ({said}); remove the folder and start again.') from error


@dataclass(frozen=True)
class Work:
    """What is to be done: every part of the ledger, and those that are not done yet."""

    output: Output
    parts: list[Part]
    missing: list[Part]

    @property
    def pictures(self) -> int:
        return sum(len(part.files) for part in self.parts)


def plan(files: Sequence[str], output: Output, model: str, top: int = 5, size: int = PART) -> Work:
    """Cuts what the ledger does not name yet into further parts, writes the ledger, and sees what is missing.

    `model` identifies what answers: parts of two models do not mix.
    """
    there = output.names()
    parts: list[Part] = []
    if LEDGER in there:
        parts = _read_ledger(output, {"model": model, "top": str(top)})
    elif there - {".lock"}:
        raise UserError(f'--out "{output.where}" holds other files; choose a folder that is new.')
    known = {file for part in parts for file in part.files}
    new = [file for file in files if file not in known]
    first = len(parts)
    parts += [Part(first + at // size, new[at : at + size]) for at in range(0, len(new), size)]
    if new:
        _write_ledger(output, parts, {"model": model, "top": str(top)})
    return Work(output, parts, [part for part in parts if part.name not in there])


def _write_ledger(output: Output, parts: Sequence[Part], meta: Mapping[str, str]) -> None:
    pa = _pyarrow()
    columns = {
        "part": pa.array([part.number for part in parts for _ in part.files], pa.int32()),
        "file": pa.array([file.encode("utf-8", "surrogatepass") for part in parts for file in part.files], pa.binary()),
    }
    output.write(LEDGER, pa.table(columns).replace_schema_metadata({f"fscil.{key}": meta[key] for key in meta}))


def _read_ledger(output: Output, meta: Mapping[str, str]) -> list[Part]:
    table = output.read(LEDGER)
    kept = table.schema.metadata or {}
    for key, value in meta.items():
        if kept.get(f"fscil.{key}".encode()) != value.encode():
            raise UserError(
                f'--out "{output.where}" was begun with another {"model" if key == "model" else "--" + key}; '
                "choose a new folder, or begin again with what it was begun with."
            )
    pa = _pyarrow()
    columns = {name: kind for name, kind in zip(table.schema.names, table.schema.types)}
    kinds = pa.binary(), pa.string()  # text: of ledgers in which names that are no UTF-8 were escaped
    fits = columns in [{"part": pa.int32(), "file": kind} for kind in kinds]
    if not fits or any(column.null_count for column in table.columns):
        raise UserError(f'"{output.path(LEDGER)}" is no list of parts; remove the folder and start again.')
    parts: dict[int, list[str]] = {}
    try:
        for number, file in zip(table["part"].to_pylist(), table["file"].cast(pa.binary()).to_pylist()):
            parts.setdefault(number, []).append(file.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise UserError(f'"{output.path(LEDGER)}" is damaged ({error}); remove the folder and start again.') from error
    if sorted(parts) != list(range(len(parts))):  # further parts are numbered after these
        raise UserError(f'"{output.path(LEDGER)}" lacks parts; remove the folder and start again.')
    return [Part(number, files) for number, files in sorted(parts.items())]


def _utf8(text: str) -> str:
    """Parquet holds UTF-8; what a file name has besides is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


# ---- answering -------------------------------------------------------------------------------------------------------


def answer(clf: Teachable, part: Part, output: Output, top: int) -> int:
    """Recognises the pictures of a part and writes them; returns how many could not be read."""
    found: list[Recognition] = []
    for at in range(0, len(part.files), AT_ONCE):
        found += _recognised(clf, part.files[at : at + AT_ONCE], top)
    output.write(part.name, as_table(part.files, found))
    return sum(item.error is not None for item in found)


def _recognised(clf: Teachable, files: Sequence[str], top: int) -> list[Recognition]:
    from fscil.teachable.recognition import Recognition

    contents: list[str | bytes] = []
    failed: dict[int, str] = {}
    for position, file in enumerate(files):
        try:
            contents.append(_read(file) if "://" in file else file)
        except UserError as error:
            failed[position] = str(error)
    answers = iter(clf.recognise(contents, top) if contents else ())
    return [Recognition.failed(failed[at]) if at in failed else next(answers) for at in range(len(files))]


def as_table(files: Sequence[str], found: Sequence[Recognition]) -> pa.Table:
    """The answers as Parquet has them; `label` is null for an unknown picture and for one that could not be read."""
    pa = _pyarrow()
    ranked = pa.list_(pa.struct([("label", pa.string()), ("probability", pa.float32())]))
    best = [[{"label": str(label), "probability": value} for label, value in item.top] for item in found]
    return pa.table(
        {
            "file": pa.array([_utf8(file) for file in files], pa.string()),
            "label": pa.array([None if item.label is None else str(item.label) for item in found], pa.string()),
            "confidence": pa.array([item.confidence for item in found], pa.float32()),
            "unknown": pa.array([item.unknown for item in found], pa.bool_()),
            "error": pa.array([None if item.error is None else _utf8(item.error) for item in found], pa.string()),
            "top": pa.array(best, ranked),
        }
    )


@dataclass(frozen=True)
class ModelAt:
    """A saved model, and how a worker opens it."""

    path: str
    weights: str | None = None
    device: str | None = None

    @property
    def identity(self) -> str:
        """Changes with everything that is taught: the head of the folder has the hash of every other file."""
        try:
            return digest_file(Path(self.path).expanduser() / HEAD)
        except OSError as error:
            raise UserError(f'"{self.path}" is not a model folder: it has no {HEAD}') from error

    def open(self) -> Teachable:
        from fscil.teachable.model import Teachable

        return Teachable.load(self.path, device=self.device or "auto", weights=self.weights)


class Engine(Protocol):
    """Who answers; yields for each part how many pictures and how many of them could not be read, as they are done."""

    def run(self, model: ModelAt, work: Work, top: int) -> Iterable[tuple[int, int]]: ...


class LocalEngine:
    """This process."""

    def run(self, model: ModelAt, work: Work, top: int) -> Iterator[tuple[int, int]]:
        clf = model.open()
        for part in work.missing:
            yield len(part.files), answer(clf, part, work.output, top)


def make_engine(name: str = "local", workers: int | None = None, address: str | None = None) -> Engine:
    """The engine of this name."""
    if name == "ray":
        from fscil.serving.bulk_ray import RayEngine

        return RayEngine(workers, address)
    if name != "local":
        raise UserError(f'--engine "{name}" is not one of local, ray.{nearest(name, ["local", "ray"])}')
    if workers not in (None, 1) or address is not None:
        raise UserError("--workers and --address are for --engine ray; the local engine is this one process.")
    return LocalEngine()


@dataclass(frozen=True)
class Summary:
    pictures: int  # in the output as a whole
    answered: int  # by this call
    unreadable: int  # of those


def recognise_all(
    model: ModelAt,
    sources: Iterable[str],
    out: str,
    engine: Engine | None = None,
    *,
    top: int = 5,
    size: int = PART,
    quiet: bool = False,
) -> Summary:
    """Recognises every picture of the sources into a folder of Parquet files. A second call does what is missing.

    >>> summary = recognise_all(ModelAt("birds"), ["photos"], "results.parquet")  # doctest: +SKIP
    """
    from fscil.display import LiveDisplay

    files = sorted({file for source in sources for file in pictures_at(source)})
    output = Output(out)
    _pyarrow()
    with _one_at_a_time(output):
        work = plan(files, output, model.identity, top, size)
        todo, bad = sum(len(part.files) for part in work.missing), 0
        done = (engine or LocalEngine()).run(model, work, top) if work.missing else ()
        display = LiveDisplay(quiet=quiet)
        with contextlib.closing(display):
            for _, unreadable in display.track(done, "recognising", len(work.missing)):
                bad += unreadable
    return Summary(work.pictures, todo, bad)


@contextlib.contextmanager
def _one_at_a_time(output: Output) -> Iterator[None]:
    """One process plans and hands out parts; on a disk it is locked, elsewhere it is up to the user."""
    if "://" in output.where:
        yield
        return
    from filelock import FileLock, Timeout

    folder = Path(output.where)
    output.names()  # refuses a file in its place
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise UserError(f'--out "{output.where}" is being written by another process; wait for it.') from None
    except OSError as error:
        raise UserError(f'--out "{output.where}" cannot be written: {error.strerror or error}') from error
