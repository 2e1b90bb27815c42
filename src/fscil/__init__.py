"""Few-shot class-incremental learning on pretrained Vision Transformers."""

from typing import Any

from fscil._version import __version__

__all__ = ["FewShotClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    """`fscil.FewShotClassifier`, imported on first use: it brings torch along."""
    if name == "FewShotClassifier":
        from fscil.teachable.estimator import FewShotClassifier

        return FewShotClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
