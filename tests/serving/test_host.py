"""One model for many people: what it refuses, and that lessons neither collide, nor get lost, nor hold up answers."""

from __future__ import annotations

import io
import shutil
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from fscil.errors import UserError
from fscil.serving import host as hosting
from fscil.serving.host import Host, Limits
from fscil.teachable.model import Teachable
from made_up_pictures import BACKBONE, pictures

pytestmark = pytest.mark.filterwarnings("ignore::fscil.teachable.recognition.Notice")


@pytest.fixture(scope="module")
def original(weights, tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    clf = Teachable(backbone=BACKBONE, weights=weights, device="cpu", thumbnails=2)
    return clf.fit(*pictures(range(4), 6)).save(root / "birds", embed=True)


@pytest.fixture
def model(original, tmp_path):
    return shutil.copytree(original, tmp_path / "birds")


@pytest.fixture
def host(model):
    return Host(model, device="cpu")


def png(array: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return file.getvalue()


def views(number: int, count: int = 5, seed: int = 0) -> list[np.ndarray]:
    return pictures([number], count, seed)[0]


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises many pixels and whose data are few."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


# ---- answers --------------------------------------------------------------------------------------------------------
def test_answers_are_the_models_own_for_every_kind_of_picture(host, model, tmp_path):
    array = views(2, 1, seed=5)[0]
    path = tmp_path / "picture.png"
    path.write_bytes(png(array))
    expected = Teachable.load(model, device="cpu").recognise([array], top=3)[0]
    for picture in (png(array), path, Image.fromarray(array), array):
        assert host.recognise([picture], top=3) == [expected]
    assert expected.label == "class 2"


def test_nearest_pictures_come_with_the_answer_in_one_pass(host, model, monkeypatch):
    from fscil.backbones.vit import Backbone

    passes, forward = [], Backbone.forward

    def counted(self, x, *rest, **named):
        passes.append(len(x))
        return forward(self, x, *rest, **named)

    monkeypatch.setattr(Backbone, "forward", counted)
    picture = views(1, 1, seed=7)[0]
    found, unreadable = host.recognise([png(picture), b"no picture"], alike=2)
    assert sum(passes) == 1  # pictures that went through the ViT
    monkeypatch.undo()
    assert [name for name, _, _ in found.alike] == ["class 1", "class 1"] and not unreadable.alike
    ((*expected, _), _) = Teachable.load(model, device="cpu").nearest_thumbnails([picture], count=2)[0]
    assert found.alike[0][:2] == (expected[0], pytest.approx(expected[1])) and found.alike[0][2].dtype == np.uint8
    assert found == host.recognise([png(picture)])[0]  # the same answer as without them


def test_pictures_that_cannot_be_used_say_why_and_do_not_stop_the_others(model):
    host = Host(model, device="cpu", limits=Limits(file_bytes=50_000, pixels=10_000, aspect=4))
    good = views(0, 1, seed=3)[0]
    large = np.random.default_rng(0).integers(0, 255, (150, 150, 3), dtype=np.uint8)
    truncated = png(good)[:-300]
    unusable = {
        "not a picture": b"%PDF-1.4 nothing to see",
        "MB are more": png(large),
        "pixels": bomb(60_000, 60_000),
        "101 x 100 pixels are more": bomb(101, 100),
        "100 x 101 pixels are more": Image.new("RGB", (100, 101)),
        "120 x 90 pixels are more": np.zeros((90, 120, 3), np.uint8),
        "too narrow": png(np.zeros((10, 41, 3), np.uint8)),
        "truncated": truncated,
        "cannot be read": "missing.png",
        "is not a picture": object(),
    }
    found = host.recognise([good, *unusable.values(), good])
    assert found[0].label == found[-1].label == "class 0"
    assert all(answer.label is None and not answer.unknown and answer.top == [] for answer in found[1:-1])
    assert [reason for reason, answer in zip(unusable, found[1:-1]) if reason not in answer.error] == []


def test_too_many_pictures(model):
    host = Host(model, device="cpu", limits=Limits(pictures=3))
    with pytest.raises(UserError, match="4 pictures are too many at once; send at most 3"):
        host.recognise(views(0, 4))
    with pytest.raises(UserError, match="too many"):
        host.learn("heron", views(10, 4))
    assert host.revision == 0


# ---- teaching -------------------------------------------------------------------------------------------------------
def test_learn_forget_undo_and_what_is_known(host, model):
    event = host.learn("heron", [png(picture) for picture in views(10)])
    assert (event["action"], event["classes"], event["known"], event["notes"]) == ("learn", {"heron": 5}, 5, [])
    assert host.recognise(views(10, 2, seed=1))[0].label == "heron"
    assert host.classes[-1] | {"since": None} == {"name": "heron", "pictures": 5, "base": False, "since": None}
    assert host.learn("heron", views(10, 2, seed=4), add=True)["classes"] == {"heron": 2}
    assert host.classes[-1]["pictures"] == 7
    both = host.learn_many({"wren": views(11), "ibis": views(12, 3)})
    assert both["classes"] == {"wren": 5, "ibis": 3} and both["known"] == 7
    assert host.forget("class 1")["classes"] == {"class 1": 6}
    undone = host.undo(2)
    assert [event["action"] for event in undone["undone"]] == ["forget", "learn"] and undone["known"] == 5
    assert host.revision == 5 and len(host.history) == 3 and host.info()["lessons"] == 2
    assert host.calibration["temperature"] > 0
    again = Host(model, device="cpu")
    assert again.classes == host.classes and again.history == host.history
    assert again.recognise(views(10, 3, seed=1)) == host.recognise(views(10, 3, seed=1))


@pytest.mark.parametrize(
    "lesson, message",
    [
        (lambda host: host.learn("class 0", views(10)), '"class 0" is known already, from 6 pictures'),
        (lambda host: host.learn(" class 0 ", views(10)), '"class 0" is known already'),
        (lambda host: host.learn("heron", []), 'no pictures of "heron"'),
        (lambda host: host.learn_many({}), "no pictures were given"),
        (lambda host: host.learn("heron", [*views(10, 2), b"junk"]), 'picture 3 of "heron" cannot be used: not a pict'),
        (lambda host: host.learn("\n", views(10)), "cannot be a class name"),
        (lambda host: host.learn("unknown", views(10)), "what pictures of no class are called"),
        (lambda host: host.learn("class\u200b 0", [b"junk"]), 'looks like the known class "class 0"'),
        (lambda host: host.learn_many({"a": views(10), "\uff41": views(11)}), 'looks like the known class "a"'),
        (lambda host: host.learn("class 0", views(0, 6), add=True), "known already; there is nothing to learn"),
        (lambda host: host.forget("class 9"), 'no class "class 9"'),
        (lambda host: host.undo(), "cannot undo 1 change: none was made since the base classes were learned"),
        (lambda host: host.undo(0), "steps is 0; it must be at least 1"),
    ],
)
def test_bad_lessons_are_refused_and_change_nothing(host, model, lesson, message):
    before = (model / "model.json").read_bytes(), host.classes, host.recognise(views(3, 2, seed=2))
    with pytest.raises(UserError, match=message):
        lesson(host)
    assert ((model / "model.json").read_bytes(), host.classes, host.recognise(views(3, 2, seed=2))) == before


def test_a_lesson_says_what_it_left_out(host):
    assert any("repeat another" in note for note in host.learn("heron", [*views(10, 2), views(10, 1)[0]])["notes"])
    assert any("from one picture" in note for note in host.learn("wren", views(11, 1))["notes"])


def test_two_people_teaching_at_once_both_count(host, model, original):
    with ThreadPoolExecutor(4) as pool:
        events = list(pool.map(lambda number: host.learn(f"bird {number}", views(number, 3)), range(10, 14)))
    assert sorted(event["known"] for event in events) == [5, 6, 7, 8]  # one after the other, in some order
    names = {f"bird {number}" for number in range(10, 14)}
    assert names <= {info["name"] for info in host.classes}
    assert names <= set(Teachable.load(model, device="cpu").classes_)
    alone = Teachable.load(original, device="cpu")  # the closed form does not depend on the order
    taught, labels = pictures(range(10, 14), 3)
    alone.learn(taught, [label.replace("class", "bird") for label in labels])
    asked = pictures(range(10, 14), 1, seed=6)[0]
    for found, expected in zip(host.recognise(asked, top=8), alone.recognise(asked, top=8), strict=True):
        assert dict(found.top) == pytest.approx(dict(expected.top), abs=1e-3)


def test_recognising_does_not_wait_for_a_lesson(host, monkeypatch):
    inside, go_on, learn = threading.Event(), threading.Event(), Teachable.learn

    def slow(self, *arguments, **options):
        inside.set()
        assert go_on.wait(60)
        return learn(self, *arguments, **options)

    monkeypatch.setattr(Teachable, "learn", slow)
    with ThreadPoolExecutor(1) as pool:
        lesson = pool.submit(host.learn, "heron", views(10))
        try:
            assert inside.wait(60)
            assert host.recognise(views(1, 1, seed=1))[0].label == "class 1"  # would hang if it waited
            assert [info["name"] for info in host.classes] == [f"class {number}" for number in range(4)]
            assert not lesson.done()
        finally:
            go_on.set()
        assert lesson.result()["known"] == 5
    assert host.recognise(views(10, 1, seed=1))[0].label == "heron"


def test_lessons_of_others_are_noticed(host, model, monkeypatch):
    monkeypatch.setattr(hosting, "LOOK_EVERY", 0.0)
    other = Teachable.load(model, device="cpu")
    with other.editing():
        other.learn(views(10), ["heron"] * 5)
    assert host.recognise(views(10, 1, seed=1))[0].label == "heron" and host.revision == 1
    assert host.learn("wren", views(11))["known"] == 6  # on top of what the other taught
    assert list(Teachable.load(model, device="cpu").classes_)[-2:] == ["heron", "wren"]


def test_a_lesson_follows_what_others_taught_even_before_it_is_noticed(host, model, monkeypatch):
    monkeypatch.setattr(hosting, "LOOK_EVERY", 1e9)
    other = Teachable.load(model, device="cpu")
    with other.editing():
        other.learn(views(10), ["heron"] * 5)
    assert len(host.classes) == 4
    with pytest.raises(UserError, match="is known already"):
        host.learn("heron", views(10, 3, seed=3))
    assert host.learn("wren", views(11))["known"] == 6


def test_undo_with_what_was_seen_takes_back_nothing_else(host, model, monkeypatch):
    monkeypatch.setattr(hosting, "LOOK_EVERY", 1e9)
    for number, name in enumerate(("heron", "wren", "ibis")):
        host.learn(name, views(10 + number))
    seen = host.revision
    with ThreadPoolExecutor(2) as two:  # who both saw "ibis" as the last change
        found = [two.submit(host.undo, seen=seen) for _ in range(2)]
    assert [type(item.exception()) for item in found].count(hosting.ChangedMeanwhile) == 1
    assert host.history[-1]["classes"] == {"wren": 5}
    seen, other = host.revision, Teachable.load(model, device="cpu")
    with other.editing():
        other.learn(views(20), ["lark"] * 5)
    assert host.revision == seen  # it was not noticed yet
    with pytest.raises(hosting.ChangedMeanwhile, match="please look again first"):
        host.undo(seen=seen)
    assert Teachable.load(model, device="cpu").history_[-1]["classes"] == {"lark": 5}


def test_a_folder_that_becomes_unreadable_does_not_stop_answers(host, model, monkeypatch, caplog):
    monkeypatch.setattr(hosting, "LOOK_EVERY", 0.0)
    good = (model / "model.json").read_bytes()
    (model / "model.json").write_bytes(good[:-100])
    assert host.recognise(views(1, 1, seed=1))[0].label == "class 1"
    assert "cannot be opened" in caplog.text
    with pytest.raises(UserError, match="nothing was changed") as refusal:
        host.learn("heron", views(10))
    assert str(model) not in str(refusal.value)
    (model / "model.json").write_bytes(good)
    assert host.learn("heron", views(10))["known"] == 5


@pytest.mark.parametrize("moment", ["learning", "writing"])
def test_a_lesson_that_fails_leaves_memory_and_disk_as_they_were(host, model, monkeypatch, moment):
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    before = host.classes, host.history, host.revision, host.recognise(views(10, 3, seed=1))

    def fail(*_, **__):
        raise MemoryError if moment == "learning" else UserError("the disk is full")

    with monkeypatch.context() as patched:
        where = (
            "fscil.teachable.model.Teachable._finish" if moment == "learning" else "fscil.teachable.folder.write_json"
        )
        patched.setattr(where, fail)
        with pytest.raises((MemoryError, UserError)):
            host.learn("heron", views(10))
    assert (host.classes, host.history, host.revision, host.recognise(views(10, 3, seed=1))) == before
    after = {path.name: path.read_bytes() for path in model.iterdir()}
    assert {name: after[name] for name in files if name != ".lock"} == {n: c for n, c in files.items() if n != ".lock"}
    assert host.learn("heron", views(10))["known"] == 5


def test_one_backbone_in_memory(host):
    host.learn("heron", views(10))
    first = host._answering.model.backbone_
    host.learn("wren", views(11))
    assert host._answering.model.backbone_ is first
