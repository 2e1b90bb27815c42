"""The HTML report of a real (tiny) run: its content parsed back, hostile names, missing data, and a real browser."""

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from fscil.errors import UserError
from fscil.evaluation.report import write_report
from fscil.files import load_tensors, read_json, write_json
from headless import headless
from probe_world import rehash

CLASSES = ["apple", "bee", "cat", "<script>alert(1)<b>", 'dog" onload="x', "eel & fox", "gnu", "hen"]
VOID = {"meta", "link", "img", "br", "input", "hr", "use", "path"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs, SMP and the baseline, on class folders of coloured noise."""
    from fscil.backbones.vit import Backbone
    from fscil.config import resolve
    from fscil.experiments.run import run
    from tiny_world import make_vit

    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir()
        colour = rng.integers(40, 215, 3)
        for number in range(10):
            pixels = (colour + rng.normal(0, 45, (20, 24, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    folders = []
    for method in ("smp", "baseline"):
        config = resolve(
            method,
            "folder",
            backbone="tiny",
            data={"root": str(root), "base": 4, "way": 2, "shots": 2, "test_fraction": 0.5},
            transform={"size": 16, "resize": 16},
            runtime={"device": "cpu"},
            options={"epochs": 1, "rank": 2, "calibration_epochs": 1, "features_per_class": 8},
        )
        folders.append(tmp_path_factory.mktemp("runs") / method)
        run(config, folders[-1], backbone=Backbone(make_vit(), "tiny"))
    return folders


class Page(HTMLParser):
    """Collects tags and text, and checks that every opened tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.pieces = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.pieces))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.pieces.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    out = write_report(runs[:1], tmp_path_factory.mktemp("report") / "one.html")
    return Page(out.read_text(encoding="utf-8"))


def test_numbers_of_the_run_are_on_the_page(page, runs):
    results = read_json(runs[0] / "results.json")
    for session in results["sessions"]:
        assert f"{session['accuracy']:.2f}" in page.text
        assert f"{session['seconds']:.1f} s" in page.text
    assert f"{results['summary']['A_avg']:.1f} %" in page.text
    assert f"{results['sessions'][-1]['trainable_parameters']:,} trainable parameters" in page.text
    assert results["environment"]["torch"] in page.text and results["stream"]["split_hash"] in page.text
    assert "options.calibration_margin" in page.text and "SMP on Folder" in page.text


def test_page_is_self_contained(page):
    links = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    links += [value for _, attributes in page.tags for key, value in attributes.items() if key.endswith(":href")]
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert not page.all("script") and not page.all("iframe")
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert "default-src 'none'" in policy


def test_hostile_class_names_stay_text(page):
    assert "<script>alert(1)<b>" in page.text and 'dog" onload="x' in page.text
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    titles = [attributes["title"] for attributes in page.all("p") if "title" in attributes]
    assert set(titles) <= set(CLASSES) and len(titles) == 4


def test_every_shot_and_the_confused_images_are_shown(page, runs):
    described = [image["alt"] for image in page.all("img")]
    shots = read_json(runs[0] / "shots.json")["tasks"]
    assert sum(alt.startswith("shot of ") for alt in described) == sum(
        len(images) for classes in shots.values() for images in classes.values()
    )
    tensors, _ = load_tensors(runs[0] / "predictions" / "session_2.safetensors")
    wrong = (tensors["labels"] != tensors["top"][:, 0]).sum().item()
    assert wrong > 0
    pairs = re.findall(r"(\d+) of 5 test images", page.text)
    assert 0 < len(pairs) <= 12 and sum(map(int, pairs)) <= wrong
    assert sum(", taken for " in alt for alt in described) == sum(min(4, int(count)) for count in pairs)


def test_the_title_names_a_chosen_head(runs, tmp_path):
    copy = moved(runs[1], tmp_path, lambda results: results["config"].update(head={"name": "plda"}))
    page = Page(write_report([copy], tmp_path / "r.html", images=False).read_text(encoding="utf-8"))
    assert "Baseline + PLDA on Folder" in page.text and "Baseline on Folder" not in page.text


def test_fisher_figure_only_where_adapters_were_merged(page, runs, tmp_path):
    assert "How the adapters were merged" in page.text
    baseline = write_report(runs[1:], tmp_path / "b.html").read_text(encoding="utf-8")
    assert "How the adapters were merged" not in baseline


def test_several_runs_are_compared(runs, tmp_path):
    page = Page(write_report(runs, tmp_path / "two.html", title="A & B").read_text(encoding="utf-8"))
    assert "A & B" in page.text and "Lead over 2nd best" in page.text and "Baseline" in page.text
    assert len([d for d in page.all("details") if d.get("class") == "run"]) == 2
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_same_runs_give_the_same_page(runs, tmp_path):
    texts = [write_report(runs, tmp_path / name).read_bytes() for name in ("a.html", "b.html")]
    assert texts[0] == texts[1]


def moved(folder, tmp_path, change):
    """A copy of a run whose results.json says something else."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    results = read_json(copy / "results.json")
    change(results)
    write_json(copy / "results.json", results)
    rehash(copy)
    return copy


def test_missing_data_are_said_not_fatal(runs, tmp_path):
    copy = moved(runs[0], tmp_path, lambda results: results["config"]["data"].update(root=str(tmp_path / "gone")))
    page = Page(write_report([copy], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "Without images:" in page.text and "does not exist" in page.text
    assert page.all("img") == [] and "0.png" in page.text  # the shots are named instead
    out = write_report(runs[:1], tmp_path / "none.html", images=False)
    assert Page(out.read_text(encoding="utf-8")).all("img") == []


def test_other_data_are_noticed(runs, tmp_path):
    copy = moved(runs[0], tmp_path, lambda results: results["stream"].update(split_hash="0" * 16))
    page = Page(write_report([copy], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "another split than the run's" in page.text and page.all("img") == []


def test_unfinished_damaged_and_foreign_folders_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        write_report([tmp_path], tmp_path / "r.html")
    with pytest.raises(UserError, match="at least one"):
        write_report([], tmp_path / "r.html")
    copy = moved(runs[0], tmp_path, lambda results: results["sessions"][0].pop("hacc"))
    with pytest.raises(UserError, match=r'it lacks "sessions\[0\].hacc"'):
        write_report([copy], tmp_path / "r.html")
    raw = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps({**raw, "format_version": 99}))
    with pytest.raises(UserError, match="format version 99"):
        write_report([copy], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_in_a_real_browser(runs, tmp_path, width, scheme):
    out = write_report(runs, tmp_path / "report.html")
    with headless(width) as browser:
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        browser.get(out.as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        loaded = browser.execute_async_script(
            "const done = arguments[0];"
            "const images = [...document.images]; images.forEach(i => i.loading = 'eager');"
            "Promise.all(images.map(i => i.decode().then(() => i.naturalWidth, () => 0))).then(done);"
        )
        assert len(loaded) > 16 and all(loaded)
        drawn = browser.execute_script(
            "return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)"
        )
        assert len(drawn) >= 6 and all(height > 100 for height in drawn)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        paper, ink = browser.execute_script(
            "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
        )
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (paper, ink)]
        assert (brightness[0] > brightness[1]) == (scheme == "light")
        assert browser.get_log("browser") == []
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
