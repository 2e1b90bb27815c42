"""Figures: the numbers drawn are the numbers of the results, and every file format opens."""

import csv
import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from fscil.errors import UserError
from fscil.evaluation import charts, figures, paper
from fscil.evaluation.metrics import confusion
from fscil.evaluation.tables import group_runs
from made_up_runs import made_up_result

SEEDS = (2023, 2024)


def rows_of(chart):
    return list(csv.DictReader(io.StringIO(chart.csv())))


def summaries(results, name):
    return [result["summary"][name] for result in results]


@pytest.fixture
def groups():
    levels = {"baseline": (0.8, 0.5), "smp": (0.9, 0.7)}
    return group_runs([made_up_result(m, s, accuracy=level) for m, level in levels.items() for s in SEEDS])


def test_saving_gives_three_pictures_and_the_data(groups, tmp_path):
    written = figures.accuracy_curves({"Glyphs": groups}, stamp="fast: 1 epoch").save(tmp_path / "curves.v2")
    assert [path.name for path in written] == [f"curves.v2.{suffix}" for suffix in ("png", "svg", "pdf", "csv")]
    image = Image.open(written[0])
    assert min(image.size) > 500 and len(set(image.convert("L").tobytes())) > 50  # print resolution, and not empty
    assert ElementTree.parse(written[1]).getroot().tag.endswith("svg")
    assert written[2].read_bytes().startswith(b"%PDF")
    rows = list(csv.DictReader(written[3].open()))
    assert {row["note"] for row in rows} == {"fast: 1 epoch"}


def test_the_same_data_gives_the_same_files(groups):
    charts = [figures.base_new_bars({"Glyphs": groups}) for _ in range(2)]
    for suffix in ("png", "svg", "pdf"):
        assert charts[0].rendered(suffix) == charts[1].rendered(suffix)


def test_curves_are_means_over_seeds(groups):
    rows = rows_of(figures.accuracy_curves({"Glyphs": groups}))
    assert len(rows) == 2 * 4
    row = next(r for r in rows if (r["method"], r["task"]) == ("SMP", "2"))
    values = [result["sessions"][2]["accuracy"] for result in groups["SMP"]]
    assert float(row["mean"]) == pytest.approx(np.mean(values))
    assert float(row["std"]) == pytest.approx(np.std(values, ddof=1))


def test_drawn_lines_carry_the_data(groups):
    axes = figures.accuracy_curves({"Glyphs": groups}).figure.axes[0]
    drawn = sorted(line.get_ydata()[-1] for line in axes.get_lines())
    assert drawn == pytest.approx(sorted(np.mean(summaries(members, "A_final")) for members in groups.values()))


def test_curve_of_one_run_also_without_new_classes():
    result = made_up_result()
    rows = rows_of(figures.accuracy_curve(result))
    assert [float(row["all classes"]) for row in rows] == pytest.approx(result["summary"]["accuracies"])
    assert rows[0]["new classes"] == "" and rows[1]["classes"] == "16"
    assert len(rows_of(figures.accuracy_curve(made_up_result(tasks=0)))) == 1


def test_merging_bars_show_the_four_accuracies_and_the_papers():
    settings = {"m = 0": "single_m0", "m = 0.2": "single_m02", "merged": "miam"}
    groups = {label: [made_up_result(method, s) for s in SEEDS] for label, method in settings.items()}
    quoted = {"CIFAR100": {label: paper.MERGING["cifar100"][m]._asdict() for label, m in settings.items()}}
    chart = figures.merging_bars({"CIFAR100": groups}, quoted=quoted)
    rows = {(row["metric"], row["setting"]): row for row in rows_of(chart)}
    assert len(rows) == 4 * 3
    assert float(rows["new", "merged"]["mean"]) == pytest.approx(np.mean(summaries(groups["merged"], "new_accuracy")))
    assert float(rows["base", "m = 0"]["paper"]) == 92.5 and rows["A_avg", "m = 0"]["paper"] == ""
    low, high = chart.figure.axes[0].get_ylim()
    assert all(low < float(rows["base", label]["mean"]) < high for label in settings)


