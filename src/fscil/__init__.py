"""Few-shot class-incremental learning on pretrained Vision Transformers."""

__version__ = "0.1.0"
