"""Tables against numbers computed by hand, by scipy, or printed in the paper; every format is parsed back."""

import csv
import io
import re

import numpy as np
import pytest
from scipy import stats

from fscil.errors import UserError
from fscil.evaluation import paper
from fscil.evaluation.metrics import harmonic
from fscil.evaluation.rendering import print_table, render, write_table
from fscil.evaluation.tables import (
    difference_table,
    group_runs,
    main_table,
    metric_table,
    over_seeds,
    paired_difference,
)
from made_up_runs import made_up_result

SEEDS = (2023, 2024, 2025)


@pytest.fixture
def results():
    levels = {"baseline": (0.8, 0.5), "smp": (0.9, 0.7), "teen": (0.85, 0.6)}
    return [made_up_result(method, seed, accuracy=level) for method, level in levels.items() for seed in SEEDS]


# ------------------------------------------------------------------------------------------------- the paper's own data


@pytest.mark.parametrize("dataset", paper.MAIN)
def test_the_papers_averages_follow_from_its_rows(dataset):
    for method, row in paper.MAIN[dataset].items():
        assert np.mean(row.accuracies) == pytest.approx(row.average, abs=0.11), method
    assert len(paper.MAIN[dataset]) == 15 == len(paper.TITLES)


def test_the_papers_tables_agree_with_each_other():
    for dataset, rows in paper.ABLATION.items():
        assert rows["smp"] == (paper.MAIN[dataset]["smp"].final, paper.MAIN[dataset]["smp"].average)
        assert rows["smp"] == paper.SHOTS[dataset][5]
    for dataset, rows in paper.CALIBRATION_MARGIN.items():
        assert rows["miam"] == paper.ABLATION[dataset]["miam"] and rows["smp"] == paper.ABLATION[dataset]["smp"]
    base, new = paper.MERGING["cifar100"]["miam"]
    assert 0.6 * base + 0.4 * new == pytest.approx(paper.ABLATION["cifar100"]["miam"].final, abs=0.06)
    exceptions = {("imagenet_r", "l2p_plus")}  # posted numbers that do not give the paper's HAcc
    for dataset, rows in paper.BASE_NEW.items():
        for method, (base, new) in rows.items():
            if (dataset, method) not in exceptions:
                assert harmonic(base, new) == pytest.approx(paper.MAIN[dataset][method].hacc, abs=0.7), (
                    dataset,
                    method,
                )


def test_reported_by_configuration():
    assert paper.reported("cifar100", "smp")["hacc"] == 87.1
    assert paper.reported("cifar100", "smp", shots=1) == {"A_final": 79.3, "A_avg": 85.9}
    assert paper.reported("cub200", "smp", pretraining="21k") == {"A_final": 87.0, "A_avg": 87.1}
    assert paper.reported("glyphs", "smp") == {} and paper.reported("cifar100", "teen", shots=1) == {}


# ---------------------------------------------------------------------------------------------- grouping and statistics


def test_grouping_gathers_seeds_and_names_what_differs(results):
    groups = group_runs(results)
    assert list(groups) == ["Baseline", "SMP", "TEEN"] and all(len(members) == 3 for members in groups.values())
    shots = [made_up_result(seed=s, data={"shots": k}) for k in (1, 5) for s in SEEDS]
    assert list(group_runs(shots)) == ["SMP (data.shots=1)", "SMP (data.shots=5)"]
    elsewhere = [made_up_result(seed=1), made_up_result(seed=2, runtime={"device": "cuda"}, recipe="x")]
    assert list(group_runs(elsewhere)) == ["SMP"]
    with pytest.raises(UserError, match="^SMP on Glyphs: two of the runs have the same settings and seed 2023; leave"):
        group_runs([made_up_result(), made_up_result()])


def test_rows_are_told_apart_by_their_weights():
    def with_weights(path, digest=None, seed=2023):
        result = made_up_result(seed=seed, weights=path)
        return {**result, "environment": {"backbone": {"hash": digest}}} if digest else result

    assert list(group_runs([with_weights("here/a.safetensors"), with_weights("b.safetensors")])) == [
        "SMP (weights=a.safetensors)", "SMP (weights=b.safetensors)",
    ]  # fmt: skip
    same_name = [with_weights("one/w.safetensors", "1" * 16), with_weights("two/w.safetensors", "2" * 16)]
    assert list(group_runs(same_name)) == ["SMP (weights=w.safetensors)", "SMP (weights=w.safetensors 2222222)"]
    copied = [with_weights(None, "1" * 16), with_weights("copy.safetensors", "1" * 16, seed=2024)]
    assert {label: len(members) for label, members in group_runs(copied).items()} == {"SMP": 2}


