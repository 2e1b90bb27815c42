"""Few-shot class-incremental learning on pretrained Vision Transformers."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["FewShotClassifier", "__version__"]


def __getattr__(name: str) -> Any:
    """`fscil.FewShotClassifier`, imported on first use: it brings torch along."""
    if name == "FewShotClassifier":
        from fscil.estimator import FewShotClassifier

        return FewShotClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
