"""`fscil leaderboard`: which runs it takes, what its pages say, and how they behave in a browser."""

import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fscil.config import resolve
from fscil.errors import UserError
from fscil.evaluation import paper
from fscil.evaluation.results import find_runs
from fscil.experiments.leaderboard import choose, write_site
from fscil.files import read_json, write_json
from headless import headless
from made_up_runs import as_stored, made_up_result
from probe_world import run, tiny_config, unhash


class Table(HTMLParser):
    """The cells of a page's table, headings first, and its links."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.links, self.inside = [], [], False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        if tag == "a":
            self.links.append(dict(attributes)["href"])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data.strip("\n")

    def column(self, title):
        place = self.rows[0].index(title)
        return {row[0]: row[place] for row in self.rows[1:]}


@pytest.fixture
def runs(probe, tmp_path):
    """Two seeds of one method, and one of another, as real run folders."""
    folder = tmp_path / "runs"
    for seed in (1, 2):
        run(folder / f"probe{seed}", replace(tiny_config(epochs=1), seed=seed))
    run(folder / "thawed", tiny_config("thawed", epochs=1))
    return folder


def made_up(folder, method, seed=2023, dataset="cifar100", **changes):
    result = made_up_result(method, seed, dataset, 60, 5, 8, per_class=2)
    result["config"] = {**resolve(method, dataset, seed=seed).to_dict(), **changes}
    write_json(folder / "results.json", as_stored(result, 60, 5, 8))
    return result


def test_real_runs_stand_on_a_page_with_their_means_and_links(runs, tmp_path, fscil):
    status, out, err = fscil("leaderboard", runs, "-o", tmp_path / "site")
    assert status == 0 and err == "" and "3 runs on 1 page" in out
    table = Table(tmp_path / "site" / "glyphs.html")
    stored = [read_json(runs / name / "results.json") for name in ("probe1", "probe2")]
    averages = [result["summary"]["A_avg"] for result in stored]
    assert table.column("A_avg")["probe*"] == f"{statistics.mean(averages):.1f} ± {statistics.stdev(averages):.1f}"
    assert table.column("Seeds") == {"probe*": "2", "thawed*": "1"}
    passes = statistics.mean(result["environment"]["passes"] for result in stored)
    assert table.column("Passes")["probe*"] == f"{passes:,.0f}" and passes > 0
    assert table.column("Code")["thawed*"].startswith(f"{len(stored[0]['environment']['modules'])} modules, ")
    links = [link for link in table.links if link.startswith("runs/")]
    assert len(links) == 3
    for link in links:
        name = link.removeprefix("runs/").removesuffix(".json")
        assert (tmp_path / "site" / link).read_bytes() == (runs / name / "results.json").read_bytes()
    assert "glyphs.html" in Table(tmp_path / "site" / "index.html").links


def test_what_is_damaged_cut_short_unhashed_or_unfinished_is_refused_by_name(runs, tmp_path, fscil):
    predictions = runs / "probe1" / "predictions" / "session_0.safetensors"
    predictions.write_bytes(predictions.read_bytes()[:-1] + b"\x07")
    unhash(runs / "probe2")
    made_up(tmp_path / "runs" / "fast", "smp", recipe="cifar100/smp+fast")
    made_up(tmp_path / "runs" / "chosen", "teen", data={"validation": True})
    (runs / "half").mkdir()
    (runs / "half" / "config.yaml").write_text("format_version: 1\n")
    status, _, err = fscil("leaderboard", runs, "-o", tmp_path / "site")
    lines = {line.split('"')[1].rpartition("/")[2]: line for line in err.splitlines()}
    assert status == 1 and lines.keys() == {"probe1", "probe2", "fast", "chosen", "half"}
    for name, said in (
        ("probe1", "session_0.safetensors"),
        ("probe2", "unhashed"),
        ("fast", "does not verify"),
        ("chosen", "validation stream"),
        ("half", "not finished"),
    ):
        assert lines[name].startswith("refused: ") and said in lines[name], lines[name]
    assert list(Table(tmp_path / "site" / "glyphs.html").column("Seeds")) == ["thawed*"]

    entries, refused = choose(find_runs([runs]), include_unverified=True)
    assert any("--include-limited" in line and "/fast" in line for line in refused) and len(refused) == 3
    assert {entry.folder.name for entry in entries} == {"probe1", "probe2", "thawed"}
    write_site(entries, tmp_path / "marked")
    text = (tmp_path / "marked" / "glyphs.html").read_text()
    assert "probe*†" in text and "† Not verified: probe, seed 1 (files" in text and str(tmp_path) not in text
    entries, refused = choose(find_runs([runs]), include_limited=True, include_unverified=True)
    assert len(refused) == 2 and len(entries) == 4
    write_site(entries, tmp_path / "all")
    assert "reduced recipe (--fast)" in (tmp_path / "all" / "cifar100.html").read_text().lower()


def test_nothing_to_show_is_one_line(tmp_path, fscil):
    made_up(tmp_path / "run", "smp")
    status, _, err = fscil("leaderboard", tmp_path / "run")
    assert status == 2 and "none of these folders holds a run to show" in err.splitlines()[-1]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write_site([], tmp_path / "file")


def test_the_papers_numbers_stand_beside_ours_with_their_source(tmp_path):
    for method in ("smp", "teen", "closed_form"):
        made_up(tmp_path / "runs" / method, method)
    entries, _ = choose(find_runs([tmp_path / "runs"]), include_unverified=True)
    write_site(entries, tmp_path / "site")
    table = Table(tmp_path / "site" / "cifar100.html")
    quoted = {row.rstrip("*†"): value for row, value in table.column("A_avg (paper)").items()}
    assert quoted == {
        "SMP": str(paper.MAIN["cifar100"]["smp"].average),
        "TEEN": str(paper.MAIN["cifar100"]["teen"].average),
        "MIAM + closed form": "",
    }
    assert "arXiv 2508.05094" in (tmp_path / "site" / "cifar100.html").read_text()


def test_everything_from_files_is_escaped_and_names_are_safe(tmp_path):
    for place in ("a", "b"):  # two folders of one name
        made_up(tmp_path / place / "run <1>", "smp", seed=ord(place), backbone="<img src=x onerror=alert(1)>")
    entries, _ = choose(find_runs([tmp_path / "a", tmp_path / "b"]), include_unverified=True)
    write_site(entries, tmp_path / "site", title="<b>ours</b>")
    page = (tmp_path / "site" / "cifar100.html").read_text()
    assert "<img" not in page and "<b>ours" not in page and "&lt;img src=x" in page
    copies = sorted(path.name for path in (tmp_path / "site" / "runs").iterdir())
    assert len(copies) == 2 and all(re.fullmatch(r"[A-Za-z0-9-]+\.json", name) for name in copies)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_two_pages_or_copies_are_never_one_file(tmp_path):
    for place, dataset in (("a/run", "hf:birds/north"), ("b/Run", "hf:birds-north")):
        made_up(tmp_path / "runs" / place, "smp", dataset=dataset)
    entries, _ = choose(find_runs([tmp_path / "runs"]), include_unverified=True)
    pages = write_site(entries, tmp_path / "site")
    assert [page.name for page in pages] == ["hf-birds-north.html", "hf-birds-north-2.html", "index.html"]
    assert [Table(page).links[-1] for page in pages[:2]] == ["runs/run.json", "runs/Run-2.json"]


def test_runs_that_exclude_each_other_leave_no_half_a_site(tmp_path):
    for place in ("a", "b"):
        made_up(tmp_path / place, "smp")
    entries, _ = choose(find_runs([tmp_path / "a", tmp_path / "b"]), include_unverified=True)
    with pytest.raises(UserError, match="the same settings and seed 2023"):
        write_site(entries, tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
def test_it_sorts_and_fits_in_a_real_browser(tmp_path, width):
    from selenium.webdriver.common.keys import Keys

    for method in ("smp", "teen", "clom", "closed_form"):
        made_up(tmp_path / "runs" / method, method)
    entries, _ = choose(find_runs([tmp_path / "runs"]), include_unverified=True)
    write_site(entries, tmp_path / "site")

    def column(title):
        return browser.execute_script(
            "const heads = [...document.querySelectorAll('thead th')];"
            "const at = heads.findIndex(h => h.textContent.trim() === arguments[0]);"
            "return [heads[at].getAttribute('aria-sort'),"
            " [...document.querySelectorAll('tbody tr')].map(r => r.cells[at])"
            ".map(cell => cell.dataset.sort ?? cell.textContent)]",
            title,
        )

    def press(title):
        browser.find_element("xpath", f"//th/button[normalize-space()='{title}']").send_keys(Keys.ENTER)

    with headless(width) as browser:
        browser.get((tmp_path / "site" / "cifar100.html").as_uri())
        order, values = column("A_avg")
        assert order == "descending" and values == sorted(values, key=float, reverse=True)
        press("A_avg")
        order, values = column("A_avg")
        assert order == "ascending" and values == sorted(values, key=float)
        press("FNR")  # lower is better: first
        order, values = column("FNR")
        assert order == "ascending" and values == sorted(values, key=float) and column("A_avg")[0] == "none"
        press("A_avg (paper)")
        values = column("A_avg (paper)")[1]
        assert values[-1] == "" and "" not in values[:-1]  # what the paper does not have comes last
        press("Method")
        values = column("Method")[1]
        assert values == sorted(values, key=str.lower)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(
            "const box = document.querySelector('.scroll'); return box.scrollWidth > box.clientWidth"
        )
        assert browser.get_log("browser") == []
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
