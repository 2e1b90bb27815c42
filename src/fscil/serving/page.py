"""`fscil app`: the web page (`page_body`) behind its gate: who may see it, what may be asked for, where it listens."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import signal
import sys
import threading
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.decoding import Decoders
from fscil.serving.gate import BUSY, Gate, Refusal, Scope, allowed_names, body_bytes, is_local, visitor
from fscil.serving.listening import listen, make_server
from fscil.serving.uploads import UPLOAD, Uploads, upload_folder

if TYPE_CHECKING:
    from fscil.serving.host import Host
    from fscil.teachable.demo import Demo

SHORTEST_PASSWORD = 8  # characters
WRONG_PASSWORD = 1.0  # seconds that a wrong password costs; one is tried at a time
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
# Gradio has many more addresses (its API's description, a proxy, development); the page needs these.
NEEDED = re.compile(
    r"/|/(config|login|logout|theme\.css|favicon\.ico|manifest\.json|robots\.txt)/?|/(assets|static|svelte)/.*"
    r"|/gradio_api/(upload|upload_progress|queue/join|queue/data|run/\w+|heartbeat/\w+|startup-events|reset|cancel|user|"
    r"login_check|app_id|theme\.css|file=/.*)/?"
)
BEFORE_LOGIN = re.compile(
    r"/|/(config|login|logout|theme\.css|favicon\.ico|manifest\.json|robots\.txt)/?|/(assets|static|svelte)/.*"
    r"|/gradio_api/(user|login_check|app_id|theme\.css)/?"
)
LOGIN_BYTES = 10_000  # of a request before login
STREAMS = re.compile(r"/gradio_api/(queue/data|heartbeat/\w+|upload_progress)/?")  # last as long as a page is open
HEADERS = {
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; worker-src 'self' blob:; "
    "font-src 'self' data:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


def make_app(
    host: Host,
    address: str = "127.0.0.1",
    user: str = "fscil",
    password: str | None = None,
    demo: Demo | None = None,
) -> Any:
    """The page as an ASGI application behind its gate."""
    import gradio as gr
    from fastapi import FastAPI
    from gradio.utils import get_upload_folder

    from fscil.serving.page_body import Page

    uploads = Uploads(get_upload_folder())
    one_at_a_time = asyncio.Lock()

    async def may_enter(name: str, said: str) -> bool:
        async with one_at_a_time:
            same = [hmac.compare_digest(a.encode(), b.encode()) for a, b in ((name, user), (said, password or ""))]
            if not all(same):
                await asyncio.sleep(WRONG_PASSWORD)
            return all(same)

    app = gr.mount_gradio_app(
        FastAPI(openapi_url=None),
        Page(host, uploads, user if password is not None else None, demo).blocks,
        path="/",
        server_name=address,
        auth=may_enter if password is not None else None,
        auth_message=(
            f"<p>To recognise with and teach {page_parts.escape(host.info()['name'])}. "
            f"The name to log in with is <b>{page_parts.escape(user)}</b>.</p>"
        ),
        allowed_paths=[],
        blocked_paths=[str(host.path.resolve()), str(Path.cwd())],
        max_file_size=host.limits.file_bytes,
        show_error=False,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        theme=_theme(),
        css_paths=[Path(__file__).with_name("page.css")],
    )
    inner = app.routes[-1].app  # Gradio's own application, which knows who has logged in

    def admit(scope: Scope) -> Refusal | None:
        refusal = only_needed(scope)
        if refusal is None and password is not None and not logged_in(scope, inner.cookie_id, inner.tokens):
            refusal = before_login(scope)
        return refusal or check_upload(scope, uploads)

    return Gate(
        uploads.noting(app),
        host.limits.request_bytes,
        allowed_names(address, open_to_others=password is not None),
        admit=admit,
        streams=STREAMS,
        headers=HEADERS,
    )


def only_needed(scope: Scope) -> Refusal | None:
    """Turns away what the page itself never asks for."""
    return None if NEEDED.fullmatch(scope["path"]) else Refusal(404, "not found")


def logged_in(scope: Scope, cookie: str, tokens: Mapping[str, str]) -> bool:
    """Whether a request carries the cookie of somebody who gave the password."""
    sent = b"; ".join(value for name, value in scope["headers"] if name == b"cookie").decode("latin-1")
    named = dict(part.strip().partition("=")[::2] for part in sent.split(";"))
    return any(named.get(f"access-token-{kind}{cookie}", "").strip('"') in tokens for kind in ("", "unsecure-"))


def before_login(scope: Scope) -> Refusal | None:
    """Lets strangers see the form and send it; nothing streams to them and nothing large is taken from them."""
    if not BEFORE_LOGIN.fullmatch(scope["path"]):
        return Refusal(401, "log in first")
    return Refusal(413, "log in first") if (body_bytes(scope) or 0) > LOGIN_BYTES else None


def check_upload(scope: Scope, uploads: Uploads) -> Refusal | None:
    """Bounds what lies in the folder for uploads, of one visitor and in all."""
    if scope["method"] in ("GET", "HEAD"):
        return None
    size = body_bytes(scope)
    if size is None:
        return Refusal(411, "the size is missing")
    if UPLOAD.fullmatch(scope["path"]) and not uploads.room_for(visitor(scope), size):
        return Refusal(503, "too many pictures wait to be used; use or wait for those, then try again", BUSY)
    return None


def _theme() -> Any:
    import gradio as gr

    return gr.themes.Default(
        primary_hue=gr.themes.Color(
            *("#e9f4fb", "#cfe7f6", "#a5d2ee", "#56b4e9", "#2a95d3", "#0072b2", "#00639b", "#005382", "#004369"),
            *("#003350", "#00263d"),
        ),
        neutral_hue="zinc",
        font=FONT,
        font_mono=("ui-monospace", "Menlo", "Consolas", "monospace"),
    ).set(
        # the colours of page.css, which the login page does not load
        body_background_fill="#f6f6f4",
        body_background_fill_dark="#14171a",
        block_background_fill="#ffffff",
        block_background_fill_dark="#1d2125",
        block_border_color="#dcdcda",
        block_border_color_dark="#3a4046",
    )


def serve(
    model: str | os.PathLike,
    address: str = "127.0.0.1",
    port: int = 7860,
    *,
    user: str = "fscil",
    password: str | None = None,
    weights: str | None = None,
    device: str = "auto",
    open_browser: bool = False,
    demo: Demo | None = None,
) -> None:
    """Opens a model and shows the page until Ctrl-C. Elsewhere than on this machine, a password is asked for."""
    if password is None and not is_local(address):
        raise UserError(
            f'--host "{address}" can be reached by others, so it needs a password: --password-file FILE, '
            "or the environment variable FSCIL_PASSWORD."
        )
    if password is not None and len(password) < SHORTEST_PASSWORD:
        raise UserError(f"the password is too short; {SHORTEST_PASSWORD} characters are the least.")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with contextlib.ExitStack() as stack:
        stack.enter_context(upload_folder())
        try:
            import gradio  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise UserError(f'the page needs Gradio ({error}): pip install "fscil[app]"') from error
        from fscil.serving.host import Host
        from fscil.serving.memory import keep_memory_small

        keep_memory_small()
        listening = stack.enter_context(listen(address, port))
        host = Host(model, weights, device, decoders=Decoders().start())
        app = make_app(host, address, user, password, demo)
        port = listening.getsockname()[1]
        everywhere = address in ("0.0.0.0", "::")
        reached = "127.0.0.1" if everywhere else f"[{address}]" if ":" in address else address
        url = f"http://{reached}:{port}"
        server = make_server(app, host, patience=1)  # open pages would keep it
        # Pages that are open when it ends are cut off; that is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after uvicorn's own end, so that the folder goes too
        others = f", from elsewhere at this machine's address, port {port}" if everywhere else ""
        print(f"{Path(model).resolve().name} is at {url}{others}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Timer(1, webbrowser.open, [url]).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
