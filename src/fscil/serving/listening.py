"""Where the web page and the server listen, and whom a listener on this machine alone may answer."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from fscil.errors import UserError

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


def is_local(address: str) -> bool:
    """Whether only this machine can reach what listens at the address.

    >>> is_local("127.0.0.1"), is_local("localhost"), is_local("::1"), is_local("0.0.0.0"), is_local("example.org")
    (True, True, True, False, False)
    """
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def from_elsewhere(origin: str | None, host: str | None) -> bool:
    """Whether a browser sent a request from a page of another site; programs name no origin.

    >>> from_elsewhere("http://127.0.0.1:80", "127.0.0.1:80"), from_elsewhere("http://other.org", "127.0.0.1:80")
    (False, True)
    """
    return origin is not None and urlsplit(origin).netloc != host


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
