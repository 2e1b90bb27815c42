"""What killed processes leave in a run folder is cleared away, links in it are refused, and nothing else is touched."""

import os

import pytest

from fscil.errors import UserError
from fscil.evaluation.results import load_results
from fscil.experiments.leftovers import clear, never_began
from probe_world import run

pytestmark = pytest.mark.usefixtures("probe")


@pytest.mark.parametrize("left", [[], ["split.json"], ["split.json", "shots.json", "hashes.json"]])
def test_a_run_that_was_killed_before_it_began_can_be_started_again(tmp_path, left):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in [".lock", ".config.yaml.abcd1234.part", *left]:
        (folder / name).write_text("half")
    with pytest.raises(UserError, match="stopped before it began; start it again with --output"):
        run(folder, resume=True)
    results = run(folder)
    assert len(results.sessions) == 3 and not list(folder.rglob("*.part"))


@pytest.mark.parametrize(
    "names", [["split.json"], [".lock", "notes.txt"], ["my.part"], [".lock", "split.json", "mine"]]
)
def test_folders_with_files_of_others_are_left_alone(tmp_path, names):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        run(folder)
    assert sorted(os.listdir(folder)) == sorted(names) and not never_began(folder)
    assert all((folder / name).read_text() == "mine" for name in names)


def test_files_half_written_go_at_the_next_start(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("x")
    ours = [folder / ".hashes.json.x1y2z3_4.part", folder / "checkpoints" / ".session_0.safetensors.aaaaaaaa.part"]
    theirs = [folder / "my.part", folder / ".hidden", folder / "checkpoints" / "x.part"]
    for path in ours + theirs:
        path.write_text("")
    clear(folder)
    assert not any(path.exists() for path in ours) and all(path.exists() for path in theirs)


@pytest.mark.parametrize("name", [".lock", "config.yaml", "hashes.json", "checkpoints/session_0.safetensors"])
def test_a_run_folder_with_a_link_is_refused_and_its_target_untouched(tmp_path, name):
    folder, target = tmp_path / "run", tmp_path / "target"
    run(folder)
    (folder / "results.json").unlink()
    path = folder / name
    target.write_bytes(path.read_bytes() if path.exists() else b"precious")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    kept = target.read_bytes()
    with pytest.raises(UserError, match="symbolic link"):
        run(folder, resume=True)
    with pytest.raises(UserError, match="symbolic link"):
        load_results(folder)
    assert kept == target.read_bytes() and path.is_symlink()


def test_checkpoints_are_not_written_elsewhere(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run(folder)
    (folder / "results.json").unlink()
    (folder / "checkpoints").rename(elsewhere)
    (folder / "checkpoints").symlink_to(elsewhere, target_is_directory=True)
    before = sorted(os.listdir(elsewhere))
    with pytest.raises(UserError, match="symbolic link"):
        run(folder, resume=True)
    assert sorted(os.listdir(elsewhere)) == before
