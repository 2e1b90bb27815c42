"""Datasets, manifests, streams of tasks and the pixels they hold."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloads and decoded images are kept: $FSCIL_CACHE, else $XDG_CACHE_HOME/fscil, else ~/.cache/fscil."""
    if own := os.environ.get("FSCIL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "fscil"
