"""`fscil verify`: what was altered is found, also where the hashes were altered with it; what is whole passes."""

import json
import re
import shutil
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file, save_file

from fscil.errors import UserError
from fscil.evaluation.hashes import RunHashes
from fscil.evaluation.metrics import confusion, evaluate_session, summarise
from fscil.evaluation.results import load_results
from fscil.experiments import api
from fscil.experiments import run as protocol
from fscil.experiments.verify import learn_again, verify
from fscil.files import load_tensors, read_json, save_tensors, write_json
from fscil.methods.teen import TEEN
from probe_world import TASKS, Stop, numbers, rehash, run, stopped, tiny_backbone, tiny_config, tiny_stream, unhash

pytestmark = pytest.mark.usefixtures("probe")
SMALL = ["--limit", "3", "--device", "cpu", "--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=2"]
SMALL += ["--set", "options.epochs=1", "--method", "teen", "--quiet"]


def states(folder):
    return {check.name: check.state for check in verify(folder)}


def failures(folder):
    return {check.name: check.text for check in verify(folder) if check.state == "failed"}


def again(folder, session=1, backbone=None):
    return learn_again(folder, session, stream=tiny_stream(), backbone=backbone or tiny_backbone())


@pytest.fixture(scope="module")
def glyph_run(tmp_path_factory, weights):
    """A small run from real files, by the command."""
    from fscil import cli

    folder = tmp_path_factory.mktemp("verified") / "run"
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", *SMALL, "--weights", str(weights), "--output", str(folder), "--set", "runtime.keep=all"])
    assert not stop.value.code
    return folder


@pytest.fixture
def copy(glyph_run, tmp_path):
    return shutil.copytree(glyph_run, tmp_path / "copy")


def change(path, alter):
    content = read_json(path)
    alter(content)
    write_json(path, content)


def test_a_whole_run_passes_every_check(glyph_run, fscil):
    status, out, _ = fscil("verify", glyph_run, "--again")
    lines = out.splitlines()
    assert status == 0 and lines[0] == str(glyph_run) and len(lines) == 9
    assert all(line.split()[0] == "ok" for line in lines[1:])
    assert "bitwise the same" in lines[-1]
    told = json.loads(fscil("verify", glyph_run, "--json")[1])
    assert [check["name"] for check in told[0]["checks"]] == [line.split()[1] for line in lines[1:-1]]
    assert {check["state"] for check in told[0]["checks"]} == {"ok"} and told[0]["run"] == str(glyph_run)


def test_every_session_can_be_learned_again_where_all_checkpoints_were_kept(glyph_run):
    for session in (1, 2):
        check = learn_again(glyph_run, session)
        assert check.state == "ok" and "tensors are bitwise the same" in check.text, check.text
    with pytest.raises(UserError, match="--session 3.*sessions 1 to 2"):
        learn_again(glyph_run, 3)


def test_a_damaged_file_is_named_and_the_status_is_1(copy, fscil):
    path = copy / "predictions" / "session_1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = fscil("verify", copy)
    assert status == 1 and str(path) in next(line for line in out.splitlines() if " files " in line)
    (copy / "config.yaml").unlink()
    status, out, _ = fscil("verify", copy, "--json")
    (told,) = json.loads(out)
    files = next(check for check in told["checks"] if check["name"] == "files")
    assert status == 1 and files["state"] == "failed" and "(and 1 more)" in files["text"]


def test_a_link_in_a_run_folder_is_named(copy, fscil):
    curve = copy / "accuracy.png"
    curve.rename(copy.parent / "elsewhere.png")
    curve.symlink_to(copy.parent / "elsewhere.png")
    status, out, _ = fscil("verify", copy)
    assert status == 1 and f'"{curve}" is a symbolic link' in next(
        line for line in out.splitlines() if " files " in line
    )


