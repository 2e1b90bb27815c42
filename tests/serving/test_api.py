"""A model over HTTP: its own answers, alone or together; strangers and floods are turned away; lessons last."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from fscil.cli import main
from fscil.serving.host import Host, Limits
from fscil.teachable.model import Teachable
from made_up_pictures import BACKBONE, pictures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extra("serve"),
    pytest.mark.filterwarnings("ignore::fscil.teachable.recognition.Notice"),
]
httpx = pytest.importorskip("httpx")

TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture(scope="module")
def original(weights, tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    clf = Teachable(backbone=BACKBONE, weights=weights, device="cpu")
    return clf.fit(*pictures(range(4), 6)).save(root / "birds", embed=True)


@pytest.fixture
def model(original, tmp_path):
    return shutil.copytree(original, tmp_path / "birds")


@contextmanager
def client(model, token=None, limits=Limits(), headers=None, **options):  # noqa: B008 (frozen)
    from fastapi.testclient import TestClient

    from fscil.serving.api import make_app

    app = make_app(Host(model, device="cpu", limits=limits), token, **options)
    with TestClient(app, base_url="http://localhost", headers=headers) as found:
        yield found


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def upload(number: int, count: int = 5, seed: int = 0) -> list[tuple]:
    """Pictures of one class as the parts of a form."""
    return [("files", (f"{at}.png", png(array))) for at, array in enumerate(pictures([number], count, seed)[0])]


def metric(client, name: str, **labels) -> float:
    """One sample of /metrics, read without the client library's help; 0 if it was never counted."""
    for line in client.get("/metrics").text.splitlines():
        found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if found and dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")) == {k: str(v) for k, v in labels.items()}:
            return float(found[2])
    return 0.0


# ---- recognising ----------------------------------------------------------------------------------------------------
def test_predict_says_what_the_model_and_the_command_say(model, tmp_path, capsys):
    array = pictures([2], 1, seed=5)[0][0]
    path = tmp_path / "bird.png"
    path.write_bytes(png(array))
    with pytest.raises(SystemExit):
        main(["predict", str(model), str(path), "--json", "--top", "3"])
    (expected,) = json.loads(capsys.readouterr().out)
    with client(model) as web:
        files = [("files", ("bird.png", path.read_bytes())), ("files", ("broken.png", b"no picture"))]
        answers = web.post("/predict", files=files, params={"top": 3}).json()["answers"]
    assert answers[0] == expected | {"file": "bird.png"} and answers[0]["label"] == "class 2"
    assert answers[1]["label"] is None and "not a picture" in answers[1]["error"] and answers[1]["top"] == []


def test_requests_that_wait_together_share_a_pass_and_get_their_own_answers(model, monkeypatch):
    inside, go_on, sizes, recognise = threading.Event(), threading.Event(), [], Teachable.recognise_decoded

    def held_up(self, X, top=5, alike=0):
        sizes.append(len(X))
        inside.set()
        assert go_on.wait(60)
        return recognise(self, X, top)

    shown = [0, 3, 1, 2, 3, 0, 2, 1, 1]
    with client(model, max_batch=8, patience=0.0) as web, ThreadPoolExecutor(9) as pool:
        alone = [web.post("/predict", files=upload(number, 2, at)).json() for at, number in enumerate(shown)]
        monkeypatch.setattr(Teachable, "recognise_decoded", held_up)
        first = pool.submit(web.post, "/predict", files=upload(shown[0], 2, 0))
        assert inside.wait(60)  # the model is busy; the others come meanwhile
        rest = [
            pool.submit(web.post, "/predict", files=upload(number, 2, at), params={"top": 1 + at % 3})
            for at, number in enumerate(shown[1:], 1)
        ]
        while metric(web, "fscil_queue_requests") < len(rest):
            time.sleep(0.01)
        go_on.set()
        together = [answer.result().json() for answer in (first, *rest)]
        assert sizes == [2, 8, 8]  # 8 requests of 2 pictures in two passes
        assert metric(web, "fscil_batch_pictures_count") == len(shown) + 3
        assert metric(web, "fscil_batch_pictures_bucket", le="2.0") == len(shown) + 1
        assert metric(web, "fscil_batch_pictures_sum") == 2 * len(shown) + 18
        assert metric(web, "fscil_queue_requests") == 0
    for at, (one, other) in enumerate(zip(alone, together)):
        for mine, theirs in zip(one["answers"], other["answers"]):
            assert len(theirs["top"]) == (1 + at % 3 if at else 4)
            assert theirs["label"] == mine["label"] and theirs["unknown"] == mine["unknown"]
            assert theirs["confidence"] == pytest.approx(mine["confidence"], abs=2e-4)
            assert [guess["label"] for guess in theirs["top"]] == [g["label"] for g in mine["top"]][
                : len(theirs["top"])
            ]


