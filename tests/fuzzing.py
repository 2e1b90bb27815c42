"""Everything that parses, fed with damaged and hostile input: each case ends in a result or a UserError.

python tests/fuzzing.py --cases 10000                          # all parsers, one after the other
python tests/fuzzing.py --cases 10000 --parser recipe --keep found
python tests/fuzzing.py --cases 60000 --record fuzzed.jsonl    # goes on where it was stopped

Seeds are files as the library writes them (some from version 0.1). A case is a seed changed in a few places: as a
structure (JSON, YAML) or as bytes. Hashes are made right again where a stranger could, so that what lies behind them is
reached. A finding is any other exception, a case of many seconds, or one that takes a lot of memory. `--keep` writes
the inputs of findings to a folder; those in tests/data/hostile are tried by every run of the tests. `--record` adds a
line per thousand cases to a file, and what has its line there is not tried again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from fscil.errors import UserError

OLD = Path(__file__).parent / "data" / "written_by_0_1"
SECONDS = 20  # of work; a case of more is a finding
MEMORY = 400 * 2**20  # so is one by which the process grows by more, in bytes


@dataclass(frozen=True)
class Parser:
    seeds: Callable[[], list[bytes]]
    parse: Callable[[bytes, Path], Any]  # of these bytes, in an empty folder
    form: str = "bytes"  # bytes | json | yaml | lines of json
    extra: str = ""  # what has to be installed


# ---- changes -------------------------------------------------------------------------------------------------------

ODD_TEXT = ["", "x" * 5000, "\x1b[31m", "\u202e", "\x00", "../../etc/passwd", "/dev/zero", "nan", "1e400", "0x7f",
            "~", "{}", "*a", "!!python/object:os.system", "unknown", "base", "2001-02-31",
            "9" * 5000, "\ud800", "é" * 300]  # fmt: skip
ODD_NUMBERS = [0, -1, 1, 2**31, 2**32, 2**63, 10**18, 10**25, 0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan]
ODD_BYTES = [b"\x00", b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x00" * 64, b"]" * 9, b"[" * 3000, b"{" * 3000, b'"',
             b"\\", b"\n", b",,,", b"&a [*a,*a]", b"\xed\xa0\x80", b"1e999", b"-", b"NaN",
             b": ", b"- ", b"!!binary x"]  # fmt: skip


def odd_value(rng: random.Random) -> Any:
    deep: Any = 1
    for _ in range(rng.choice([2, 45, 120])):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    simple = [None, True, False, [], {}, [[]], [1, "a", None], {"": {}}, {"a": [{}]}, deep]
    return rng.choice([rng.choice(ODD_TEXT), rng.choice(ODD_NUMBERS), rng.choice(simple)])


def places(value: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a structure."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < limit:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else []
        found += [(item, key) for key in keys]
        waiting += [item[key] for key in keys]
    return found


def changed_structure(rng: random.Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        where = places(value)
        if not where or rng.random() < 0.02:
            return odd_value(rng)
        container, key = rng.choice(where)
        action = rng.random()
        if action < 0.5:
            container[key] = odd_value(rng)
        elif action < 0.65:
            del container[key]
        elif action < 0.8 and isinstance(container, dict):
            container[rng.choice([*ODD_TEXT, key + "x"])] = container.pop(key)
        elif action < 0.9:
            other, place = rng.choice(where)
            if not _inside(container, key, other, place):
                container[key] = copy.deepcopy(other[place])
        elif isinstance(container, list):
            container.extend(copy.deepcopy(container[:50]))
        else:
            container[f"{key}2"] = copy.deepcopy(container[key])
    return value


def _inside(container: Any, key: Any, other: Any, place: Any) -> bool:
    """Whether a copy would not be found any more: an earlier change took its place away."""
    try:
        return other[place] is None and container[key] is None
    except (KeyError, IndexError):
        return True


def changed_bytes(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(made) + 1)
        if rng.random() < 0.4:
            at = min(at, rng.randrange(200))  # headers are where things are decided
        end = min(len(made), at + rng.choice([1, 2, 4, 8, 64, 1000]))
        action = rng.randrange(8)
        if action == 0 and made:
            made[min(at, len(made) - 1)] ^= 1 << rng.randrange(8)
        elif action == 1:
            made[at:end] = rng.randbytes(end - at)
        elif action == 2:
            del made[at:end]
        elif action == 3:
            made[at:at] = made[at:end] * rng.choice([1, 2, 50])
        elif action == 4:
            made[at:at] = rng.choice(ODD_BYTES)
        elif action == 5:
            number = rng.choice([0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(made)])
            packed = struct.pack(rng.choice("<>") + "Q", number)
            width = rng.choice([2, 4, 8])
            made[at : at + width] = packed[:width]
        elif action == 6:
            del made[at:]
        else:
            other = rng.choice(others)
            cut = rng.randrange(len(other) + 1)
            made[at:end] = other[cut : cut + 500]
    return bytes(made)


Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def cases(parser: Parser, rng: random.Random) -> Iterator[bytes]:
    """Changed seeds, without end."""
    seeds = parser.seeds()
    readers = {"json": json.loads, "yaml": yaml.safe_load, "lines": lambda text: [*map(json.loads, text.splitlines())]}
    values = [readers[parser.form](seed) for seed in seeds] if parser.form in readers else []
    while True:
        if not values or rng.random() < 0.25:
            yield changed_bytes(rng, rng.choice(seeds), seeds)
            continue
        value = changed_structure(rng, rng.choice(values))
        try:
            if parser.form == "yaml":
                text = yaml.dump(value, Dumper=Dumper, allow_unicode=True)
            elif parser.form == "lines" and isinstance(value, list):
                text = "".join(json.dumps(line) + "\n" for line in value)
            else:
                text = json.dumps(value)
        except (RecursionError, yaml.YAMLError, UnicodeEncodeError):
            continue
        yield text.encode("utf-8", "surrogatepass")


# ---- parsers: files of runs ----------------------------------------------------------------------------------------


def written(data: bytes, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def parse_results(data: bytes, folder: Path) -> None:
    from fscil.evaluation import tables
    from fscil.evaluation.results import load_results

    written(data, folder, "results.json")
    results = load_results(folder)
    repr(results), results.table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        groups = tables.group_runs([results.to_dict()])
        tables.main_table(groups)


def parse_metrics(data: bytes, folder: Path) -> None:
    from fscil.evaluation.forms import parse_sessions

    parse_sessions(data.splitlines(), folder / "metrics.jsonl")


def parse_hashes(data: bytes, folder: Path) -> None:
    from fscil.evaluation.hashes import BLANK, RunHashes

    at = data.find(b'"sha256": "') + len(b'"sha256": "')
    if data[at + 64 : at + 65] == b'"':
        digest = hashlib.sha256(data[:at] + BLANK.encode() + data[at + 64 :]).hexdigest()
        data = data[:at] + digest.encode() + data[at + 64 :]
    written(data, folder, "hashes.json")
    hashes = RunHashes.read(folder)
    list(hashes.compared()) if hashes is not None else None


def seeds_of_hashes() -> list[bytes]:
    from fscil.evaluation.hashes import RunHashes

    with tempfile.TemporaryDirectory() as place:
        hashes = RunHashes(Path(place), progress=["checkpoints/task_0_x.safetensors"])
        for name in ("split.json", "metrics.jsonl"):
            hashes.add(written(b"{}\n", Path(place), name))
        hashes.write()
        return [(Path(place) / "hashes.json").read_bytes()]


def parse_shots(data: bytes, folder: Path) -> None:
    from fscil.data.shots import ledger_shots, read_shots

    path = written(data, folder, "shots.json")
    read_shots(path)
    ledger_shots(path, {1: {"cat": [1, 2, 3]}})


def parse_split(data: bytes, folder: Path) -> None:
    from fscil.data.manifests import Manifest

    Manifest.load(written(data, folder, "split.json"))


def seeds_of_split() -> list[bytes]:
    from fscil.data.manifests import Manifest, manifest_of_lists

    made: Manifest = manifest_of_lists("pets", "80-20", ["cat", "dög"], [("a.jpg", 0), (3, 1)], [("b.jpg", 0), (4, 1)])
    with tempfile.TemporaryDirectory() as place:
        made.save(Path(place) / "split.json")
        text = (Path(place) / "split.json").read_text(encoding="utf-8")
    value = json.loads(text)
    value.pop("split_hash")  # without one, any content is right
    return [text.encode(), json.dumps(value).encode()]


def finished_run(folder: Path) -> Path:
    """A copy of a whole run, but for its split."""
    run = folder / "run"
    for path in (OLD / "finished").rglob("*.*"):
        place = run / path.relative_to(OLD / "finished")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    return run


def parse_verify(data: bytes, folder: Path) -> None:
    """The predictions that a run's figures are computed from again."""
    from fscil.experiments.verify import verify

    run = finished_run(folder)
    written(data, run / "predictions", "session_0.safetensors")
    list(verify(run))


