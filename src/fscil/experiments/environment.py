"""What the numbers of a run were computed with, and the memory that took."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fscil
from fscil._version import __version__
from fscil.runtime import Runtime


def environment(runtime: Runtime) -> dict[str, Any]:
    """What the numbers were computed with."""
    on_gpu = runtime.device.type == "cuda"
    return {
        "fscil": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in ("torch", "torchvision", "timm", "numpy", "safetensors")},
        "cpu": _cpu(),
        "device": torch.cuda.get_device_name(runtime.device) if on_gpu else runtime.device.type,
        "precision": str(runtime.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processes": runtime.processes,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu() -> str:
    """The model of this machine's processor: others may round otherwise."""
    return _found(r"^model name\s*: (.*)$", "/proc/cpuinfo") or platform.processor() or platform.machine()


def _found(pattern: str, path: str) -> str | None:
    """What the group of a pattern matches in one of Linux's files about itself; None elsewhere."""
    with contextlib.suppress(OSError):
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
        return found[1].strip() if found else None
    return None


def _commit() -> str | None:
    """The git commit of the source, when the package runs from a checkout; "+" marks uncommitted changes."""
    here = Path(fscil.__file__).resolve().parent
    if here.parent.name != "src":
        return None
    try:
        commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "--", "."])
        outputs = [
            subprocess.run(["git", "-C", here, *command], capture_output=True, text=True, timeout=10, check=True).stdout
            for command in commands
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return outputs[0].strip() + ("+" if outputs[1].strip() else "")


class PeakMemory:
    """Most memory used since this object was made: of the process, and of the GPU where there is one."""

    def __init__(self, runtime: Runtime):
        self.device = runtime.device
        with contextlib.suppress(OSError):  # Linux only; elsewhere the peak is that of the whole process life
            Path("/proc/self/clear_refs").write_text("5")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> dict[str, int | None]:
        gpu = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {"peak_memory": self._process(), "peak_gpu_memory": gpu}

    @staticmethod
    def _process() -> int:
        peak = _found(r"VmHWM:\s+(\d+) kB", "/proc/self/status")
        if peak is not None:
            return int(peak) * 1024
        import psutil

        return psutil.Process().memory_info().rss
