"""What is built and promised outside of the code: wheel and sdist, versions, links, the examples of CONTRIBUTING."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("fscil-*.tar.gz"), folder.glob("fscil-*.whl")
    return {"sdist": sdist, "wheel": wheel}


def files_below(*folders: str) -> set[str]:
    """Files of the checkout, as paths from its root."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_what_is_built_holds_everything_the_package_and_its_tests_read(built):
    wheel = set(zipfile.ZipFile(built["wheel"]).namelist())
    assert {path.removeprefix("src/") for path in files_below("src/fscil")} - wheel == set()
    assert any(name.endswith("LICENSE") for name in wheel)
    with tarfile.open(built["sdist"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert files_below("src", "tests", "docs", "constraints") | {"Makefile", "conftest.py", "README.md"} <= sdist


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_runs_in_an_environment_of_its_own(kind, built, tmp_path):
    """A bare environment with nothing but the package; the dependencies are read from the one that runs this test."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", built[kind]], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    packages = subprocess.run([binaries / "python", "-c", code], env=environment, capture_output=True, text=True).stdout
    # paths named in a .pth file are searched, but their own .pth files, among them that of the checkout, are not read
    (Path(packages.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    command = [binaries / "fscil", "run", "--limit", "2", "--set", "options.epochs=1", "--quiet", "-o", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "results.json").exists()
    asked = [binaries / "python", "-c", "import fscil; print(fscil.__file__)"]
    assert subprocess.run(asked, env=environment, capture_output=True, text=True).stdout.startswith(packages.strip())


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(distribution): version for distribution, version in pairs}


def declared() -> dict[str, SpecifierSet]:
    """Every direct dependency of pyproject.toml, by a plain look at its strings."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project]")[2]
    found = re.findall(r'"([\w.-]+)(>=[\w.,<]+)"', text.partition("[project.scripts]")[0])
    return {canonicalize_name(name): SpecifierSet(versions) for name, versions in found}


def test_the_lowest_versions_are_those_that_are_declared():
    floors = {name: next(s.version for s in given if s.operator == ">=") for name, given in declared().items()}
    assert len(floors) > 30 and pins("lowest.txt") == floors


def test_the_tested_versions_hold_every_dependency_and_are_allowed():
    tested = pins("tested.txt")
    assert {name: tested[name] for name, versions in declared().items() if tested[name] not in versions} == {}


def test_the_linter_of_a_commit_is_the_one_of_the_tests():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.search(r"ruff-pre-commit\s+rev: v(\S+)", hooks)[1] == pins("tested.txt")["ruff"]


def test_the_workflow_pins_what_it_uses_and_checks_what_is_shipped():
    """Actions by commit; wheel and sdist built and tried; a bill of materials and an audit of the tested versions."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    used = re.findall(r"uses: (.*)", workflow)
    assert len(used) > 5 and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+(\.\d+)*", action) for action in used)
    steps = [step["run"] for job in yaml.safe_load(workflow)["jobs"].values() for step in job["steps"] if "run" in step]
    for wanted in (r"-m build.*\.whl.*\.tar\.gz.*fscil run", r"cyclonedx-py .*tested\.txt", r"pip-audit .*tested\.txt"):
        assert any(re.search(wanted, step, re.DOTALL) for step in steps), wanted


def test_the_readme_shows_make_first_and_names_existing_targets():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("make run") < text.index("make test") < text.index("pip install")
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_between_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://", "mailto:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_examples_of_contributing_work_from_another_package(weights, tmp_path, monkeypatch, capsys):
    """The code of the two pages, as a package of its own that is found by its entry points."""
    from PIL import Image

    from fscil import cli, registry
    from fscil.evaluation.results import load_results

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    method, method_entry, head, head_entry, data, data_entry = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    points = "".join(re.findall(r"```toml\n\[project\.entry-points\.(.*?)```", text, re.DOTALL))
    package, info = tmp_path / "my_package", tmp_path / "my_package-1.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(method_entry + head_entry + data_entry)
    (package / "nearest_mean.py").write_text(method)
    (package / "euclidean.py").write_text(head)
    (package / "data.py").write_text(data)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(re.sub(r'"(fscil\.\w+)"\]', r"[\1]", points).replace('"', ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._third_party.cache_clear()

    for part, count in (("train", 2), ("test", 1)):
        for number, name in enumerate(("birch", "oak", "yew")):
            (tmp_path / "leaves" / part / name).mkdir(parents=True)
            for copy in range(count):
                colour = (80 * number + 20 * copy, 200 - 60 * number, 10 + copy)
                Image.new("RGB", (50, 60), colour).save(tmp_path / "leaves" / part / name / f"{copy}.jpg")
    monkeypatch.setenv("FSCIL_CACHE", str(tmp_path / "cache"))
    command = ["run", "--method", "nearest_mean", "--head", "euclidean", "--dataset", "leaves", "--quiet"]
    command += ["--data-root", tmp_path / "leaves"]
    command += ["--backbone", "glyph_vit_a", "--weights", weights, "--device", "cpu", "--output", tmp_path / "run"]
    for setting in ("data.base=2", "data.way=1", "data.shots=1", "options.temperature=8"):
        command += ["--set", setting]
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(word) for word in command])
        assert not stop.value.code, capsys.readouterr().err
        assert "nearest_mean" in registry.methods() and "leaves" in registry.datasets()
        assert "euclidean" in registry.heads()
    finally:
        registry._third_party.cache_clear()
    results = load_results(tmp_path / "run")
    assert results.stream["class_names"] == ["birch", "oak", "yew"]
    assert results.summary["A_final"] == 100  # three plain colours are not hard