def test_a_request_that_fails_in_the_model_does_not_fail_the_others_beside_it(model, monkeypatch):
    from fscil.serving.api import Metrics
    from fscil.serving.batching import Batcher

    host = Host(model, device="cpu")
    recognise = host.recognise_decoded

    def fragile(decoded, top):
        if any(isinstance(item, np.ndarray) and item.max() == 0 for item in decoded):
            raise MemoryError("too large")
        return recognise(decoded, top)

    monkeypatch.setattr(host, "recognise_decoded", fragile)

    async def both():
        batcher = Batcher(host, Metrics(host), patience=0.05)
        work = asyncio.create_task(batcher.run())
        jobs = [pictures([1], 1)[0], [np.zeros((48, 48, 3), np.uint8)], pictures([2], 1)[0]]
        found = await asyncio.gather(*(batcher.recognise(job, 1) for job in jobs), return_exceptions=True)
        work.cancel()
        return found

    one, failed, other = asyncio.run(both())
    assert one[0].label == "class 1" and other[0].label == "class 2" and isinstance(failed, MemoryError)


def test_a_full_queue_asks_to_come_back(model, monkeypatch):
    inside, go_on, recognise = threading.Event(), threading.Event(), Teachable.recognise_decoded

    def held_up(self, X, top=5, alike=0):
        inside.set()
        assert go_on.wait(60)
        return recognise(self, X, top)

    monkeypatch.setattr(Teachable, "recognise_decoded", held_up)
    with client(model, waiting=2, patience=0.0, max_batch=1) as web, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(web.post, "/predict", files=upload(0, 1))]
        assert inside.wait(60)
        running += [pool.submit(web.post, "/predict", files=upload(0, 1)) for _ in range(2)]
        while metric(web, "fscil_queue_requests") < 2:
            time.sleep(0.01)
        refused = web.post("/predict", files=upload(0, 1))
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        go_on.set()
        assert [answer.result().status_code for answer in running] == [200, 200, 200]
        assert metric(web, "fscil_requests_total", route="/predict", status=503) == 1


# ---- teaching -------------------------------------------------------------------------------------------------------
def test_learn_then_predict_then_forget_and_undo(model):
    with client(model) as web:
        event = web.post("/learn", files=upload(10), data={"name": "heron"}).json()
        assert (event["action"], event["classes"], event["known"], event["notes"]) == ("learn", {"heron": 5}, 5, [])
        assert web.post("/predict", files=upload(10, 1, 3)).json()["answers"][0]["label"] == "heron"
        refused = web.post("/learn", files=upload(10, 2, 1), data={"name": "heron"})
        assert refused.status_code == 422 and '"heron" is known already, from 5' in refused.json()["detail"]
        more = {"names": ["heron", "heron", "wren", "wren", "wren"], "add": "true"}
        event = web.post("/learn", files=upload(10, 2, 1) + upload(11, 3), data=more).json()
        assert event["classes"] == {"heron": 2, "wren": 3}
        known = {info["name"]: info["pictures"] for info in web.get("/classes").json()["classes"]}
        assert known == {"class 0": 6, "class 1": 6, "class 2": 6, "class 3": 6, "heron": 7, "wren": 3}
        assert web.post("/forget", data={"name": "class 1"}).json()["known"] == 5
        undone = web.post("/undo", data={"steps": 2}).json()
        assert [event["action"] for event in undone["undone"]] == ["forget", "learn"] and undone["known"] == 5
        assert [event["action"] for event in web.get("/history").json()["history"]] == ["fit", "learn"]
        assert metric(web, "fscil_lessons_total", action="learn") == 2 and metric(web, "fscil_classes") == 5
    assert list(Teachable.load(model, device="cpu").classes_)[-1] == "heron"


