"""`fscil reproduce`: which runs each table and figure needs, what is shared, and what is made of them."""

import csv
import subprocess
import sys

import numpy as np
import pytest

from fscil.errors import UserError
from fscil.evaluation import paper
from fscil.experiments.grid import cell_name, plan
from fscil.experiments.reproduce import EXPERIMENTS, MARGINS, Request, choose, make_artefacts, write_index
from made_up_runs import made_up_result


def request(*names, **rest):
    return Request(choose(names or ("all",)), **{"datasets": ("glyphs",), "seeds": (2023,), **rest})


def cells(experiment, seed=2023, dataset="glyphs"):
    chosen = request(experiment)
    return {label: cell_name(chosen.config(dataset, seed, v)) for label, v in EXPERIMENTS[experiment].variants.items()}


# ---- which runs ----------------------------------------------------------------------------------------------------


def test_tables_meet_in_the_same_cells():
    """SMP of the main table is the sweep's m = 0.2, K = 5, "both" of the ablation, and so on."""
    smp = cells("main")["SMP"]
    assert cells("margins")["m = 0.2"] == cells("shots")["K = 5"] == cells("ablation")["SMP"] == smp
    assert cells("bias")["With MPCC"] == cells("calibration")["Calibration, m = 0.2"] == cells("fisher")["SMP"] == smp
    assert cells("merging")["m = 0"] == cells("tradeoff")["m = 0"]
    assert cells("merging")["m = 0.2"] == cells("tradeoff")["m = 0.2"]
    assert cells("merging")["merged"] == cells("bias")["Without MPCC"] == cells("ablation")["+MIAM"]
    assert cells("ablation-backbone")["SMP"] != smp


def test_margin_sweep_sets_m_in_merging_and_calibration_together():
    for label, variant in EXPERIMENTS["margins"].variants.items():
        options = request("margins").config("glyphs", 1, variant).options
        assert options["margin"] == float(label.split()[-1]) and options["margin_g"] == 0.0
        assert options["calibration_margin"] is None and options["calibration"] == "mpcc"  # None: that of set d
    assert [float(label.split()[-1]) for label in EXPERIMENTS["margins"].variants] == list(MARGINS)


def test_the_tradeoff_is_one_set_at_scale_16_with_prototypes_only():
    margins = []
    for variant in EXPERIMENTS["tradeoff"].variants.values():
        options = request("tradeoff").config("glyphs", 1, variant).options
        assert options["adapters"] == "one" and options["scale"] == 16 and not options["learnable_scale"]
        assert options["calibration"] == "prototypes"
        margins.append(options["margin"])
    assert margins == [0.0, *MARGINS]


def test_everything_trains_each_adapter_set_once(tmp_path):
    """Seven sets for the first backbone (g, five margins, the baseline's), three for the second, one pass each."""
    # under one schedule; recipes that train differently share less
    chosen = request(settings=["options.epochs=2", "options.lr=0.01"])
    jobs = plan(tmp_path, chosen.configs())
    passes = {job.config.backbone: set(job.specs) for job in jobs if job.specs}
    d = {(m, 16.0, False) for m in MARGINS}
    assert passes["glyph_vit_a"] == {(0.0, 16.0, False), (0.0, 1.0, True), *d}
    assert passes["glyph_vit_b"] == {(0.0, 16.0, False), (0.0, 1.0, True), (0.2, 16.0, False)}
    assert len([job for job in jobs if job.specs]) == 2
    shots = {cell_name(chosen.config("glyphs", 2023, v)) for v in EXPERIMENTS["shots"].variants.values()}
    assert {job.share_base for job in jobs if job.name in shots} == {True}
    assert [job.share_base for job in jobs if job.config.method == "smp_no_margin"] == [True]


def test_other_datasets_take_the_paper_s_second_backbone():
    chosen = request("ablation-backbone", datasets=("cifar100",), flags={"weights": "first.safetensors"})
    config = chosen.config("cifar100", 1, EXPERIMENTS["ablation-backbone"].variants["SMP"])
    assert config.backbone == "vit_base_patch16_224.augreg_in21k" and config.weights is None
    named = request(
        "ablation-backbone", second_backbone="deit_tiny_patch16_224.fb_in1k", second_weights="b.safetensors"
    )
    config = named.config("glyphs", 1, EXPERIMENTS["ablation-backbone"].variants["SMP"])
    assert config.backbone == "deit_tiny_patch16_224.fb_in1k" and config.weights == "b.safetensors"


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UserError, match='Did you mean "margins"'):
        choose(["margin"])
    assert list(choose(["all"])) == list(EXPERIMENTS) and list(choose(["shots", "main"])) == ["shots", "main"]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("shots", "data.shots=2"),
        ("margins", "options.margin=0.1"),
        ("beyond-shots", "data.shots=2"),
        ("beyond-sessions", "data.way=2"),
        ("beyond-heads", "head.name=plda"),
        ("beyond-ablation", "options.margins=[0.1]"),
        ("beyond-correction", "data.validation=false"),  # said by all rows alike
    ],
)
def test_what_names_the_rows_of_a_table_cannot_be_set_for_all(name, setting):
    with pytest.raises(UserError, match=f'--set {setting.split("=")[0]}=.*rows of "{name}" say'):
        request(name, settings=[setting])
    assert request("main", settings=["data.shots=2"]).configs()
    assert request("beyond-heads", settings=["head.dimensions=9"])
    with pytest.raises(UserError, match='--set head.dimensions=9: rows of "beyond-heads" say'):
        request("beyond-heads", settings=["head.dimensions=9"], fast=True)  # a quick look has less of them
    assert request("beyond-correction", settings=["data.validation=true"])  # set in all of its rows alike
    with pytest.raises(UserError, match="--seeds says the seed"):
        request(name, settings=["seed=7"])


