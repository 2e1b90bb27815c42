"""The datasets, one file each: a manifest (which images, which split) and how its images are read into a uint8 store.

To add one, write a function from `DataConfig` to `Dataset` and name it in the registry, or offer it from another
package by the entry point group `fscil.datasets`.
"""

from fscil.data.datasets.common import Dataset, array_dataset, file_dataset, load_dataset

__all__ = ["Dataset", "array_dataset", "file_dataset", "load_dataset"]
