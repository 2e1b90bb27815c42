"""Recognising very many pictures: every picture answered once, whatever was killed, by either engine."""

import contextlib
import functools
import http.server
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from fscil import FewShotClassifier
from fscil.errors import UserError
from fscil.serving import bulk
from made_up_pictures import pictures, write_folders

pytestmark = pytest.mark.extra("bulk")
BACKBONE = "glyph_vit_a"


@pytest.fixture(scope="module")
def model(weights, tmp_path_factory):
    clf = FewShotClassifier(backbone=BACKBONE, weights=weights, train="never", head="prototypes")
    path = clf.fit(*pictures(range(4), 4)).save(tmp_path_factory.mktemp("bulk") / "model")
    return bulk.ModelAt(str(path), str(weights), "cpu")


@pytest.fixture
def photos(tmp_path):
    return write_folders(tmp_path / "photos", range(4), 5, seed=1)


def answers(out):
    """All rows of an output as pandas, or anyone else, reads them: the folder whole."""
    import pyarrow.parquet as pq

    return pq.read_table(out).to_pylist()


def test_local_answers_are_those_of_recognise(model, photos, tmp_path):
    (photos / "class 0" / "broken.jpg").write_bytes(b"no picture")
    out = str(tmp_path / "out.parquet")
    done = bulk.recognise_all(model, [str(photos)], out, size=8, top=2, quiet=True)
    assert done == bulk.Summary(pictures=21, answered=21, unreadable=1)
    rows = {row["file"]: row for row in answers(out)}
    assert len(rows) == 21 and sorted(os.listdir(out)) == [".lock", "_ledger.parquet"] + [
        f"part-00000{number}.parquet" for number in range(3)
    ]
    files = sorted(map(str, photos.rglob("*.*")))
    for file, item in zip(files, model.open().recognise(files, top=2)):
        row = rows[file]
        assert (row["label"], row["unknown"]) == (item.label, item.unknown)
        assert row["confidence"] == pytest.approx(item.confidence, abs=1e-4)
        assert [entry["label"] for entry in row["top"]] == [label for label, _ in item.top]
        assert (row["error"] is None) == (item.error is None)


def test_local_start_again_does_what_is_missing_and_adds_what_is_new(model, photos, tmp_path):
    out = tmp_path / "out.parquet"
    bulk.recognise_all(model, [str(photos)], str(out), size=6, quiet=True)
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    (out / "part-000001.parquet").unlink()
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(photos / "class 3" / "new.png")
    done = bulk.recognise_all(model, [str(photos)], str(out), size=6, quiet=True)
    assert done == bulk.Summary(pictures=21, answered=7, unreadable=0)
    untouched = {name for name, when in first.items() if (out / name).stat().st_mtime_ns == when}
    assert untouched == first.keys() - {"part-000001.parquet"}
    files = [row["file"] for row in answers(out)]
    assert len(files) == len(set(files)) == 21
    assert bulk.recognise_all(model, [str(photos)], str(out), size=6, quiet=True).answered == 0


def test_local_names_that_are_no_utf8_are_done_once(model, photos, tmp_path):
    """Also those of a part that was lost: its files are read under the names that they have."""
    picture = next((photos / "class 0").iterdir())
    odd = os.fsencode(photos / "class 0") + b"/caf\xe9.png"
    try:
        os.link(picture, odd)
    except OSError:
        pytest.skip("this disk takes names in UTF-8 alone")
    (photos / "class 0" / r"caf\udce9.png").write_bytes(picture.read_bytes())  # as the odd one is shown
    out = tmp_path / "out.parquet"
    first = bulk.recognise_all(model, [str(photos)], str(out), size=100, quiet=True)
    assert first == bulk.Summary(pictures=22, answered=22, unreadable=0)
    assert bulk.recognise_all(model, [str(photos)], str(out), size=100, quiet=True).answered == 0
    before = answers(out)
    (out / "part-000000.parquet").unlink()
    again = bulk.recognise_all(model, [str(photos)], str(out), size=100, quiet=True)
    assert again == first and answers(out) == before


@pytest.mark.skipif(os.name == "nt", reason="no colons in names")
def test_local_names_that_would_chain_urls(model, photos, tmp_path):
    folder = photos / "zip::class"
    (photos / "class 0").rename(folder)
    next(folder.iterdir()).rename(folder / "a::memory:b.png")
    for source in (str(photos), f"file://{photos}", f"file://{folder}/a::memory:b.png"):
        out = tmp_path / f"{len(source)}.parquet"
        done = bulk.recognise_all(model, [source], str(out), quiet=True)
        assert done.unreadable == 0 and done.answered == (1 if source.endswith("png") else 20)
        assert any(row["file"].endswith("zip::class/a::memory:b.png") for row in answers(out))
    assert bulk.recognise_all(model, [str(folder)], f"file://{tmp_path}/out::here", quiet=True).answered == 5
    assert (tmp_path / "out::here" / "part-000000.parquet").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted there")
