"""The names of `grain.experimental`. Their datasets and functions are not experimental here."""

from typing import TYPE_CHECKING

from millstream import dataset
from millstream.core import lazy_imports
from millstream.grain_names import REMEDIES

if TYPE_CHECKING:
    from millstream.dataset import *  # noqa: F403  (most of its names)
    from millstream.dataset.grain_compat.file_streams import (  # noqa: F401  (programs derive from Grain's)
        _TFRecordDatasetIterator,
        _TFRecordReader,
    )
    from millstream.dataset.grain_compat.prefetching import device_put
    from millstream.transforms import BOSHandling, FlatMapTransform, MapWithIndexTransform, PackAndBatchOperation

__all__ = ["BOSHandling", "FlatMapTransform", "MapWithIndexTransform", "PackAndBatchOperation", "device_put"]
__all__ += dataset.__all__
# These are in Grain's main module only. Type checkers know `remove`.
__all__.remove("DatasetIterator")  # noqa: PYI056
__all__.remove("IterDataset")  # noqa: PYI056
__all__.remove("MapDataset")  # noqa: PYI056

if not TYPE_CHECKING:
    __all__.sort()
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        dict.fromkeys(__all__, "millstream.dataset")
        | {
            "BOSHandling": "millstream.transforms",
            "FlatMapTransform": "millstream.transforms",
            "MapWithIndexTransform": "millstream.transforms",
            "PackAndBatchOperation": "millstream.transforms",
            "_TFRecordDatasetIterator": "millstream.dataset.grain_compat.file_streams",
            "_TFRecordReader": "millstream.dataset.grain_compat.file_streams",
            "device_put": "millstream.dataset.grain_compat.prefetching",
        },
        REMEDIES,
    )
