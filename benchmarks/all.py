"""Every benchmark that this machine can run, one after the other, and what they print into RESULTS.md.

    python benchmarks/all.py                         # all of them, those for GPUs only where there is one: an hour
    python benchmarks/all.py --only startup scale    # some of them

Each runs in a process of its own; one that fails leaves what RESULTS.md had of it and does not stop the others. Only
the parts between this script's marks are rewritten; what people wrote around them stays.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
HEADING = "## Made by `python benchmarks/all.py`"
HOURS_AT_MOST = 2


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder and its arguments; `released`: what the authors' released code takes for the same."""

    name: str
    arguments: str = ""
    gpu: bool = False
    released: str = ""

    @property
    def command(self) -> str:
        return f"python benchmarks/{self.name}.py {self.arguments}".strip()


BENCHMARKS = (
    Benchmark("train_step", gpu=True, released="152.6 s a base epoch of CIFAR100 (scaled from 40 batches; fp32)"),
    Benchmark("fisher", gpu=True, released="155 s for the Fisher passes of CIFAR100"),
    Benchmark("pipeline", "--epochs 1", gpu=True, released="about 65 minutes for the whole recipe"),
    Benchmark("startup", "--repeat 3"),
    Benchmark("teaching"),
    Benchmark("recognise"),
    Benchmark("scale"),
    Benchmark("labelling"),
    Benchmark("openset"),
    Benchmark("serving", "--clients 1 8 32 --seconds 5"),
    Benchmark("bulk"),
)


def placed(text: str, name: str, body: str) -> str:
    """RESULTS.md with the part of one benchmark replaced, or added at the end if there was none."""
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    part = f"{first}\n{body.strip()}\n{last}"
    if first in text:
        return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: part, text, flags=re.DOTALL)
    heading = "" if HEADING in text else f"\n{HEADING}\n"
    return f"{text.rstrip()}\n{heading}\n{part}\n"


def measured(benchmark: Benchmark, commit: str, hardware: str) -> str | None:
    """The part of one benchmark; None if it failed, which is said on stderr."""
    began = time.time()
    command = [sys.executable, str(HERE / f"{benchmark.name}.py"), *benchmark.arguments.split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600 * HOURS_AT_MOST, cwd=HERE.parent)
        problem = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
        if done.returncode == 0:
            day = time.strftime("%Y-%m-%d", time.gmtime(began))
            head = f"### {benchmark.name}\n\n| command | commit | hardware | date | s |\n|---|---|---|---|---|\n"
            row = f"| `{benchmark.command}` | {commit} | {hardware} | {day} | {time.time() - began:.0f} |"
            theirs = f"\n\nThe authors' released code, ViT-B/16, one H200: {benchmark.released}."
            printed = re.sub(r"(?m)^([^|\n].*)\n(?=\|)", r"\1\n\n", done.stdout.strip())  # a table wants room above it
            return f"{head}{row}\n\n{printed}{theirs if benchmark.released else ''}"
    except subprocess.TimeoutExpired:
        problem = f"longer than {HOURS_AT_MOST} hours"
    print(f"{benchmark.name} failed: {problem}", file=sys.stderr, flush=True)
    return None


def hardware() -> tuple[str, bool]:
    """The machine in a few words, and whether it has a GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), True
    known = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", known.read_text()) if known.exists() else []
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}, load average {load:.0f}", False


def main(chosen: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[benchmark.name for benchmark in BENCHMARKS])
    only = parser.parse_args(chosen).only
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=HERE
    )
    commit, (machine, gpu), failed = described.stdout.strip() or "unknown", hardware(), 0
    for benchmark in BENCHMARKS:
        if (only and benchmark.name not in only) or (benchmark.gpu and not gpu):
            continue
        print(benchmark.command, flush=True)
        body = measured(benchmark, commit, machine)
        failed += body is None
        if body is not None:
            RESULTS.write_text(placed(RESULTS.read_text(encoding="utf-8"), benchmark.name, body), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