def parse_leaderboard(data: bytes, folder: Path) -> None:
    """The results of somebody's run, on a page."""
    from fscil.experiments.leaderboard import choose, write_site

    run = finished_run(folder)
    written(data, run, "results.json")
    kept, refused = choose([run], include_limited=True, include_unverified=True)
    assert len(kept) + len(refused) == 1
    if not kept:
        raise UserError(refused[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_site(kept, folder / "site")


def parse_vary(data: bytes, folder: Path) -> None:
    """What `fscil tune` compares, a line per --vary."""
    from fscil.experiments.comparison import parse_variants
    from fscil.experiments.tune import head_settings

    lines = data.decode("utf-8", "surrogateescape").splitlines()
    if sum(line.count(",") for line in lines) < 1000:  # a person's own command; it may ask for much
        head_settings(parse_variants(lines[:3]))


def parse_config(data: bytes, folder: Path) -> None:
    from fscil.config import read_config

    read_config(written(data, folder, "config.yaml")).fingerprint()


def parse_recipe(data: bytes, folder: Path) -> None:
    from fscil.config import resolve

    path = written(data, folder, "own.yaml")
    resolve(recipe=str(path), fast=True).fingerprint()


def parse_grid(data: bytes, folder: Path) -> None:
    from fscil.experiments.comparison import read_grid

    grid = read_grid(written(data, folder, "grid.yaml"))
    if len(grid.datasets) * len(grid.seeds) * len(grid.methods) * len(grid.settings) < 50:
        grid.configs()


def parse_csv(data: bytes, folder: Path) -> None:
    from fscil.config import DataConfig
    from fscil.data.datasets import load_dataset

    load_dataset("folder", DataConfig(root=str(written(data, folder, "images.csv"))))


def parse_table(data: bytes, folder: Path) -> None:
    """The pictures that a model is fitted on, with their classes."""
    from fscil.data.picture_files import labelled_files

    labelled_files(written(data, folder, "pictures.csv"))


def parse_listed(data: bytes, folder: Path) -> None:
    """The pictures that are to be recognised."""
    from fscil.serving.bulk import pictures_at

    pictures_at(str(written(data, folder, "pictures.csv" if data[:1] in (b"p", b"f") else "pictures.txt")))


def parse_sorted(data: bytes, folder: Path) -> None:
    """The table of pictures that were sorted before."""
    from fscil.teachable.sorting import Sorted

    assert folder not in Sorted(written(data, folder, "answers.csv").parent)


def parse_ledger(data: bytes, folder: Path) -> None:
    """The list of parts of a bulk prediction that goes on."""
    from fscil.serving.bulk import LEDGER, Output, plan

    written(data, folder, LEDGER)
    work = plan(["c.jpg"], Output(str(folder)), "m", top=5, size=2)
    assert [part.number for part in work.parts] == list(range(len(work.parts))), "a part would take another's place"


@functools.cache
def seeds_of_ledger() -> list[bytes]:
    from fscil.serving.bulk import LEDGER, Output, Part, _write_ledger

    with tempfile.TemporaryDirectory() as place:
        _write_ledger(Output(place), [Part(0, ["a.jpg", "b.jpg"]), Part(1, ["é.jpg"])], {"model": "m", "top": "5"})
        return [(Path(place) / LEDGER).read_bytes()]


def parse_cache(data: bytes, folder: Path) -> None:
    """The index of pictures that were decoded before; what does not fit is decoded again."""
    from fscil.data.decode import _read_index

    (folder / "cache.bin").write_bytes(bytes(2 * 3 * 3 * 3))
    index = _read_index(folder / "cache.bin", written(data, folder, "cache.safetensors"), 3)
    if index is None:
        raise UserError("decoded again")
    sizes, kept, bad = index
    assert sizes.prod(1).sum() == 18 and set(kept.tolist()) <= {0, 1, 2} and "; ".join(bad) is not None


def seeds_of_cache() -> list[bytes]:
    import torch

    from fscil.files import save_tensors

    with tempfile.TemporaryDirectory() as place:
        tensors = {"sizes": torch.tensor([[3, 3], [3, 3]]), "kept": torch.tensor([0, 2])}
        save_tensors(Path(place) / "cache.safetensors", tensors, {"bad": ["b.jpg (cut short)"]})
        return [(Path(place) / "cache.safetensors").read_bytes()]


def parse_coda(data: bytes, folder: Path) -> None:
    from fscil.data.datasets.imagenet_r import read_coda_lists

    written(data, folder, "imagenet-r_train.yaml")
    read_coda_lists(str(written(data, folder, "imagenet-r_test.yaml")))


def parse_pickle(data: bytes, folder: Path) -> None:
    from fscil.data.plain_pickle import read_plain_pickle

    read_plain_pickle(written(data, folder, "train"))


def seeds_of_pickle() -> list[bytes]:
    import pickle  # to write one; the library never does

    batch = {b"data": np.arange(12, dtype=np.uint8).reshape(2, 6), b"fine_labels": [1, 2], b"batch_label": b"one"}
    meta = {"fine_label_names": ["a", "b"]}
    return [*(pickle.dumps(batch, protocol) for protocol in (2, 0, 4)), pickle.dumps(meta, 2)]


def parse_tar(data: bytes, folder: Path) -> None:
    from fscil.data.downloads import unpack

    out = folder / "out"
    unpack(written(data, folder, "archive.tar"), out)
    stray = {path.name for path in folder.iterdir()} - {"archive.tar", "out"}
    assert not stray and not any(path.is_symlink() for path in out.rglob("*")), stray


def seeds_of_tar() -> list[bytes]:
    made = []
    for mode, kind in (("w:gz", tarfile.GNU_FORMAT), ("w", tarfile.PAX_FORMAT), ("w:bz2", tarfile.USTAR_FORMAT)):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode, format=kind) as tar:
            for name, linked in [
                ("a/é.txt", None),
                ("a/" + "b" * 90, None),
                *([("link", "../../out")] if mode == "w" else []),
            ]:
                member = tarfile.TarInfo(name)
                member.size = 0 if linked else 3
                if linked:
                    member.type, member.linkname = tarfile.SYMTYPE, linked
                tar.addfile(member, io.BytesIO(b"abc"))
        made.append(file.getvalue())
    return made


# ---- parsers: tensors and models -----------------------------------------------------------------------------------


def parse_tensors(data: bytes, folder: Path) -> None:
    from fscil.files import check_finite, load_tensors

    check_finite(load_tensors(written(data, folder, "a.safetensors"))[0], "a.safetensors")


@functools.cache
def backbone() -> Any:
    from fscil.backbones.loading import make_backbone

    return make_backbone("glyph_vit_a")


def open_model(folder: Path) -> None:
    from fscil.teachable.model import Teachable

    clf = Teachable.load(folder, backbone=backbone(), device="cpu")
    probabilities = clf.predict_proba([np.zeros((48, 48, 3), np.uint8)])
    assert np.isfinite(probabilities).all()


def rehashed(text: bytes) -> bytes:
    """model.json with its own hash right again, if it is JSON at all."""
    from fscil.teachable.folder import _digest_json

    try:
        data = json.loads(text)
        head = {"format_version": data.pop("format_version", None)}
        data.pop("sha256", None)
        return json.dumps({**head, "sha256": _digest_json(data), **data}).encode("utf-8", "surrogatepass")
    except (ValueError, AttributeError, TypeError, RecursionError):
        return text


def parse_model(data: bytes, folder: Path) -> None:
    for state in (OLD / "frozen").glob("state-*"):
        shutil.copy(state, folder)
    written(rehashed(data), folder, "model.json")
    open_model(folder)


def parse_state(data: bytes, folder: Path) -> None:
    """The tensors of a model's first version, listed by their hash."""
    head = json.loads((OLD / "frozen" / "model.json").read_text())
    head["versions"] = head["versions"][:1]
    name = next(iter(head["versions"][0]["tensors"].values()))
    written(data, folder, name)
    head["files"] = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}}
    written(rehashed(json.dumps(head).encode()), folder, "model.json")
    open_model(folder)