# ---- what is made --------------------------------------------------------------------------------------------------


def made_up(chosen):
    """Results for every run of a request, as if they had been computed."""
    results = {}
    for config in chosen.configs():
        result = made_up_result(
            config.method,
            config.seed,
            config.dataset,
            **{key: value for key, value in config.to_dict().items() if key not in ("method", "seed", "dataset")},
        )
        rng = np.random.default_rng(config.seed)
        norms = rng.uniform(0.1, 1, (6, 2, 2))
        result["sessions"][0]["diagnostics"] = {
            "fisher_norms": norms.tolist(),
            "merge_weights": (norms / norms.sum(1, keepdims=True)).tolist(),
        }
        results[cell_name(config)] = result
    return results


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    chosen = request(datasets=("glyphs", "cifar100"), seeds=(2023, 2024), fast=True)
    made, problems = make_artefacts(chosen, made_up(chosen), folder)
    write_index(chosen, made, folder)
    return folder, chosen, made, problems


def test_every_table_and_figure_of_the_paper_is_made(everything):
    folder, _, made, problems = everything
    assert not problems and list(made) == list(EXPERIMENTS)
    figures = ("curves", "base-new", "merging", "margins", "shots", "fisher", "tradeoff")
    for name in figures:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert all((folder / f"{name}.{suffix}").stat().st_size > 100 for suffix in ("svg", "csv"))
    tables = ("main", "base-new", "ablation", "ablation-backbone", "merging", "margins", "shots", "bias", "calibration")
    for name in tables:
        for dataset in ("glyphs", "cifar100"):
            assert all((folder / f"{name}-{dataset}.{suffix}").exists() for suffix in ("csv", "md", "tex")), name
    index = (folder / "index.md").read_text()
    assert all(f"`fscil reproduce {name}`" in index for name in EXPERIMENTS)


def test_every_artefact_says_what_was_reduced(everything):
    folder, _, made, _ = everything
    for path in [*folder.glob("*.csv"), *folder.glob("*.md"), *folder.glob("*.tex")]:
        assert "Reduced by --fast: 2 seeds instead of 3" in path.read_text().replace(r"-{}-", "--"), path.name
    for parts in made.values():
        assert all("epochs" in part.stamp for part in parts.values())


def test_nothing_is_stamped_when_nothing_was_reduced():
    experiment = EXPERIMENTS["shots"]
    assert request("shots", seeds=(1, 2, 3)).stamp(experiment) == ""
    assert "options.rank=4" in request("shots", settings=["options.rank=4"]).stamp(experiment)
    assert "5 images per class" in request("shots", flags={"data": {"limit": 5}}).stamp(experiment)
    fast = request("shots", fast=True).stamp(experiment)
    full, short = (request("shots", fast=f).config("glyphs", 1, experiment.variants["K = 5"]) for f in (False, True))
    assert f"epochs {short.options['epochs']} instead of {full.options['epochs']}" in fast


def test_the_paper_s_numbers_stand_beside_ours(everything):
    folder, _, _, _ = everything

    def rows(name):
        with open(folder / f"{name}-cifar100.csv", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    shots = {row["shots"]: float(row["A_final_paper"]) for row in rows("shots")}
    assert shots == {f"K = {k}": number.final for k, number in paper.SHOTS["cifar100"].items()}
    calibration = [float(row["A_avg_paper"]) for row in rows("calibration")]
    assert calibration == [number.average for number in paper.CALIBRATION_MARGIN["cifar100"].values()]
    bias = {row["setting"]: (float(row["fnr_paper"]), float(row["fpr_paper"])) for row in rows("bias")}
    assert bias == {"Without MPCC": paper.BIAS["cifar100"]["miam"], "With MPCC": paper.BIAS["cifar100"]["smp"]}
    second = [float(row["A_final_paper"]) for row in rows("ablation-backbone")]
    assert second == [number.final for number in paper.ABLATION_21K["cifar100"].values()]
    assert "A_final_paper" not in rows("margins")[0]  # the paper gives the sweep as a figure only


def test_missing_runs_are_said_and_the_rest_is_made(tmp_path):
    chosen = request("shots", "bias", "fisher")
    results = made_up(chosen)
    for label in ("K = 1", "K = 5"):
        del results[cells("shots")[label]]
    made, problems = make_artefacts(chosen, results, tmp_path)
    assert list(made) == ["shots", "bias"] and len(problems) == 3
    assert "shots: 2 of its runs are missing" in problems[0]
    assert not (tmp_path / "fisher.png").exists()


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_makes_what_it_names(weights, tmp_path):
    document = tmp_path / "R.md"
    document.write_text("<!-- fscil:calibration-glyphs -->\n<!-- /fscil:calibration-glyphs -->\n")
    command = ["reproduce", "calibration", "fisher", "--fast", "--limit", "3", "--weights", str(weights)]
    command += ["--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=1", "--set", "options.epochs=1"]
    command += ["-o", "grid", "--markdown", "R.md", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "fscil", *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 made" in done.stdout and "Calibration, m = 0.2" in done.stdout
    made = {path.name for path in (tmp_path / "grid" / "reproduce" / "glyphs-fast").iterdir()}
    assert {"fisher.png", "fisher.csv", "calibration-glyphs.tex", "index.md"} <= made
    assert "Calibration, m = 0.2" in document.read_text() and "Limited to 3 images per class" in document.read_text()
    log = next((tmp_path / "grid" / "logs").glob("*-smp-seed*.log")).read_text()
    assert "from the shelf: base-model" in log  # smp_no_margin came first and left it there
