"""`fscil reproduce beyond`: which runs the tables of CHORD need, and what is made of them."""

import csv
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from fscil.evaluation.tables import metric
from fscil.experiments.beyond import ABLATION, BEYOND, CORRECTIONS, REPRESENTATIONS, WAYS
from fscil.experiments.grid import cell_name, plan
from fscil.experiments.reproduce import EXPERIMENTS, Request, choose, make_artefacts
from fscil.experiments.run import Examination
from fscil.registry import HEADS
from made_up_runs import made_up_result
from probe_world import run, tiny_stream
from tiny_world import make_method


def request(*names, **rest):
    return Request(choose(names or ("beyond",)), **{"datasets": ("glyphs",), "seeds": (2023,), **rest})


def cells(name):
    return {label: cell_name(request().config("glyphs", 2023, v)) for label, v in BEYOND[name].variants.items()}


def test_beyond_is_all_of_them_and_all_is_the_paper():
    assert choose(["beyond"]) == BEYOND and choose(["all"]) == EXPERIMENTS
    assert list(choose(["shots", "beyond-shots"])) == ["shots", "beyond-shots"]


def test_tables_meet_in_the_same_cells():
    chord = cells("beyond-ablation")["CHORD"]
    assert cells("beyond-shots")["CHORD, 5"] == cells("beyond-openset")["CHORD"] == chord
    assert cells("beyond-heads")["own head on CHORD"] == chord
    assert cells("beyond-heads")["own head on merged"] == cell_name(
        request("merging").config("glyphs", 2023, EXPERIMENTS["merging"].variants["merged"])
    )
    assert len(set(cells("beyond-ablation").values())) == len(ABLATION)
    assert len(cells("beyond-heads")) == (1 + len(HEADS)) * len(REPRESENTATIONS)


def test_settings_are_what_the_rows_say():
    chosen = request()
    configs = {label: chosen.config("glyphs", 1, v) for label, v in BEYOND["beyond-sessions"].variants.items()}
    assert {label: c.data.way for label, c in configs.items()} == {
        f"{m}, {w}": w for m in ("CHORD", "SMP") for w in WAYS
    }
    configs = [chosen.config("glyphs", 1, v) for v in BEYOND["beyond-correction"].variants.values()]
    assert [c.options["correction"] for c in configs] == list(CORRECTIONS)
    on_validation = {
        name
        for name, experiment in BEYOND.items()
        for variant in experiment.variants.values()
        if chosen.config("glyphs", 1, variant).data.validation
    }
    assert on_validation == {"beyond-correction"}  # settings are chosen there, all else is reported on test images
    alone = chosen.config("glyphs", 1, BEYOND["beyond-ablation"].variants["margin -0.1 alone"])
    assert alone.options["margins"] == [-0.1] and alone.options["frozen"] is True


def test_a_quick_look_makes_do_with_smaller_heads_and_says_so():
    variant = BEYOND["beyond-heads"].variants["RanPAC on frozen"]
    assert request().config("glyphs", 1, variant).head["projections"] == 10_000
    for quick in (request(fast=True), request(flags={"data": {"limit": 3}})):
        assert quick.config("glyphs", 1, variant).head["projections"] == 500
        assert "projections" in quick.stamp(BEYOND["beyond-heads"])
    assert "projections" not in request(fast=True).stamp(BEYOND["beyond-ablation"])