def parse_packed(data: bytes, folder: Path) -> None:
    """An estimator as bytes, the way pickle, joblib and deepcopy see it."""
    from fscil.teachable.estimator import FewShotClassifier
    from fscil.teachable.packing import unpack

    clf = FewShotClassifier.__new__(FewShotClassifier)
    unpack(clf, data, backbone())


@functools.cache
def seeds_of_packed() -> list[bytes]:
    from fscil.teachable.estimator import FewShotClassifier
    from fscil.teachable.packing import pack
    from made_up_pictures import pictures

    fresh = FewShotClassifier(backbone="glyph_vit_a", device="cpu")
    fitted = FewShotClassifier(backbone="glyph_vit_a", device="cpu", train="never").fit(*pictures(range(3), 3))
    return [pack(fitted), pack(fresh)]


@functools.cache
def packed_with_backbone() -> bytes:
    from fscil.teachable.estimator import FewShotClassifier
    from fscil.teachable.packing import pack

    return pack(FewShotClassifier(backbone=backbone(), device="cpu"))


def parse_described(data: bytes, folder: Path) -> None:
    """What a packed estimator says of itself and of the backbone that goes with it."""
    blob = packed_with_backbone()
    length = int.from_bytes(blob[:8], "little")
    head = json.loads(blob[8 : 8 + length])
    head["__metadata__"]["meta"] = data.decode("utf-8", "surrogateescape")
    text = json.dumps(head).encode()
    parse_packed(struct.pack("<Q", len(text)) + text + blob[8 + length :], folder)


