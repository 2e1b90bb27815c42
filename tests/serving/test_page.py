"""The web page: its parts as HTML, its uploads, and all of it in a real browser against a real `fscil app`."""

import asyncio
import base64
import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fscil.commands.app import read_password
from fscil.errors import UserError
from fscil.serving import page_parts
from fscil.serving.gate import is_local
from fscil.serving.page import before_login, check_upload, logged_in, serve
from fscil.serving.uploads import Uploads
from headless import headless, resize

HOSTILE = '<img src=x onerror="alert(1)">{{value}}${1+1}'


class Parsed(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.pieces = [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.pieces).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.pieces.append(data)

    def all(self, tag, style=None):
        return [given for name, given in self.tags if name == tag and style in (None, given.get("class"))]


def recognition(**changes):
    from fscil.teachable.recognition import Recognition

    usual = dict(label="jay", confidence=0.9, unknown=False, top=[("jay", 0.9), ("owl", 0.1)])
    return Recognition(**{**usual, **changes})


def event(action="learn", accuracy=0.8, rejection=None, **classes):
    when = "2026-11-15T22:01:34Z"
    figures = {"held_out_accuracy": accuracy, "taught_rejection": rejection}
    return {"action": action, "when": when, "classes": classes, "known": len(classes), **figures}


# ---- parts -----------------------------------------------------------------------------------------------------------
def test_bars_are_as_long_as_the_probabilities():
    page = Parsed(page_parts.bars([("jay", 0.75), ("owl", 0.2), ("wren", 0.001)]))
    widths = [float(re.fullmatch(r"width:(.*)%", span["style"])[1]) for span in page.all("span") if "style" in span]
    assert widths == [75.0, 20.0, 0.1]
    assert page.text == "jay 75 % owl 20 % wren <1 %"


def test_an_answer_says_how_sure_it_is_and_shows_what_it_is_like():
    picture = np.full((40, 20, 3), 200, np.uint8)
    page = Parsed(page_parts.answer(recognition(alike=[("jay", 0.8, picture), ("owl", 0.7, picture)]), picture))
    assert "90 % sure. About 90 of 100 answers this sure are right." in page.text
    assert [image["alt"] for image in page.all("img")] == [
        "your picture",
        "known picture of jay",
        "known picture of owl",
    ]
    assert all(image["src"].startswith("data:image/jpeg;base64,") for image in page.all("img"))
    assert "Unknown" not in page.text


def test_unknown_is_said_plainly_with_the_nearest_class():
    page = Parsed(page_parts.answer(recognition(label=None, unknown=True, confidence=0.4, top=[("jay", 0.4)])))
    assert page.all("p", "verdict unknown")
    assert page.text.startswith("Unknown It does not look like anything this model was taught. Nearest is jay .")
    assert "sure" not in page.text


def test_unreadable_files_give_the_reason_and_no_bars():
    page = Parsed(page_parts.answer(recognition(label=None, top=[], error="not a picture")))
    assert page.text == "This file cannot be used: not a picture." and not page.all("ol")


def test_names_of_people_stay_text():
    classes = [{"name": HOSTILE, "pictures": 3, "base": False, "since": HOSTILE}]
    parts = [
        page_parts.answer(
            recognition(label=HOSTILE, top=[(HOSTILE, 1.0)], alike=[(HOSTILE, 1, np.zeros((2, 2, 3), "u1"))])
        ),
        page_parts.answer(recognition(label=None, unknown=True, top=[(HOSTILE, 1.0)])),
        page_parts.answer(recognition(label=None, top=[], error=HOSTILE)),
        page_parts.message(HOSTILE),
        page_parts.heading(HOSTILE, classes),
        page_parts.class_table(classes, {HOSTILE: [np.zeros((2, 2, 3), "u1")]}),
        page_parts.inbox_card(np.zeros((2, 2, 3), "u1"), HOSTILE, 1, 1),
        page_parts.answers_table([HOSTILE], [recognition(label=HOSTILE)], [None]),
        page_parts.notes([HOSTILE]),
        page_parts.history_table([event(**{HOSTILE: 3})]),
    ]
    for part in parts:
        page = Parsed(part)
        assert HOSTILE in page.text
        assert all(image["src"].startswith("data:") and "onerror" not in image for image in page.all("img"))


def test_the_chart_places_every_figure():
    history = [event("fit", 1.0, None, a=9), event(rejection=0.5, b=1), event(accuracy=None, rejection=0.0, c=1)]
    page = Parsed(page_parts.history_chart(history))
    base, taught = page.all("circle", "base"), page.all("circle", "taught")
    assert [(dot["cx"], dot["cy"]) for dot in base] == [("0.00%", "14.0"), ("50.00%", f"{14 + 0.2 * 216:.1f}")]
    assert [(dot["cx"], dot["cy"]) for dot in taught] == [("50.00%", "122.0"), ("100.00%", "230.0")]
    assert len(page.all("line", "base")) == len(page.all("line", "taught")) == 1
    assert "taught pictures called unknown: now 0 %" in page.all("svg")[0]["aria-label"]


def test_a_model_from_the_hub_says_where_it_began():
    assert page_parts.in_words(event("push", jay=5, owl=6)) == "Uploaded with 2 classes (11 pictures)"


def test_a_history_without_figures_says_so():
    assert "no figures" in page_parts.history_chart([event("fit", None, None, a=1, b=1)])


def test_history_rows_are_newest_first_and_numbered_as_in_the_chart():
    many = {f"class {number}": 2 for number in range(6)}
    page = Parsed(page_parts.history_table([event("fit", 0.5, **many), event("learn", 0.25, 0.125, **many)]))
    named = "“class 0”, “class 1”, “class 2”, “class 3” and 2 more (12 pictures)"
    newest = f"1 Learned {named} 15 Nov 2026, 22:01 UTC 6 25 % −25 12 %"
    oldest = "0 Started with 6 classes (12 pictures) 15 Nov 2026, 22:01 UTC 6 50 % –"
    assert page.text.endswith(f"Taught called unknown {newest} {oldest}")


def test_small_changes_are_folded_away():
    history = [event("fit", 0.8, a=9), event("learn", 0.8, a=1), event("learn", 0.79, a=1), event("learn", 0.7, a=1)]
    page = page_parts.history_table(history)
    shown, folded = page.split("<details>")
    assert "2 smaller changes" in Parsed(folded).text
    rows = [Parsed(part).text.count("Learned “a” (1 picture)") for part in (shown, folded)]
    assert rows == [1, 2] and "70 % −9" in Parsed(shown).text and "Started with" in Parsed(shown).text
    assert "<details>" not in page_parts.history_table(history[:1])


def test_classes_are_in_order_with_the_pictures_that_are_kept():
    classes = [
        {"name": name, "pictures": 3, "base": True, "since": "2026-11-15T22:01:34Z"} for name in ("b 10", "b 9", "A", 3)
    ]
    page = Parsed(page_parts.class_table(classes, {"b 9": [np.zeros((96, 96, 3), np.uint8)] * 2}))
    assert re.findall(r"(b 10|b 9|A|3) 3 base", page.text) == ["3", "A", "b 9", "b 10"]
    assert [image["alt"] for image in page.all("img")] == ["picture of b 9"] * 2


def test_answers_about_several_pictures_are_a_table_and_a_csv_file():
    found = [recognition(), recognition(label=None, unknown=True, top=[("owl", 0.4)]), recognition(error="no picture")]
    small = np.zeros((10, 10, 3), np.uint8)
    page = Parsed(page_parts.answers_table(["=a.jpg", HOSTILE, "c.txt"], found, [small, small, None]))
    assert "jay 90 % =a.jpg" in page.text and "Unknown nearest: owl" in page.text and "no picture c.txt" in page.text
    assert len(page.all("img")) == 2
    (link,) = page.all("a")
    head, data = link["href"].split(",", 1)
    rows = list(csv.reader(io.StringIO(base64.b64decode(data).decode())))
    assert link["download"] == "answers.csv" and head.startswith("data:text/csv")
    assert rows[0] == ["file", "label", "confidence", "unknown", "error"]
    assert rows[1][:2] == ["'=a.jpg", "jay"] and rows[2][:2] == [HOSTILE, "unknown"] and rows[3][4] == "no picture"


def test_an_inbox_counts_answers_and_passes_over():
    from fscil.serving.page_inbox import Inbox
    from fscil.teachable.suggesting import Suggestion

    order = [Suggestion(at, "jay", 0.5, "owl", False) for at in (2, 0, 1)]
    inbox = Inbox(["a", "b", "c"], order).answered("jay").answered(None).answered("jay")
    assert inbox.lessons() == {"jay": ["c", "b"]} and inbox.current is None
    assert inbox.answered("owl").answers == inbox.answers


class MadeUpHost:
    """What the inbox asks of a host: any file is a picture, and all are asked about in their order."""

    classes, limits = ({"name": "jay"},), SimpleNamespace(pictures=3)

    def decode(self, files):
        return list(files)

    def suggest(self, pictures):
        from fscil.teachable.suggesting import Suggestion

        return [Suggestion(at, "jay", 0.5, "owl", False) for at in range(len(pictures))]


def test_answers_stay_when_pictures_are_added_to_an_inbox():
    from fscil.serving.page_inbox import Inbox, filled

    # str would be an error of the decoder
    inbox, said, _ = filled(MadeUpHost(), Inbox(), [b"a", b"b"])
    assert said == ""
    inbox, *_ = filled(MadeUpHost(), inbox.answered(None).answered("owl"), [b"c", b"d"])
    assert inbox.answers == {0: "owl"} and inbox.pictures[inbox.current.position] == b"c"
    inbox = inbox.answered("jay")
    assert inbox.lessons() == {"owl": [b"b"], "jay": [b"c"]}
    with pytest.raises(UserError, match="teach the 2 answers first"):  # a lesson takes 3
        filled(MadeUpHost(), inbox, [b"e", b"f"])


@pytest.mark.parametrize(
    "typed, why", [("unknown", "pictures of no class"), ("ja\u200by", "looks like"), (" ", "choose")]
)
def test_an_answer_that_could_not_be_taught_is_refused_at_once(typed, why):
    from fscil.serving.page_inbox import Inbox, filled, named

    inbox = filled(MadeUpHost(), Inbox(), [b"a"])[0]
    after, said, kind = named(MadeUpHost(), inbox, typed)
    assert why in said and kind == "bad" and after is inbox
    after, said, _ = named(MadeUpHost(), inbox, " owl ")
    assert after.answers == {0: "owl"} and said == ""


@pytest.mark.extra("app")
def test_pictures_are_added_only_to_the_class_that_the_button_names(tmp_path):
    from fscil.serving.page_body import Page

    class Taught(MadeUpHost):
        classes = ({"name": "jay", "pictures": 5}, {"name": "owl", "pictures": 5})
        history, notes, revision, calibration = [event("fit", jay=5, owl=5)], (), 0, {"threshold": 0.0}
        lessons: list[tuple[str, bool]] = []

        def info(self):
            return {"name": "birds", "stored_pictures": 0}

        def learn(self, name, pictures, add):
            self.lessons.append((name, add))
            return {**event(**{name: len(pictures)}), "notes": []}

    page = Page(Taught(), Uploads(tmp_path))
    (tmp_path / "a.png").touch()
    files = [str(tmp_path / "a.png")]
    (asked,) = page.lesson("jay", files)
    assert asked[page.agreed] == "jay" and "“jay”" in asked[page.add_button]["value"] and not Taught.lessons
    (asked,) = page.lesson("owl", files, "jay")  # another name was typed before the button was pressed
    assert asked[page.agreed] == "owl" and not Taught.lessons
    assert list(page.lesson(" owl ", files, "owl")) and Taught.lessons == [("owl", True)]
    assert list(page.lesson("wren", files)) and Taught.lessons[1:] == [("wren", False)]


# ---- keeping strangers out -------------------------------------------------------------------------------------------
def test_only_what_the_page_needs_is_let_through():
    from fscil.serving.page import only_needed

    allowed = ("/", "/assets/index.js", "/gradio_api/upload", "/gradio_api/queue/data", "/login")
    assert [path for path in allowed if only_needed({"path": path})] == []
    inner = ("info", "openapi.json", "file=http://example.org/x", "proxy=http://example.org", "runs", "dev/reload")
    for path in ("/docs", "/monitoring", *(f"/gradio_api/{name}" for name in inner)):
        assert only_needed({"path": path}).status == 404


def test_other_addresses_need_a_password(tmp_path):
    assert not is_local("0.0.0.0") and not is_local("::") and is_local("::1")
    with pytest.raises(UserError, match="needs a password"):
        serve(tmp_path, "0.0.0.0")
    with pytest.raises(UserError, match="too short"):
        serve(tmp_path, "0.0.0.0", password="1234567")


def test_passwords_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("correct horse \nsecond line\n")
    assert read_password(file) == "correct horse"
    monkeypatch.setenv("FSCIL_PASSWORD", "from outside")
    assert read_password(None) == "from outside"
    monkeypatch.setenv("FSCIL_PASSWORD", "")
    assert read_password(None) is None
    file.write_text("\n")
    with pytest.raises(UserError, match="no password in its first line"):
        read_password(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_password(tmp_path / "absent")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r'pip install "fscil\[app\]"'):
        serve(tmp_path)


def test_unused_uploads_are_swept(tmp_path):
    for name, age in (("old", 100), ("new", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"x")
        for path in (tmp_path / name / "a.png", tmp_path / name):
            os.utime(path, (time.time() - age, time.time() - age))
    Uploads(tmp_path).sweep(age=50)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["a.png"] and (tmp_path / "new" / "a.png").exists()


def test_used_files_go_but_not_those_that_took_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr("fscil.serving.uploads.DELETED_AFTER", 0.2)
    used, again = tmp_path / "used.png", tmp_path / "again.png"
    for file in (used, again):
        file.write_bytes(b"x")
    Uploads(tmp_path).discard([str(used), str(again), str(tmp_path / "gone.png")])
    (tmp_path / "aside").write_bytes(b"x")
    (tmp_path / "aside").replace(again)
    assert wait_until(lambda: not used.exists())
    assert again.exists()


def test_uploads_have_a_quota_per_visitor_and_in_all(tmp_path, monkeypatch):
    monkeypatch.setattr("fscil.serving.uploads.PER_VISITOR", 250)
    monkeypatch.setattr("fscil.serving.uploads.IN_ALL", 450)
    uploads = Uploads(tmp_path)

    async def gradio(scope, receive, send):
        """Puts a file of the announced size into the folder, as Gradio's address for uploads does."""
        size = int(dict(scope["headers"])[b"content-length"])
        path = tmp_path / f"{len(uploads.owners)}.png"
        path.write_bytes(bytes(size))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps([str(path)]).encode()})

    def upload(who, size):
        path, length = "/gradio_api/upload", (b"content-length", str(size).encode())
        scope = {"type": "http", "method": "POST", "path": path, "headers": [length], "client": (who, 1)}
        refusal = check_upload(scope, uploads)
        if refusal is None:
            asyncio.run(uploads.noting(gradio)(scope, None, lambda message: asyncio.sleep(0)))
        return refusal and refusal.status

    assert [upload("ann", 100) for _ in range(3)] == [None, None, 503]
    assert [upload("bob", 200), upload("eve", 100), upload("eve", 50)] == [None, 503, None]
    (tmp_path / "0.png").unlink()  # used
    assert [upload("ann", 200), upload("ann", 100)] == [503, None]
    assert check_upload({"method": "POST", "path": "/gradio_api/upload", "headers": []}, uploads).status == 411


