"""What needs an extra does not get in the way of people without it."""

import os
import subprocess
import sys
from pathlib import Path

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fastapi", "gradio", "uvicorn", "starlette", "pydantic", "prometheus_client"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--doctest-modules", sys.argv[1]]))
"""


def test_doctests_of_serving_are_collected_without_the_extras():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "FSCIL_REQUIRE_ALL": ""}
    command = [sys.executable, "-c", REFUSE, str(root / "src" / "fscil" / "serving")]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "error" not in done.stdout