def test_over_seeds_is_the_sample_standard_deviation():
    value = over_seeds([1.0, 4.0, None, 7.0])
    assert (value.mean, value.spread) == (4.0, pytest.approx(np.std([1, 4, 7], ddof=1)))
    assert over_seeds([3.0]).spread is None and over_seeds([None]) is None


def test_paired_difference_agrees_with_scipy():
    rng = np.random.default_rng(0)
    first, second = rng.normal(80, 2, 5), rng.normal(78, 2, 5)
    ours = paired_difference(first, second, 0.9)
    interval = stats.ttest_rel(first, second).confidence_interval(0.9)
    assert ours.mean == pytest.approx(np.mean(first - second))
    assert ours.interval == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert paired_difference([2.0], [1.0]).interval is None


# --------------------------------------------------------------------------------------------------------------- tables


def test_main_table_numbers(results):
    table = main_table(group_runs(results), extras=("trainable_parameters", "minutes"))
    smp = [r for r in results if r["config"]["method"] == "smp"]
    row = table.row("SMP").values
    assert row["A_2"].mean == pytest.approx(np.mean([r["sessions"][2]["accuracy"] for r in smp]))
    assert row["A_2"].spread == pytest.approx(np.std([r["sessions"][2]["accuracy"] for r in smp], ddof=1))
    assert row["hacc"].mean == pytest.approx(np.mean([r["sessions"][-1]["hacc"]["group"] for r in smp]))
    assert row["A_avg"].mean == pytest.approx(np.mean([[s["accuracy"] for s in r["sessions"]] for r in smp]))
    assert row["trainable_parameters"].mean == 737280 and row["minutes"].mean == pytest.approx(126 / 60)
    assert row["A_avg"].bold and not table.row("Baseline").values["A_avg"].bold

    averages = sorted(table.row(label).values["A_avg"].mean for label in ("Baseline", "SMP", "TEEN"))
    margin = table.row("Lead over 2nd best", "margin")
    assert margin.values["A_avg"].mean == pytest.approx(averages[-1] - averages[-2])
    assert "minutes" not in margin.values


def test_papers_row_stands_beside_ours_where_it_exists():
    protocol = {"dataset": "cifar100", "base": 60, "way": 5, "tasks": 8, "per_class": 2}
    results = [made_up_result(method, **protocol) for method in ("smp", "smp_average")]
    table = main_table(group_runs(results))
    quoted = [row for row in table.rows if row.kind == "paper"]
    assert [row.label for row in quoted] == ["SMP"]
    assert [quoted[0].values[f"A_{t}"].mean for t in range(9)] == list(paper.MAIN["cifar100"]["smp"].accuracies)
    assert quoted[0].values["hacc"].mean == 87.1 and not any(value.bold for value in quoted[0].values.values())
    ablation = main_table(group_runs([made_up_result("miam", **protocol)])).row("+MIAM", "paper").values
    assert {key: value.mean for key, value in ablation.items()} == {"A_8": 88.1, "A_avg": 90.7}
    smoke = [made_up_result(**protocol, data={"limit": 10})]
    assert all(row.kind != "paper" for row in main_table(group_runs(smoke)).rows)


def test_ties_are_all_bold_and_lower_is_better_for_fpr(results):
    tied = [made_up_result("smp"), {**made_up_result("smp"), "config": {**made_up_result("teen")["config"]}}]
    table = metric_table(group_runs(tied), ("A_avg",))
    assert all(row.values["A_avg"].bold for row in table.rows)
    table = metric_table(group_runs(results), ("fpr",))
    best = min(table.rows, key=lambda row: row.values["fpr"].mean)
    assert [row.label for row in table.rows if row.values["fpr"].bold] == [best.label]


def test_metric_table_sets_the_papers_column_beside_ours():
    protocol = {"dataset": "cifar100", "base": 60, "way": 5, "tasks": 8, "per_class": 2}
    groups = group_runs([made_up_result(m, **protocol) for m in ("baseline", "miam", "mpcc", "smp")])
    table = metric_table(groups, ("A_final", "A_avg"))
    assert list(table.columns) == ["A_final", "A_final_paper", "A_avg", "A_avg_paper"]
    assert [row.values["A_avg_paper"].mean for row in table.rows] == [90.0, 90.7, 90.5, 91.0]
    assert list(metric_table(groups, ("A_final",), beside_paper=False).columns) == ["A_final"]