def test_a_folder_that_cannot_be_written_is_not_the_clients_fault(model, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with client(model) as web:
        monkeypatch.setattr("os.replace", full)
        answer = web.post("/learn", files=upload(10), data={"name": "heron"})
        assert answer.status_code == 500 and "disk is full" in answer.json()["detail"]
        monkeypatch.undo()
        assert web.post("/learn", files=upload(10), data={"name": "heron"}).status_code == 200


def test_a_model_folder_that_is_gone_is_not_the_clients_fault(model, tmp_path):
    with client(model) as web:
        model.rename(tmp_path / "aside")
        for path, form in (("/learn", {"files": upload(10), "data": {"name": "heron"}}), ("/undo", {})):
            answer = web.post(path, **form)
            assert answer.status_code == 500 and "cannot be read just now" in answer.json()["detail"]
            assert str(tmp_path) not in answer.text and "fscil fit" not in answer.text
        assert not model.exists() and web.post("/predict", files=upload(1, 1)).status_code == 200
        (tmp_path / "aside").rename(model)
        assert web.post("/learn", files=upload(10), data={"name": "heron"}).status_code == 200


# ---- who may, and how much ------------------------------------------------------------------------------------------
def test_the_token(model):
    right = {"Authorization": f"Bearer {TOKEN}"}
    with client(model, TOKEN) as web:
        for path in ("/classes", "/history", "/metrics", "/nowhere"):
            missing, wrong = web.get(path), web.get(path, headers={"Authorization": f"Bearer {TOKEN}x"})
            assert missing.status_code == wrong.status_code == 401 and missing.headers["www-authenticate"] == "Bearer"
        for header in (TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer  ", "Bearer é".encode("latin-1")):
            assert web.get("/classes", headers={"Authorization": header}).status_code == 401
        assert web.post("/learn", files=upload(10), data={"name": "heron"}).status_code == 401
        assert web.get("/health").json()["status"] == "ok" and web.get("/docs").status_code == 200
        assert len(web.get("/classes", headers=right).json()["classes"]) == 4
        elsewhere = right | {"Host": "birds.example.org", "Origin": "https://birds.example.org"}
        assert web.get("/classes", headers=elsewhere).status_code == 200


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "https://example.org"}, 403),  # a form on another site, sent by a browser on this machine
        ({"Origin": "null"}, 403),
        ({"Host": "example.org"}, 403),  # a name that was made to point to this machine
    ],
)
def test_without_a_token_only_this_machine_is_served(model, headers, status):
    with client(model) as web:
        assert web.post("/forget", data={"name": "class 0"}, headers=headers).status_code == status


def test_what_is_too_large_is_refused_while_it_is_read(model):
    limits = Limits(file_bytes=30_000, pictures=3, request_bytes=60_000)
    noise = png(np.random.default_rng(0).integers(0, 255, (110, 110, 3), dtype=np.uint8))  # about 36 kB
    with client(model, limits=limits) as web:
        answers = web.post("/predict", files=[("files", ("n.png", noise)), *upload(0, 1)]).json()["answers"]
        assert "MB are more than" in answers[0]["error"] and answers[1]["label"] == "class 0"
        learn = web.post("/learn", files=[("files", ("n.png", noise))], data={"name": "noise"})
        assert learn.status_code == 422 and 'picture 1 of "noise" cannot be used' in learn.json()["detail"]
        announced = web.post("/predict", files=[("files", ("n.png", noise))] * 2)
        assert announced.status_code == 413 and "larger than the 0.06 MB allowed" in announced.json()["detail"]
        many = web.post("/predict", files=upload(0, 4))
        assert many.status_code == 413 and "at most 3" in many.json()["detail"]

        answer, chunks = asyncio.run(flood(web.app, "/predict", bytes(1000)))
        assert answer["status"] == 413 and chunks == 61  # the rest was not even read
        assert metric(web, "fscil_requests_total", route="/predict", status=413) == 2
        assert web.post("/predict", files=upload(0, 1)).status_code == 200  # nothing is held any more


