"""What is built and promised outside of the code: the wheel's contents and the commands of the README."""

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_everything_the_package_reads(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("fscil-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = [path for path in (source / "fscil").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(source).as_posix() for path in files}
    assert wanted - inside == set()
    assert any(name.endswith("LICENSE") for name in inside)


def readme_commands() -> list[str]:
    """The `fscil …` lines of the README that need neither data nor network."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    needs_data = ("cifar100", "cub200", "imagenet_r", "--dataset folder", "photos", "birds", "RUN")
    return [line for line in lines if line.startswith("fscil ") and not any(word in line for word in needs_data)]


@pytest.mark.slow
@pytest.mark.parametrize("command", readme_commands())
def test_the_commands_of_the_readme_work(command, tmp_path):
    arguments = shlex.split(command)[1:]
    done = subprocess.run([sys.executable, "-m", "fscil", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    method, method_entry, data, data_entry = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    points = "".join(re.findall(r"```toml\n\[project\.entry-points\.(.*?)```", text, re.DOTALL))
    package, info = tmp_path / "my_package", tmp_path / "my_package-1.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(method_entry + data_entry)
    (package / "nearest_mean.py").write_text(method)
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
    command = ["run", "--method", "nearest_mean", "--dataset", "leaves", "--data-root", tmp_path / "leaves", "--quiet"]
    command += ["--backbone", "glyph_vit_a", "--weights", weights, "--device", "cpu", "--output", tmp_path / "run"]
    for setting in ("data.base=2", "data.way=1", "data.shots=1", "options.temperature=8"):
        command += ["--set", setting]
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(word) for word in command])
        assert not stop.value.code, capsys.readouterr().err
        assert "nearest_mean" in registry.methods() and "leaves" in registry.datasets()
    finally:
        registry._third_party.cache_clear()
    results = load_results(tmp_path / "run")
    assert results.stream["class_names"] == ["birch", "oak", "yew"]
    assert results.summary["A_final"] == 100  # three plain colours are not hard
