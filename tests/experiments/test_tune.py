"""`fscil tune`: the figures of a run on the validation stream, nothing of the test stream, and what the tables say."""

import statistics
from dataclasses import replace

import pytest

from fscil.config import resolve
from fscil.data.datasets import load_dataset
from fscil.display import LiveDisplay
from fscil.errors import UserError
from fscil.evaluation.tables import metric, metrics
from fscil.experiments import one_base
from fscil.experiments.api import run
from fscil.experiments.one_base import fresh_head
from fscil.experiments.run import make_runtime
from fscil.experiments.tune import AS_IT_IS, OF_WHOLE_RUNS, best_setting, head_settings, tune, tuning_tables
from fscil.files import read_json
from made_up_runs import made_up_result

SMALL = ["data.base=9", "data.way=2", "data.shots=2", "data.limit=4", "options.epochs=1"]


def config(weights, method="miam", **flags):
    return resolve(method, "glyphs", settings=SMALL, weights=str(weights), runtime={"device": "cpu"}, **flags)


def test_the_first_draw_is_a_run_on_the_validation_stream(weights, tmp_path):
    """The same figures by the other way there: a whole run for each setting, trained by itself."""
    settings = head_settings([{"head.correction": 0.5, "head.shrinkage": 0.2}])
    groups = tune(config(weights, head={"name": "closed_form"}), settings, draws=2)
    for label, options in settings.items():
        texts = [*SMALL, "data.validation=true", *(f"head.{key}={value}" for key, value in options.items())]
        whole = run(
            "miam", "glyphs", head="closed_form", settings=texts, weights=weights, device="cpu", folder=tmp_path / label
        )
        for key in ("accuracies", "hacc", "fnr", "fpr", "forgetting"):
            assert groups[label][0]["summary"][key] == pytest.approx(whole.summary[key]), (label, key)
    assert [len(members) for members in groups.values()] == [2, 2]


def test_only_training_images_of_base_classes_are_read(weights):
    frozen = {"settings": SMALL[:-1], "weights": str(weights), "runtime": {"device": "cpu"}}
    chosen = resolve("frozen", "glyphs", head={"name": "prototypes"}, **frozen)
    dataset = load_dataset("glyphs", chosen.data)
    seen = []

    def read(positions):
        seen.extend(positions)
        return dataset.read(positions)

    tune(chosen, head_settings([{"head.scale": 4.0}]), draws=3, dataset=replace(dataset, read=read))
    entries = [dataset.manifest.entries[at] for at in seen]
    assert {entry.split for entry in entries} == {"train"}
    assert {entry.label for entry in entries} == set(range(9))  # the base classes, in natural order


def test_a_base_is_trained_once_for_all_settings_and_draws(weights, monkeypatch):
    fitted = []
    known = one_base.OneBase.__init__

    def counted(self, method, draws):
        fitted.append(len(draws.streams))
        known(self, method, draws)

    monkeypatch.setattr(one_base.OneBase, "__init__", counted)
    varied = head_settings([{"head.correction": c} for c in (0.0, 0.5, 2.0)])
    groups = tune(config(weights, head={"name": "closed_form"}), varied, 3)
    assert fitted == [3] and len(groups) == 4
    averages = [{result["summary"]["A_avg"] for result in members} for members in groups.values()]
    assert len(averages[0]) > 1  # draws differ


def test_the_methods_own_head_takes_changed_options(weights):
    from fscil.display import LiveDisplay
    from fscil.experiments.run import assemble, make_runtime

    chosen = config(weights, "chord")
    parts = assemble(chosen, make_runtime(chosen, LiveDisplay(quiet=True)))
    changed = fresh_head(parts.method, "own", {"correction": 0.25})
    assert changed.options == replace(parts.method.head.options, correction=0.25)
    assert parts.method.head.options.correction == 0.9
    with pytest.raises(UserError, match='Did you mean "head.correction"'):
        fresh_head(parts.method, "own", {"corection": 1})


def test_what_cannot_be_tuned_is_said_before_anything_is_trained(weights, fscil, monkeypatch):
    monkeypatch.setattr(one_base.OneBase, "__init__", None)
    for arguments, said in (
        (["--vary", "options.lr=0.1,0.2"], "fscil compare --set data.validation=true --vary options.lr"),
        (["--vary", "head.corection=1,2", "--head", "closed_form"], 'Did you mean "head.correction"'),
        (["--vary", "head.margin=1,2", "--by", "A_average"], 'unknown metric "A_average"'),
        (["--vary", "head.scale=1,2", "--by", "trainable_parameters"], "--by trainable_parameters: "),
        (["--vary", "head.name=plda,slda"], "--head NAME"),
        (["--vary", "head.scale=1,2", "--set", "seed=7"], "--seeds says the seed"),
        (["--vary", "head.scale=1,2", "--set", "method=teen"], "--method says the method"),
        (["--vary", "head.margin"], "--vary"),
        (["--vary", "head.scale=1,2", "--method", "l2p"], "its features move after the base task"),
    ):
        small = [part for text in SMALL[:-1] for part in ("--set", text)]
        status, _, err = fscil("tune", "--weights", weights, "--device", "cpu", *small, *arguments)
        assert status == 2 and said in err and len(err.splitlines()) == 1, (arguments, err)
    with pytest.raises(UserError, match="name what to compare"):
        head_settings([])


