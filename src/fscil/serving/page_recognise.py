"""The page's tab to recognise: one picture or several, and what to do when the answer is wrong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.page_demo import picture_buttons
from fscil.serving.page_parts import QUIET, TROUBLE

if TYPE_CHECKING:
    from fscil.serving.host import Host
    from fscil.serving.uploads import Uploads

SHOWN_ALIKE = 3  # known pictures beside an answer, where small copies are kept
IN_MEMORY = 900  # seconds that the picture last looked at can still be taught
log = logging.getLogger(__name__)


def recognise_tab(host: Host, uploads: Uploads, promise: str, tries: Sequence[np.ndarray] = ()) -> list[Any]:
    """Draws the tab, in the Blocks that are open, with pictures to try if there are some; returns the events after
    which the model may know more."""
    import gradio as gr

    looked = gr.State(None, time_to_live=IN_MEMORY)  # the picture last looked at, decoded and reduced
    with gr.Row(elem_id="recognise-row"):
        with gr.Column():
            picture = uploads.only(gr.Image)(
                label="Picture to recognise",
                sources=["upload", "webcam", "clipboard"],
                type="filepath",
                height=280,
                buttons=[],
                webcam_options=gr.WebcamOptions(
                    mirror=False, constraints={"video": {"facingMode": {"ideal": "environment"}}}
                ),
                elem_id="picture",
            )
            many = uploads.only(gr.UploadButton)(
                "Several pictures at once", file_count="multiple", file_types=["image"], elem_id="many"
            )
            gr.HTML(f"<p>{promise}</p>", elem_classes="fs-hint")
            buttons = picture_buttons(tries) if tries else []
        with gr.Column():
            found = gr.HTML(page_parts.placeholder("The answer appears here."), elem_id="answer")
            with gr.Row(visible=False, elem_id="correction") as correction:
                truth = gr.Dropdown(
                    label="No, it is …", choices=[], value=None, allow_custom_value=True, scale=3, elem_id="truth"
                )
                teach = gr.Button("Teach this", scale=1, min_width=120, elem_id="teach-this")
            said = gr.HTML(elem_id="correction-said")

    def answered(decode: Callable[[], np.ndarray | str]) -> tuple[Any, ...]:
        """What one picture shows, and the way to say that it is something else."""
        shown, decoded, offer = page_parts.message(TROUBLE, "bad"), None, gr.update()
        try:
            decoded = decode()
            (answer,) = host.recognise_decoded([decoded], alike=SHOWN_ALIKE)
            shown = page_parts.answer(answer, None if isinstance(decoded, str) else decoded)
            label = "Teach this as …" if answer.unknown else "No, it is …"
            offer = gr.update(choices=class_names(host), value=None, label=label)
        except UserError as error:
            shown = page_parts.message(page_parts.sentence(str(error)), "bad")
        except Exception:
            log.exception("recognising failed")
        usable = decoded is not None and not isinstance(decoded, str)
        return None, shown, decoded if usable else None, gr.update(visible=usable), offer, ""

    def recognise(path: str | None) -> tuple[Any, ...]:
        if path is None:
            return (gr.skip(),) * 6
        try:
            return answered(lambda: host.decode(uploads.find([path]))[0])
        finally:
            uploads.discard([path])

    def several(paths: list[str] | str | None) -> tuple[Any, ...]:
        paths = [paths] if isinstance(paths, str) else paths or []
        if not paths:
            return (gr.skip(),) * 5
        try:
            decoded = host.decode(uploads.find(paths))
            found = host.recognise_decoded(decoded)
            pictures = [None if isinstance(item, str) else item for item in decoded]
            shown = page_parts.answers_table([os.path.basename(path) for path in paths], found, pictures)
        except UserError as error:
            shown = page_parts.message(page_parts.sentence(str(error)), "bad")
        except Exception:
            log.exception("recognising failed")
            shown = page_parts.message(TROUBLE, "bad")
        finally:
            uploads.discard(paths)
        return None, shown, None, gr.update(visible=False), ""

    def correct(array: np.ndarray | None, name: str | None) -> tuple[Any, Any]:
        text, kind = teach_decoded(host, array, name)
        return page_parts.message(text, kind), gr.update(visible=kind != "good")

    outputs = [picture, found, looked, correction, truth, said]
    picture.change(recognise, picture, outputs, show_progress="minimal", show_progress_on=found, **QUIET)
    for button, example in zip(buttons, tries):
        button.click(partial(answered, partial(np.asarray, example)), None, outputs, show_progress_on=found, **QUIET)
    many.upload(several, many, [many, found, looked, correction, said], show_progress_on=found, **QUIET)
    return [teach.click(correct, [looked, truth], [said, correction], show_progress_on=said, **QUIET)]


def class_names(host: Host) -> list[str]:
    """Names of all classes in the order people look for them."""
    return sorted((str(info["name"]) for info in host.classes), key=page_parts.in_order)


def teach_decoded(host: Host, array: np.ndarray | None, name: str | None) -> tuple[str, str]:
    """Teaches one picture, to a known class or a new one: (what to say, kind of message)."""
    name = (name or "").strip()
    if array is None:
        return "The picture is no longer in memory; please give it again.", "bad"
    if not name:
        return "Please choose a class, or type a new name.", "bad"
    try:
        event = host.learn(name, [array], add=name in class_names(host))
    except UserError as error:
        return page_parts.sentence(str(error)), "bad"
    except Exception:
        log.exception("teaching failed")
        return TROUBLE, "bad"
    return " ".join([f"{page_parts.in_words(event)}.", *map(page_parts.sentence, event["notes"])]), "good"
