"""Where the web page and the server listen, the connections they take, and how they come to an end."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

from fscil.errors import UserError

if TYPE_CHECKING:
    from fscil.serving.gate import Gate
    from fscil.serving.host import Host

HEADER_SECONDS = 10.0  # from a connection's begin, or the end of its last answer, to the next request's headers
DECODING_SECONDS = 2.0  # for pictures that are being decoded when the server is told to stop
CONNECTIONS = 512  # at once; beyond them whoever has kept silent longest has to go


def listen(address: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; they are answered once the server runs."""
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(place[:2], family=family, backlog=2048)
        # Inherited by every connection. asyncio sets it only on sockets made for TCP by number, and without it the
        # body of an answer waits 40 ms for the client's delayed acknowledgement of the headers.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # the address is named anyway
        raise UserError(
            f"cannot listen on {address}, port {port}: {reason}; choose another --host or --port."
        ) from error


def make_server(
    gate: Gate, host: Host | None = None, patience: int | None = None, connections: int = CONNECTIONS
) -> Any:
    """A uvicorn server; when told to stop, it answers what has arrived whole, for at most `patience` seconds."""
    import uvicorn

    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with a form, its sender is told

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            gate.close()
            if host is not None:
                asyncio.get_running_loop().call_later(DECODING_SECONDS, host.close)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        gate,
        http=connection_class(connections),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # whoever sends them could say any address
        timeout_graceful_shutdown=patience,
    )
    return Server(config)


def connection_class(connections: int) -> type:
    """uvicorn's connection with a deadline for headers, and a bound on how many there are.

    uvicorn itself waits for ever for the rest of a header, so that a few hundred silent clients would be all it has.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        deadline: asyncio.TimerHandle | None = None
        heard = 0.0  # when something came in

        @property
        def answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        @property
        def silent(self) -> bool:
            """Whether it is the client's turn: no request yet, or not all of one."""
            return not self.answering or self.cycle.more_body

        def connection_made(self, transport: Any) -> None:  # uvicorn narrows what asyncio says about it
            super().connection_made(transport)
            self.heard = self.loop.time()
            self._watch()
            if len(self.connections) > connections:
                alike = [other for other in self.connections if isinstance(other, Connection)]
                others = [other for other in alike if other.silent and other is not self]
                if others:
                    min(others, key=lambda other: other.heard).transport.abort()
                else:
                    self.limit_concurrency = 0  # everybody is being answered: this one is told to come back

        def data_received(self, data: bytes) -> None:
            self.heard = self.loop.time()
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unwatch()

        def _watch(self) -> None:
            if self.answering or self.transport.is_closing():
                self._unwatch()
            elif self.deadline is None:
                self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def _unwatch(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Connection
