"""What happens to an element: the operations of a pipeline."""

from typing import TYPE_CHECKING

from millstream import late_names
from millstream.transforms.base import Filter, FlatMap, Map, MapWithIndex, RandomMap
from millstream.transforms.batch import Batch, PaddedBatch
from millstream.transforms.only_for import OnlyFor
from millstream.transforms.pack import Pack
from millstream.transforms.transformation import Transformation

FilterTransform = Filter
FlatMapTransform = FlatMap
MapTransform = Map
MapWithIndexTransform = MapWithIndex
RandomMapTransform = RandomMap

if TYPE_CHECKING:
    from millstream.example_features import FixedLengthFeature, RaggedColumn, VariableLengthFeature
    from millstream.transforms.best_fit import BestFitPack
    from millstream.transforms.example_encoding import encode_example
    from millstream.transforms.examples import decode_examples
    from millstream.transforms.first_fit import FirstFitPack
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "BestFitPack": "millstream.transforms.best_fit",
            "FirstFitPack": "millstream.transforms.first_fit",
            "FixedLengthFeature": "millstream.example_features",
            "RaggedColumn": "millstream.example_features",
            "VariableLengthFeature": "millstream.example_features",
            "decode_examples": "millstream.transforms.examples",
            "encode_example": "millstream.transforms.example_encoding",
        },
    )

__all__ = [
    "Batch",
    "BestFitPack",
    "Filter",
    "FilterTransform",
    "FirstFitPack",
    "FixedLengthFeature",
    "FlatMap",
    "FlatMapTransform",
    "Map",
    "MapTransform",
    "MapWithIndex",
    "MapWithIndexTransform",
    "OnlyFor",
    "Pack",
    "PaddedBatch",
    "RaggedColumn",
    "RandomMap",
    "RandomMapTransform",
    "Transformation",
    "VariableLengthFeature",
    "decode_examples",
    "encode_example",
]
