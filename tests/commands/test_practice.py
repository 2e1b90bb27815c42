"""The commands for people with photos, from the first folder to the hub, and what they say to bad input."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fscil.cli import app, main
from fscil.errors import UserError
from fscil.teachable import hub
from fscil.teachable.folder import ModelFolder
from made_up_pictures import BACKBONE, write_folders


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_folders(root / "base", range(4), 6)
    write_folders(root / "new", [10, 11], 5)
    write_folders(root / "test", [*range(4), 10, 11, 30, 31, 32], 4, seed=1)
    write_folders(root / "more", [10], 3, seed=2)
    return root


def run(*arguments) -> int:
    """The exit status of a command run in this process."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code or 0


def say(capsys, *arguments) -> str:
    assert run(*arguments) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def original(weights, photos, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "birds"
    assert run("fit", photos / "base", "-o", path, "--backbone", BACKBONE, "--weights", weights, "--embed", "-q") == 0
    return path


@pytest.fixture
def model(original, tmp_path):
    return shutil.copytree(original, tmp_path / "birds")


def test_from_photos_to_answers(model, photos, capsys):
    assert "learn: class 10 (5), class 11 (5)" in say(capsys, "learn", model, photos / "new")
    said = say(capsys, "predict", model, photos / "test" / "class 10", photos / "test" / "class 0" / "000.png")
    assert len(said.splitlines()) == 5 and "class 10" in said and "%" in said

    entries = json.loads(say(capsys, "predict", model, photos / "test", "--json", "--top", "2"))
    right = [entry["label"] == Path(entry["file"]).parent.name for entry in entries[: 6 * 4]]
    assert len(entries) == 36 and all(len(entry["top"]) == 2 for entry in entries)
    strangers = [entry for entry in entries if Path(entry["file"]).parent.name in ("class 30", "class 31", "class 32")]
    assert sum(right) > 16 and sum(entry["label"] == "unknown" for entry in strangers) > 6

    rows = list(csv.DictReader(io.StringIO(say(capsys, "predict", model, photos / "test", "--csv"))))
    assert [row["label"] for row in rows] == [entry["label"] for entry in entries]

    result = json.loads(say(capsys, "evaluate", model, photos / "test", "--json"))
    assert result["accuracy"] > 0.9 and result["taught_accuracy"] > 0.9 and result["auroc"] > 0.8
    known = [entry for entry in entries if entry not in strangers]
    assert result["known_rejected"] == pytest.approx(sum(entry["unknown"] for entry in known) / len(known))
    table = say(capsys, "evaluate", model, photos / "test")
    assert "pictures of taught classes called unknown" in table and "AUROC" in table


def test_classes_info_forget_and_undo(model, photos, capsys):
    say(capsys, "learn", model, "--class", "kolibri", photos / "new" / "class 10")
    assert "kolibri" in say(capsys, "classes", model)
    listed = json.loads(say(capsys, "classes", model, "--json"))
    assert [(entry["name"], entry["pictures"], entry["base"]) for entry in listed][-1] == ("kolibri", 5, False)

    say(capsys, "forget", model, "class 2")
    assert "class 2" not in say(capsys, "classes", model)
    said = say(capsys, "info", model)
    assert "embedded" in said and "forget: class 2 (6)" in said and "learn: kolibri (5)" in said
    assert json.loads(say(capsys, "info", model, "--json"))["history"][-1]["action"] == "forget"

    assert "undone: " in say(capsys, "undo", model)
    assert "class 2" in say(capsys, "classes", model)
    say(capsys, "undo", model)
    assert "kolibri" not in say(capsys, "classes", model)
    assert run("undo", model) == 2
    assert "cannot undo 1 change: none was made" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--purge", "--for-good"])
def test_purging_leaves_no_trace(model, photos, capsys, option):
    say(capsys, "learn", model, photos / "new")
    said = say(capsys, "forget", model, "class 10", option)
    assert "forget: class 10 (5)" in said and "purged: 2 earlier versions, 2 files" in said
    assert "purged: 1 earlier version, 1 file (" in say(capsys, "forget", model, "class 11", option)
    assert "left: 5 classes" in said and "left of the class" not in said and "copies elsewhere" in said
    assert b"class 10" not in b"".join(path.read_bytes() for path in model.iterdir())
    assert run("undo", model) == 2
    assert "covariances of all base pictures" in say(capsys, "forget", model, "class 1", option)


def test_a_known_class_wants_add(model, photos, capsys):
    say(capsys, "learn", model, photos / "new")
    assert run("learn", model, photos / "more") == 2
    assert '"class 10" is known already, from 5 pictures' in capsys.readouterr().err
    assert "learn: class 10 (3)" in say(capsys, "learn", model, photos / "more", "--add")
    assert json.loads(say(capsys, "classes", model, "--json"))[4]["pictures"] == 8


def test_what_needs_no_torch_is_refused_without_it(original, photos, tmp_path):
    """A wrong folder, name or option is answered at once; torch alone takes seconds to import."""
    (tmp_path / "empty").mkdir()
    wrong = [
        ["predict", original, "empty"],
        ["predict", original, photos, "--sort-into", original / "model.json"],
        ["learn", original, "empty"],
        ["learn", original, photos / "base" / "class 1"],
        ["learn", original, photos, "--class", "unknown"],
        ["forget", original, "nobody"],
        ["undo", original, "--steps", "9"],
        ["evaluate", original, "empty"],
        ["review", original, "empty"],
        ["suggest", original, "empty"],
        ["fit", "empty", "-o", "new"],
        ["fit", photos / "base", "-o", photos],
    ]
    code = f"""
import sys
from fscil import cli
for words in {[list(map(str, words)) for words in wrong]!r}:
    try:
        cli.main(words)
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["2 False"] * len(wrong) + [""], done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["predict", "nowhere", "x.png"], "does not exist"),
        (["predict", "MODEL", "EMPTY"], "holds no pictures"),
        (["predict", "MODEL", "x.png", "--json", "--csv"], "exclude one another"),
        (["learn", "MODEL", "EMPTY"], "holds no class folders"),
        (["learn", "MODEL", "x.png"], "--class NAME"),
        (["learn", "MODEL", "--class", "heron", "x.png"], "x.png .no such file"),
        (["learn", "MODEL", "--class", " ", "x.png"], "cannot be a class name"),
        (["learn", "MODEL", "--class", "heron", "EMPTY"], "holds no pictures"),
        (["learn", "MODEL", "HOLLOW"], "HOLLOW/nothing. holds no pictures"),
        (["learn", "MODEL", "HOLLOW/nothing", "--class", "heron"], "holds no pictures"),
        (["fit", "HOLLOW", "-o", "other", "--backbone", BACKBONE], "HOLLOW/nothing. holds no pictures"),
        (["learn", "MODEL", "FAKE"], "FAKE/heron/a.jpg .not a picture"),
        (
            ["learn", "MODEL", "PHOTOS", "--class", "heron"],
            "folders of its own .class 0, class 1, class 2, class 3",
        ),
        (
            ["learn", "MODEL", "PHOTOS", "--class", "class 2"],
            r"one of them: fscil learn \S+ --class 'class 2' '\S+ 2'",
        ),
        (["learn", "MODEL", "PHOTOS/class 2"], r"to teach them as one class: fscil learn \S+ --class 'class 2' "),
        (["learn", "MODEL", "x.png", "--class", "unknown"], "it is what pictures of no class are called"),
        (["learn", "MODEL", "x.png", "--class", "class\u200b 1"], 'looks like the known class "class 1"'),
        (["learn", "MODEL", "x.png", "--class", "caf\udce9"], "not valid text"),
        (["learn", "MODEL", "x.png", "--class", "a\x1b[31m"], r"a.x1b.31m"),
        (
            ["fit", "PHOTOS", "-o", "other", "--backbone", BACKBONE, "-s", "options.epohcs=1"],
            'Did you mean "options.epochs"',
        ),
        (["forget", "MODEL", "clas 1"], 'Did you mean "class 1"'),
        (["fit", "PHOTOS", "-o", "MODEL"], "holds a model already"),
        (["fit", "PHOTOS", "-o", "other", "--backbone", "glyph_vit_x"], 'Did you mean "glyph_vit_'),
        (["fit", "PHOTOS", "-o", "other", "--set", "epochs=3"], "only options.NAME"),
        (["evaluate", "MODEL", "EMPTY"], "holds no class folders"),
        # before anything is computed, and nothing that is there is touched
        (["fit", "PHOTOS", "-o", "HOLLOW"], '--output "HOLLOW": it holds other files .*nothing'),
        (["fit", "PHOTOS", "-o", "FAKE/heron/a.jpg"], '--output "FAKE/heron/a.jpg": "a.jpg" is a file'),
        (["fit", "PHOTOS", "-o", "FAKE/heron/a.jpg/birds"], '"a.jpg" is a file; name a folder'),
        (["predict", "MODEL", "x.png", "--sort-into", "FAKE/heron/a.jpg"], '--sort-into "FAKE/heron/a.jpg" is a file'),
        (["fit", "PHOTOS", "-o", "other", "--backbone", BACKBONE, "-s", "options.rank=-3"], "at least 1, got -3"),
        (["fit", "PHOTOS", "-o", "other", "--backbone", BACKBONE, "--held-out", "2"], "--held-out .held_out. is 2.0"),
        (["fit", "PHOTOS", "-o", "other", "--set", "options.rank=4", "--set", "foo.bar=1"], '--set "foo.bar=1": only'),
        (["suggest", "MODEL", "nowhere"], '"nowhere" does not exist; give pictures'),
        (["suggest", "MODEL", "PHOTOS", "--copy-to", "FAKE/heron/a.jpg"], '--copy-to "FAKE/heron/a.jpg" is a file'),
        (["app", "--demo", "MODEL"], "leave out either --demo or"),
        (["app", "MODEL", "--password-file", "none"], '--password-file "none" cannot be read: No such file'),
        (["learn", "MODEL", "nowhere"], '"nowhere" does not exist; give one folder'),
        (["forget", "MODEL", "zebra"], 'no class "zebra". Known: class 0, class 1'),
        # what the options themselves do not allow
        (["prdict", "MODEL", "x.png"], "No such command 'prdict'. Did you mean 'predict'.+ See: fscil --help"),
        (["predict", "MODEL", "x.png", "--jsno"], "No such option:? .?--jsno.*--json.* See: fscil predict --help"),
        (
            ["predict", "MODEL", "x.png", "--top", "0"],
            '--top "0": it must be a whole number of at least 1. See: fscil pr',
        ),
        (["predict", "MODEL", "x.png", "--top=many"], '--top "many": it must be a whole number .*See: fscil predict -'),
        (["serve", "MODEL", "--port", "99999"], '--port "99999": it must be a whole number from 0 to 65535'),
        (
            ["fit", "PHOTOS", "-o", "other", "--held-out", "half"],
            '--held-out "half": it must be a number. See: fscil fit',
        ),
        (["list", "method"], 'KIND "method" is not one of methods, heads, .* Did you mean "methods".* See: fscil list'),
        (["suggest", "MODEL", "EMPTY", "-n", "-1"], '-n "-1": '),
        (["fit", "PHOTOS"], "Missing option .*--output.* See: fscil fit --help"),
        (["predict"], "Missing argument .*MODEL.* See: fscil predict --help"),
        (["export", "MODEL", "--to"], "--to.* requires an argument. See: fscil export --help"),
    ],
)
def test_bad_input_is_one_line_and_status_two(original, photos, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    for name in ("HOLLOW/nothing/notes.txt", "FAKE/heron/a.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("no picture")
    places = {"MODEL": original, "PHOTOS": photos / "base"}
    for place, path in places.items():
        arguments = [
            str(path) + argument[len(place) :] if argument.startswith(place) else argument for argument in arguments
        ]
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.out == ""
    assert re.search(message, said.err), said.err


def test_unreadable_pictures_do_not_stop_the_others(model, photos, tmp_path, capsys):
    (tmp_path / "broken.jpg").write_bytes(b"nonsense")
    assert run("predict", model, tmp_path / "broken.jpg", photos / "test" / "class 1") == 1
    said = capsys.readouterr()
    assert "broken.jpg: not a picture" in said.err and said.out.count("class 1") >= 4


def test_small_starts_and_repeats_are_noted(weights, photos, tmp_path, capsys):
    folder = shutil.copytree(photos / "base", tmp_path / "base")
    shutil.copy(folder / "class 0" / "000.png", folder / "class 0" / "again.png")
    assert run("fit", folder, "-o", tmp_path / "m", "--backbone", BACKBONE, "--weights", weights, "-q") == 0
    said = capsys.readouterr().err
    assert "note: 1 of 25 pictures repeat" in said and "backbone stays as it is" in said


def test_what_is_left_out_is_counted(model, photos, tmp_path, capsys):
    folder = shutil.copytree(photos / "new", tmp_path / "new")
    for name in ("loose.png", "class 10/notes.txt", "class 11/a.mov", "class 11/.hidden", "README"):
        shutil.copy(photos / "base" / "class 0" / "000.png", folder / name)
    assert run("learn", model, folder, "-q") == 0
    said = capsys.readouterr()
    assert "note: left out: 1 picture beside the class folders and 2 files of other types." in said.err
    assert "learn: class 10 (5), class 11 (5)" in said.out
    assert run("evaluate", model, folder, "-q") == 0
    assert "note: left out: 1 picture beside" in capsys.readouterr().err


def test_folders_above_the_classes_are_noted(model, photos, weights, tmp_path, capsys):
    """Somebody names the folder that holds base/ and new/: two classes come of it, and a note says so."""
    above = tmp_path / "above"
    for part in ("base", "new"):
        shutil.copytree(photos / part, above / part)
    note, place = 'note: "base" is taken for one class with all that its folders hold (', f'give "{above / "base"}".'
    assert run("fit", above, "-o", tmp_path / "m", "--backbone", BACKBONE, "--weights", weights, "-q") == 0
    assert note in (said := capsys.readouterr().err) and place in said
    assert run("learn", model, above, "-q") == 0
    assert place in capsys.readouterr().err
    (above / "new" / "class 10").rename(above / "class 10")  # a class among them: folders in classes are meant
    assert run("learn", model, above, "--add", "-q") == 0
    assert "taken for one class" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "learn", "evaluate", "review", "suggest"])
def test_a_model_that_is_named_last_is_noticed(model, photos, capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, str(photos / "new"), str(model)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f'but "{model}" is one: name the model first, then the pictures.' in said


def test_one_class_folder_is_told_to_name_the_folder_above(model, photos, capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", str(model), str(photos / "base" / "class 0")])
    assert "if they are one class, name the folder above it" in capsys.readouterr().err


def test_names_that_a_terminal_would_obey_are_shown_escaped(model, capsys):
    from fscil.teachable.folder import ModelFolder

    folder = ModelFolder(model)
    head = folder.read()
    head.current.record["classes"][0]["name"] = "red\x1b[31m"  # as in a model from a stranger
    head.current.record["event"]["classes"] = {"red\x1b[31m": 6}
    folder.write(head.config, head.versions, before=head)
    for command in ("classes", "info"):
        assert "red\\x1b[31m" in say(capsys, command, model)
    assert json.loads(say(capsys, "classes", model, "--json"))[0]["name"] == "red\x1b[31m"


def test_files_whose_names_are_no_utf8_are_named_all_the_same(model, photos, tmp_path, capsys):
    odd = tmp_path / "caf\udce9\x1b.png"
    shutil.copy(photos / "test" / "class 1" / "004.png", odd)
    assert json.loads(say(capsys, "predict", model, odd, "--json"))[0]["file"] == str(odd)
    for form in ([], ["--csv"]):
        assert "caf\\udce9\\x1b.png" in say(capsys, "predict", model, odd, *form)


def test_other_case_is_noted(model, photos, capsys):
    assert run("learn", model, "-q", "--class", "CLASS 1", photos / "new" / "class 10") == 0
    assert 'note: "CLASS 1" and "class 1" differ in case only and are two classes.' in capsys.readouterr().err


def test_one_picture_twice_is_one_and_noted(model, photos, capsys):
    picture = photos / "new" / "class 10" / "000.png"
    assert run("learn", model, "-q", "--class", "kolibri", picture, picture) == 0
    said = capsys.readouterr()
    assert "note: 1 of 2 pictures repeat" in said.err and "learned from one picture" in said.err
    assert "learn: kolibri (1)" in said.out
    assert run("learn", model, "--class", "kolibri", "--add", picture) == 2
    assert "known already; there is nothing to learn" in capsys.readouterr().err


def test_odd_pictures_and_names_from_the_command_line(model, photos, tmp_path, capsys):
    """CMYK, 16 bits, an animation, a turned camera and 50 megapixels, in a folder named as macOS spells it."""
    first, *others = [Image.open(path) for path in sorted((photos / "new" / "class 10").glob("*.png"))]
    folder = tmp_path / "odd" / "e\u0301toile \U0001f31f"
    folder.mkdir(parents=True)
    first.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    Image.fromarray(np.asarray(others[0].convert("L")).astype(np.uint16) * 257).save(folder / "deep.png")
    others[1].save(folder / "moving.gif", save_all=True, append_images=[first])
    exif = Image.Exif()
    exif[0x0112] = 6
    others[2].transpose(Image.Transpose.ROTATE_90).save(folder / "turned.jpg", exif=exif, quality=95)
    others[3].resize((7072, 7072), Image.Resampling.NEAREST).save(folder / "large.jpg")
    (folder / "notes.txt").write_text("no picture by its name: passed over")
    assert "learn: \u00e9toile \U0001f31f (5)" in say(capsys, "learn", model, tmp_path / "odd")
    assert "\u00e9toile \U0001f31f" in say(capsys, "predict", model, folder / "large.jpg", folder / "turned.jpg")
    say(capsys, "forget", model, "\u00e9toile \U0001f31f")
    assert "toile" not in say(capsys, "classes", model)


def test_damaged_and_newer_models_are_refused_in_one_line(model, photos, capsys):
    picture = photos / "test" / "class 1" / "004.png"
    head, state = model / "model.json", next(model.glob("state-*.safetensors"))
    whole, bytes_ = head.read_text(), state.read_bytes()

    def refused(message):
        assert run("predict", model, picture) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and re.search(message, said), said

    state.write_bytes(bytes_ + b"x")
    refused(f"{state.name}. was altered or damaged: its SHA-256")
    state.unlink()
    refused(f"{state.name}. is missing")
    state.write_bytes(bytes_)
    head.write_text(whole.replace("class 1", "class one"))
    refused("model.json. was altered")
    head.write_text(whole.replace('"format_version": 1', '"format_version": 99'))
    refused("format version 99.*Upgrade fscil")
    head.write_text(whole)
    assert "class 1" in say(capsys, "predict", model, picture)


def test_every_command_is_in_the_index_of_pages():
    pages = Path(__file__).parents[2] / "docs" / "commands"
    linked = dict(re.findall(r"\[`fscil (\w+)[^\]]*\]\((\w+\.md)", (pages / "README.md").read_text()))
    assert linked.keys() == {command.name for command in app.registered_commands}
    for name, page in linked.items():
        assert f"# fscil {name}" in (pages / page).read_text()


def test_review_names_what_looks_wrong(model, photos, tmp_path, capsys):
    folder = shutil.copytree(photos / "base", tmp_path / "base")
    shutil.move(folder / "class 0" / "000.png", folder / "class 3" / "strayed.png")
    entries = json.loads(say(capsys, "review", model, folder, "--json"))
    (wrong,) = [entry for entry in entries if entry["finding"] == "other class"]
    assert Path(wrong["file"]).name == "strayed.png" and (wrong["label"], wrong["looks_like"]) == ("class 3", "class 0")
    rows = list(csv.DictReader(io.StringIO(say(capsys, "review", model, folder, "--csv"))))
    assert [row["file"] for row in rows] == [entry["file"] for entry in entries]
    assert run("review", model, folder) == 0
    said = capsys.readouterr()
    assert "strayed.png  looks like class 0" in said.out and "of 24 pictures look wrong" in said.err


def test_sorting_copies_once_and_goes_on_where_it_was(model, photos, tmp_path, capsys):
    inbox, out = shutil.copytree(photos / "test" / "class 1", tmp_path / "inbox"), tmp_path / "out"
    first = sorted(inbox.iterdir())[0]
    say(capsys, "predict", model, first, "--sort-into", out, "-q")
    assert run("predict", model, inbox, "--sort-into", out, "--csv", "-q") == 0
    said = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert len(rows) == 3 and "1 of 4 pictures were sorted before" in said.err
    for row in rows:
        copy = out / row["label"] / Path(row["file"]).name
        assert copy.read_bytes() == Path(row["file"]).read_bytes()
    assert len(list(inbox.iterdir())) == 4 and len(list(out.rglob("*.png"))) == 4
    say(capsys, "predict", model, inbox, "--sort-into", tmp_path / "moved", "--move", "-q")
    assert not list(inbox.iterdir()) and len(list((tmp_path / "moved").rglob("*.png"))) == 4
    for wrong in (["--move"], ["--link", "--move", "--sort-into", "x"], []):
        assert run("predict", model, *([inbox] if wrong else []), *wrong) == 2


def test_what_comes_under_an_old_name_is_sorted_too(model, photos, tmp_path, capsys):
    inbox, out = tmp_path / "inbox", tmp_path / "inbox" / "sorted"  # below what is looked through
    inbox.mkdir()
    shown = sorted((photos / "test" / "class 1").iterdir())[:3]
    for picture in shown[:2]:
        shutil.copy(picture, inbox / "latest.png")
        (entry,) = json.loads(say(capsys, "predict", model, inbox, "--sort-into", out, "--move", "--json"))
        assert entry["file"] == str(inbox / "latest.png") and not (inbox / "latest.png").exists()
    for picture in shown[2:0:-1]:  # and without --move
        shutil.copy(picture, inbox / "latest.png")
        assert len(json.loads(say(capsys, "predict", model, inbox, "--sort-into", out, "--json"))) == 1
    assert say(capsys, "predict", model, inbox, "--sort-into", out, "--json") == "[]\n"
    assert {file.read_bytes() for file in out.rglob("*.png")} == {file.read_bytes() for file in shown}


def test_pictures_that_come_are_answered_until_control_c(model, photos, tmp_path, capsys, monkeypatch):
    inbox, pictures = tmp_path / "inbox", sorted((photos / "test" / "class 1").iterdir())
    inbox.mkdir()
    shutil.copy(pictures[0], inbox / "old.png")
    steps = iter([pictures[1], None, None, "end"])

    def sleep(_):
        """One look after another: a picture comes, is seen, has settled, and then somebody presses Ctrl-C."""
        step = next(steps)
        if step == "end":
            raise KeyboardInterrupt
        if step is not None:
            shutil.copy(step, inbox / "new.png")

    monkeypatch.setattr("fscil.teachable.watching.time.sleep", sleep)
    assert run("predict", model, "--watch", inbox, "--sort-into", inbox / "sorted", "--json", "-q") == 0
    said = capsys.readouterr()
    (entry,) = [json.loads(line) for line in said.out.splitlines()]
    assert entry["file"] == str(inbox / "new.png") and "stopped" in said.err
    assert [path.name for path in (inbox / "sorted").rglob("*.png")] == ["new.png"]


def test_suggestions_can_be_copied_and_labelled(model, photos, tmp_path, capsys):
    entries = json.loads(
        say(capsys, "suggest", model, photos / "test", "-n", "6", "--copy-to", tmp_path / "these", "--json")
    )
    assert len(entries) == 6 and len({entry["file"] for entry in entries}) == 6
    assert all(Path(entry["copied_to"]).read_bytes() == Path(entry["file"]).read_bytes() for entry in entries)
    strange = [entry for entry in entries if int(Path(entry["file"]).parent.name.split()[1]) >= 10]
    assert len(strange) >= 4  # four known classes and five unknown ones
    assert len(say(capsys, "suggest", model, photos / "test", "-n", "3").splitlines()) == 3


def test_what_was_put_aside_to_be_labelled_is_not_suggested_again(model, photos, tmp_path, capsys):
    pool = shutil.copytree(photos / "test", tmp_path / "pool")
    for _ in range(2):
        asked = ("suggest", model, pool, "-n", "1000", "--copy-to", pool / "label these", "--json")
        assert len(json.loads(say(capsys, *asked))) == 36


def test_evaluation_says_what_is_taken_for_what(model, photos, tmp_path, capsys):
    folder = shutil.copytree(photos / "test", tmp_path / "test")
    for file in sorted((folder / "class 0").iterdir())[:3]:
        shutil.move(file, folder / "class 1" / f"strayed-{file.name}")
    result = json.loads(say(capsys, "evaluate", model, folder, "--json", "--matrix", tmp_path / "matrix.png"))
    assert result["confusions"][0] == {"class": "class 1", "taken_for": "class 0", "pictures": 3, "share": 3 / 7}
    counts = np.array(result["matrix"]["counts"])
    assert counts[1, 0] == 3 and counts.sum() == 16 and result["matrix"]["classes"][1] == "class 1"
    assert counts.trace() / counts.sum() == pytest.approx(result["accuracy"]) and isinstance(result["notes"], list)
    assert Image.open(tmp_path / "matrix.png").size[0] > 300
    table = say(capsys, "evaluate", model, folder)
    assert "most often confused" in table and "class 1  class 0           3  42.9 %" in table
    listed = tmp_path / "test.csv"
    listed.write_text("\n".join(["path,label", *(f"{f},{f.parent.name}" for f in sorted(folder.rglob("*.png")))]))
    assert json.loads(say(capsys, "evaluate", model, listed, "--json"))["accuracy"] == result["accuracy"]
    (tmp_path / "folder.png").mkdir()
    for place in ("matrix.jpg", tmp_path / "folder.png"):
        capsys.readouterr()
        assert run("evaluate", model, folder, "--matrix", place) == 2
        assert "must be a file that ends in .png" in capsys.readouterr().err


def test_lessons_from_a_table_and_as_json(weights, photos, tmp_path, capsys):
    table = tmp_path / "base.csv"
    rows = [f"{file},{file.parent.name}" for file in sorted((photos / "base").rglob("*.png"))]
    table.write_text("\n".join(["path,label", *rows]))
    given = ["--backbone", BACKBONE, "--weights", weights, "-q", "--json"]
    fitted = json.loads(say(capsys, "fit", table, "-o", tmp_path / "m", *given))
    assert fitted["classes"] == {f"class {number}": 6 for number in range(4)} and isinstance(fitted["notes"], list)
    strangers = [photos / "test" / f"class {number}" / f"{4 * place:03d}.png" for place, number in ((7, 31), (8, 32))]
    table.write_text("\n".join(["file,label", *(f"{file},mixed" for file in strangers)]))
    learned = json.loads(say(capsys, "learn", tmp_path / "m", table, "-q", "--json"))
    assert learned["action"] == "learn" and learned["classes"] == {"mixed": 2}
    assert any('"mixed" was not learned: 2 of its 2 pictures' in text for text in learned["notes"])
    assert isinstance(json.loads(say(capsys, "info", tmp_path / "m", "--json"))["notes"], list)


def test_an_export_of_the_folder_one_is_in_goes_beside_it(model, monkeypatch, capsys):
    monkeypatch.chdir(model)
    assert f"wrote {model}-timm" in say(capsys, "export", ".", "--to", "timm")


def test_export_to_timm(model, tmp_path, capsys):
    assert "birds-timm" in say(capsys, "export", model, "--to", "timm")
    assert {file.name for file in (tmp_path / "birds-timm").iterdir()} == {
        "model.safetensors",
        "config.json",
        "fscil.json",
    }


# ---- the hub, against a client that keeps repositories in a folder ----


class LocalHub:
    """The few calls of huggingface_hub.HfApi that fscil makes, with folders for repositories and their commits."""

    def __init__(self, root: Path):
        self.root = root
        self.commits: list[str] = []
        self.fetched: list[str] = []

    def create_repo(self, repo, private=False, exist_ok=False):
        (self.root / repo).mkdir(parents=True, exist_ok=exist_ok)
        return f"https://hub.local/{repo}"

    def list_repo_files(self, repo):
        return [path.name for path in (self.root / repo).iterdir()]

    def create_commit(self, repo, operations, commit_message):
        for operation in operations:
            path = self.root / repo / operation.path_in_repo
            if hasattr(operation, "path_or_fileobj"):
                content = operation.path_or_fileobj
                path.write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
            else:
                path.unlink()
        self.commits.append(f"{len(self.commits) + 1:040x}")
        shutil.copytree(self.root / repo, self.at(repo, self.commits[-1]))

    def at(self, repo, commit):
        return self.root / "commits" / commit / repo

    def model_info(self, repo, *, revision=None, files_metadata=False):
        assert files_metadata
        commit = revision or self.commits[-1]
        files = [SimpleNamespace(rfilename=p.name, size=p.stat().st_size) for p in self.at(repo, commit).iterdir()]
        return SimpleNamespace(sha=commit, siblings=files)

    def hf_hub_download(self, repo, name, *, revision, local_dir):
        self.fetched.append(name)
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / ".cache").mkdir(exist_ok=True)  # the real one keeps its books there
        shutil.copy(self.at(repo, revision) / name, local_dir)


def test_the_real_client_takes_the_same_calls(model, tmp_path):
    from huggingface_hub import HfApi

    made = set()

    class Bound(LocalHub):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if not hasattr(HfApi, name) or name.startswith("__"):
                return value

            def call(*arguments, **named):
                inspect.signature(getattr(HfApi, name)).bind(self, *arguments, **named)  # TypeError if it would not
                made.add(name)
                return value(*arguments, **named)

            return call

    client = Bound(tmp_path / "hub")
    hub.push(model, "me/birds", client=client)
    hub.pull(tmp_path / "mine", "me/birds", client=client)
    assert made == {"create_repo", "list_repo_files", "create_commit", "model_info", "hf_hub_download"}


def test_push_and_pull(model, photos, tmp_path, monkeypatch, capsys):
    client = LocalHub(tmp_path / "hub")
    monkeypatch.setattr(hub, "_client", lambda: client)
    say(capsys, "learn", model, photos / "new")
    say(capsys, "forget", model, "class 11")
    assert "https://hub.local/me/birds" in say(capsys, "push", model, "me/birds")
    assert len(client.commits) == 1  # everything at once
    card = (tmp_path / "hub" / "me" / "birds" / "README.md").read_text()
    assert "| class 10 | 5 | taught |" in card and "fscil pull birds me/birds" in card
    uploaded = "".join(path.read_text() for path in (tmp_path / "hub" / "me" / "birds").glob("*.json"))
    assert "class 11" not in uploaded and str(tmp_path) not in uploaded  # neither what was forgotten nor local paths

    assert "5 classes" in say(capsys, "pull", tmp_path / "mine", "me/birds")
    first, second = (say(capsys, "predict", place, photos / "test", "--json") for place in (model, tmp_path / "mine"))
    assert first == second
    say(capsys, "learn", tmp_path / "mine", "--class", "class 11", photos / "new" / "class 11")
    assert run("pull", tmp_path / "mine", "me/birds") == 2

    say(capsys, "push", tmp_path / "mine", "me/birds", "--history")
    kept = ModelFolder(tmp_path / "hub" / "me" / "birds").read()
    assert [version.record["event"]["action"] for version in kept.versions] == ["push", "learn"]
    assert "6 classes" in say(capsys, "pull", tmp_path / "latest", "me/birds")
    said = say(capsys, "pull", tmp_path / "first", "me/birds", "--revision", client.commits[0])
    assert "5 classes" in said and client.commits[0] in said
    assert not (tmp_path / "first" / ".cache").exists()
    assert run("undo", tmp_path / "first") == 2
    assert "none was made since the model was pushed without its history" in capsys.readouterr().err


def test_an_empty_folder_is_filled_by_a_pull(uploaded, tmp_path, monkeypatch):
    client, _ = uploaded
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    hub.pull(".", "me/birds", client=client)
    assert sorted(os.listdir()) == sorted(["model.json", *ModelFolder(".").read().files])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match='"notes.txt" is a file; choose another folder'):
        hub.pull(tmp_path / "notes.txt" / "mine", "me/birds", client=client)


def test_a_pull_that_fails_leaves_no_folders(model, tmp_path):
    client = LocalHub(tmp_path / "hub")
    (tmp_path / "there").mkdir()
    for target in ("a/b/c", "there/b", "there"):
        with pytest.raises(UserError, match="cannot pull"):
            hub.pull(tmp_path / target, "me/nothing", client=client)
    assert not (tmp_path / "a").exists() and not list((tmp_path / "there").iterdir())
    hub.push(model, "me/birds", client=client)
    hub.pull(tmp_path / "a/b/c", "me/birds", client=client)
    assert (tmp_path / "a/b/c/model.json").exists()


@pytest.fixture
def uploaded(model, tmp_path):
    """A hub with a model and, beside it, a file that the model does not name."""
    client = LocalHub(tmp_path / "hub")
    hub.push(model, "me/birds", client=client)
    folder = client.at("me/birds", client.commits[0])
    (folder / "state-9999.safetensors").write_bytes(b"never asked for")
    return client, folder


def refused(client, target, message, revision=None):
    client.fetched.clear()
    with pytest.raises(UserError, match=message):
        hub.pull(target, "me/birds", revision, client=client)
    assert not target.exists() and not list(target.parent.glob(f".{target.name}*"))
    return client.fetched


def test_the_head_is_read_before_the_rest_is_fetched(uploaded, tmp_path):
    client, folder = uploaded
    hub.pull(tmp_path / "whole", "me/birds", client=client)
    assert client.fetched == ["model.json", *ModelFolder(folder).read().files]
    state = next(folder.glob("state-0*")).name
    whole = (folder / "model.json").read_text()
    (folder / "model.json").write_text(whole.replace("class 1", "class one"))
    assert refused(client, tmp_path / "mine", "altered or damaged") == ["model.json"]
    (folder / "model.json").write_text("[" * 100_000)
    assert refused(client, tmp_path / "mine", "not a JSON file") == ["model.json"]
    (folder / "model.json").write_text(whole)
    with open(folder / state, "ab") as file:
        file.write(b"x")
    assert refused(client, tmp_path / "mine", f"{state}.* bytes, model.json says") == ["model.json"]
    (folder / state).unlink()
    assert refused(client, tmp_path / "mine", f"not whole .no {state}") == ["model.json"]


def test_what_is_too_large_is_not_fetched(uploaded, tmp_path, monkeypatch):
    client, folder = uploaded
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    total, (largest, size) = ModelFolder(folder).read().bytes, max(sizes.items(), key=lambda item: item[1])
    monkeypatch.setattr(hub, "MODEL_BYTES", total - 1)
    assert refused(client, tmp_path / "mine", f"has {total} bytes; at most {total - 1} are") == ["model.json"]
    monkeypatch.setattr(hub, "FILE_BYTES", size - 1)
    assert refused(client, tmp_path / "mine", f"{largest}.*has {size} bytes; at most {size - 1} are") == ["model.json"]
    monkeypatch.setattr(hub, "HEAD_BYTES", 10)
    assert refused(client, tmp_path / "mine", "model.json.* at most 10 are fetched") == []


def test_another_commit_than_asked_for_is_refused(uploaded, tmp_path):
    client, _ = uploaded
    wanted = "f" * 40
    client.model_info = lambda *_, **__: SimpleNamespace(sha=client.commits[0], siblings=[])
    assert refused(client, tmp_path / "mine", f"commit {client.commits[0]} for --revision {wanted}", wanted) == []


def test_a_damaged_download_is_refused_and_leaves_nothing(model, tmp_path, monkeypatch):
    client = LocalHub(tmp_path / "hub")
    hub.push(model, "me/birds", client=client)
    state = next(client.at("me/birds", client.commits[0]).glob("state-*"))
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with pytest.raises(UserError, match=f"{state.name}.*altered"):
        hub.pull(tmp_path / "mine", "me/birds", client=client)
    assert not (tmp_path / "mine").exists() and not list(tmp_path.glob(".mine*"))
    client.at("me/other", client.commits[0]).mkdir()
    with pytest.raises(UserError, match="holds no model"):
        hub.pull(tmp_path / "mine", "me/other", client=client)


def test_an_unreachable_hub_is_explained(model, tmp_path):
    class Offline(LocalHub):
        def create_repo(self, *_, **__):
            raise OSError("no route to host")

    with pytest.raises(UserError, match='cannot push to "me/birds".*no route to host.*logged in'):
        hub.push(model, "me/birds", client=Offline(tmp_path))


@pytest.mark.slow
def test_looking_at_a_model_needs_no_torch(original):
    code = (
        "import sys; from fscil.cli import app, main\n"
        f"try: main(['info', {str(original)!r}])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_weights_that_moved_are_named_before_anything_heavy_is_imported(photos, tmp_path):
    """A model that was fitted with --weights FILE, and FILE is gone: where it was, and the option that helps."""
    import timm
    import torch
    from safetensors.torch import save_file

    with torch.random.fork_rng():
        vit = timm.create_model("deit_tiny_patch16_224", num_classes=0)
    old, new, model = tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "model"
    save_file(vit.state_dict(), old)
    chosen = ["--backbone", "deit_tiny_patch16_224.fb_in1k", "--weights", old, "--train", "never", "-q"]
    assert run("fit", photos / "base", "-o", model, *chosen) == 0
    old.rename(new)
    picture = next((photos / "test").rglob("*.png"))
    code = """
import sys
from fscil import cli
try:
    cli.main(sys.argv[1:])
finally:
    print([name for name in ("torch", "numpy", "PIL") if name in sys.modules])
"""
    lines = [
        ["predict", model, picture],
        ["evaluate", model, photos / "test"],
        ["learn", model, photos / "new"],
        ["export", model, "--to", "timm"],
        ["serve", model],
        ["app", model],
    ]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "nothing fetched")}
    for line in lines:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, line)], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 2 and done.stdout.strip() == "[]", done.stdout + done.stderr
        assert f'were in "{old}", which is not there any more' in done.stderr and "--weights FILE" in done.stderr
    assert run("predict", model, picture, "--weights", new) == 0
