"""What `fscil app --demo` adds to the page: pictures to try, and lessons that need no pictures of one's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fscil.data.uris import data_uri
from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.page_parts import QUIET, TROUBLE

if TYPE_CHECKING:
    import numpy as np

    from fscil.serving.host import Host

log = logging.getLogger(__name__)


def picture_buttons(pictures: Sequence[np.ndarray]) -> list[Any]:
    """A row of pictures to click on, in the Blocks that are open."""
    import gradio as gr

    looks = "".join(
        f"#try-{number} {{ background-image: url({data_uri(picture)}) }}" for number, picture in enumerate(pictures)
    )
    gr.HTML(f"<style>{looks}</style><p>Or try one of these, some of classes that are not known yet:</p>")
    with gr.Row(elem_id="tries"):
        return [
            gr.Button(f"try picture {number + 1}", elem_id=f"try-{number}", min_width=56)
            for number in range(len(pictures))
        ]


def lesson_buttons(host: Host, lessons: Mapping[str, Sequence[np.ndarray]], said: Any) -> list[Any]:
    """A button and pictures for each lesson; returns the events after which the model may know more."""
    import gradio as gr

    def teach(name: str) -> str:
        try:
            event = host.learn(name, lessons[name])
        except UserError as error:
            return page_parts.message(page_parts.sentence(str(error)), "ask")
        except Exception:
            log.exception("teaching failed")
            return page_parts.message(TROUBLE, "bad")
        notes = map(page_parts.sentence, event["notes"])
        return page_parts.message(" ".join([f"{page_parts.in_words(event)}. Now try it under Recognise.", *notes]))

    events = []
    for number, (name, pictures) in enumerate(lessons.items()):
        gr.HTML(page_parts.strip(pictures))
        button = gr.Button(f"Teach “{name}” from these {len(pictures)}", elem_id=f"demo-teach-{number}")
        events.append(button.click(partial(teach, name), None, said, show_progress_on=said, **QUIET))
    return events
