"""The demonstration: a model made of nothing, that knows its own pictures and not yet those to be taught."""

import pytest

from fscil.errors import UserError
from fscil.teachable.demo import make_demo
from fscil.teachable.model import Teachable


def test_a_demonstration_is_made_once_and_has_something_to_learn(tmp_path):
    demo = make_demo(tmp_path / "runes")
    model = Teachable.load(demo.model, device="cpu")
    assert (
        len(model.classes_) == 16 and "black scissors" in model.classes_ and not set(demo.lessons) & {*model.classes_}
    )
    for name, pictures in demo.lessons.items():
        model.learn(pictures, name)
    assert {found.label for found in model.recognise(demo.lessons["writing hand"])} == {"writing hand"}
    model.save(demo.model)
    again = make_demo(tmp_path / "runes")  # not fitted anew: what was taught is still there
    assert "writing hand" in Teachable.load(again.model, device="cpu").classes_
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="in the way"):
        make_demo(tmp_path / "other")
