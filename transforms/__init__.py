"""What happens to an element: the operations of a pipeline."""

from millstream.example_features import FixedLengthFeature, RaggedColumn, VariableLengthFeature
from millstream.transforms.base import Filter, FlatMap, Map, MapWithIndex, RandomMap
from millstream.transforms.batch import Batch, PaddedBatch
from millstream.transforms.examples import decode_examples
from millstream.transforms.only_for import OnlyFor
from millstream.transforms.pack import Pack
from millstream.transforms.transformation import Transformation

FilterTransform = Filter
FlatMapTransform = FlatMap
MapTransform = Map
MapWithIndexTransform = MapWithIndex
RandomMapTransform = RandomMap

__all__ = [
    "Batch",
    "Filter",
    "FilterTransform",
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
]