@pytest.mark.parametrize(
    ("check", "said", "name", "alter"),
    [
        ("settings", "options.lr", "results.json", lambda r: r["config"]["options"].update(lr=0.7)),
        ("settings", "recipe", "results.json", lambda r: r["config"].update(recipe="glyphs/frozen")),
        ("shots", "task 2 has", "results.json", lambda r: r["stream"]["training_images"].reverse()),
        ("results", "classes_seen", "results.json", lambda r: r["stream"]["classes_seen"].reverse()),
        ("results", "test_images", "results.json", lambda r: r["stream"].update(test_images=1)),
        ("split", "different splits", "results.json", lambda r: r["stream"].update(split_hash="0" * 64)),
        ("split", "was changed", "split.json", lambda s: s["entries"].pop()),
        ("shots", "not the shots that seed 2023 draws", "shots.json", lambda s: _swap(s["tasks"])),
        ("shots", "none of its training images", "shots.json", lambda s: _cross(s["tasks"])),
        ("results", "not those of metrics.jsonl", "results.json", lambda r: r["sessions"][1].update(accuracy=99.0)),
        ("results", "A_avg in the summary", "results.json", lambda r: r["summary"].update(A_avg=99.0)),
        ("results", "confusion", "results.json", lambda r: r["confusion"][0].reverse()),
    ],
)
def test_what_was_changed_together_with_its_hash_is_found(copy, check, said, name, alter):
    change(copy / name, alter)
    rehash(copy)
    found = failures(copy)
    assert next(iter(found)) == check and said in found[check], found
    assert len(found) == 1 or name == "split.json"  # without a list of images, there is no telling about shots either


def test_settings_that_were_changed_everywhere_are_found(copy):
    """config.yaml and results.json agree, hashes too; what was learned carries the mark of other settings."""
    change(copy / "results.json", lambda r: r["config"]["options"].update(lr=0.7))
    config = copy / "config.yaml"
    text = config.read_text()
    changed = re.sub(r"(?m)^(\s+lr:) .*$", r"\1 0.7", text)
    assert changed != text
    config.write_text(changed)
    rehash(copy)
    assert "not made under the settings" in failures(copy)["settings"]


def _swap(tasks):
    for classes in tasks.values():
        for listed in classes.values():
            listed.reverse()


def _cross(tasks):
    first, second = list(tasks["1"].values())
    first[0], second[0] = second[0], first[0]


def test_a_metric_that_its_predictions_do_not_give_is_found(copy):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[1]["accuracy"] += 1
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(copy / "results.json", lambda r: r.update(sessions=lines, summary=summarise(lines)))
    rehash(copy)
    (found,) = failures(copy).items()
    assert found[0] == "metrics" and "session 1: accuracy is" in found[1]


def test_test_images_that_were_left_out_are_found(copy):
    """Easier images make better numbers."""
    for session in range(3):
        path = copy / "predictions" / f"session_{session}.safetensors"
        tensors, meta = load_tensors(path)
        right = tensors["labels"] == tensors["top"][:, 0]
        save_tensors(path, {name: tensor[right] for name, tensor in tensors.items()}, meta)
    rehash(copy)
    assert "predictions" in failures(copy)


def test_invented_predictions_pass_everything_but_learning_again(copy):
    """All of it made up to suit: predictions, metrics, results, hashes."""
    sessions, facts = [], read_json(copy / "results.json")["stream"]
    for number, line in enumerate((copy / "metrics.jsonl").read_text().splitlines()):
        path = copy / "predictions" / f"session_{number}.safetensors"
        tensors, meta = load_tensors(path)
        labels, top = tensors["labels"], tensors["top"].clone()
        for row, label in zip(top, labels):  # every image is recognised
            rest = row[row != label]
            row.copy_(torch.cat([label[None], rest])[: len(row)])
        save_tensors(path, {**tensors, "top": top}, meta)
        session = json.loads(line)
        made_up = evaluate_session(labels.numpy(), top.numpy(), facts["base_classes"], session["seen"], facts["way"])
        sessions.append({**session, **made_up})
    (copy / "metrics.jsonl").write_text("".join(json.dumps(session) + "\n" for session in sessions))
    counts = confusion(labels.numpy(), top[:, 0].numpy(), sessions[-1]["seen"]).tolist()
    invented = {"sessions": sessions, "summary": summarise(sessions), "confusion": counts}
    change(copy / "results.json", lambda results: results.update(invented))
    rehash(copy)
    assert load_results(copy).summary["A_avg"] == 100 and failures(copy) == {}
    check = learn_again(copy)
    assert check.state == "failed" and "predictions differ" in check.text and "same CPU and torch" in check.text


