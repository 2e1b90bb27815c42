"""Few-shot class-incremental learning on pretrained Vision Transformers."""

from typing import Any

from fscil._version import __version__

__all__ = ["FewShotClassifier", "__version__", "run"]


def __getattr__(name: str) -> Any:
    """`fscil.FewShotClassifier` and `fscil.run`, imported on first use: they bring torch along."""
    if name == "FewShotClassifier":
        from fscil.teachable.estimator import FewShotClassifier

        return FewShotClassifier
    if name == "run":
        from fscil.experiments.api import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
