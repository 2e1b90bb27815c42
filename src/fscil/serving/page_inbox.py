"""The page's inbox: unlabelled pictures, those worth a label first, answered with a click each and taught together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.page_parts import QUIET, TROUBLE
from fscil.serving.page_recognise import IN_MEMORY, class_names
from fscil.teachable.names import check_class_name

if TYPE_CHECKING:
    import numpy as np

    from fscil.serving.host import Host
    from fscil.serving.uploads import Uploads
    from fscil.teachable.suggesting import Suggestion

HINT = (
    "Pictures most worth a label come first: unsure ones, and those like nothing known. Answer as many as you like; "
    "they are taught together."
)
GUESSES = 2  # classes that are offered as buttons
log = logging.getLogger(__name__)


@dataclass
class Inbox:
    """Pictures of one visitor, in the order they are asked about, and the answers so far."""

    pictures: list[np.ndarray] = field(default_factory=list)
    order: list[Suggestion] = field(default_factory=list)
    asked: int = 0
    answers: dict[int, str] = field(default_factory=dict)  # place in `pictures` -> class

    @property
    def current(self) -> Suggestion | None:
        return self.order[self.asked] if self.asked < len(self.order) else None

    @property
    def guesses(self) -> list[str]:
        """The likeliest classes of the picture that is asked about."""
        now = self.current
        return [str(name) for name in (now.label, now.second) if name is not None] if now is not None else []

    def answered(self, name: str | None) -> Inbox:
        """After an answer, or None to pass over the picture that is asked about."""
        if self.current is None:
            return self
        given = {self.current.position: name} if name else {}
        return Inbox(self.pictures, self.order, self.asked + 1, self.answers | given)

    def refilled(self, pictures: Sequence[np.ndarray], order: Sequence[Suggestion]) -> Inbox:
        """With other pictures to ask about; answers that were not taught yet stay."""
        kept = [self.pictures[position] for position in self.answers]
        moved = [replace(item, position=len(kept) + item.position) for item in order]
        return Inbox([*kept, *pictures], moved, 0, dict(enumerate(self.answers.values())))

    def lessons(self) -> dict[str, list[np.ndarray]]:
        found: dict[str, list[np.ndarray]] = {}
        for position, name in self.answers.items():
            found.setdefault(name, []).append(self.pictures[position])
        return found


def inbox_tab(host: Host, uploads: Uploads) -> list[Any]:
    """Draws the tab, in the Blocks that are open; returns the events after which the model may know more."""
    import gradio as gr

    state = gr.State(Inbox(), time_to_live=IN_MEMORY)
    with gr.Row():
        with gr.Column():
            given = uploads.only(gr.UploadButton)(
                "Add unlabelled pictures", file_count="multiple", file_types=["image"], elem_id="inbox-add"
            )
            gr.HTML(f"<p>{HINT}</p>", elem_classes="fs-hint")
            finish = gr.Button("Teach the answers", variant="primary", visible=False, elem_id="inbox-teach")
            said = gr.HTML(elem_id="inbox-said")
        with gr.Column():
            card = gr.HTML(page_parts.placeholder("The first picture appears here."), elem_id="inbox-card")
            with gr.Row(visible=False, elem_id="inbox-answers") as row:
                guesses = [gr.Button("", elem_id=f"inbox-guess-{number}") for number in range(GUESSES)]
                skip = gr.Button("Skip", elem_id="inbox-skip")
            with gr.Row(visible=False, elem_id="inbox-another") as another:
                typed = gr.Dropdown(
                    label="It is …", choices=[], value=None, allow_custom_value=True, scale=3, elem_id="inbox-name"
                )
                answer = gr.Button("That is it", scale=1, min_width=120, elem_id="inbox-answer")

    views = [state, card, row, another, *guesses, typed, finish, said]

    def show(inbox: Inbox, text: str = "", kind: str = "good") -> tuple[Any, ...]:
        """The next picture with its buttons, or what to do now that there is none."""
        now = inbox.current
        names = inbox.guesses
        buttons = [gr.update(value=name, visible=True) for name in names]
        buttons += [gr.update(visible=False)] * (GUESSES - len(names))
        done = f"Teach {page_parts.count(len(inbox.answers), 'answer')}"
        return (
            inbox,
            page_parts.inbox_card(inbox.pictures[now.position], now.reason, inbox.asked + 1, len(inbox.order))
            if now is not None
            else page_parts.placeholder("That was the last one." if inbox.order else "The first picture appears here."),
            gr.update(visible=now is not None),
            gr.update(visible=now is not None),
            *buttons,
            gr.update(
                choices=sorted({*class_names(host), *inbox.answers.values()}, key=page_parts.in_order), value=None
            ),
            gr.update(visible=bool(inbox.answers), value=done),
            page_parts.message(text, kind) if text else "",
        )

    def add(inbox: Inbox, paths: list[str] | str | None) -> tuple[Any, ...]:
        paths = [paths] if isinstance(paths, str) else paths or []
        try:
            return show(*filled(host, inbox, uploads.find(paths)))
        except Exception as error:
            return show(inbox, *explained(error))
        finally:
            uploads.discard(paths)

    def say(inbox: Inbox, name: str | None) -> tuple[Any, ...]:
        return show(*named(host, inbox, name))

    def teach(inbox: Inbox) -> tuple[Any, ...]:
        try:
            event = host.learn_many(inbox.lessons(), add=True)
        except Exception as error:
            return show(inbox, *explained(error))
        text = " ".join([f"{page_parts.in_words(event)}.", *map(page_parts.sentence, event["notes"])])
        return show(Inbox(inbox.pictures, inbox.order, inbox.asked), text)

    given.upload(add, [state, given], views, show_progress_on=card, **QUIET)
    for number, button in enumerate(guesses):
        button.click(
            lambda inbox, number=number: show(inbox.answered(inbox.guesses[number])),
            state,
            views,
            show_progress="hidden",
            **QUIET,
        )
    skip.click(lambda inbox: show(inbox.answered(None)), state, views, show_progress="hidden", **QUIET)
    answer.click(say, [state, typed], views, show_progress="hidden", **QUIET)
    return [finish.click(teach, state, views, show_progress_on=said, **QUIET)]


def filled(host: Host, inbox: Inbox, files: Sequence[Path]) -> tuple[Inbox, str, str]:
    """The inbox with these pictures to ask about, and what to say about those that cannot be used."""
    if inbox.answers and len(inbox.answers) + len(files) > host.limits.pictures:
        raise UserError(f"teach the {page_parts.count(len(inbox.answers), 'answer')} first, then add more pictures.")
    decoded = host.decode(files)
    good = [item for item in decoded if not isinstance(item, str)]
    if not good:
        return inbox, "None of these files can be used.", "bad"
    bad = len(decoded) - len(good)
    said = f"{page_parts.count(bad, 'file')} could not be used." if bad else ""
    return inbox.refilled(good, host.suggest(good)), said, "ask"


def named(host: Host, inbox: Inbox, name: str | None) -> tuple[Inbox, str, str]:
    """The inbox after an answer was typed, and what is wrong with it: one bad name would keep all from being taught."""
    if not (name := (name or "").strip()):
        return inbox, "Please choose a class, or type a new name.", "bad"
    try:
        checked = check_class_name(name, {*class_names(host), *inbox.answers.values()})
    except UserError as error:
        return inbox, *explained(error)
    return inbox.answered(str(checked)), "", "good"


def explained(error: Exception) -> tuple[str, str]:
    """What to say about something that failed, and how; what nobody could foresee goes to the log."""
    if isinstance(error, UserError):
        return page_parts.sentence(str(error)), "bad"
    log.error("the inbox failed", exc_info=error)
    return TROUBLE, "bad"
