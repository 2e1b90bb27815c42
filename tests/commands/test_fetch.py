"""`fscil fetch`: what it says, offline and from a hub on this machine."""

import http.server
import os
import subprocess
import sys
import threading

import pytest
from PIL import Image

from fscil.backbones.loading import make_backbone
from fscil.config import DataConfig
from fscil.data.datasets import load_dataset

SMALL = "test_vit.r160_in1k"  # timm's smallest


def test_what_is_there_is_named_with_its_hash(fscil, tmp_path):
    for part in ("train", "test"):
        for name in ("ash", "oak"):
            (tmp_path / "trees" / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / "trees" / part / name / "1.png")
    status, out, err = fscil("fetch", "glyphs", "glyph_vit_a", "folder", "--data-root", tmp_path / "trees")
    assert status == 2 and "--data-root is the folder of one dataset" in err and out == ""
    status, out, err = fscil("fetch", "glyph_vit_a", "--data-root", tmp_path / "trees")
    assert status == 2 and "is the folder of a dataset; name one, or leave it out" in err and out == ""
    status, out, err = fscil("fetch", "glyph_vit_a", "folder", "--data-root", tmp_path / "trees")
    assert status == 0, err
    backbone, folder = out.splitlines()
    assert backbone.endswith(f"in the package, hash {make_backbone('glyph_vit_a').hash}")
    manifest = load_dataset("folder", DataConfig(root=str(tmp_path / "trees"))).manifest
    assert folder == f"folder: 4 images of 2 classes in {tmp_path / 'trees'}, split pack, hash {manifest.hash}"


def test_names_that_are_neither(fscil):
    for name, said in (
        ("glyph", 'neither a dataset nor a backbone. Did you mean "glyphs"'),
        ("torchvision:Flower102", 'Did you mean "Flowers102"'),
    ):
        status, _, err = fscil("fetch", name)
        assert status == 2 and said in err and len(err.splitlines()) == 1


def call(name, endpoint, tmp_path):
    """The command in a process of its own: the hub's address and caches are read when it is imported."""
    quiet = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    places = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "FSCIL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "fscil", "fetch", name]
    return subprocess.run(command, env={**quiet, **places}, capture_output=True, text=True)


@pytest.mark.slow
def test_weights_from_a_hub_and_again_without_it(tmp_path):
    import timm
    from safetensors.torch import save

    content = save(timm.create_model("test_vit", num_classes=1000).state_dict())

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self, body=False):
            if self.path != f"/timm/{SMALL}/resolve/main/model.safetensors":
                self.send_error(404)
                return
            self.send_response(200)
            for key, value in (("X-Repo-Commit", "0" * 40), ("ETag", '"1234"'), ("Content-Length", len(content))):
                self.send_header(key, str(value))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def do_GET(self):
            self.do_HEAD(body=True)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    first = call(SMALL, endpoint, tmp_path)
    server.shutdown()
    server.server_close()
    assert first.returncode == 0, first.stderr
    assert str(tmp_path / "hub") in first.stdout and ", hash " in first.stdout
    again = call(SMALL, endpoint, tmp_path)  # nobody answers there any more
    assert again.stdout == first.stdout, again.stderr


@pytest.mark.slow
def test_what_cannot_be_reached_is_one_line_with_the_fix(tmp_path):
    done = call(SMALL, "http://127.0.0.1:9", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert f'weights of backbone "{SMALL}" could not be fetched' in line and "--weights FILE" in line