def test_strangers_see_the_form_to_log_in_and_no_more():
    def refusal(path, *headers):
        scope = {"path": path, "method": "GET", "headers": list(headers)}
        return None if logged_in(scope, "id", {"secret": "ann"}) else before_login(scope)

    for path in ("/", "/login", "/config", "/assets/index.js", "/gradio_api/login_check"):
        assert refusal(path) is None
    for path in ("heartbeat/x", "queue/data", "queue/join", "upload", "upload_progress", "run/predict", "file=/x"):
        assert refusal(f"/gradio_api/{path}").status == 401
        assert refusal(f"/gradio_api/{path}", (b"cookie", b"a=b; access-token-unsecure-id=secret")) is None
        assert refusal(f"/gradio_api/{path}", (b"cookie", b"access-token-id=wrong; access-token-id2=secret"))
    assert refusal("/login", (b"content-length", b"20000")).status == 413


def test_only_files_in_the_folder_for_uploads_are_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("fscil.serving.uploads.DELETED_AFTER", 0.05)
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads-beside").mkdir()
    uploads, inside = Uploads(tmp_path / "uploads"), tmp_path / "uploads" / "a.png"
    canaries = [tmp_path / "canary.png", tmp_path / "uploads-beside" / "canary.png"]
    for file in (inside, *canaries):
        file.write_bytes(b"x")
    link = tmp_path / "uploads" / "link.png"
    link.symlink_to(canaries[0])
    monkeypatch.chdir(tmp_path / "uploads")
    around = str(tmp_path / "uploads" / ".." / "canary.png")
    for path in (*map(str, canaries), around, str(link), "a.png", "", None, "http://example.org/a.png"):
        for use in (uploads.check, lambda path: uploads.find([path]), lambda path: uploads.discard([path])):
            with pytest.raises(UserError, match="only uploaded files"):
                use(path)
    assert uploads.find([str(inside)]) == [inside]
    with pytest.raises(UserError, match="waited too long"):
        uploads.find([str(inside), str(tmp_path / "uploads" / "gone.png")])
    uploads.discard([str(inside)])
    assert wait_until(lambda: not inside.exists())
    assert all(file.exists() for file in canaries)


