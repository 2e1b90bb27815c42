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
    """Random weights of the glyph backbone, for tests that look at the command, not at accuracy."""
    import torch
    from safetensors.torch import save_file
    from timm.models.vision_transformer import VisionTransformer

    from fscil.backbones.vit import GLYPH_VITS

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    save_file(VisionTransformer(num_classes=0, **GLYPH_VITS["glyph_vit_a"]).state_dict(), path)
    return path
