"""The gate before the web page and the server: who may enter, how much they may send, and for how long.

It reads the raw headers, because frameworks mend what they cannot read: an invalid Host becomes the server's own
address, and with it a page of another site whose name was made to point here would pass for ours.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
ORIGIN = re.compile(rb"https?://(" + HOST.pattern + rb")")
STALL_SECONDS = 10.0  # a body of which nothing arrives for so long, or an answer of which nothing is taken, is given up
BODY_SECONDS = 120.0  # for a whole body
REQUEST_SECONDS = 600.0  # from request to answer
BODIES_AT_ONCE = 4  # memory for bodies of all requests, in largest requests
BUSY = {"retry-after": "1"}

Scope = MutableMapping[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """Why a request is turned away."""

    status: int
    reason: str
    headers: Mapping[str, str] = field(default_factory=dict)


def is_local(address: str) -> bool:
    """Whether only this machine can reach what listens at the address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("::1"), is_local("0.0.0.0"), is_local("example.org")
    (True, True, True, False, False)
    """
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def allowed_names(address: str, open_to_others: bool) -> frozenset[str] | None:
    """The host names a request may be meant for; None: any, where a token or password keeps strangers out."""
    return None if open_to_others else LOCAL_NAMES | {_plain(address)}


class Gate:
    """ASGI: lets requests in that may enter, bounds their bodies while they are read, and gives up on those that stall.

    `names` are the host names that may have been used (None: any), `own_origin` whether pages of other sites are kept
    out, `admit` what else must hold, `streams` the paths whose answers go on for as long as somebody looks, `headers`
    what is added to every answer, and `ended` is told of every request: scope, status and seconds.
    """

    def __init__(
        self,
        app: Callable,
        request_bytes: int,
        names: frozenset[str] | None = None,
        *,
        own_origin: bool = True,
        admit: Callable[[Scope], Refusal | None] = lambda scope: None,
        streams: re.Pattern[str] | None = None,
        headers: Mapping[str, str] | None = None,
        ended: Callable[[Scope, int, float], None] = lambda scope, status, seconds: None,
    ):
        self.app, self.request_bytes, self.names, self.own_origin = app, request_bytes, names, own_origin
        self.admit, self.streams, self.ended = admit, streams, ended
        self.headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.held = 0  # bytes of all bodies that are being worked on
        self.arriving: set[asyncio.Future] = set()  # waits for more of a body
        self.closing = False

    def close(self) -> None:
        """No more bodies: what has not arrived whole is refused at once, so that the server can end."""
        self.closing = True
        for waiting in self.arriving:
            waiting.cancel()

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:  # nothing here speaks through web sockets
            await send({"type": f"{scope['type']}.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Callable, send: Callable) -> None:
        exchange, began = _Exchange(self, receive, send), time.perf_counter()
        try:
            refusal = self.refusal(scope)
            if refusal is None:
                forever = self.streams is not None and self.streams.fullmatch(scope["path"])
                answering = self.app(scope, exchange.receive, exchange.send)
                await (answering if forever else asyncio.wait_for(answering, REQUEST_SECONDS))
            else:
                await exchange.refuse(refusal)
        except Exception as error:
            if isinstance(error, asyncio.TimeoutError):
                await exchange.refuse(Refusal(503, "this took too long; try again later", BUSY))
            elif not exchange.refused:  # else it is what the application makes of a body that was cut short
                raise
        finally:
            exchange.forget()
            self.ended(scope, exchange.status or 500, time.perf_counter() - began)

    # ---- checks -----------------------------------------------------------------------------------------------------
    def refusal(self, scope: Scope) -> Refusal | None:
        """Why a request is not let through, judged by its headers alone."""
        hosts, origins, lengths = (_values(scope, name) for name in (b"host", b"origin", b"content-length"))
        host = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host is None:
            return Refusal(400, "the header Host is missing, repeated or malformed")
        if self.names is not None and _plain(host[1].decode()) not in self.names:
            return Refusal(403, "without a token or password only requests meant for this machine are answered")
        if len(origins) > 1 or (origins and origins[0] != b"null" and not ORIGIN.fullmatch(origins[0])):
            return Refusal(400, "the header Origin is repeated or malformed")
        if self.own_origin and origins and (origins[0] == b"null" or _netloc(origins[0]) != host[0].lower()):
            return Refusal(403, "requests from pages of other sites are refused")
        if len(lengths) > 1 or not all(length.isdigit() for length in lengths):
            return Refusal(400, "the header Content-Length is repeated or malformed")
        if lengths and _values(scope, b"transfer-encoding"):  # two sizes, of which a proxy may believe the other
            return Refusal(400, "a request has a Content-Length or a Transfer-Encoding, not both")
        if lengths and (len(lengths[0]) > 18 or int(lengths[0]) > self.request_bytes):
            return self.too_large()
        return self.admit(scope)

    def too_large(self) -> Refusal:
        return Refusal(413, f"the request is larger than the {self.request_bytes / 1e6:g} MB allowed")


class _Exchange:
    """One request and its answer. A body that is too large, or stalls, is refused and looks to the application as if
    the client had gone; what it then answers is dropped."""

    def __init__(self, gate: Gate, receive: Callable, send: Callable):
        self.gate, self._receive, self._send = gate, receive, send
        self.began = time.monotonic()
        self.size, self.whole = 0, False  # of the body so far
        self.status: int | None = None
        self.refused = False

    async def send(self, message: Message) -> None:
        if self.refused:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self.gate.headers]}
        await asyncio.wait_for(self._send(message), STALL_SECONDS)

    async def refuse(self, refusal: Refusal) -> None:
        """Answers in the application's stead, unless it has begun to answer."""
        if self.status is None:
            content = json.dumps({"detail": refusal.reason}).encode()
            headers = {"content-type": "application/json", "content-length": str(len(content)), **refusal.headers}
            if refusal.status in (400, 408, 413, 503):
                headers["connection"] = "close"  # what else is sent is not read
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self.send({"type": "http.response.start", "status": refusal.status, "headers": pairs})
            await self.send({"type": "http.response.body", "body": content})
        self.refused = True

    async def receive(self) -> Message:
        if self.whole:  # nothing more comes but the news that the client has gone
            return await self._receive()
        message = None if self.refused else await self._next()
        refusal = Refusal(408, "the request did not arrive in time") if message is None else self._count(message)
        if self.gate.closing and not self.whole:
            refusal = Refusal(503, "the server is closing", BUSY)
        if refusal is None:
            assert message is not None
            return message
        await self.refuse(refusal)
        return {"type": "http.disconnect"}

    async def _next(self) -> Message | None:
        """What comes next of the body; None if nothing does in time."""
        left = self.began + BODY_SECONDS - time.monotonic()
        waiting = asyncio.ensure_future(self._receive())
        self.gate.arriving.add(waiting)
        try:
            await asyncio.wait([waiting], timeout=max(0.0, min(STALL_SECONDS, left)))
            return waiting.result() if waiting.done() and not waiting.cancelled() else None
        finally:
            self.gate.arriving.discard(waiting)
            waiting.cancel()

    def _count(self, message: Message) -> Refusal | None:
        self.whole, size = not message.get("more_body", False), len(message.get("body", b""))
        gate = self.gate
        self.size += size
        gate.held += size
        if self.size > gate.request_bytes:
            return gate.too_large()
        if gate.held > BODIES_AT_ONCE * gate.request_bytes:
            return Refusal(503, "too much is being sent at once; try again in a second", BUSY)
        return None

    def forget(self) -> None:
        self.gate.held -= self.size


def visitor(scope: Scope) -> str:
    """Whom a request is from, as far as can be told: the address."""
    client = scope.get("client")
    return client[0] if client else ""


def body_bytes(scope: Scope) -> int | None:
    """The size that a request announces for its body, checked by the gate before; None if it does not say."""
    return int(found[0]) if (found := _values(scope, b"content-length")) else None


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _netloc(origin: bytes) -> bytes:
    return origin.partition(b"://")[2].lower()


def _plain(name: str) -> str:
    """A host name or address in one spelling.

    >>> _plain("[::1]"), _plain("0:0:0:0:0:0:0:1"), _plain("LocalHost"), _plain("127.0.0.1")
    ('::1', '::1', 'localhost', '127.0.0.1')
    """
    name = name.strip("[]").lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
