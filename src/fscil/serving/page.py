"""The web page of `fscil app`, in Gradio: recognise, teach, inbox, classes, history. `page_parts` draws it."""

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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.decoding import Decoders
from fscil.serving.gate import BUSY, Gate, Refusal, Scope, allowed_names, body_bytes, is_local, visitor
from fscil.serving.listening import listen, make_server
from fscil.serving.page_demo import lesson_buttons
from fscil.serving.page_inbox import inbox_tab
from fscil.serving.page_recognise import class_names, recognise_tab
from fscil.serving.uploads import UPLOAD, Uploads, upload_folder
from fscil.teachable.names import check_class_name

if TYPE_CHECKING:
    import gradio as gr

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
log = logging.getLogger(__name__)


# ---- the page --------------------------------------------------------------------------------------------------------
def make_page(host: Host, uploads: Uploads, user: str | None = None, demo: Demo | None = None) -> gr.Blocks:
    """The page on one model, with a way out for the user that logged in, and with pictures to try and to teach in a
    demonstration. `make_app` adds what keeps strangers out."""
    import gradio as gr

    page = gr.Blocks(title=f"{host.info()['name']} – fscil", analytics_enabled=False)
    with page:
        head = gr.HTML()
        with gr.Tabs() as tabs:
            with gr.Tab("Recognise", id="recognise"):
                changing = recognise_tab(host, uploads, _promise(host), demo.tries if demo else ())
            with gr.Tab("Teach", id="teach"):
                with gr.Row():
                    with gr.Column():
                        name = gr.Textbox(label="Name of the class", max_lines=1, max_length=200, elem_id="name")
                        shots = uploads.only(gr.Gallery)(
                            label="Pictures of it",
                            file_types=["image"],
                            type="filepath",
                            sources=["upload", "webcam", "clipboard"],
                            columns=4,
                            height=280,
                            object_fit="cover",
                            buttons=[],
                            interactive=True,
                            elem_id="shots",
                        )
                        gr.HTML(f"<p>{_advice(host)}</p>", elem_classes="fs-hint")
                        teach_button = gr.Button("Teach", variant="primary", elem_id="teach-button")
                    with gr.Column():
                        said = gr.HTML(
                            page_parts.placeholder("What you teach is known at once: try it under Recognise."),
                            elem_id="lesson",
                        )
                        add_button = gr.Button("Add", visible=False, variant="primary", elem_id="add-button")
                        try_button = gr.Button("Try it on a picture", visible=False, elem_id="try-button")
                        if demo is not None:
                            changing += lesson_buttons(host, demo.lessons, said)
            with gr.Tab("Inbox", id="inbox"):
                changing += inbox_tab(host, uploads)
            with gr.Tab("Classes", id="classes") as classes_tab:
                with gr.Row():
                    with gr.Column(scale=2):
                        known = gr.HTML(elem_id="known")
                    with gr.Column(scale=1, min_width=260):
                        chosen = gr.Dropdown(label="Class to remove", choices=[], value=None, elem_id="chosen")
                        remove_button = gr.Button("Remove this class", elem_id="remove-button")
                        undo_button = gr.Button("Undo the last change", elem_id="undo-button")
                        last = gr.HTML(elem_classes="fs-hint")
                        changed = gr.HTML(elem_id="changed")
            with gr.Tab("History", id="history") as history_tab:
                chart = gr.HTML(elem_id="chart")
                events = gr.HTML(elem_id="events")
        seen = gr.State(-1)  # the revision that this browser shows

    def show() -> tuple[Any, ...]:
        """Everything that says what the model knows."""
        revision, history, classes = host.revision, host.history, host.classes
        undoable = len(history) > 1
        return (
            page_parts.heading(host.info()["name"], classes, user is not None, user or "")
            + page_parts.notes(host.notes),
            page_parts.class_table(classes, host.thumbnails()),
            gr.update(choices=class_names(host), value=None),
            gr.update(interactive=undoable),
            f"<p>Last change: {page_parts.escape(page_parts.in_words(history[-1]))}</p>" if undoable else "",
            page_parts.history_chart(history),
            page_parts.history_table(history),
            revision,
        )

    views = [head, known, chosen, undo_button, last, chart, events, seen]

    def lesson(add: bool, typed: str, paths: list[str] | None) -> Iterator[dict[Any, Any]]:
        """Teaches one class, saying what is going on. Pictures stay until they were learned from."""
        typed, paths = (typed or "").strip(), paths or []
        hidden = {add_button: gr.update(visible=False), try_button: gr.update(visible=False)}

        def say(text: str, kind: str) -> dict[Any, Any]:
            return {**hidden, teach_button: gr.update(interactive=True), said: page_parts.message(text, kind)}

        if not typed:
            yield say("Please give the class a name.", "bad")
            return
        if not paths:
            yield say(f"Please add some pictures of “{typed}”; five of different scenes are a good start.", "bad")
            return
        known = {str(info["name"]): info["pictures"] for info in host.classes}
        try:
            has = known.get(str(check_class_name(typed, known)))
        except UserError as error:
            yield say(page_parts.sentence(str(error)), "bad")
            return
        if has is not None and not add:
            text = f"“{typed}” is known already, from {page_parts.count(has, 'picture')}. "
            text += "Add these pictures to it, or choose another name for another class."
            button = f"Add {page_parts.count(len(paths), 'picture')} to “{typed}”"
            yield {**say(text, "ask"), add_button: gr.update(visible=True, value=button)}
            return
        waiting = f"Teaching “{typed}” from {page_parts.count(len(paths), 'picture')} …"
        yield {**say(waiting, "busy"), teach_button: gr.update(interactive=False)}
        try:
            event = host.learn(typed, uploads.find(paths), add=add)
        except UserError as error:
            yield say(page_parts.sentence(str(error)), "bad")
        except Exception:
            log.exception("teaching failed")
            yield say("Something went wrong on the server; the model is as it was. Please try again.", "bad")
        else:
            uploads.discard(paths)
            notes = " ".join(page_parts.sentence(note) for note in event["notes"])
            done = {**say(f"{page_parts.in_words(event)}. {notes}", "good"), try_button: gr.update(visible=True)}
            yield {**done, name: "", shots: None}

    def remove(label: str | None) -> str:
        if label is None:
            return page_parts.message("Please choose a class first.", "bad")
        return _change(lambda: page_parts.in_words(host.forget(label)) + ".")

    def undo(revision: int) -> str:
        if revision != host.revision:
            return page_parts.message("Somebody has changed the model meanwhile; please look again first.", "ask")
        return _change(lambda: f"Taken back: {page_parts.in_words(host.undo()['undone'][0])}.")

    # The host keeps what it is asked in order. Lessons go through Gradio's queue because they report as they go on, and
    # nothing else does: its client can lose the answer to a call that joins the queue just as another leaves it.
    queued: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": 8, "show_progress": "hidden"}
    quiet: dict[str, Any] = {"api_visibility": "private", "queue": False}
    lesson_views = [said, add_button, try_button, teach_button, name, shots]
    with page:
        for change in changing:
            change.then(show, None, views, **quiet)
        for button, add in ((teach_button, False), (add_button, True)):
            taught = button.click(partial(lesson, add), [name, shots], lesson_views, **queued)
            taught.then(show, None, views, **quiet)
        try_button.click(lambda: gr.Tabs(selected="recognise"), None, tabs, **quiet)
        remove_button.click(remove, chosen, changed, **quiet).then(show, None, views, **quiet)
        undo_button.click(undo, seen, changed, **quiet).then(show, None, views, **quiet)
        for trigger in (page.load, classes_tab.select, history_tab.select):
            trigger(show, None, views, show_progress="hidden", **quiet)
    page.queue(max_size=200, api_open=False)
    return page


def _promise(host: Host) -> str:
    said = (
        "Drop a picture, paste one, or take one with the camera. Its file is deleted once looked at; a small copy "
        "stays in memory until the next one, so that you can teach it."
    )
    if host.calibration["threshold"] is None:
        said += " This model never says “unknown”: it had too few pictures to tell from which point on it should."
    return said


def _advice(host: Host) -> str:
    copies = "; small copies of some are kept, as was chosen when the model was fitted"
    return (
        "Three to ten pictures of different scenes are best. They are deleted once learned"
        f"{copies if host.info()['stored_pictures'] else ''}."
    )


def _change(change: Callable[[], str]) -> str:
    try:
        return page_parts.message(change())
    except UserError as error:
        return page_parts.message(page_parts.sentence(str(error)), "bad")
    except Exception:
        log.exception("changing the model failed")
        return page_parts.message("Something went wrong on the server; the model is as it was.", "bad")


# ---- serving ---------------------------------------------------------------------------------------------------------
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
        make_page(host, uploads, user if password is not None else None, demo),
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
