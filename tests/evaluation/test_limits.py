"""A limited run says so wherever its numbers are shown; one that is what its recipe says carries no mark."""

import csv
import re

import pytest

from fscil.config import resolve
from fscil.evaluation.figures import accuracy_curve
from fscil.evaluation.limits import limits
from fscil.evaluation.results import load_results
from fscil.files import write_json
from made_up_runs import made_up_result

LIMITED = "limited to 5 images per class; epochs 1 instead of 4"


def result_of(method, settings=(), stream=None, **given):
    """Made-up numbers under a real configuration."""
    config = resolve(method, given.pop("dataset", "glyphs"), settings=settings, **given).to_dict()
    seed = config["seed"]
    made = made_up_result(method, seed, dataset=config["dataset"])
    facts = {"split_hash": "0" * 64, "base_classes": 12, "way": 4, "class_names": []}
    return {**made, "config": config, "stream": {**facts, **(stream or {})}, "confusion": []}


@pytest.fixture
def folders(tmp_path):
    """SMP as its recipe has it, two seeds; TEEN on five images per class for one epoch, two seeds."""
    for seed in (2023, 2024):
        write_json(tmp_path / f"smp{seed}" / "results.json", result_of("smp", seed=seed))
        reduced = result_of("teen", ["data.limit=5", "options.epochs=1"], seed=seed)
        write_json(tmp_path / f"teen{seed}" / "results.json", reduced)
    return tmp_path


def test_what_counts_as_a_limit():
    assert limits(result_of("smp")) == limits(result_of("miam", seed=7, weights="copy.safetensors")) == []
    assert limits(result_of("smp", runtime={"device": "cpu", "precision": "fp32"}, data={"root": "elsewhere"})) == []
    assert limits(result_of("teen", ["data.limit=1", "options.lr=0.5"])) == [
        "limited to 1 image per class", "lr 0.5 instead of 0.05",
    ]  # fmt: skip
    assert limits(result_of("smp", recipe="glyphs/smp_full")) == []  # another recipe is no change of it
    assert limits(result_of("smp", ["data.tasks=2"], backbone="glyph_vit_b")) == [
        "backbone \"glyph_vit_b\" instead of \"glyph_vit_a\"", "data.tasks 2",
    ]  # fmt: skip
    fast = limits(result_of("smp", fast=True))
    assert fast[:2] == ["limited to 20 images per class", "reduced recipe (--fast)"]
    assert "epochs 2 instead of 4" in fast and "views 4 instead of 8" in fast


def test_what_the_dataset_decides_is_compared_with_the_dataset():
    filled = ["data.base=60", "data.way=5", "data.shots=1"]  # as every finished run has them
    usual = {"usual": {"data.base": 60, "data.way": 5, "data.shots": 5}}
    assert limits(result_of("smp", filled, stream=usual)) == ["data.shots 1 instead of 5"]
    assert limits(result_of("smp", filled)) == []  # a run from before this was kept: unknown, so nothing is claimed


def test_a_recipe_or_method_that_is_not_here_leaves_what_is_certain():
    result = result_of("smp", ["data.limit=5", "options.epochs=1"])
    for change in ({"method": "of another package"}, {"recipe": "gone.yaml"}):
        assert limits({**result, "config": {**result["config"], **change}}) == ["limited to 5 images per class"]


def test_results_know_it(folders):
    assert load_results(folders / "teen2023").limits == LIMITED.split("; ")
    assert load_results(folders / "smp2023").limits == []
    assert "limited to 5 images per class" in repr(load_results(folders / "teen2023"))
    assert "limited" not in repr(load_results(folders / "smp2023")) + load_results(folders / "smp2023").table()
    assert LIMITED in load_results(folders / "teen2023").table()


def test_compare_marks_limited_rows_in_every_form(folders, fscil):
    status, out, err = fscil("compare", folders)
    assert status == 0, err
    note = f"* {LIMITED[0].upper()}{LIMITED[1:]}."
    tables = out.split("Base and new classes at the last task")
    assert all(note in part for part in tables) and out.count(note) == 3  # the differences as well
    assert re.search(r"^ TEEN\* ", out, re.MULTILINE) and not re.search(r"SMP\*", out)
    place = folders / "runs" / "grid" / "compare"
    for part in ("glyphs", "glyphs-details", "glyphs-differences"):
        markdown, latex = ((place / f"{part}.{form}").read_text(encoding="utf-8") for form in ("md", "tex"))
        assert r"| TEEN\* |" in markdown and rf"\{note}" in markdown and "SMP*" not in markdown
        assert "TEEN* &" in latex and note in latex
        with open(place / f"{part}.csv", encoding="utf-8") as file:
            rows = {row.get("method") or row["over"]: row for row in csv.DictReader(file)}
        assert rows["TEEN"]["limits"] == LIMITED
        assert rows.get("SMP", {"limits": ""})["limits"] == ""


