"""What whoever runs the server needs: a line per request, whether it can take work, and a page of its description.

FastAPI reads annotations, so they are evaluated here.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from fscil.serving.batching import Batcher
from fscil.serving.gate import Scope, visitor
from fscil.teachable.names import printable

access = logging.getLogger("fscil.access")
PROBES = ("/health", "/ready")  # asked every few seconds; logged only when something is wrong
LOGGED = 200  # letters of what was asked for: a client chooses how many it sends
# The page is one file with its script inside and fetches nothing but /openapi.json.
DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """One line: when, who, what, how it ended and how long it took. Neither query nor headers: they may hold secrets.

    >>> logging.basicConfig(format="%(message)s", level="INFO")
    >>> log_request({"client": ("10.0.0.7", 4711), "method": "POST", "path": "/predict"}, 200, 0.0123)
    """
    if scope["path"] in PROBES and status < 400:
        return
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    what = f"{scope['method']} {printable(scope['path'][:LOGGED])}"
    access.info('%s %s "%s" %d %.0f ms', when, visitor(scope), what[:LOGGED], status, 1000 * seconds)


@contextlib.contextmanager
def access_log_on_stderr() -> Iterator[None]:
    """Shows the access log within the block; it is silent unless somebody listens."""
    handler, level = logging.StreamHandler(), access.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    try:
        yield
    finally:
        access.removeHandler(handler)
        access.setLevel(level)


def why_not_ready(batcher: Batcher, closing: bool) -> str | None:
    """Why the server should get no more requests just now; None: it should."""
    if closing:
        return "stopping"
    if not batcher.running:
        return "starting"
    return "too many requests wait" if batcher.queue.full() else None


def docs_page() -> str:
    """The description of the API as a page: /openapi.json made readable by a script of its own."""
    return (files("fscil.serving") / "docs.html").read_text(encoding="utf-8")


def add_operations(app: Any, batcher: Batcher, closing: Callable[[], bool], version: str) -> None:
    """The routes /health, /ready and /docs, which need no token; `closing()` says whether the server is stopping."""
    from fastapi.responses import HTMLResponse, JSONResponse

    from fscil.serving.schemas import Health

    @app.get("/health", response_model=Health, tags=["operate"])
    def health() -> dict[str, str]:
        """Whether the server answers; needs no token. If not, start it again."""
        return {"status": "ok", "version": version}

    @app.get("/ready", response_model=Health, tags=["operate"], responses={503: {"model": Health}})
    def ready() -> JSONResponse:
        """Whether the server can take requests now; needs no token. If not, send them elsewhere meanwhile."""
        reason = why_not_ready(batcher, closing())
        return JSONResponse({"status": reason or "ready", "version": version}, 200 if reason is None else 503)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(), headers=DOCS_HEADERS)