def test_on_another_machine_the_best_classes_are_compared(tmp_path):
    run(tmp_path / "run")
    change(tmp_path / "run" / "results.json", lambda r: r["environment"].update(torch="1.0", threads=99))
    rehash(tmp_path / "run")
    assert "bitwise the same" in again(tmp_path / "run").text
    path = tmp_path / "run" / "predictions" / "session_1.safetensors"
    tensors, meta = load_tensors(path)
    order = tensors["top"].clone()
    order[:, 1:] = order[:, 1:].flip(1)  # beyond the best class nothing counts
    save_tensors(path, {**tensors, "top": order}, meta)
    check = again(tmp_path / "run")
    assert check.state == "ok" and "0 of 24 predictions differ (0.00 %)" in check.text
    assert f"torch {metadata.version('torch')} instead of 1.0" in check.text
    order[:1, 0] = (order[:1, 0] + 1) % 6
    save_tensors(path, {**tensors, "top": order}, meta)
    check = again(tmp_path / "run")
    assert check.state == "failed" and "1 of 24 predictions differ (4.17 %)" in check.text and "2%" in check.text


def test_other_data_or_weights_are_told_from_other_numbers(tmp_path):
    run(tmp_path / "run")
    other = tiny_backbone()
    other.vit.blocks[0].mlp.fc1.bias.data += 1
    assert "other weights" in again(tmp_path / "run", backbone=other).text
    check = learn_again(tmp_path / "run", stream=tiny_stream(3), backbone=tiny_backbone())
    assert check.state == "failed" and "another split" in check.text


