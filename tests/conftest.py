"""Fixtures of all tests. What happens where something is not installed is in the conftest.py above."""

import pytest


@pytest.fixture
def fscil(capsys, monkeypatch, tmp_path):
    """Run the command in an empty folder; returns (exit status, stdout, stderr)."""
    from fscil import cli

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A file of random weights for the backbone glyph_vit_a: tests do not depend on what the shipped ones can do."""
    from tiny_world import save_weights

    return save_weights(tmp_path_factory.mktemp("weights") / "random.safetensors")
