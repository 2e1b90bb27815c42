"""The command line: it answers quickly, teaches, runs, and meets bad input with one line."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from fscil import __version__, cli, registry

SMALL = ["--limit", "3", "--device", "cpu", "--set", "data.base=6", "--set", "data.way=2", "--set", "data.tasks=2"]
SMALL += ["--set", "options.epochs=1", "--set", "options.views=1", "--set", "options.calibration_epochs=1"]


def test_help_imports_nothing_heavy():
    script = (
        "import sys; sys.argv = ['fscil', '--help']\n"
        "from fscil.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'timm', 'torchvision', 'matplotlib', 'gradio', 'ray', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout and "list" in done.stdout


@pytest.mark.parametrize("wrong", [["--method", "smq"], ["--dataset", "glyph"], ["--recipe", "nowhere"]])
def test_a_name_that_is_not_known_is_said_before_torch_is_imported(wrong):
    script = (
        "import sys\n"
        "from fscil.cli import main\n"
        f"try: main(['run', *{wrong!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "2 False", done.stderr


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "fscil", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"fscil {__version__}"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_an_encoding_lacks_is_escaped(encoding):
    """As text and, read back, as JSON."""
    names = ["M\u00f6we", "\u9dfa", "\U0001f426", "\udcff"]
    script = (
        "import sys; from fscil import cli\n"
        f"names = {names!a}\n"
        "cli.app = lambda *words, **options: print(__import__('json').dumps(names, ensure_ascii=False))\n"
        "cli.main([])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment)
    assert done.returncode == 0 and json.loads(done.stdout.decode(encoding)) == names, done.stderr


def test_help_is_in_the_order_of_work(fscil):
    _, out, _ = fscil("--help")
    places = [out.index(f"│ {name} ") for name in ("fit", "learn", "predict", "review", "app", "list", "run", "report")]
    assert places == sorted(places)
    headings = [out.index(heading) for heading in ("Your own photos", "Experiments", "Results")]
    assert headings == sorted(headings)
    assert {command.rich_help_panel for command in cli.app.registered_commands} == set(cli.PANELS)
    assert {name for line in cli.PANELS.values() for name in line.split()} == {
        c.name for c in cli.app.registered_commands
    }


def test_every_command_explains_itself(fscil):
    for command in cli.app.registered_commands:
        status, out, _ = fscil(command.name, "--help")
        assert status == 0 and command.name in out
        for name in ("<bool>", "<str>", "<int", "<float", "<path>", "<list", "INTEGER", "FLOAT", "list["):
            assert name not in out, f"{command.name} --help speaks Python: {name}"
        assert "Examples" in out or "Example" in out, f"{command.name} has no example in its help"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", ["smp", "baseline", "closed_form"]),
        ("datasets", ["glyphs", "cifar100", "folder"]),
        ("backbones", ["glyph_vit_a", registry.PAPER_BACKBONE]),
        ("recipes", ["glyphs/smp_full", "cub200/baseline"]),
    ],
)
def test_everything_that_can_be_chosen_is_listed(fscil, kind, names):
    status, out, _ = fscil("list", kind)
    assert status == 0
    assert set(names) <= {line.split()[0] for line in out.splitlines() if line}


def test_a_small_run_from_end_to_end(fscil, weights, tmp_path):
    status, out, err = fscil("run", *SMALL, "--weights", weights, "--output", "mine", "--method", "smp")
    assert status == 0, err
    assert "A_avg" in out and "results in mine" in out
    assert "estimate: about" in err and err.count("session ") == 3
    content = json.loads((tmp_path / "mine" / "results.json").read_text())
    assert [session["seen"] for session in content["sessions"]] == [6, 8, 10]
    assert content["config"]["data"]["limit"] == 3 and len(content["sessions"][-1]["per_class"]) == 10
    config = yaml.safe_load((tmp_path / "mine" / "config.yaml").read_text())
    assert (config["data"]["shots"], config["recipe"], config["transform"]["size"]) == (5, "glyphs/smp", 48)

    # the same shots again, from the ledger, with another method and without a word
    ledger = tmp_path / "mine" / "shots.json"
    shots = ["--shots-file", ledger, "--seed", "1", "--quiet", "--output", "again"]
    status, out, err = fscil("run", *SMALL, "--weights", weights, "--method", "closed_form", *shots)
    assert status == 0 and err == ""
    assert (
        json.loads((tmp_path / "again" / "shots.json").read_text())["tasks"] == json.loads(ledger.read_text())["tasks"]
    )

    for arguments, words in (
        (["--resume", "mine"], "finished"),
        (["--output", "mine"], "not empty"),
        (["--resume", "mine", "--output", "other"], "exclude"),
        (["--resume", "mine", "--fast"], "--fast"),
    ):
        assert_one_line(fscil("run", *arguments), words)
    stored = (tmp_path / "mine" / "config.yaml").read_text()
    (tmp_path / "mine" / "config.yaml").write_text(stored.replace("format_version: 1", "format_version: 7"))
    assert_one_line(fscil("run", "--resume", "mine"), "format version 7")
    (tmp_path / "mine" / "config.yaml").write_text(stored)
    (tmp_path / "mine" / "results.json").unlink()
    assert_one_line(fscil("run", "--resume", "mine", "--seed", "1"), "another configuration (seed: 2023 -> 1)")


def assert_one_line(outcome, words):
    status, _, err = outcome
    lines = err.splitlines()
    assert status == 2, err
    assert len(lines) == 1 and lines[0].startswith("fscil: error: "), err
    assert words in lines[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "smq"], 'unknown method "smq". Did you mean "smp"?'),
        (["--dataset", "glyph"], 'unknown dataset "glyph". Did you mean "glyphs"?'),
        (["--backbone", "glyph_vit_c"], 'Did you mean "glyph_vit_'),
        (["--backbone", "vit_base_patch16_224"], "no tag"),
        (["--recipe", "glyphs/smq"], 'unknown recipe "glyphs/smq"'),
        (["--recipe", "missing.yaml"], "missing.yaml"),
        (["--set", "options.epoch=3"], 'Did you mean "options.epochs"?'),
        (["--set", "options.epochs=three"], '"options.epochs" must be a whole number, got "three"'),
        (["--set", "epochs"], "key=value"),
        (["--set", "nokey=1"], 'unknown key "nokey". Known: method, dataset,'),
        (["--set", "options.batch_size=0"], '"options.batch_size" must be at least 1, got 0'),
        (["--set", "options.lr=-1"], '"options.lr" must be at least 0, got -1.0'),
        (["--set", "options.views=0"], "options.views must be at least 1, or null for fresh ones, got 0"),
        (["--limit", "0"], '--limit "0": '),
        (["--precision", "fp61"], '"runtime.precision" must be one of auto, fp32, bf16'),
        (["--device", "abacus"], "abacus"),
        (["--set", "data.base=90", "--set", "data.tasks=3"], "105 classes"),
        (["--set", "data.shots=100000"], "100000"),
        (["--weights", "missing.safetensors"], "missing.safetensors"),
        (["--resume", "nowhere"], "not a run folder"),
        (["--shots-file", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(fscil, weights, tmp_path, arguments, words):
    if not {"--weights", "--backbone", "--resume"} & set(arguments):
        arguments = [*arguments, "--weights", str(weights)]
    assert_one_line(fscil("run", *arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_architecture_are_refused(fscil, tmp_path, tmp_path_factory):
    from safetensors.torch import save_file

    from tiny_world import make_vit

    path = tmp_path_factory.mktemp("other") / "other.safetensors"
    save_file(make_vit(img_size=48, embed_dim=64).state_dict(), path)
    assert_one_line(fscil("run", "--weights", path), "another architecture")
    path.write_bytes(b"not tensors")
    assert_one_line(fscil("run", "--weights", path), "not a readable safetensors file")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(fscil, weights, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert_one_line(fscil("run", *SMALL, "--weights", weights, "--output", "file/run"), "cannot write")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX limits on file sizes")
def test_a_disk_that_fills_up_is_one_line_and_the_run_can_go_on(weights, tmp_path):
    """A limit on file sizes stands for the full disk: small files fit, the first checkpoint does not."""
    script = (
        "import resource, sys\n"
        "from fscil.cli import main\n"
        "import fscil.experiments.run\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))\n"
        "main()"
    )
    run = ["run", *SMALL, "--weights", weights, "--output", tmp_path / "run", "--quiet"]
    full = subprocess.run([sys.executable, "-c", script, *run], capture_output=True, text=True)
    assert full.returncode == 2 and full.stderr.startswith("fscil: error: cannot write"), full.stderr
    assert full.stderr.count("\n") == 1
    assert not list((tmp_path / "run").rglob("*.part"))
    go_on = [sys.executable, "-m", "fscil", "run", "--resume", tmp_path / "run", "--quiet"]
    done = subprocess.run(go_on, capture_output=True, text=True)
    assert done.returncode == 0 and "A_avg" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "Did you mean fscil fit (your own photos) or fscil run (an experiment)? See: fscil --help"),
        (["teach", "m"], "Did you mean fscil learn? See"),
        (["methods"], "Did you mean fscil list methods?"),
        (["run", "smp"], "(smp). Did you mean --method smp? See: fscil run --help"),
        (["run", "cifar100", "smp"], "Did you mean --dataset cifar100 --method smp?"),
        (["compare", "smp", "baseline"], "write: --methods smp,baseline"),
        (["compare", "--methods", "smp", "baseline"], '"baseline" is a method, not a folder of runs'),
        (["run", "--head", "chord"], 'unknown head "chord". It is a method: --method chord.'),
        (["run", "--method", "glyphs"], "It is a dataset: --dataset glyphs."),
        (["run", "--dataset", "."], "For pictures of your own: --dataset folder --data-root ."),
        (["run", "--recipe", "smp"], "cifar100/smp, cub200/smp, glyphs/smp, imagenet_r/smp"),
        (["run", "--set", "options.learning_rate=1"], 'Did you mean "options.lr"?'),
    ],
)
def test_what_a_newcomer_types_is_answered_by_what_was_meant(fscil, tmp_path, arguments, words):
    assert_one_line(fscil(*arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_or_option_is_not_a_traceback(fscil):
    for arguments in (["rum"], ["run", "--methd", "smp"], ["list", "colours"]):
        status, _, err = fscil(*arguments)
        assert status == 2 and "Traceback" not in err and err