async def flood(app, path: str, chunk: bytes) -> tuple[dict, int]:
    """(start of the answer, chunks that were read) for a form that never ends and does not say how long it is."""
    start, sent = b'--x\r\nContent-Disposition: form-data; name="files"; filename="n.png"\r\n\r\n', []
    chunks = 0

    async def receive():
        nonlocal chunks
        chunks += 1
        return {
            "type": "http.request",
            "body": start + chunk[len(start) :] if chunks == 1 else chunk,
            "more_body": True,
        }

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "scheme": "http"}
    await app(scope | {"server": ("localhost", 80), "http_version": "1.1"}, receive, send)
    return sent[0], chunks


@pytest.mark.parametrize(
    "path, request_, status, message",
    [
        ("/predict", {"json": {"files": []}}, 415, "multipart form, not application/json"),
        ("/predict", {}, 422, "files: Field required"),
        ("/predict", {"data": {"name": "x"}}, 422, "the form has no field 'name'; its fields are files"),
        ("/predict", {"files": upload(0), "data": {"top": "1"}}, 422, "the form has no field 'top'"),
        ("/undo", {"data": {"step": "3"}}, 422, "the form has no field 'step'; its fields are steps"),
        ("/undo", {"json": {"steps": 3}}, 415, "multipart form, not application/json"),
        ("/undo", {"content": "steps=3"}, 415, "multipart form, not bytes of no type"),
        ("/learn", {"files": upload(10), "data": {"nam": "x"}}, 422, "its fields are files, name, names, add"),
        ("/learn", {"files": [*upload(10), ("file", ("x.png", b"x"))], "data": {"name": "x"}}, 422, "no field 'file'"),
        ("/predict", {"files": upload(0, 1), "params": {"top": 0}}, 422, "top: "),
        ("/learn", {"files": upload(10)}, 422, "either name"),
        ("/learn", {"files": upload(10), "data": {"names": ["a", "b"]}}, 422, "5 pictures but 2 names"),
        ("/learn", {"files": [("files", ("x.png", b"junk"))], "data": {"name": "x"}}, 422, 'picture 1 of "x" cannot'),
        ("/learn", {"files": upload(10), "data": {"name": "  "}}, 422, "cannot be a class name"),
        ("/forget", {"data": {"name": "class 9"}}, 422, 'no class "class 9"'),
        ("/forget", {}, 422, "name: Field required"),
        ("/undo", {"data": {"steps": "5"}}, 422, "cannot undo 5 changes"),
        ("/undo", {"data": {"steps": "-1"}}, 422, "steps: "),
        ("/undo", {"params": {"steps": 3}}, 422, "steps is not read from the address here"),
        ("/learn", {"files": upload(0), "data": {"name": "class 0"}, "params": {"add": 1}}, 422, "add is not read"),
    ],
)
def test_bad_requests_are_told_why(model, path, request_, status, message):
    with client(model) as web:
        answer = web.post(path, **request_)
        assert answer.status_code == status and message in answer.json()["detail"]
        assert metric(web, "fscil_requests_total", route=path, status=status) == 1
        assert len(web.get("/classes").json()["classes"]) == 4


def test_requests_are_counted_by_route_and_status(model):
    with client(model) as web:
        for _ in range(3):
            web.post("/predict", files=upload(0, 2))
        web.get("/nowhere/at/all")
        web.get("/health")
        assert metric(web, "fscil_requests_total", route="/predict", status=200) == 3
        assert metric(web, "fscil_request_seconds_count", route="/predict") == 3
        assert metric(web, "fscil_requests_total", route="other", status=404) == 1
        assert metric(web, "fscil_requests_total", route="/health", status=200) == 1