def test_representations_are_trained_once(tmp_path):
    """SMP's two sets, and CHORD's with those of its ablation, which take more epochs, whatever the number of heads."""
    jobs = plan(tmp_path, request("beyond-heads", "beyond-ablation").configs())
    passes = [job.specs for job in jobs if job.specs]
    smp = {(0.0, 16.0, False), (0.2, 16.0, False)}
    assert [set(specs) for specs in passes] == [smp, {*smp, (-0.1, 16.0, False)}]
    assert {job.name for job in jobs if not job.specs} == {
        *cells("beyond-heads").values(),
        *cells("beyond-ablation").values(),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything, of made-up results for every run."""
    folder = tmp_path_factory.mktemp("beyond")
    chosen = request(seeds=(2023, 2024), fast=True)
    rng, results = np.random.default_rng(0), {}
    for config in chosen.configs():
        rest = {key: value for key, value in config.to_dict().items() if key not in ("method", "seed", "dataset")}
        accuracy = tuple(rng.uniform(0.4, 0.9, 2))
        result = made_up_result(config.method, config.seed, config.dataset, accuracy=accuracy, per_class=4, **rest)
        for session in result["sessions"][:-1]:
            session["open_set"] = {"auroc": float(rng.uniform(50, 100)), "fpr95": float(rng.uniform(0, 100))}
        results[cell_name(config)] = result
    parts, problems = make_artefacts(chosen, results, folder)
    assert not problems
    return folder, chosen, results, parts


def rows(folder, name):
    with open(folder / f"{name}.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_of_heads_has_the_mean_of_each_pair(made):
    folder, chosen, results, parts = made
    assert list(parts) == list(BEYOND)
    for name in ("A_avg", "A_final", "hacc"):
        table = {row["head"]: row for row in rows(folder, f"beyond-heads-glyphs-{name}")}
        assert table.keys() == {"own head", *(entry.title for entry in HEADS.values())}
        variant = BEYOND["beyond-heads"].variants["PLDA on d"]
        values = [metric(name).read(results[cell_name(chosen.config("glyphs", s, variant))]) for s in (2023, 2024)]
        assert float(table["PLDA"]["d"]) == pytest.approx(statistics.mean(values))
        assert float(table["PLDA"]["d_std"]) == pytest.approx(statistics.stdev(values))


def test_the_other_tables_and_the_curve(made):
    folder, chosen, results, parts = made
    assert [row["form"] for row in rows(folder, "beyond-ablation-glyphs")] == list(ABLATION)
    assert len(rows(folder, "beyond-ablation-glyphs-differences")) == len(ABLATION) - 1
    openset = {row["method"]: row for row in rows(folder, "beyond-openset-glyphs")}
    variant = BEYOND["beyond-openset"].variants["SMP"]
    told = [
        statistics.mean(session["open_set"]["auroc"] for session in results[name]["sessions"][:-1])
        for name in (cell_name(chosen.config("glyphs", seed, variant)) for seed in (2023, 2024))
    ]
    assert float(openset["SMP"]["auroc"]) == pytest.approx(statistics.mean(told))
    assert (folder / "beyond-correction.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows(folder, "beyond-correction")) == 2 * len(CORRECTIONS)
    assert all("Reduced by --fast" in part.stamp for made_parts in parts.values() for part in made_parts.values())


# ---- the open set ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("probe")
def test_runs_tell_how_well_classes_to_come_are_told_apart(tmp_path):
    results = run(tmp_path / "run")
    assert [session["open_set"] is None for session in results.sessions] == [False, False, True]
    assert all(0 <= session["open_set"]["auroc"] <= 100 for session in results.sessions[:-1])
    assert metric("auroc").read(results.to_dict()) == pytest.approx(
        statistics.mean(session["open_set"]["auroc"] for session in results.sessions[:-1])
    )


def test_the_open_set_agrees_with_scikit_learn():
    stream, method = tiny_stream(), make_method("frozen")
    method.fit_base(stream.tasks[0])
    examination = Examination("frozen", method, stream)
    examination.after(stream.tasks[0])
    sure = torch.softmax(method.logits(stream.test).double(), 1).amax(1).numpy()
    known = (stream.test_labels < stream.base_classes).numpy()
    assert examination.open_set["auroc"] == pytest.approx(100 * roc_auc_score(known, sure))
    false, true, _ = roc_curve(known, sure, drop_intermediate=False)
    assert examination.open_set["fpr95"] == pytest.approx(100 * false[np.argmax(true >= 0.95)])


@pytest.mark.slow
def test_the_command_makes_all_of_them(weights, tmp_path):
    command = ["reproduce", "beyond", "--fast", "--limit", "3", "--seeds", "1", "--weights", str(weights)]
    command += ["--set", "data.base=6", "--set", "data.tasks=1", "-o", "grid", "--device", "cpu", "--jobs", "2"]
    done = subprocess.run([sys.executable, "-m", "fscil", *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 made" in done.stdout and "C-RanPAC" in done.stdout
