"""The gate before page and server: other sites, malformed headers, floods and clients that stall, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

from fscil.serving import gate as gates
from fscil.serving import listening
from fscil.serving.gate import Gate, Refusal, allowed_names

LOCAL = allowed_names("127.0.0.1", open_to_others=False)
READY = (b"host", b"127.0.0.1:8000")


async def echo(scope, receive, send):
    """Answers with the length of what was sent."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RuntimeError("the client has gone")
        size, more = size + len(message["body"]), message["more_body"]
    body = json.dumps({"size": size}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def ask(gate, headers=(READY,), method="GET", body=b"", **scope):
    """(status, detail) of one request, straight through the gate."""
    sent, parts = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/", "method": method, "headers": list(headers), **scope}
    asyncio.run(gate(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"]).get("detail")


@pytest.mark.parametrize(
    "headers, status",
    [
        ([(b"host", b"localhost")], 200),
        ([(b"host", b"LOCALHOST:8000")], 200),
        ([(b"host", b"[::1]:8000")], 200),
        ([(b"host", b"[0:0:0:0:0:0:0:1]")], 200),
        ([READY, (b"origin", b"http://127.0.0.1:8000")], 200),
        ([(b"host", b"example.org")], 403),  # a name that was made to point to this machine
        ([(b"host", b"localhost.evil.test")], 403),
        ([(b"host", b"127.0.0.2")], 403),
        ([READY, (b"origin", b"https://example.org")], 403),  # a form on another site
        ([READY, (b"origin", b"http://127.0.0.1:9000")], 403),  # another program's page on this machine
        ([READY, (b"origin", b"null")], 403),
        ([(b"host", b"a{b.evil.test")], 400),  # what a framework would replace by its own address
        ([(b"host", b"evil.test@127.0.0.1")], 400),
        ([(b"host", b"127.0.0.1:8000/x")], 400),
        ([(b"host", b"127.0.0.1:port")], 400),
        ([(b"host", b"")], 400),
        ([(b"host", b"\xff\xfe")], 400),
        ([(b"host", b"127.0.0.1\n")], 400),
        ([], 400),
        ([READY, READY], 400),
        ([READY, (b"origin", b"http://[::1")], 400),
        ([READY, (b"origin", b"\xff")], 400),
        ([READY, (b"origin", b"http://127.0.0.1:8000"), (b"origin", b"http://127.0.0.1:8000")], 400),
        ([READY, (b"content-length", b"-1")], 400),
        ([READY, (b"content-length", "\u0663".encode())], 400),
        ([READY, (b"content-length", b"1"), (b"content-length", b"2")], 400),
        ([READY, (b"content-length", b"1001")], 413),
        ([READY, (b"transfer-encoding", b"chunked")], 200),
        ([READY, (b"content-length", b"4"), (b"transfer-encoding", b"chunked")], 400),
    ],
)
def test_only_well_formed_requests_meant_for_this_machine_enter(headers, status):
    answered, detail = ask(Gate(echo, 1000, LOCAL), headers)
    assert answered == status and bool(detail) == (status != 200)


def test_any_address_of_this_machine_can_be_listened_at():
    names = allowed_names("127.0.0.2", open_to_others=False)
    assert ask(Gate(echo, 1000, names), [(b"host", b"127.0.0.2:8000")])[0] == 200
    assert ask(Gate(echo, 1000, names), [(b"host", b"127.0.0.3:8000")])[0] == 403
    assert ask(Gate(echo, 1000, allowed_names("0.0.0.0", open_to_others=True)), [(b"host", b"birds.org")])[0] == 200


def test_web_sockets_are_closed_before_the_application_sees_them():
    async def never(scope, receive, send):
        raise AssertionError

    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Gate(never, 1000, LOCAL)({"type": "websocket", "path": "/", "headers": [READY]}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_what_is_added_noted_and_refused_by_rule():
    noted = []
    gate = Gate(
        echo,
        10,
        None,
        admit=lambda scope: Refusal(404, "not here") if scope["path"] == "/x" else None,
        ended=lambda scope, status, seconds: noted.append((scope["path"], status)),
    )
    assert ask(gate, path="/x") == (404, "not here") and ask(gate, method="POST", body=b"1234567890")[0] == 200
    assert ask(gate, method="POST", body=b"12345678901") == (413, "the request is larger than the 1e-05 MB allowed")
    assert noted == [("/x", 404), ("/", 200), ("/", 413)] and gate.held == 0


# ---- over sockets ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def served(gate, connections=512):
    """The port of a real server."""
    pytest.importorskip("uvicorn")
    server, listener = listening.make_server(gate, connections=connections), listening.listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(8)
        assert not thread.is_alive()


def connect(port, text=""):
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.sendall(text.replace("\n", "\r\n").encode("latin-1"))
    return client


def status(client) -> int:
    """Of the answer on a connection; 0 if it was closed without one."""
    try:
        line = client.makefile("rb").readline()
    except ConnectionResetError:
        return 0
    return int(line.split()[1]) if line else 0


def get(port) -> int:
    with connect(port, f"GET / HTTP/1.1\nHost: 127.0.0.1:{port}\n\n") as client:
        return status(client)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("GET / HTTP/1.1\nHost: a{b.evil.test\n\n", 400),
        ("GET / HTTP/1.1\n\n", 400),
        ("GET / HTTP/1.0\n\n", 400),
        ("GET / HTTP/1.1\nHost: localhost\nHost: localhost\n\n", 400),
        ("GET / HTTP/1.1\nHost: localhost\nOrigin: http://\xff\n\n", 400),
        ("GET / HTTP/1.1\nHost: evil.test\nConnection: Upgrade\nUpgrade: websocket\n\n", 403),
        ("GET http://localhost/ HTTP/1.1\nHost: evil.test\n\n", 403),
        ("POST / HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\nzzz\n", 400),
        ("POST / HTTP/1.1\nHost: localhost\nTransfer-Encoding: chunked\n\n1\nx\n0\n\n", 200),
        ("POST / HTTP/1.1\nHost: localhost\nContent-Length: 4\nTransfer-Encoding: chunked\n\n1\nx\n0\n\n", 400),
        ("POST / HTTP/1.1\nHost: localhost\nContent-Length: 4\nContent-Length: 5\n\nabcd", 400),
        ("GET / HTTP/1.1\nHost: localhost\n\n", 200),
    ],
)
def test_attacks_as_they_come_over_the_wire(text, expected):
    with served(Gate(echo, 1000, LOCAL)) as port, connect(port, text) as client:
        assert status(client) == expected


def test_half_a_header_and_half_a_body_are_given_up(monkeypatch):
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(gates, "STALL_SECONDS", 0.3)
    gate = Gate(echo, 1000, LOCAL)
    with served(gate) as port:
        head = "POST / HTTP/1.1\nHost: localhost\nContent-Length: 500\n\n"
        with connect(port, "GET / HTTP/1.1\nHo") as half, connect(port) as mute, connect(port, head + "x" * 9) as body:
            assert status(half) == status(mute) == 0 and status(body) == 408
        assert get(port) == 200 and gate.held == 0  # in this order: the gate forgets after it has answered


def test_a_body_that_trickles_is_given_up_in_the_end(monkeypatch):
    monkeypatch.setattr(gates, "BODY_SECONDS", 0.6)
    with served(Gate(echo, 1000, LOCAL)) as port:
        with connect(port, "POST / HTTP/1.1\nHost: localhost\nContent-Length: 500\n\n") as client:
            with contextlib.suppress(OSError):
                for _ in range(20):
                    client.sendall(b"x")
                    time.sleep(0.1)
            assert status(client) in (408, 0)  # closed, with the answer if it was read before the reset
        assert get(port) == 200


def test_silent_connections_make_room_for_those_that_speak():
    with served(Gate(echo, 1000, LOCAL), connections=5) as port, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(port, "GET / HT")) for _ in range(8)]
        assert get(port) == 200
        assert status(silent[0]) == 0  # the first to come had to go
        stack.enter_context(connect(port, "POST / HTTP/1.1\nHost: localhost\nContent-Length: 500\n\nx"))
        assert [get(port) for _ in range(6)] == [200] * 6