def wait_until(holds, seconds=30):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


# ---- in a browser ----------------------------------------------------------------------------------------------------
CLASSES, TAUGHT, SHOTS = range(0, 6), 62, 5
TEST_PICTURES = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model of six glyph classes, and pictures of those and of one to be taught."""
    from fscil.data.glyphs import glyph_images
    from fscil.teachable.model import Teachable

    root = tmp_path_factory.mktemp("world")
    images, labels, names = glyph_images("benchmark", "train")
    chosen = [at for number in CLASSES for at in np.nonzero(labels == number)[0][:15]]
    model = Teachable(backbone="glyph_vit_a", train="never", thumbnails=2, device="cpu")
    model.fit([images[at] for at in chosen], [names[labels[at]] for at in chosen])
    model.save(root / "runes")

    def write(name, arrays):
        (root / name).mkdir()
        for number, array in enumerate(arrays):
            Image.fromarray(array).save(root / name / f"{number}.png")
        return sorted((root / name).iterdir())

    shots = write("shots", images[labels == TAUGHT][:SHOTS])
    more = write("more", images[labels == TAUGHT][SHOTS : SHOTS + 2])
    images, labels, _ = glyph_images("benchmark", "test")
    known = write("known", images[labels == 0][:TEST_PICTURES])
    new = write("new", images[labels == TAUGHT][:TEST_PICTURES])
    return {"model": root / "runes", "shots": shots, "more": more, "known": known, "new": new, "name": names[0]}


@contextlib.contextmanager
def running(model, tmp_path, *arguments, password=None, **variables):
    """(address, folder of its temporary files) of `fscil app`, which is ended by Ctrl-C and must end well."""
    temporary = tmp_path / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "FSCIL_PASSWORD": password or ""}
    environment |= variables
    command = [sys.executable, "-m", "fscil", "app", str(model), "--port", "0", "--device", "cpu", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        port = re.search(r"http://[\d.]+:(\d+)", line)
        assert port, f"{line} {process.communicate()[1]}"
        yield f"http://127.0.0.1:{port[1]}", temporary
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0 and "Traceback" not in said, said
        assert "127.0.0.1" not in said and "HTTP" not in said  # the page has no log of requests
        assert not list(temporary.glob("fscil-app-*"))
    finally:
        process.kill()
        process.wait()


class Visitor:
    """Somebody with a browser, who reads and clicks what is on the page, and tries again while it still moves."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address

    def open(self):
        self.browser.get("about:blank")  # what an earlier page had to complain about is not this one's
        self.browser.get_log("browser")
        self.browser.get(self.address)
        return self

    def until(self, act, seconds=30):
        """What `act` gives, once the page lets it: parts of it are drawn anew whenever the server has answered."""
        from selenium.common.exceptions import WebDriverException

        deadline = time.monotonic() + seconds
        while True:
            try:
                return act()
            except (WebDriverException, AssertionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def find(self, css):
        return self.until(lambda: self.browser.find_element("css selector", css))

    def read(self, css):
        return self.until(lambda: self.find(css).text)

    def wait(self, css, text, seconds=30):
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join(' ')"

        def shown():
            assert text in (found := " ".join(self.browser.execute_script(script, css).split())), (
                f"{text!r} is not in {found!r}"
            )

        self.until(shown, seconds)

    def click(self, css):
        self.until(lambda: self.find(css).click())

    def named(self, css, name):
        """The one of that name, among several."""
        found = [item for item in self.browser.find_elements("css selector", css) if name in item.text]
        assert found, f"there is no {css} named {name!r}"
        return found[0]

    def tab(self, name):
        def opened():
            self.named("[role=tab]", name).click()
            assert self.named("[role=tab]", name).get_attribute("aria-selected") == "true"

        self.until(opened)

    def write(self, css, text):
        """Puts the text in the place of what a box holds."""
        from selenium.webdriver.common.keys import Keys

        def written():
            box = self.find(css)
            box.send_keys(Keys.CONTROL, "a")
            box.send_keys(text)
            assert self.find(css).get_attribute("value") == text

        self.until(written)

    def choose(self, css, name):
        """Types a name into a list of them."""
        from selenium.webdriver.common.keys import Keys

        self.click(f"{css} input")
        self.write(f"{css} input", name)
        self.find(f"{css} input").send_keys(Keys.ENTER)  # takes the name and closes the list
        time.sleep(0.3)

    def pick(self, css, name):
        """Opens a list and clicks on a name in it."""

        def picked():
            if not self.browser.find_elements("css selector", "[role=option]"):
                self.find(f"{css} input").click()
            self.named("[role=option]", name).click()
            assert self.find(f"{css} input").get_attribute("value") == name

        self.until(picked)

    def upload(self, css, *files):
        self.until(lambda: self.find(f"{css} input[type=file]").send_keys("\n".join(map(str, files))))

    def upload_through(self, button, *files):
        """Through a button of that label, whose input lies beside it."""
        self.find(f"input[data-testid='{button}-upload-button']").send_keys("\n".join(map(str, files)))

    def recognise(self, file, expected):
        self.tab("Recognise")
        mark = "document.querySelectorAll('#answer [class^=fs-]').forEach(old => old.setAttribute('data-old', ''))"
        self.browser.execute_script(mark)
        self.upload("#picture", file)
        self.wait("#answer [class^=fs-]:not([data-old])", expected)
        return self.read("#answer [class^=fs-]")

    def teach(self, name, files):
        self.tab("Teach")
        time.sleep(0.7)  # nobody chooses files in the instant a tab appears
        self.upload("#shots", *files)
        self.shown(len(files))
        self.write("#name input, #name textarea", name)
        time.sleep(0.5)
        self.click("#teach-button")

    def shown(self, count):
        pictures = "#shots .grid-container img"
        assert wait_until(lambda: len(self.browser.find_elements("css selector", pictures)) == count, 30)

    def errors(self):
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser():
    with headless(1280, "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as found:
        yield found


def files_in(folder):
    return [path for path in Path(folder).glob("fscil-app-*/**/*") if path.is_file()]


def library_says(model, file):
    """What the library itself says about a picture, opened anew from the folder."""
    from fscil.teachable.model import Teachable

    (found,) = Teachable.load(model, device="cpu").recognise([file])
    return found


@pytest.mark.slow
@pytest.mark.extra("app")
def test_recognise_teach_undo_and_restart(world, browser, tmp_path):
    model = shutil.copytree(world["model"], tmp_path / "runes")
    known, new = world["known"][0], world["new"][0]
    with running(model, tmp_path) as (address, temporary):
        visitor = Visitor(browser, address).open()
        answer = visitor.recognise(known, "sure.")
        found = library_says(model, known)
        assert not found.unknown and answer.startswith(world["name"])  # the picture is of that class
        assert f"{100 * found.confidence:.0f} % sure" in answer and "Known pictures most like it" in answer
        assert wait_until(lambda: files_in(temporary) == [])  # nothing of a picture stays

        visitor.teach("new rune", world["shots"])
        visitor.wait("#lesson", "Learned “new rune” (5 pictures)")
        visitor.wait(".fs-head", "knows 7 classes, 1 of them taught")
        assert wait_until(lambda: files_in(temporary) == [])
        visitor.click("#try-button")
        visitor.recognise(new, "new rune")
        assert library_says(model, new).top[0][0] == "new rune"

        visitor.teach("new rune", world["more"])  # a name that is known: it asks
        visitor.wait("#lesson", "“new rune” is known already, from 5 pictures")
        visitor.click("#add-button")
        visitor.wait("#lesson", "Learned “new rune” (2 pictures)")
        visitor.tab("Classes")
        visitor.wait("#known", "new rune 7 taught")
        visitor.click("#undo-button")
        visitor.wait("#changed", "Taken back: Learned “new rune” (2 pictures)")
        visitor.wait("#known", "new rune 5 taught")

        visitor.pick("#chosen", "new rune")
        visitor.click("#remove-button")
        visitor.wait("#changed", "Removed “new rune” (5 pictures)")
        visitor.wait(".fs-head", "knows 6 classes")
        visitor.click("#undo-button")
        visitor.wait(".fs-head", "knows 7 classes, 1 of them taught")
        visitor.tab("History")
        visitor.wait("#events", "Learned “new rune” (5 pictures)")
        assert len(browser.find_elements("css selector", "#chart circle.base")) == 2
        assert visitor.errors() == []
    with running(model, tmp_path) as (address, _):
        visitor = Visitor(browser, address).open()
        visitor.wait(".fs-head", "knows 7 classes, 1 of them taught")
        visitor.recognise(new, "new rune")
        assert visitor.recognise(known, "sure.").startswith(world["name"])
        visitor.tab("Classes")
        visitor.click("#undo-button")
        visitor.wait(".fs-head", "knows 6 classes")
        assert "new rune" not in visitor.recognise(
            new, "Best classes" if not library_says(model, new).unknown else "Unknown"
        )
        assert visitor.errors() == []


@pytest.mark.slow
@pytest.mark.extra("app")
def test_answers_are_corrected_several_pictures_asked_about_and_an_inbox_taught(world, browser, tmp_path):
    model = shutil.copytree(world["model"], tmp_path / "runes")
    with running(model, tmp_path) as (address, temporary):
        visitor = Visitor(browser, address).open()
        visitor.recognise(world["new"][0], "sure." if not library_says(model, world["new"][0]).unknown else "Unknown")
        visitor.choose("#truth", "rune of mine")
        visitor.click("#teach-this")
        visitor.wait("#correction-said", "Learned “rune of mine” (1 picture)")
        visitor.wait("#correction-said", "learned from one picture")
        visitor.wait(".fs-head", "knows 7 classes, 1 of them taught")
        visitor.recognise(world["new"][0], "rune of mine")
        visitor.choose("#truth", world["name"])  # a known class: the picture is added to it
        visitor.click("#teach-this")
        visitor.wait("#correction-said", f"Learned “{world['name']}” (1 picture)")

        text = tmp_path / "text.png"
        text.write_text("I am no picture")
        visitor.upload_through("Several pictures at once", *world["known"], text)
        visitor.wait("#answer", "Download as CSV")
        answer = visitor.read("#answer")
        assert "not a picture of a known format" in answer and "text.png" in answer
        assert sum(name.name in answer for name in world["known"]) == TEST_PICTURES
        assert not browser.find_elements("css selector", "#teach-this")  # that is for one picture
        assert wait_until(lambda: files_in(temporary) == [])

        visitor.tab("Inbox")
        visitor.upload_through("Add unlabelled pictures", *world["shots"], *world["known"][1:2])
        visitor.wait("#inbox-card", "1 of 6")
        visitor.choose("#inbox-name", "from the inbox")
        visitor.click("#inbox-answer")
        visitor.wait("#inbox-card", "2 of 6")
        guessed = visitor.read("#inbox-guess-0")
        visitor.click("#inbox-guess-0")
        visitor.wait("#inbox-card", "3 of 6")
        visitor.click("#inbox-skip")
        visitor.wait("#inbox-card", "4 of 6")
        visitor.wait("#inbox-teach", "Teach 2 answers")
        visitor.click("#inbox-teach")
        visitor.wait("#inbox-said", "“from the inbox”")
        visitor.wait("#inbox-said", f"“{guessed}”")
        visitor.wait(".fs-head", "knows 8 classes, 2 of them taught")
        assert visitor.errors() == []


@pytest.mark.slow
@pytest.mark.extra("app")
def test_the_demonstration_needs_no_model_and_no_pictures(browser, tmp_path):
    with running("--demo", tmp_path, FSCIL_CACHE=str(tmp_path / "cache")) as (address, _):
        visitor = Visitor(browser, address).open()
        visitor.wait(".fs-head", "knows 16 classes")
        visitor.click("#try-0")
        visitor.wait("#answer section", "Best classes")
        visitor.tab("Teach")
        visitor.click("#demo-teach-0")
        visitor.wait("#lesson", "Learned “writing hand” (5 pictures)")
        visitor.wait(".fs-head", "knows 17 classes, 1 of them taught")
        visitor.click("#demo-teach-0")
        visitor.wait("#lesson", "is known already")
        visitor.tab("Recognise")
        visitor.click("#try-3")
        visitor.wait("#answer section", "writing hand")
        assert visitor.errors() == []


def bomb(side):
    """A PNG of a few kilobytes that decodes to side x side pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def page(world, browser, tmp_path_factory):
    """A running page that several tests visit: (visitor, model, temporary files)."""
    folder = tmp_path_factory.mktemp("page")
    model = shutil.copytree(world["model"], folder / "runes")
    with running(model, folder) as (address, temporary):
        yield Visitor(browser, address), model, temporary


@pytest.mark.slow
@pytest.mark.extra("app")
def test_bad_uploads_are_refused_in_words(world, page, tmp_path):
    visitor, model, temporary = page
    text, cut = tmp_path / "text.png", tmp_path / "cut.png"
    text.write_text("I am no picture")
    cut.write_bytes(world["known"][0].read_bytes()[:300])
    for side in (10_000, 30_000):  # beyond our limit, and beyond Pillow's own
        (tmp_path / f"{side}.png").write_bytes(bomb(side))
    visitor.open()
    visitor.recognise(text, "This file cannot be used: not a picture of a known format")
    visitor.recognise(cut, "This file cannot be used:")
    visitor.recognise(tmp_path / "10000.png", "10000 x 10000 pixels are more than the 60000000 allowed")
    visitor.recognise(tmp_path / "30000.png", "more pixels than the 60000000 allowed")
    visitor.teach("trouble", [*world["shots"][:2], text])
    visitor.wait("#lesson", 'Picture 3 of "trouble" cannot be used: not a picture of a known format')
    assert (model / "model.json").read_bytes() == (world["model"] / "model.json").read_bytes()
    assert visitor.errors() == []
    large = tmp_path / "large.png"
    large.write_bytes(bytes(21_000_000))
    visitor.open().tab("Recognise")
    visitor.upload("#picture", large)
    visitor.wait("[data-testid=toast-body], .toast-body", "exceed the maximum allowed size")
    assert [file for file in files_in(temporary) if file.stat().st_size > 1_000_000] == []


@pytest.mark.slow
@pytest.mark.extra("app")
def test_two_people_teach_at_once_and_hostile_names_stay_text(world, page):
    from fscil.teachable.folder import ModelFolder

    visitor, model, _ = page
    browser, first = visitor.browser, visitor.browser.current_window_handle
    visitor.open().teach(HOSTILE, world["shots"])
    browser.switch_to.new_window("tab")
    resize(browser, 1280)
    visitor.open().teach("another", world["more"])
    visitor.wait("#lesson", "Learned “another”")
    browser.close()
    browser.switch_to.window(first)
    visitor.wait("#lesson", f"Learned “{HOSTILE}” (5 pictures)")
    visitor.tab("Classes")
    visitor.wait("#known", HOSTILE)
    visitor.wait("#known", "another")
    names = [info["name"] for info in ModelFolder(model).read().current.record["classes"]]
    assert sorted(names[-2:]) == sorted(["another", HOSTILE])
    visitor.tab("Recognise")
    visitor.recognise(world["new"][0], HOSTILE)
    assert visitor.errors() == []


@pytest.mark.slow
@pytest.mark.extra("app")
def test_the_camera_works(page):
    visitor, _, temporary = page
    time.sleep(1.5)  # what earlier tests used is gone
    before = files_in(temporary)
    visitor.open().tab("Recognise")
    visitor.click("#picture [aria-label='Capture from camera']")
    visitor.wait("#picture", "Webcam")
    visitor.click("#picture [title='grant webcam access'] button")
    visitor.click("#picture [aria-label='capture photo']")
    visitor.wait("#answer", "Known pictures most like it")
    assert wait_until(lambda: files_in(temporary) == before)
    assert visitor.errors() == []


@pytest.mark.slow
@pytest.mark.extra("app")
def test_a_phone_needs_no_sideways_scrolling(world, page):
    visitor, _, _ = page
    resize(visitor.browser, 390)
    try:
        visitor.open().recognise(world["known"][0], world["name"])
        answer, box = (visitor.find(css).rect for css in ("#answer", "#picture"))
        assert answer["y"] < box["y"] and box["height"] < 200  # the answer comes first, the box has given way
        for name in ("Recognise", "Teach", "Inbox", "Classes", "History"):
            visitor.tab(name)
            time.sleep(0.5)
            assert visitor.browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert visitor.errors() == []
    finally:
        resize(visitor.browser, 1280)


def status(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.extra("app")
def test_the_model_and_the_interface_behind_the_page_are_not_served(page):
    visitor, model, _ = page
    assert status(visitor.address) == 200
    for path in (model / "model.json", Path(__file__).resolve(), Path.cwd() / "pyproject.toml"):
        assert status(f"{visitor.address}/gradio_api/file={path}") == 403
    for path in ("/gradio_api/info", "/gradio_api/openapi.json", "/openapi.json", "/docs", "/gradio_api/runs"):
        assert status(visitor.address + path) == 404
    assert status(visitor.address, Host="example.org") == status(visitor.address, Origin="http://other.org") == 403


@pytest.mark.slow
@pytest.mark.extra("app")
def test_files_that_were_not_uploaded_are_neither_read_nor_deleted(world, page, tmp_path):
    visitor, model, temporary = page
    with urllib.request.urlopen(f"{visitor.address}/config", timeout=20) as answer:
        calls = {call["api_name"]: call for call in json.load(answer)["dependencies"]}
    canary = tmp_path / "canary.png"
    shutil.copy(world["known"][0], canary)
    (uploads,) = temporary.glob("fscil-app-*")
    around = f"{uploads}/../../../{canary.relative_to('/')}"

    def recognise(path, meta=True):
        file = {"path": path, "url": path, "orig_name": "a.png"} | (
            {"meta": {"_type": "gradio.FileData"}} if meta else {}
        )
        body = {"data": [file], "fn_index": calls["recognise"]["id"], "session_hash": "stranger"}
        request = urllib.request.Request(
            f"{visitor.address}/gradio_api/run/predict", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=20).read().decode()
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    for path in (str(canary), around, str(model / "model.json"), "http://127.0.0.1:9/a.png", "canary.png"):
        for meta in (True, False):
            assert re.match(r"(500|422) ", recognise(path, meta)), path
    time.sleep(2.5)  # longer than used files are kept
    assert canary.exists() and (model / "model.json").exists()


@pytest.mark.slow
@pytest.mark.extra("app")
def test_a_password_is_asked_for(world, browser, tmp_path):
    with running(world["model"], tmp_path, "--host", "0.0.0.0", "--user", "ann", password="correct horse") as (
        address,
        _,
    ):
        for path in ("config", "gradio_api/queue/data", "gradio_api/heartbeat/abc", "gradio_api/startup-events"):
            assert status(f"{address}/{path}") == 401
        visitor = Visitor(browser, address).open()
        visitor.wait("body", "The name to log in with is ann")

        def log_in(name, password):
            visitor.wait("button", "Login")
            visitor.find("input[type=text]").send_keys(name)
            visitor.find("input[type=password]").send_keys(password)
            visitor.click("button.primary")

        for name, password in (("ann", "wrong horse"), ("bob", "correct horse")):
            visitor.open()
            log_in(name, password)
            visitor.wait("body", "Incorrect Credentials")
        visitor.open()
        log_in("ann", "correct horse")
        visitor.wait(".fs-head", "knows 6 classes")
        visitor.errors()  # the refused passwords are logged
        visitor.recognise(world["known"][0], world["name"])
        assert visitor.errors() == []
        assert "ann · Log out" in visitor.read(".fs-head")
        visitor.click(".fs-head a")
        visitor.wait("button", "Login")