def test_a_head_and_its_options_may_be_set_and_hold_for_every_row(weights, tmp_path, fscil):
    small = [part for text in SMALL[:-1] for part in ("--set", text)]
    common = ["--method", "frozen", "--weights", weights, "--device", "cpu", "--draws", "1", *small]
    common += ["--set", "head.shrinkage=0.9", "--vary", "head.correction=0.5"]
    for name, chosen in (("flag", ["--head", "closed_form"]), ("set", ["--set", "head.name=closed_form"])):
        status, out, err = fscil("tune", *common, *chosen, "-o", tmp_path / name)
        assert status == 0, err
        assert "Frozen + closed form" in out
        stored = read_json(tmp_path / name / "tune.json")
        assert stored["head"] == "closed_form" and list(stored["settings"]) == [AS_IT_IS, "correction=0.5"]
        for label, more in ((AS_IT_IS, {}), ("correction=0.5", {"head.correction": 0.5})):
            settings = {**dict(text.split("=") for text in SMALL[:-1]), "data.validation": "true", **more}
            settings = [f"{key}={value}" for key, value in {**settings, "head.shrinkage": 0.9}.items()]
            folder = tmp_path / f"{name}-{label}"
            whole = run("frozen", head="closed_form", settings=settings, weights=weights, device="cpu", folder=folder)
            found = stored["settings"][label][0]["accuracies"]
            assert found == pytest.approx(whole.summary["accuracies"]), (name, label)


def test_what_can_decide_is_measured(weights):
    frozen = resolve("frozen", "glyphs", settings=SMALL[:-1], weights=str(weights), runtime={"device": "cpu"})
    groups = tune(frozen, head_settings([{"head.scale": 4.0}]), draws=1)
    usable = [name for name in metrics() if name not in OF_WHOLE_RUNS]
    assert "A_avg" in usable and all(best_setting(groups, name) in groups for name in usable)


def drawn(accuracies):
    """Results of draws whose A_avg is as given."""
    results = []
    for number, accuracy in enumerate(accuracies):
        result = made_up_result(seed=number)
        summary = {**result["summary"], "A_avg": accuracy}
        results.append({**result, "summary": summary, "config": {**result["config"], "seed": f"2023, draw {number}"}})
    return results


def test_the_tables_hold_means_spreads_and_paired_gains():
    groups = {AS_IT_IS: drawn([60.0, 62.0, 64.0]), "correction=0.5": drawn([61.0, 63.5, 64.5])}
    made = tuning_tables(groups, "title")
    value = made["tune"].row("correction=0.5").values["A_avg"]
    assert value.mean == pytest.approx(63.0) and value.spread == pytest.approx(statistics.stdev([61.0, 63.5, 64.5]))
    gain = made["tune-gains"].row("correction=0.5").values["A_avg"]
    assert gain.mean == pytest.approx((1.0 + 1.5 + 0.5) / 3)
    half = 4.302652729911275 * 0.5 / 3**0.5  # Student's t for 95 % and two degrees of freedom, gains 1, 1.5, 0.5
    assert gain.interval == pytest.approx((1.0 - half, 1.0 + half))
    assert "3 draws" in made["tune"].notes[0]
    assert best_setting(groups) == "correction=0.5"
    assert best_setting({AS_IT_IS: drawn([60.0]), "x=1": drawn([60.0])}) == AS_IT_IS
    assert metric("fnr").column.better == "low" and best_setting(groups, "fnr") in groups


def test_the_command(weights, tmp_path, fscil):
    small = [part for text in SMALL for part in ("--set", text)]
    command = ["tune", "--method", "miam", "--head", "closed_form", "--vary", "head.correction=0,1", "--draws", "2"]
    status, out, err = fscil(*command, "--weights", weights, "--device", "cpu", "-o", tmp_path / "tune", *small)
    assert status == 0, err
    assert "over 2 draws of the shots" in out
    stored = read_json(tmp_path / "tune" / "tune.json")
    assert list(stored["settings"]) == [AS_IT_IS, "correction=0", "correction=1"]
    means = {label: statistics.mean(draw["A_avg"] for draw in draws) for label, draws in stored["settings"].items()}
    best = max(means, key=means.get)
    assert means[out.split("best by A_avg: ")[1].partition(";")[0].strip()] == pytest.approx(means[best])
    assert (tmp_path / "tune" / "tune.csv").exists() and (tmp_path / "tune" / "tune-gains.md").exists()


def test_further_protocols_share_the_base_task_and_are_their_own_runs(weights, tmp_path):
    chosen = config(weights)
    runtime = make_runtime(chosen, LiveDisplay(quiet=True))
    changes = {"shots=3": {"shots": 3}, "way=1": {"way": 1, "tasks": 2}}
    changes |= {"tasks=2": {"tasks": 2}, "one class": {"way": 1, "tasks": 1}}  # more and fewer classes than the first
    draws = one_base.Draws.make(chosen, 1, runtime, protocols=[{}, *changes.values()])
    method = one_base.represented("miam", chosen.options, draws.backbone, runtime)
    base = one_base.OneBase(method, draws)
    for number, (label, changed) in enumerate(changes.items(), 1):
        found = base.examine(fresh_head(method, "closed_form"), number)
        texts = [*SMALL, *(f"data.{key}={value}" for key, value in changed.items())]
        whole = run(
            "miam", "glyphs", head="closed_form", settings=texts, weights=weights, device="cpu", folder=tmp_path / label
        )
        assert [session.get("open_set") for session in found["sessions"]] == [
            session.get("open_set") for session in whole.sessions
        ]
        for key in ("accuracies", "hacc", "fnr"):
            assert found["summary"][key] == pytest.approx(whole.summary[key]), (label, key)