def seeds_of_described() -> list[bytes]:
    blob = packed_with_backbone()
    head = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return [head["__metadata__"]["meta"].encode()]


def parse_weights(data: bytes, folder: Path) -> None:
    from fscil.backbones.loading import load_weights
    from tiny_world import make_vit

    load_weights(make_vit(), written(data, folder, "weights.safetensors"))


@functools.cache
def seeds_of_weights() -> list[bytes]:
    from safetensors.torch import save

    from tiny_world import make_vit

    return [save(make_vit().state_dict())]


# ---- parsers: what visitors send -----------------------------------------------------------------------------------


def seeds_of_picture(kind: str) -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
    more: dict[str, list[dict[str, Any]]] = {
        "JPEG": [{"progressive": True, "exif": b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x00\x00"}],
        "GIF": [{"save_all": True, "append_images": [Image.fromarray(pixels[::-1])]}],
        "TIFF": [{"compression": "tiff_lzw"}, {"compression": "jpeg"}],
        "WEBP": [{"lossless": True}],
    }
    made = []
    for options in [{}, *more.get(kind, [])]:
        for mode in ("RGB", "L"):
            file = io.BytesIO()
            Image.fromarray(pixels).convert(mode).save(file, kind, **options)
            made.append(file.getvalue())
    return made


def parse_picture(data: bytes, folder: Path) -> None:
    from fscil.serving.decoding import decode_bounded

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels = decode_bounded(data, 64, 4_000_000, 50.0)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


def parse_headers(data: bytes, folder: Path) -> None:
    """Lines "name: value" as the gate gets them: whatever passes is meant for this machine, from no other site."""
    from fscil.serving.gate import LOCAL_NAMES, Gate

    lines = [line.partition(b": ") for line in data.split(b"\r\n") if line]
    scope = {"type": "http", "path": "/", "headers": [(name.lower(), value) for name, _, value in lines]}

    async def nothing(*_: Any) -> None:
        pass

    if Gate(nothing, 1000, LOCAL_NAMES).refusal(scope) is None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        assert len(hosts) == 1 and len(origins) <= 1, hosts
        name = hosts[0].decode("ascii")
        plain = name[1 : name.index("]")] if name.startswith("[") else name.split(":")[0]
        assert plain.lower() in LOCAL_NAMES or set(plain) <= set("0:1.f"), name
        assert not origins or origins[0].lower().partition(b"://")[2] == hosts[0].lower(), origins


SEEDS_OF_HEADERS = [
    b"host: localhost:8000\r\norigin: http://localhost:8000\r\ncontent-length: 10\r\n",
    b"host: [::1]:8000\r\norigin: https://[::1]:8000\r\n",
    b"host: 127.0.0.1\r\norigin: null\r\n",
    b"host: localhost\r\nhost: evil.example\r\norigin: http://evil.example\r\ncontent-length: 99999999999999999999\r\n",
]


def parse_request(data: bytes, folder: Path) -> None:
    """A request to the server: the first line names the path and the type of the body that follows."""
    import asyncio

    first, _, body = data.partition(b"\n")
    path, _, kind = first.partition(b" ")
    headers = [(b"host", b"localhost"), (b"content-type", kind[:500]), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path.decode("latin-1"), "raw_path": path, "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("localhost", 80),
    }  # fmt: skip
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(server()(scope, receive, send))
    assert sent[0]["status"] in (200, 307, 400, 403, 404, 405, 413, 415, 422), sent[0]["status"]


@functools.cache
def server() -> Any:
    """The server's own application on a host that has nothing to teach: what is tried is how bodies are read."""
    from fscil.serving.api import make_app

    class Empty:
        class limits:
            pictures, request_bytes = 20, 10**6

        def refuse(self, *_: Any, **__: Any) -> Any:
            raise UserError("nothing can be taught here.")

        decode = learn_many = forget = undo = refuse

        def __getattr__(self, name: str) -> Any:
            return 0

    return make_app(Empty())  # type: ignore[arg-type]


MULTIPART = [
    b'/learn multipart/form-data; boundary=x\n--x\r\nContent-Disposition: form-data; name="name"\r\n\r\nheron\r\n'
    b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nabc\r\n--x--\r\n',
    b'/predict multipart/form-data; boundary="x y"\n--x y\r\nContent-Disposition: form-data; name="files"; '
    b"filename*=UTF-8''%e2%82%ac.png\r\n\r\n\r\n--x y--",
]
URLENCODED = [
    b"/forget application/x-www-form-urlencoded\nname=heron&name=%ff%00",
    b"/undo application/x-www-form-urlencoded\nsteps=1",
]
JSON_BODIES = [b'/undo application/json\n{"steps": 1}', b'/forget application/json; charset=utf-16\n{"name": "heron"}']


def old(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [(OLD / name).read_bytes() for name in names]


def recipes() -> list[bytes]:
    from fscil.recipes import FOLDER

    return [(FOLDER / name).read_bytes() for name in ("glyphs/smp.yaml", "glyphs/default.yaml")]


GRID = b"methods: [smp, teen]\ndatasets: glyphs\nseeds: [1, 2]\nset: {data.limit: 5}\nsettings: [{data.shots: 1}, {}]"
LEDGER = b'{"format_version": 1, "kind": "shots", "split_hash": "x", "tasks": {"1": {"cat": [1, 2]}}}'
CSV = [b"path,label,split\na.jpg,cat,train\nb.jpg,cat,test\n", b"\xef\xbb\xbfa,x\nb,x\nc,y\nd,y\n"]
TABLES = [b'path,label\na/1.jpg,owl\n"2.jpg", a jay\n', b"\xef\xbb\xbffile;label;x\r\na.jpg;owl;1\r\nb.jpg;jay\r\n"]
SORTED = b"file,label,confidence,placed,sha256\r\n/a/1.jpg,owl,0.9931,owl/1.jpg,9f86d0\r\n/a/2.jpg,jay,0.5,,\r\n"
PARSERS = {
    "model": Parser(old("frozen/model.json", "trained/model.json"), parse_model, "json"),
    "state": Parser(old("frozen/state-0001.safetensors"), parse_state),
    "packed": Parser(seeds_of_packed, parse_packed),
    "described": Parser(seeds_of_described, parse_described, "json"),
    "weights": Parser(seeds_of_weights, parse_weights),
    "tensors": Parser(
        old("finished/predictions/session_0.safetensors", "finished/checkpoints/session_0.safetensors"), parse_tensors
    ),
    "results": Parser(old("finished/results.json", "runs/clom/results.json"), parse_results, "json"),
    "metrics": Parser(old("finished/metrics.jsonl"), parse_metrics, "lines"),
    "hashes": Parser(seeds_of_hashes, parse_hashes, "json"),
    "shots": Parser(lambda: [LEDGER, *old("finished/shots.json")()], parse_shots, "json"),
    "split": Parser(seeds_of_split, parse_split, "json"),
    "verify": Parser(old("finished/predictions/session_0.safetensors"), parse_verify),
    "leaderboard": Parser(old("finished/results.json"), parse_leaderboard, "json"),
    "config": Parser(old("finished/config.yaml"), parse_config, "yaml"),
    "recipe": Parser(recipes, parse_recipe, "yaml"),
    "grid": Parser(lambda: [GRID], parse_grid, "yaml"),
    "vary": Parser(lambda: [b"head.correction=0.5,0.75,1\nhead.rank=[1, 2],null"], parse_vary),
    "csv": Parser(lambda: CSV, parse_csv),
    "table": Parser(lambda: TABLES, parse_table),
    "listed": Parser(lambda: [TABLES[0], b"a.jpg\n\xff.png\ns3://b/c.jpg\n"], parse_listed),
    "sorted": Parser(lambda: [SORTED], parse_sorted),
    "ledger": Parser(seeds_of_ledger, parse_ledger, extra="bulk"),
    "cache": Parser(seeds_of_cache, parse_cache),
    "coda": Parser(lambda: [b"data:\n- a/b/c.jpg\n- x/y.jpg\ntargets:\n- 1\n- 2\n"], parse_coda, "yaml"),
    "pickle": Parser(seeds_of_pickle, parse_pickle),
    "tar": Parser(seeds_of_tar, parse_tar),
    **{
        kind.lower(): Parser(functools.partial(seeds_of_picture, kind), parse_picture)
        for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
    },
    "headers": Parser(lambda: SEEDS_OF_HEADERS, parse_headers),
    "multipart": Parser(lambda: MULTIPART, parse_request, extra="serve"),
    "urlencoded": Parser(lambda: URLENCODED, parse_request, extra="serve"),
    "body": Parser(lambda: JSON_BODIES, parse_request, extra="serve"),
}  # fmt: skip


# ---- trying --------------------------------------------------------------------------------------------------------


def problem(name: str, data: bytes) -> str:
    """What is wrong with how a parser took an input; "" where it took or refused it as it should."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handlers = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(20 * SECONDS)  # for one that waits; on a busy machine, work may take long as well
    try:
        with tempfile.TemporaryDirectory() as place:
            PARSERS[name].parse(data, Path(place))
    except UserError:
        return ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return f"{grown / 1e6:.0f} MB of memory" if grown > MEMORY else ""


HEAD = "| parser | cases | findings | seconds | MB |\n|---|---:|---:|---:|---:|"
BLOCK = 1000  # cases that share a seed and a line of the record


@dataclass(frozen=True)
class Block:
    """So many cases of one parser, and what they showed."""

    parser: str
    seed: int
    number: int
    cases: int
    seconds: float
    megabytes: int  # the most that the process has held by then
    findings: list[str]


def try_block(name: str, seed: int, number: int, count: int, keep: Path | None) -> Block:
    began, found = time.monotonic(), dict[str, None]()
    for data in itertools.islice(cases(PARSERS[name], random.Random(f"{seed} {name} {number}")), count):
        if said := problem(name, data):
            found[said] = None
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return Block(name, seed, number, count, round(time.monotonic() - began, 1), peak, list(found))


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--cases", type=int, default=1000, help="per parser")
    arguments.add_argument("--seconds", type=float, default=math.inf, help="at most so long per parser")
    arguments.add_argument("--parser", action="append", choices=PARSERS, help="all, unless named")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--keep", type=Path, help="a folder for the inputs of findings")
    arguments.add_argument("--record", type=Path, help="a line per thousand cases; those in it are not tried again")
    given = arguments.parse_args()
    names = given.parser or [*PARSERS]
    if len(names) == 1:
        sys.exit(try_parser(names[0], given))
    print(HEAD, flush=True)
    failed = 0
    for name in names:  # each in a process of its own: what one holds or breaks is not another's
        options = [f"--{key}={value}" for key, value in vars(given).items() if value is not None and key != "parser"]
        ended = subprocess.run([sys.executable, __file__, *options, f"--parser={name}"]).returncode
        failed += ended != 0
        if ended < 0:
            print(f"{name}: ended by signal {-ended}", flush=True)
    sys.exit(failed > 0)


def try_parser(name: str, given: argparse.Namespace) -> bool:
    """Tries one parser and prints its row; whether there were findings."""
    logging.disable()
    if Path("/dev/shm").is_dir():
        tempfile.tempdir = "/dev/shm"  # in memory: files are made by the million
    recorded = given.record.read_text().splitlines() if given.record and given.record.exists() else []
    blocks = [block for block in (Block(**json.loads(line)) for line in recorded) if block.parser == name]
    there = {block.number for block in blocks if block.seed == given.seed}
    wanted = {at: min(BLOCK, given.cases - BLOCK * at) for at in range(-(-given.cases // BLOCK)) if at not in there}
    for seed in PARSERS[name].seeds() if wanted else []:
        problem(name, seed)  # what is loaded once does not count
    began = time.monotonic()
    for number, count in wanted.items():
        if time.monotonic() - began > given.seconds:
            break
        blocks.append(try_block(name, given.seed, number, count, given.keep))
        if given.record:
            with given.record.open("a") as file:
                file.write(json.dumps(vars(blocks[-1])) + "\n")
    findings = sorted({f"{name}: {said}" for block in blocks for said in block.findings})
    tried, seconds = sum(block.cases for block in blocks), sum(block.seconds for block in blocks)
    peak = max((block.megabytes for block in blocks), default=0)
    print(f"| {name} | {tried:,} | {len(findings)} | {seconds:,.0f} | {peak:,} |", *findings, sep="\n", flush=True)
    return bool(findings)


if __name__ == "__main__":
    main()
