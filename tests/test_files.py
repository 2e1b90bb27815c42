"""Files are whole or absent, carry a version, and never need pickle."""

import errno
import hashlib
import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fscil import files
from fscil.errors import UserError
from fscil.files import atomic_write, digest_file, load_tensors, read_json, save_tensors, write_json


def test_json_round_trip_keeps_values_and_matrix_rows_on_one_line(tmp_path):
    data = {"a": 0.1 + 0.2, "list": [1, 2, 3], "matrix": [[1, 2], [3, 4]], "empty": {}, "none": None, "text": "é [ 1 ]"}
    write_json(tmp_path / "x.json", data)
    assert read_json(tmp_path / "x.json") == data
    text = (tmp_path / "x.json").read_text()
    assert "[1, 2]" in text and json.loads(text)["format_version"] == files.FORMAT_VERSION


def test_tensors_round_trip_with_their_types_and_description(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "float": whole,
        "view": whole[1:],  # shares memory with the first
        "transposed": whole.T,
        "integers": torch.tensor([1, -2]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    save_tensors(tmp_path / "x.safetensors", tensors, {"session": 3, "names": ["ä"]})
    loaded, meta = load_tensors(tmp_path / "x.safetensors")
    assert meta == {"session": 3, "names": ["ä"]}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format_version": 2}', "format version 2.*Upgrade"),
        ('{"format_version": 0}', "format version 0"),
        ("{}", "no format version"),
        ("[1]", "not written by fscil"),
        ("{", "not a JSON file"),
    ],
)
def test_foreign_json_is_refused(tmp_path, content, words):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=words):
        read_json(tmp_path / "x.json")


def test_foreign_tensors_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    with pytest.raises(UserError, match="No such file"):
        load_tensors(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(UserError, match="no format version"):
        load_tensors(path)
    save_file({"a": torch.ones(1)}, path, metadata={"format_version": "99"})
    with pytest.raises(UserError, match="format version 99"):
        load_tensors(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match="cannot read"):
        load_tensors(path)
    save_tensors(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-40])  # cut off
    with pytest.raises(UserError, match="cannot read"):
        load_tensors(path)


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "no permission")])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, code, words):
    path = tmp_path / "x.json"
    atomic_write(path, "old")

    def fail(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=words):
        atomic_write(path, "new")
    with pytest.raises(UserError, match=words):
        save_tensors(path, {"a": torch.ones(3)})
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX limits on file sizes")
def test_tensors_that_do_not_fit_leave_nothing(tmp_path):
    script = f"""
import resource, torch
from fscil.files import save_tensors
from fscil.errors import UserError
large = torch.ones(100_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_tensors({str(tmp_path / "x.safetensors")!r}, {{"a": large}})
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert os.listdir(tmp_path) == []


def test_an_interruption_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "x", "new")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        atomic_write(tmp_path / "file" / "x", "data")


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_written_files_have_ordinary_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        atomic_write(tmp_path / "x", b"data")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


def test_files_are_hashed_whole(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    (tmp_path / "long").write_bytes(b"a" * 3_000_000)  # longer than a block
    assert digest_file(tmp_path / "abc").startswith("ba7816bf8f01cfea")  # FIPS 180-2's own example
    assert digest_file(tmp_path / "long") == hashlib.sha256(b"a" * 3_000_000).hexdigest()
    assert digest_file(tmp_path / "abc", "md5") == "900150983cd24fb0d6963f7d28e17f72"  # RFC 1321


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files")
@pytest.mark.parametrize("name", ["new", "new/model", "self/new.png"])
def test_a_place_that_takes_no_files_is_refused_before_the_work(name):
    with pytest.raises(UserError, match=f'cannot write "/proc/{name}"'):
        files.check_place(f"/proc/{name}")


def test_a_place_below_a_file_is_refused_by_the_file(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match='"notes.txt" is a file; choose another folder'):
        files.check_place(tmp_path / "notes.txt" / "a" / "model")
    files.check_place(tmp_path / "notes.txt")  # whether it may be replaced is another question


def test_looking_at_a_place_leaves_nothing_there(tmp_path):
    for path in (tmp_path / "model", tmp_path / "a" / "b" / "figure.png", tmp_path):
        files.check_place(path)
    assert not list(tmp_path.iterdir())