def test_differences_from_a_limited_reference_are_all_marked(tmp_path, fscil):
    write_json(tmp_path / "smp" / "results.json", result_of("smp", ["data.limit=5"]))
    write_json(tmp_path / "teen" / "results.json", result_of("teen"))
    out = fscil("compare", tmp_path)[1]
    main, details, lead = re.split("Base and new classes at|Lead of SMP over", out)
    assert "SMP*" in main and "TEEN*" not in main + details and "TEEN*" in lead


def test_rows_that_name_what_was_varied_are_not_marked_for_it(tmp_path, fscil):
    for margin in (0.1, 0.2, 0.3):
        result = result_of("smp", [f"options.margin={margin}", "options.epochs=1"])
        write_json(tmp_path / str(margin) / "results.json", result)
    out = fscil("compare", tmp_path)[1]
    assert out.count("* Epochs 1 instead of 4.") == 3 and "SMP (margin=0.1)*" in out and "margin 0.1" not in out


def test_a_head_that_the_row_is_named_by_is_not_marked_but_its_changed_options_are(tmp_path, fscil):
    assert limits(result_of("miam", ["head.name=closed_form"])) == []
    assert limits(result_of("miam", ["head.name=ranpac_balanced"])) == []  # an entry with options of its own
    assert limits(result_of("miam", ["head.name=closed_form", "head.shrinkage=0.4"])) == [
        "head.shrinkage 0.4 instead of 0.3"
    ]
    assert limits(result_of("miam", ["head.name=plda", "options.epochs=1"])) == ["epochs 1 instead of 4"]
    for head in ("closed_form", "plda"):
        write_json(tmp_path / head / "results.json", result_of("miam", [f"head.name={head}"]))
    out = fscil("compare", tmp_path)[1]
    assert "+MIAM + closed form" in out and "+MIAM + PLDA" in out and "*" not in out


def test_a_head_that_a_recipe_of_another_head_was_given_is_compared_with_its_own_defaults(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("method: miam\nhead: {name: closed_form, shrinkage: 0.5}\n")
    assert limits(result_of("miam", recipe=str(recipe))) == []
    assert limits(result_of("miam", ["head={name: plda, shrinkage: 0.3}"], recipe=str(recipe))) == []


def test_runs_as_their_recipes_have_them_carry_no_mark(tmp_path, fscil):
    for method in ("smp", "teen", "baseline"):
        write_json(tmp_path / method / "results.json", result_of(method))
    out = fscil("compare", tmp_path)[1]
    assert "*" not in out and "imited" not in out
    with open(tmp_path / "runs" / "grid" / "compare" / "glyphs.csv", encoding="utf-8") as file:
        assert "limits" not in next(csv.reader(file))


def test_the_curve_says_whose_it_is_and_what_was_left_out():
    limited = accuracy_curve(result_of("teen", ["data.limit=5", "options.epochs=1"], seed=7))
    assert limited.figure.axes[0].get_title() == "TEEN on Glyphs, seed 7\nlimited to 5 images per class"
    assert limited.figure.get_supxlabel() == "epochs 1 instead of 4"
    assert {"note": "epochs 1 instead of 4"}.items() <= next(csv.DictReader(limited.csv().splitlines())).items()
    whole = accuracy_curve(result_of("smp"))
    assert whole.figure.axes[0].get_title() == "SMP on Glyphs, seed 2023" and whole.figure.get_supxlabel() == ""


def test_a_real_run_says_so_from_its_folder_to_its_report(fscil, weights, tmp_path):
    small = ["--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=1", "--set", "options.epochs=1"]
    command = ["run", "--method", "teen", "--limit", 2, *small, "--weights", weights, "--device", "cpu", "-q"]
    said = "limited to 2 images per class; data.base 6 instead of 60; data.tasks 1; data.way 2 instead of 5; "
    said += "epochs 1 instead of 4"
    status, out, err = fscil(*command, "-o", "run")
    assert status == 0 and said in " ".join(out.split()), out + err
    results = load_results(tmp_path / "run")
    assert "; ".join(results.limits) == said
    assert (tmp_path / "run" / "accuracy.png").read_bytes() == accuracy_curve(results.to_dict()).rendered("png")
    assert fscil("report", "run", "--no-images")[0] == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"Not the recipe&#39;s run: {said}." in page or f"Not the recipe's run: {said}." in page

    assert fscil(*command, "--seed", 1, "-o", "run1")[0] == 0
    assert fscil(*[word if word != "teen" else "baseline" for word in command], "-o", "run2")[0] == 0
    assert fscil("report", "run", "run1", "run2", "--no-images", "-o", "both.html")[0] == 0
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<td>TEEN*</td>" in page and f"* {said[0].upper()}{said[1:]}." in page