def test_sweeps_are_ordered_by_setting_and_quote_the_paper_on_its_datasets():
    margins = {0.25: [made_up_result()], 0.05: [made_up_result(seed=1)]}
    rows = rows_of(figures.margin_sweep({"Glyphs": margins}))
    assert [row["margin"] for row in rows if row["metric"] == "A_avg"] == ["0.05", "0.25"]
    by_shots = {k: [made_up_result(dataset="cub200", data={"shots": k})] for k in (1, 5)}
    rows = rows_of(figures.shots({"CUB200": by_shots}))
    assert [float(row["paper"]) for row in rows if row["metric"] == "A_final"] == [77.0, 86.6]
    assert float(rows[0]["mean"]) == pytest.approx(by_shots[1][0]["summary"]["A_final"])
    assert {row["paper"] for row in rows_of(figures.shots({"CUB200": by_shots}, beside_paper=False))} == {""}


def test_tradeoff_draws_base_against_new():
    results = {m: [made_up_result(seed=s, accuracy=(0.8 + m, 0.7 - m)) for s in SEEDS] for m in (0.0, 0.1, 0.2)}
    chart = figures.tradeoff({"Glyphs": results})
    path = chart.figure.axes[1].get_lines()[0]
    assert path.get_xdata() == pytest.approx([np.mean(summaries(results[m], "new_accuracy")) for m in sorted(results)])
    assert path.get_ydata() == pytest.approx([np.mean(summaries(results[m], "base_accuracy")) for m in sorted(results)])
    change = chart.figure.axes[0].get_lines()[0].get_ydata()
    assert change[0] == 0 and change[2] == pytest.approx(path.get_ydata()[2] - path.get_ydata()[0])


def test_fisher_figure_averages_seeds_and_fits_least_squares():
    rng = np.random.default_rng(0)
    results = [made_up_result(seed=s) for s in SEEDS]
    norms = rng.uniform(1, 5, (2, 6, 2, 2))  # seed, layer, set, projection
    for result, of_seed in zip(results, norms, strict=True):
        weights = of_seed / of_seed.sum(axis=1, keepdims=True)
        result["sessions"][0]["diagnostics"] = {"fisher_norms": of_seed.tolist(), "merge_weights": weights.tolist()}
    chart = figures.fisher({"Glyphs": results})
    rows = rows_of(chart)
    assert len(rows) == 2 * 6 * 2 * 2
    value = next(
        float(row["value"])
        for row in rows
        if (row["quantity"], row["set"], row["projection"], row["layer"]) == ("fisher_norms", "d", "v", "3")
    )
    assert value == pytest.approx(norms[:, 2, 1, 1].mean())
    weights_of_keys = chart.figure.axes[2]
    drawn, fitted = (weights_of_keys.get_lines()[i].get_ydata() for i in (0, 1))
    layers = np.arange(1, 7)
    expected = np.linalg.lstsq(np.stack([layers, np.ones(6)], 1), drawn, rcond=None)[0]
    assert fitted == pytest.approx(expected[0] * layers + expected[1])
    with pytest.raises(UserError, match="recorded no fisher_norms"):
        figures.fisher({"Glyphs": [made_up_result("baseline")]})


def test_confusion_matrix_keeps_every_count():
    counts = confusion([0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 0, 2], 3)
    rows = rows_of(figures.confusion_matrix(counts, base_classes=2))
    assert {(row["true"], row["predicted"]): int(row["images"]) for row in rows} == {
        ("0", "0"): 1, ("0", "1"): 1, ("1", "1"): 1, ("2", "2"): 2, ("2", "0"): 1,
    }  # fmt: skip


def test_inline_svg_follows_the_page_and_keeps_its_ids_to_itself():
    chart = figures.accuracy_curve(made_up_result())
    svg = chart.inline_svg("run1", 'a "quoted" <description>')
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == 'a "quoted" <description>' and "width:100%" in root.attrib["style"]
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert ids and all(name.startswith("run1-") for name in ids) and len(ids) == len(set(ids))
    used = [
        value[1:] for e in root.iter() for key, value in e.attrib.items() if key.endswith("href") if value[0] == "#"
    ]
    assert used and set(used) <= set(ids)
    assert "currentColor" in svg and charts.INK not in svg and "var(--line" in svg


def test_many_methods_stay_tellable_apart():
    labels = [*paper.TITLES.values(), *(f"mine {i}" for i in range(6))]
    looks = charts.looks_of(labels)
    assert len(set(looks.values())) == len(labels)
