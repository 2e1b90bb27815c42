"""Few-shot class-incremental learning on pretrained Vision Transformers.

Names are imported on first use, so that `import fscil` brings neither torch nor anything else along:

>>> import fscil
>>> "smp" in fscil.list_methods() and "closed_form" in fscil.list_heads()
True
"""

from typing import TYPE_CHECKING, Any

from fscil._version import __version__

if TYPE_CHECKING:
    from fscil.backbones.loading import make_backbone
    from fscil.backbones.vit import Backbone
    from fscil.config import RunConfig, resolve
    from fscil.data.datasets import Dataset
    from fscil.data.stream import Stream, Task
    from fscil.errors import UserError
    from fscil.evaluation.results import load_results
    from fscil.experiments.api import run
    from fscil.heads.base import Head
    from fscil.methods.base import Method
    from fscil.registry import DatasetEntry, HeadEntry, MethodEntry
    from fscil.registry import backbones as list_backbones
    from fscil.registry import datasets as list_datasets
    from fscil.registry import heads as list_heads
    from fscil.registry import methods as list_methods
    from fscil.serving.host import Host
    from fscil.teachable.estimator import FewShotClassifier

__all__ = [
    "Backbone",
    "Dataset",
    "DatasetEntry",
    "FewShotClassifier",
    "Head",
    "HeadEntry",
    "Host",
    "Method",
    "MethodEntry",
    "RunConfig",
    "Stream",
    "Task",
    "UserError",
    "__version__",
    "list_backbones",
    "list_datasets",
    "list_heads",
    "list_methods",
    "load_results",
    "make_backbone",
    "resolve",
    "run",
]

# Where each name lives: "module:name".
_PUBLIC = {
    "Backbone": "fscil.backbones.vit:Backbone",
    "Dataset": "fscil.data.datasets:Dataset",
    "DatasetEntry": "fscil.registry:DatasetEntry",
    "FewShotClassifier": "fscil.teachable.estimator:FewShotClassifier",
    "Head": "fscil.heads.base:Head",
    "HeadEntry": "fscil.registry:HeadEntry",
    "Host": "fscil.serving.host:Host",
    "Method": "fscil.methods.base:Method",
    "MethodEntry": "fscil.registry:MethodEntry",
    "RunConfig": "fscil.config:RunConfig",
    "Stream": "fscil.data.stream:Stream",
    "Task": "fscil.data.stream:Task",
    "UserError": "fscil.errors:UserError",
    "list_backbones": "fscil.registry:backbones",
    "list_datasets": "fscil.registry:datasets",
    "list_heads": "fscil.registry:heads",
    "list_methods": "fscil.registry:methods",
    "load_results": "fscil.evaluation.results:load_results",
    "make_backbone": "fscil.backbones.loading:make_backbone",
    "resolve": "fscil.config:resolve",
    "run": "fscil.experiments.api:run",
}


def __getattr__(name: str) -> Any:
    """A public name, imported on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC} - {"Any", "TYPE_CHECKING"})