def test_local_output_is_read_in_the_callers_thread(model, photos, tmp_path):
    """A thread of pyarrow's that lets go of what was read while Python ends aborts the process: of 48 calls that had
    nothing left to do, 11 ended so. Threads once started stay, so a new process counts them."""
    bulk.recognise_all(model, [str(photos)], str(tmp_path / "out"), quiet=True)
    program = (
        "import os, pyarrow.parquet; from fscil.serving import bulk; output = bulk.Output('out')\n"
        "before = set(os.listdir('/proc/self/task')); rows = output.read(bulk.LEDGER).num_rows\n"
        "print(rows, len(set(os.listdir('/proc/self/task')) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "20 0\n"


def test_local_refuses_what_would_mix(model, photos, weights, tmp_path):
    out = tmp_path / "out.parquet"
    bulk.recognise_all(model, [str(photos)], str(out), quiet=True)
    with pytest.raises(UserError, match="another --top"):
        bulk.recognise_all(model, [str(photos)], str(out), top=3, quiet=True)
    other = FewShotClassifier.load(model.path, weights=weights).learn(*pictures([7], 3)).save(tmp_path / "other")
    with pytest.raises(UserError, match="another model"):
        bulk.recognise_all(bulk.ModelAt(str(other), str(weights)), [str(photos)], str(out), quiet=True)
    with pytest.raises(UserError, match="holds other files"):
        bulk.recognise_all(model, [str(photos)], str(photos), quiet=True)
    (out / bulk.LEDGER).write_bytes(b"PAR1 of nobody")
    with pytest.raises(UserError, match=r"_ledger\.parquet.*damaged"):
        bulk.recognise_all(model, [str(photos)], str(out), quiet=True)


def test_local_lists_and_urls(model, photos, tmp_path):
    import fsspec

    files = sorted(map(str, photos.rglob("*.png")))
    (tmp_path / "list.txt").write_text("\n".join(files[:3]) + "\n\n")
    (tmp_path / "list.csv").write_text("path,who\n" + "".join(f'"{file}",x\n' for file in files[2:6]))
    assert bulk.pictures_at(str(tmp_path / "list.txt")) == files[:3]
    assert bulk.pictures_at(str(tmp_path / "list.csv")) == files[2:6]
    (tmp_path / "of Excel.csv").write_text("who,File \n" + "".join(f'x,"{file}"\n' for file in files[2:6]), "utf-8-sig")
    (tmp_path / "of Notepad.txt").write_text("\n".join(files[:3]), "utf-8-sig")
    assert bulk.pictures_at(str(tmp_path / "of Excel.csv")) == files[2:6]
    assert bulk.pictures_at(str(tmp_path / "of Notepad.txt")) == files[:3]
    assert bulk.pictures_at(f"file://{photos}") == [f"file://{file}" for file in files]
    memory = fsspec.filesystem("memory")
    for file in files[:5]:
        memory.pipe_file(f"/photos/{os.path.basename(file)}", open(file, "rb").read())
    done = bulk.recognise_all(model, ["memory://photos"], "memory://answers", size=2, quiet=True)
    assert done.answered == 5 and done.unreadable == 0
    named = [
        row["label"]
        for name in sorted(memory.find("/answers"))
        if "part-" in name
        for row in _memory_rows(memory, name)
    ]
    assert named == [item.label for item in model.open().recognise(files[:5])]
    assert bulk.recognise_all(model, ["memory://photos"], "memory://answers", size=2, quiet=True).answered == 0


def _memory_rows(memory, name):
    import io

    import pyarrow.parquet as pq

    return pq.read_table(io.BytesIO(memory.cat_file(name))).to_pylist()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_local_http(model, photos, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(photos)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        out = str(tmp_path / "out.parquet")
        done = bulk.recognise_all(model, [f"http://127.0.0.1:{server.server_port}/"], out, quiet=True)
    finally:
        server.shutdown()
    assert done == bulk.Summary(20, 20, 0)
    expected = [item.label for item in model.open().recognise(sorted(map(str, photos.rglob("*.png"))))]
    assert [row["label"] for row in sorted(answers(out), key=lambda row: row["file"])] == expected


@pytest.mark.parametrize(
    "source, said",
    [
        ("nowhere", "holds no pictures"),
        ("odd://x", "cannot be opened"),
        ("http://127.0.0.1:9/", "cannot be reached"),
        ("list.csv", r"no column path \(or file"),
        ("empty.txt", "names no pictures"),
    ],
)
def test_local_sources_that_cannot_be_used_say_so(source, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match=said):
        bulk.pictures_at(source)


def test_local_command(fscil, model, photos, tmp_path):
    given = ("predict", model.path, photos, "--weights", model.weights, "--out", "answers.parquet", "--quiet")
    status, out, _ = fscil(*given)
    assert status == 0 and "answers.parquet: 20 pictures answered\n" == out
    assert fscil(*given)[1] == "answers.parquet: 0 pictures answered; 20 were there before\n"
    assert fscil(*given, "--json")[0] == 2
    status, _, err = fscil("predict", model.path, "http://example.invalid/a.png")
    assert status == 2 and "add --out" in err
    status, _, err = fscil("predict", model.path, photos, "--workers", 2)
    assert status == 2 and "add --out" in err
    status, _, err = fscil(*given, "--workers", 2)
    assert status == 2 and "--engine ray" in err


# ---- killed, and on a cluster ----------------------------------------------------------------------------------------

DRIVER = """
import sys
from fscil.serving import bulk
path, weights, photos, out, engine = sys.argv[1:]
if __name__ == "__main__":
    bulk.recognise_all(bulk.ModelAt(path, weights, "cpu"), [photos], out, bulk.make_engine(engine), size=2, quiet=True)
"""


@pytest.mark.slow
@pytest.mark.extra("cluster")
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_driver_loses_and_doubles_nothing(model, tmp_path, engine):
    photos = write_folders(tmp_path / "photos", range(4), 60, seed=2)
    out = tmp_path / "out.parquet"
    command = [sys.executable, "-c", DRIVER, model.path, model.weights, str(photos), str(out), engine]
    driver = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(list(out.glob("part-*"))) < 3 and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.02)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    before = {part.name: part.stat().st_mtime_ns for part in out.glob("part-*")}
    assert 3 <= len(before) < 120
    done = bulk.recognise_all(model, [str(photos)], str(out), size=2, quiet=True)
    assert done.answered <= 240 - 2 * len(before)  # a worker of the cluster outlives its driver for a part or two
    assert before == {name: (out / name).stat().st_mtime_ns for name in before}  # what was there was not done again
    files = [row["file"] for row in answers(out)]
    assert len(files) == len(set(files)) == 240


@pytest.mark.slow
@pytest.mark.extra("cluster")
def test_ray_gives_the_same_and_outlives_a_killed_worker(model, tmp_path):
    import psutil

    photos = write_folders(tmp_path / "photos", range(4), 60, seed=2)
    local, spread = str(tmp_path / "local.parquet"), tmp_path / "ray.parquet"
    bulk.recognise_all(model, [str(photos)], local, size=10, quiet=True)

    def kill_a_worker():
        deadline = time.monotonic() + 200
        while not list(spread.glob("part-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in psutil.Process().children(recursive=True):
            if "ray::Worker" in " ".join(child.cmdline()):
                child.kill()
                killed.append(child.pid)
                return

    killed: list[int] = []
    thread = threading.Thread(target=kill_a_worker)
    thread.start()
    engine = bulk.make_engine("ray", 4 * (os.cpu_count() or 1))  # more than have a core: they would never start
    done = bulk.recognise_all(model, [str(photos)], str(spread), engine, size=10, quiet=True)
    thread.join()
    assert killed and done.pictures == 240
    by_file = lambda row: row["file"]  # noqa: E731
    assert sorted(answers(spread), key=by_file) == sorted(answers(local), key=by_file)


@pytest.mark.slow
@pytest.mark.extra("cluster")
def test_ray_workers_that_die_again_and_again_are_one_line_and_nothing_is_lost(model, tmp_path):
    """As on a machine with too little memory: whatever does the work is killed, however often it is started."""
    import psutil

    photos = write_folders(tmp_path / "photos", range(4), 60, seed=2)
    out = tmp_path / "ray.parquet"
    over = threading.Event()
    killed: set[int] = set()

    def kill_all_workers():
        while not over.wait(0.05):
            if list(out.glob("part-*")):  # the first was done while there was memory
                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "ray::Worker" in " ".join(child.cmdline()):
                            child.kill()
                            killed.add(child.pid)

    thread = threading.Thread(target=kill_all_workers)
    thread.start()
    try:
        with pytest.raises(UserError, match="killed again and again") as said:
            bulk.recognise_all(model, [str(photos)], str(out), bulk.make_engine("ray", 2), size=10, quiet=True)
    finally:
        over.set()
        thread.join()
    assert len(killed) > 1 and "\n" not in str(said.value)
    before = {path.name: path.read_bytes() for path in out.glob("part-*")}
    assert 0 < len(before) < 24
    done = bulk.recognise_all(model, [str(photos)], str(out), size=10, quiet=True)
    assert done == bulk.Summary(240, 240 - 10 * len(before), 0)
    assert all((out / name).read_bytes() == data for name, data in before.items())
    files = [row["file"] for row in answers(out)]
    assert len(files) == len(set(files)) == 240