def test_checkpoints_that_were_not_kept(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(UserError, match=r"--session 2 starts from the checkpoint of session 1; this run kept 0, 2"):
        again(tmp_path / "run", 2)
    config = tiny_config()
    run(tmp_path / "all", replace(config, runtime=replace(config.runtime, keep="all")))
    assert "bitwise" in again(tmp_path / "all", TASKS).text


def test_unfinished_and_unhashed_runs_are_checked_as_far_as_they_go(tmp_path, monkeypatch):
    run(tmp_path / "old")
    unhash(tmp_path / "old")
    assert states(tmp_path / "old") == {
        "files": "left out", "settings": "ok", "split": "left out", "shots": "left out", "predictions": "ok",
        "metrics": "ok", "results": "ok",
    }  # fmt: skip
    stopped(tmp_path / "half", monkeypatch, (2, 0))
    found = states(tmp_path / "half")
    assert found["files"] == found["predictions"] == found["metrics"] == "ok" and found["results"] == "left out"
    assert "bitwise the same" in again(tmp_path / "half").text
    before = numbers(run(tmp_path / "half", resume=True))
    assert before == numbers(load_results(tmp_path / "old"))  # looking changed nothing


@pytest.mark.parametrize("validation", [False, True])
def test_a_run_that_stopped_after_the_base_task_is_intact(tmp_path, weights, monkeypatch, validation):
    """Group averages of the base classes follow `way`; a validation stream of 4 + 3 classes has a way of 3 at most."""
    settings = {"data.base": 7, "data.way": 4, "data.validation": validation, "options.epochs": 1}
    settings |= {"data.validation_base": 4} if validation else {"data.tasks": 2}
    learn = TEEN.learn

    def stop(method, task):
        if task.index:
            raise Stop
        learn(method, task)

    monkeypatch.setattr(TEEN, "learn", stop)
    with pytest.raises(Stop):
        api.run("teen", settings=settings, folder=tmp_path / "run", limit=7, weights=weights, device="cpu")
    assert states(tmp_path / "run")["metrics"] == "ok", failures(tmp_path / "run")
    (session,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tensors, _ = load_tensors(tmp_path / "run" / "predictions" / "session_0.safetensors")
    labels, top, base = tensors["labels"].numpy(), tensors["top"].numpy(), session["seen"]
    right, *wrong = (
        evaluate_session(labels, top, base, base, way)["base"] for way in ((3, 1, 4) if validation else (4, 1))
    )
    assert right == session["base"] and right not in wrong


def test_a_stopped_run_goes_on_with_the_same_weights_at_another_path(tmp_path, weights, monkeypatch):
    settings = {"data.base": 4, "data.way": 2, "data.tasks": 1, "options.epochs": 1}
    here, there = shutil.copy(weights, tmp_path / "here.safetensors"), tmp_path / "there.safetensors"
    whole = api.run("teen", settings=settings, folder=tmp_path / "whole", limit=3, weights=weights, device="cpu")
    learn = TEEN.learn
    for name in ("run", "old"):
        with monkeypatch.context() as patched, pytest.raises(Stop):
            patched.setattr(TEEN, "learn", lambda method, task: stop() if task.index else learn(method, task))
            api.run("teen", settings=settings, folder=tmp_path / name, limit=3, weights=here, device="cpu")
    hashes = RunHashes.read(tmp_path / "old")
    hashes.backbone = None  # of a run that began before this was kept
    hashes.write()
    other = tmp_path / "other.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, other)
    shutil.copy(here, there)
    for name, said in (("run", "here have"), ("old", "another configuration .weights: ")):
        with pytest.raises(UserError, match=said):
            api.run(folder=tmp_path / name, resume=True, weights=other)
    assert numbers(api.run(folder=tmp_path / "old", resume=True, weights=there)) == numbers(whole)
    shutil.copy(other, here)
    with pytest.raises(UserError, match="here have"):
        api.run(folder=tmp_path / "run", resume=True)  # other weights in the old place
    here.unlink()
    assert learn_again(tmp_path / "run", weights=there).state == "left out"  # no few-shot session is done yet
    resumed = api.run(folder=tmp_path / "run", resume=True, weights=there)
    assert numbers(resumed) == numbers(whole)
    assert all(check.state == "ok" for check in verify(tmp_path / "run"))
    assert learn_again(tmp_path / "run", weights=there).state == "ok"
    assert learn_again(tmp_path / "run", weights=other).state == "failed"


def stop():
    raise Stop


def test_a_session_that_is_not_there_is_left_out_and_the_next_folder_is_checked(
    tmp_path, monkeypatch, fscil, glyph_run
):
    stopped(tmp_path / "at-once", monkeypatch, (0, 0))
    stopped(tmp_path / "base", monkeypatch, (1, 0))
    stream = tiny_stream()
    of_base = torch.arange(16)  # its test images
    base_alone = {"test": stream.test.select(of_base), "test_labels": stream.test_labels[of_base]}
    run(tmp_path / "no-task", stream=replace(stream, tasks=stream.tasks[:1], shots={}, **base_alone))
    folders = [tmp_path / name for name in ("at-once", "base", "no-task")]
    status, out, _ = fscil("verify", "--again", "--json", *folders, glyph_run)
    found = [(told["checks"][-1]["name"], told["checks"][-1]["state"]) for told in json.loads(out)]
    assert status == 0 and found == [("again", "left out")] * 3 + [("again", "ok")]
    assert [told["checks"][-1]["text"] for told in json.loads(out)][:3] == [
        "no session is done yet", "no few-shot session is done yet", "the run has no few-shot task",
    ]  # fmt: skip
    for folder in folders:
        status, _, err = fscil("verify", "--again", "--session", 1, folder)
        assert status == 2 and f'--session 1: "{folder}" has no few-shot session' in err


def test_damage_that_keeps_a_session_from_being_learned_again_does_not_hide_the_next_folder(copy, fscil, glyph_run):
    (copy / "config.yaml").write_text("method: [")
    status, out, _ = fscil("verify", "--again", "--json", copy, glyph_run)
    damaged, whole = (told["checks"][-1] for told in json.loads(out))
    assert status == 1 and (damaged["name"], damaged["state"], whole["state"]) == ("again", "failed", "ok")


def test_predictions_of_other_code_are_not_put_down_to_the_machine(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        now = protocol.module_hashes
        patched.setattr(protocol, "module_hashes", lambda *about: {**now(*about), "data/stream.py": "of another day"})
        run(tmp_path / "run")
        stopped(tmp_path / "half", monkeypatch, (2, 0))
    assert "bitwise the same" in again(tmp_path / "run").text  # the change did not matter here
    for name, said in (("run", "other code than the session's in data/stream.py"), ("half", "other code than")):
        path = tmp_path / name / "predictions" / "session_1.safetensors"
        tensors, meta = load_tensors(path)
        save_tensors(path, {**tensors, "top": tensors["top"].roll(1, 1)}, meta)
        check = again(tmp_path / name)
        assert check.state == "failed" and said in check.text and "same CPU" not in check.text, check.text
    change(tmp_path / "run" / "results.json", lambda r: r["environment"].update(torch="1.0"))
    assert "instead of 1.0, other code than the session's in data/stream.py" in again(tmp_path / "run").text


def test_what_is_refused(fscil, tmp_path, glyph_run):
    for arguments, said in (
        (["nowhere"], "does not exist"),
        ([glyph_run, "--session", 2], "add --again"),
        ([glyph_run, "--again", "--session", 9], "sessions 1 to 2"),
    ):
        status, _, err = fscil("verify", *arguments)
        assert status == 2 and said in err and len(err.splitlines()) == 1, err