def test_the_schema_lists_every_route_with_its_answers(model):
    with client(model, TOKEN) as web:
        schema = web.get("/openapi.json").json()
    methods = {path: sorted(found) for path, found in schema["paths"].items()}
    posts, gets = ("/predict", "/learn", "/forget", "/undo"), ("/classes", "/history", "/health", "/ready", "/metrics")
    assert methods == {path: ["post"] for path in posts} | {path: ["get"] for path in gets}
    for path, found in schema["paths"].items():
        (operation,) = found.values()
        assert operation["description"] and bool(operation.get("security")) == (path not in ("/health", "/ready"))
    assert schema["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Answers"
    }
    fields = schema["components"]["schemas"]["Answer"]["properties"]
    assert fields["confidence"]["description"] == "Calibrated probability of the best class."


# ---- the command ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, environment, message",
    [
        (["--host", "0.0.0.0"], {}, "needs a token"),
        (["--token-file", "missing.txt"], {}, "cannot be read"),
        ([], {"FSCIL_TOKEN": "short"}, "at least 16"),
        (["--host", "256.0.0.1", "--port", "0"], {"FSCIL_TOKEN": TOKEN}, "cannot listen on 256.0.0.1"),
    ],
)
def test_what_the_command_refuses(model, options, environment, message, monkeypatch, capsys):
    monkeypatch.delenv("FSCIL_TOKEN", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(model), *options])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(model, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as stop:
        main(["serve", str(model)])
    assert stop.value.code == 2 and 'pip install "fscil[serve]"' in capsys.readouterr().err


@contextmanager
def served(model, *options, token=TOKEN):
    """A real server process and a client for it."""
    environment = {**os.environ, "FSCIL_TOKEN": token, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fscil", "serve", str(model), "--port", "0", "--device", "cpu", *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            address = re.search(r"http://[\d.:]+", line)
            assert address, line + process.stderr.read()
            with httpx.Client(base_url=address[0], headers={"Authorization": f"Bearer {token}"}, timeout=60) as web:
                yield process, web
        finally:
            process.kill()


def test_a_server_killed_while_learning_loses_nothing_it_acknowledged(model):
    acknowledged, round_ = [], 0
    for round_ in range(3):
        with served(model) as (process, web):
            known = {info["name"]: info["pictures"] for info in web.get("/classes").json()["classes"]}
            assert [name for name in acknowledged if known.get(name) != 3] == []
            killer = threading.Timer(0.4 + 0.15 * round_, process.kill)
            killer.start()
            for number in range(1000):
                name = f"bird {round_}-{number}"
                try:
                    answer = web.post("/learn", files=upload(100 + number, 3, round_), data={"name": name})
                except httpx.HTTPError:  # killed
                    break
                assert answer.status_code == 200
                acknowledged.append(name)
            killer.join()
            assert process.wait(60) == -signal.SIGKILL
    clf = Teachable.load(model, device="cpu")
    assert acknowledged and set(acknowledged) <= set(clf.classes_)
    # a lesson may have been written and its answer lost; each round can add one such class at most
    assert len(clf.classes_) <= 4 + len(acknowledged) + round_ + 1


def bomb(side=7000, kind="RGBA") -> bytes:
    """A few hundred kilobytes that take seconds and hundreds of megabytes to decode, and are allowed."""
    file = io.BytesIO()
    Image.new(kind, (side, side)).save(file, "PNG")
    return file.getvalue()


def test_bombs_neither_stop_the_others_nor_the_end(model):
    large = bomb()
    attack = [("files", (f"{at}.png", large)) for at in range(30)]
    scans = Image.new("L", (64, 64))
    file = io.BytesIO()
    scans.save(file, "JPEG", progressive=True)
    data = file.getvalue()
    many = data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 5000 + data[-2:]
    with served(model) as (process, web), ThreadPoolExecutor(4) as pool:
        refused = web.post("/predict", files=[("files", ("many.jpg", many))]).json()["answers"][0]
        assert "more than 100 scans" in refused["error"]
        attacks = [pool.submit(web.post, "/predict", files=attack) for _ in range(3)]
        while "fscil_requests_total" not in web.get("/metrics").text:
            pass
        time.sleep(1)
        for _ in range(3):  # between two of the attackers' pictures
            assert web.post("/predict", files=upload(0, 1)).json()["answers"][0]["label"] == "class 0"
            assert len(web.get("/classes").json()["classes"]) == 4
        assert not any(running.done() for running in attacks)
        process.send_signal(signal.SIGTERM)
        process.wait(20)  # what the attackers sent would take minutes
        assert all(running.result().json()["answers"][-1]["error"] == "the server is closing" for running in attacks)


def test_sigterm_finishes_what_is_running(model):
    with served(model) as (process, web), ThreadPoolExecutor(8) as pool:
        assert web.get("/health").status_code == 200
        running = [pool.submit(web.post, "/learn", files=upload(n, 5), data={"name": f"b{n}"}) for n in range(10, 13)]
        running += [pool.submit(web.post, "/predict", files=upload(0, 5)) for _ in range(4)]
        while 'fscil_requests_total{route="/learn",status="200"}' not in web.get("/metrics").text:
            pass
        process.send_signal(signal.SIGTERM)
        codes = [answer.result().status_code for answer in running]
        process.wait(60)
    assert codes == [200] * 7
    assert {"b10", "b11", "b12"} <= set(Teachable.load(model, device="cpu").classes_)


# ---- operation ----


def test_ready_is_apart_from_health(model):
    with client(model, waiting=1) as web:
        assert web.get("/ready").status_code == 200 and web.get("/ready").json()["status"] == "ready"
        gate = web.app
        gate.closing = True
        stopping = web.get("/ready")
        assert (stopping.status_code, stopping.json()["status"]) == (503, "stopping")
        assert web.get("/health").status_code == 200


def test_why_it_is_not_ready():
    import asyncio
    from types import SimpleNamespace

    from fscil.serving.operating import why_not_ready

    async def tell():
        queue = asyncio.Queue(1)
        batcher = SimpleNamespace(queue=queue, running=False)
        said = [why_not_ready(batcher, False)]
        batcher.running = True
        said.append(why_not_ready(batcher, False))
        queue.put_nowait("a request")
        return [*said, why_not_ready(batcher, False), why_not_ready(batcher, True)]

    assert asyncio.run(tell()) == ["starting", None, "too many requests wait", "stopping"]


def test_every_request_is_a_line_but_no_secret(model, caplog):
    with caplog.at_level("INFO", "fscil.access"), client(model, token="a token of some length") as web:
        web.get("/health")
        web.get("/classes?token=secret", headers={"Authorization": "Bearer wrong"})
        web.get("/evil%0Aline")
    lines = [record.getMessage() for record in caplog.records if record.name == "fscil.access"]
    assert len(lines) == 2 and all("\n" not in line for line in lines)
    assert re.fullmatch(r'\S+Z \S+ "GET /classes" 401 \d+ ms', lines[0]) and "secret" not in lines[0]


def test_the_command_logs_addresses_but_nothing_that_was_sent(model):
    for options, expected in (((), 6), (("--no-access-log",), 0)):
        with served(model, *options) as (process, web):
            picture = ("secret-file.png", png(pictures([10], 1)[0][0]))
            web.post("/learn", files={"files": picture}, data={"name": f"secret-name-{expected}"})
            web.post("/predict?secret=query", files={"files": picture}, headers={"Cookie": "secret=cookie"})
            web.get("/classes", headers={"Authorization": "Bearer secret-token"})
            web.get("/" + "x" * 5000)
            form = {"Content-Type": "multipart/form-data; boundary=secret-boundary"}
            web.post("/forget", content=b"--another\r\nsecret", headers=form)
            web.post("/predict", files={"files": ("secret-text.txt", b"secret")})
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
        lines = said.splitlines()
        assert len(lines) == expected and "secret" not in said and TOKEN not in said
        assert all(re.fullmatch(r'\S+Z 127\.0\.0\.1 "(GET|POST) /\S*" \d{3} \d+ ms', line) for line in lines)
        assert max(map(len, lines), default=0) < 300


def test_the_description_is_a_page_that_loads_nothing_from_elsewhere(model):
    with client(model) as web:
        page = web.get("/docs")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "http://" not in page.text and "https://" not in page.text and "//cdn" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"] and 'fetch("openapi.json")' in page.text
        assert {"/predict", "/ready", "/health"} <= set(web.get("/openapi.json").json()["paths"])