def test_differences_pair_common_seeds_only(results):
    results = [r for r in results if (r["config"]["method"], r["config"]["seed"]) != ("teen", 2024)]
    table = difference_table(group_runs(results), "SMP", ("A_avg",))
    value = table.row("TEEN").values
    by = {(r["config"]["method"], r["config"]["seed"]): r["summary"]["A_avg"] for r in results}
    first, second = ([by[m, s] for s in (2023, 2025)] for m in ("smp", "teen"))
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert value["A_avg"].interval == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert value["seeds"].mean == 2 and table.row("Baseline").values["seeds"].mean == 3
    with pytest.raises(UserError, match='Did you mean "SMP"'):
        difference_table(group_runs(results), "SNP")


def test_unequal_runs_are_refused(results):
    with pytest.raises(UserError, match="sessions"):
        main_table(group_runs([*results, made_up_result("asp", tasks=2)]))
    with pytest.raises(UserError, match="several: cub200, glyphs"):
        main_table(group_runs([*results, made_up_result("asp", dataset="cub200")]))
    with pytest.raises(UserError, match="no finished runs"):
        main_table({})
    with pytest.raises(UserError, match='Did you mean "A_avg"'):
        metric_table(group_runs(results), ("A_avgg",))


# ------------------------------------------------------------------------------------------------------------ rendering


def test_csv_keeps_full_precision(results):
    table = main_table(group_runs(results))
    rows = list(csv.DictReader(io.StringIO(render(table, "csv"))))
    smp = next(row for row in rows if row["method"] == "SMP")
    assert float(smp["A_avg"]) == pytest.approx(table.row("SMP").values["A_avg"].mean, rel=1e-9)
    assert float(smp["hacc_std"]) == pytest.approx(table.row("SMP").values["hacc"].spread, rel=1e-9)
    assert next(row for row in rows if row["kind"] == "margin")["A_avg_std"] == ""


def test_markdown_is_a_table_with_the_best_in_bold(results):
    table = main_table(group_runs(results))
    lines = [line for line in render(table, "markdown").splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert lines[0].startswith("| Method | 0 | 1 | 2 | 3 | A\\_avg | HAcc |")
    value = table.row("SMP").values["A_avg"]
    smp = next(line for line in lines if line.startswith("| SMP |"))
    assert f"**{value.mean:.1f}** ± {value.spread:.1f}" in smp
    hostile = metric_table({"a|b <script>": [made_up_result()]}, ("A_avg",))
    assert "a\\|b \\<script\\>" in render(hostile, "markdown")


def test_latex_is_balanced_booktabs(results):
    text = render(main_table(group_runs(results)), "latex")
    assert [text.count(rule) for rule in (r"\toprule", r"\bottomrule")] == [1, 1] and r"\cmidrule(lr){2-5}" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {6}
    assert text.count("{") == text.count("}") and text.count("$") % 2 == 0 and r"\textbf{" in text and r"$\pm$" in text
    hostile = metric_table({"50% & more_of {it} \\": [made_up_result()]}, ("A_avg",))
    assert r"50\% \& more\_of \{it\} \textbackslash{}" in render(hostile, "latex")


def test_screen_shows_as_much_of_the_single_tasks_as_fits(results):
    from rich.console import Console

    table = main_table(group_runs(results))
    shown = {}
    for width in (56, 70, 120):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        print_table(table, console)
        shown[width] = console.file.getvalue()
    average = table.row("SMP").values["A_avg"]
    assert all(f"{average.mean:.1f} ± {average.spread:.1f}" in text and "…" not in text for text in shown.values())
    middle = f"{table.row('SMP').values['A_1'].mean:.1f}"
    smp = {width: next(line for line in text.splitlines() if "SMP" in line) for width, text in shown.items()}
    assert [smp[width].count("±") for width in (56, 70, 120)] == [2, 2, 6]
    assert middle in smp[70] and len(smp[56].split()) < len(smp[70].split())
    assert "every task" in shown[56] and "± of each task" in shown[70] and "wider" not in shown[120]


def test_files_are_written_side_by_side(results, tmp_path):
    table = main_table(group_runs(results))
    written = write_table(table, tmp_path / "main.table")
    assert [path.name for path in written] == ["main.table.csv", "main.table.md", "main.table.tex"]
    assert written[1].read_text() == render(table, "markdown")
    with pytest.raises(UserError, match='Did you mean "latex"'):
        render(table, "latx")