def test_only_what_is_too_much_is_told_to_come_back():
    go_on = threading.Event()

    async def slow(scope, receive, send):
        while scope["type"] == "http" and not go_on.is_set():
            await asyncio.sleep(0.01)
        await echo(scope, receive, send)

    with served(Gate(slow, 1000, LOCAL), connections=3) as port, contextlib.ExitStack() as stack:
        request = f"GET / HTTP/1.1\nHost: 127.0.0.1:{port}\n\n"
        working = [stack.enter_context(connect(port, request)) for _ in range(3)]
        time.sleep(0.3)  # all three are being answered
        excess = stack.enter_context(connect(port, request))
        assert status(excess) == 503
        go_on.set()
        assert [status(client) for client in working] == [200, 200, 200]


def test_a_server_that_ends_does_not_wait_for_a_stalled_body():
    with served(Gate(echo, 1000, LOCAL)) as port:  # leaving it asserts that it ends; bodies may stall for longer
        client = connect(port, "POST / HTTP/1.1\nHost: localhost\nContent-Length: 500\n\nx")
        time.sleep(0.2)
    assert status(client) == 503
    client.close()


def test_requests_are_not_logged(capfd, caplog):
    """Neither those that are answered nor those that are refused or fail; of a failure there is a traceback."""

    async def failing(scope, receive, send):
        if scope["path"] == "/secret-path":
            raise RuntimeError("broken inside")
        await echo(scope, receive, send)

    with caplog.at_level("DEBUG"), served(Gate(failing, 1000, LOCAL)) as port:
        assert get(port) == 200
        for line in ("GET /secret-path?name=secret-name", "POST /secret-name"):
            with connect(port, f"{line} HTTP/1.1\nHost: 127.0.0.1:{port}\nContent-Length: 5000\n\n") as client:
                assert status(client) in (413, 500)
        with connect(port, f"GET /secret-path?name=secret-name HTTP/1.1\nHost: 127.0.0.1:{port}\n\n") as client:
            assert status(client) == 500
    said = caplog.text + "".join(capfd.readouterr())
    assert "broken inside" in said and "secret" not in said.replace('scope["path"] == "/secret-path"', "")


def test_what_is_no_request_is_logged_without_its_bytes(capfd, caplog):
    with served(Gate(echo, 1000, LOCAL)) as port:
        for text in ("secret\n\n", "GET /secret HTTP/1.1\nHost: localhost\nsecret\n\n", "\x16\x03\x01secret\n\n"):
            with connect(port, text) as client:
                assert status(client) == 400
    said = caplog.text + "".join(capfd.readouterr())
    assert said.count("Invalid HTTP request received.") >= 3 and "secret" not in said
