"""The web page itself, in Gradio: five tabs on one model, and what happens when somebody uses them.

To recognise and the inbox have modules of their own, `page_recognise` and `page_inbox`.

`page_parts` draws what is shown; `page` keeps strangers out and serves it, and imports this only where Gradio is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.host import ChangedMeanwhile, Host
from fscil.serving.page_demo import lesson_buttons
from fscil.serving.page_inbox import inbox_tab
from fscil.serving.page_parts import QUIET
from fscil.serving.page_recognise import class_names, recognise_tab
from fscil.serving.uploads import Uploads
from fscil.teachable.names import check_class_name

if TYPE_CHECKING:
    from fscil.teachable.demo import Demo

SOURCES = ["upload", "webcam", "clipboard"]
log = logging.getLogger(__name__)


class Page:
    """The page on one model, with a way out for the user who logged in, and with pictures to try and to teach in a
    demonstration; `blocks` is what Gradio serves."""

    def __init__(self, host: Host, uploads: Uploads, user: str | None = None, demo: Demo | None = None):
        self.host, self.uploads, self.user, self.demo = host, uploads, user, demo
        self.blocks = gr.Blocks(title=f"{host.info()['name']} – fscil", analytics_enabled=False)
        with self.blocks:
            self.head = gr.HTML()
            with gr.Tabs() as self.tabs:
                with gr.Tab("Recognise", id="recognise"):
                    self.changing = recognise_tab(host, uploads, self._promise(), demo.tries if demo else ())
                with gr.Tab("Teach", id="teach"), gr.Row():
                    self._teach_tab()
                with gr.Tab("Inbox", id="inbox"):
                    self.changing += inbox_tab(host, uploads)
                with gr.Tab("Classes", id="classes") as self.classes_tab, gr.Row():
                    self._classes_tab()
                with gr.Tab("History", id="history") as self.history_tab:
                    self.chart = gr.HTML(elem_id="chart")
                    self.events = gr.HTML(elem_id="events")
            self.seen = gr.State(-1)  # the revision that this browser shows
            self._connect()
        self.blocks.queue(max_size=200, api_open=False)

    # ---- what there is -----------------------------------------------------------------------------------------------
    def _teach_tab(self) -> None:
        with gr.Column():
            self.name = gr.Textbox(label="Name of the class", max_lines=1, max_length=200, elem_id="name")
            self.shots = self.uploads.only(gr.Gallery)(
                label="Pictures of it",
                file_types=["image"],
                type="filepath",
                sources=SOURCES,
                columns=4,
                height=280,
                object_fit="cover",
                buttons=[],
                interactive=True,
                elem_id="shots",
            )
            gr.HTML(f"<p>{self._advice()}</p>", elem_classes="fs-hint")
            self.teach_button = gr.Button("Teach", variant="primary", elem_id="teach-button")
        with gr.Column():
            self.said = gr.HTML(
                page_parts.placeholder("What you teach is known at once: try it under Recognise."), elem_id="lesson"
            )
            self.agreed = gr.State(None)  # the known class that the button below offers to add to
            self.add_button = gr.Button("Add", visible=False, variant="primary", elem_id="add-button")
            self.try_button = gr.Button("Try it on a picture", visible=False, elem_id="try-button")
            if self.demo is not None:
                self.changing += lesson_buttons(self.host, self.demo.lessons, self.said)

    def _classes_tab(self) -> None:
        with gr.Column(scale=2):
            self.known = gr.HTML(elem_id="known")
        with gr.Column(scale=1, min_width=260):
            self.chosen = gr.Dropdown(label="Class to remove", choices=[], value=None, elem_id="chosen")
            self.remove_button = gr.Button("Remove this class", elem_id="remove-button")
            self.undo_button = gr.Button("Undo the last change", elem_id="undo-button")
            self.last = gr.HTML(elem_classes="fs-hint")
            self.changed = gr.HTML(elem_id="changed")

    def _promise(self) -> str:
        said = (
            "Drop a picture, paste one, or take one with the camera. Its file is deleted once looked at; a small copy "
            "stays in memory until the next one, so that you can teach it."
        )
        if self.host.calibration["threshold"] is None:
            said += " This model never says “unknown”: it had too few pictures to tell from which point on it should."
        return said

    def _advice(self) -> str:
        copies = "; small copies of some are kept, as was chosen when the model was fitted"
        return (
            "Three to ten pictures of different scenes are best. They are deleted once learned"
            f"{copies if self.host.info()['stored_pictures'] else ''}."
        )

    # ---- who calls whom ----------------------------------------------------------------------------------------------
    def _connect(self) -> None:
        # The host keeps what it is asked in order. Lessons go through Gradio's queue because they report as they go on,
        # and nothing else does: its client can lose the answer to a call that joins just as another leaves.
        queued: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": 8, "show_progress": "hidden"}
        views = [self.head, self.known, self.chosen, self.undo_button, self.last, self.chart, self.events, self.seen]
        given = [self.name, self.shots]
        lesson_views = [self.said, self.agreed, self.add_button, self.try_button, self.teach_button, *given]
        for change in self.changing:
            change.then(self.show, None, views, **QUIET)
        for button, inputs in ((self.teach_button, given), (self.add_button, [*given, self.agreed])):
            taught = button.click(self.lesson, inputs, lesson_views, **queued)
            taught.then(self.show, None, views, **QUIET)
        self.try_button.click(lambda: gr.Tabs(selected="recognise"), None, self.tabs, **QUIET)
        self.remove_button.click(self.remove, self.chosen, self.changed, **QUIET).then(self.show, None, views, **QUIET)
        self.undo_button.click(self.undo, self.seen, self.changed, **QUIET).then(self.show, None, views, **QUIET)
        for trigger in (self.blocks.load, self.classes_tab.select, self.history_tab.select):
            trigger(self.show, None, views, show_progress="hidden", **QUIET)

    # ---- what happens ------------------------------------------------------------------------------------------------
    def show(self) -> tuple[Any, ...]:
        """Everything that says what the model knows, in the order of the views."""
        revision, history, classes = self.host.revision, self.host.history, self.host.classes
        undoable = len(history) > 1
        return (
            page_parts.heading(self.host.info()["name"], classes, self.user) + page_parts.notes(self.host.notes),
            page_parts.class_table(classes, self.host.thumbnails()),
            gr.update(choices=class_names(self.host), value=None),
            gr.update(interactive=undoable),
            f"<p>Last change: {page_parts.escape(page_parts.in_words(history[-1]))}</p>" if undoable else "",
            page_parts.history_chart(history),
            page_parts.history_table(history),
            revision,
        )

    def lesson(self, typed: str, paths: list[str] | None, agreed: str | None = None) -> Iterator[dict[Any, Any]]:
        """Teaches one class, saying what is going on; a known one only if it is the one that was `agreed` to add to.
        Pictures stay until they were learned from."""
        typed, paths = (typed or "").strip(), paths or []
        if not typed:
            yield self._say("Please give the class a name.", "bad")
            return
        if not paths:
            yield self._say(f"Please add some pictures of “{typed}”; five of different scenes are a good start.", "bad")
            return
        known = {str(info["name"]): info["pictures"] for info in self.host.classes}
        try:
            name = str(check_class_name(typed, known))
        except UserError as error:
            yield self._say(page_parts.sentence(str(error)), "bad")
            return
        if name in known and name != agreed:
            text = f"“{typed}” is known already, from {page_parts.count(known[name], 'picture')}. "
            text += "Add these pictures to it, or choose another name for another class."
            button = f"Add {page_parts.count(len(paths), 'picture')} to “{typed}”"
            yield {
                **self._say(text, "ask"),
                self.add_button: gr.update(visible=True, value=button),
                self.agreed: name,
            }
            return
        waiting = f"Teaching “{typed}” from {page_parts.count(len(paths), 'picture')} …"
        yield {**self._say(waiting, "busy"), self.teach_button: gr.update(interactive=False)}
        try:
            event = self.host.learn(typed, self.uploads.find(paths), add=name == agreed)
        except UserError as error:
            yield self._say(page_parts.sentence(str(error)), "bad")
        except Exception:
            log.exception("teaching failed")
            yield self._say("Something went wrong on the server; the model is as it was. Please try again.", "bad")
        else:
            self.uploads.discard(paths)
            notes = " ".join(page_parts.sentence(note) for note in event["notes"])
            done = self._say(f"{page_parts.in_words(event)}. {notes}", "good")
            yield {**done, self.try_button: gr.update(visible=True), self.name: "", self.shots: None}

    def _say(self, text: str, kind: str) -> dict[Any, Any]:
        """A message about a lesson, with the buttons as they are while nothing is offered."""
        hidden = {button: gr.update(visible=False) for button in (self.add_button, self.try_button)}
        return {**hidden, self.teach_button: gr.update(interactive=True), self.said: page_parts.message(text, kind)}

    def remove(self, label: str | None) -> str:
        if label is None:
            return page_parts.message("Please choose a class first.", "bad")
        return _change(lambda: page_parts.in_words(self.host.forget(label)) + ".")

    def undo(self, revision: int) -> str:
        return _change(lambda: f"Taken back: {page_parts.in_words(self.host.undo(seen=revision)['undone'][0])}.")


def _change(change: Callable[[], str]) -> str:
    try:
        return page_parts.message(change())
    except ChangedMeanwhile as error:
        return page_parts.message(page_parts.sentence(str(error)), "ask")
    except UserError as error:
        return page_parts.message(page_parts.sentence(str(error)), "bad")
    except Exception:
        log.exception("changing the model failed")
        return page_parts.message("Something went wrong on the server; the model is as it was.", "bad")
