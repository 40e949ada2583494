"""The operations of a pipeline, which transform its elements."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.transforms.base import Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from millstream.transforms.batching.batch import Batch, PaddedBatch
from millstream.transforms.components import OnlyFor, WithComponent
from millstream.transforms.packing.rows import Pack

# Grain's names, which are no part of the contract.
FilterTransform = Filter
FlatMapTransform = FlatMap
MapTransform = Map
MapWithIndexTransform = MapWithIndex
RandomMapTransform = RandomMap
Transformations = Sequence[Transformation]

if TYPE_CHECKING:
    from millstream.tf_example.encoding import encode_example
    from millstream.tf_example.features import FixedLengthFeature, RaggedColumn, VariableLengthFeature
    from millstream.transforms.batching.by_length import BucketBatch, PadTo, TokenBudgetBatch
    from millstream.transforms.example_decoding import decode_example, decode_examples
    from millstream.transforms.grain_classes import DatasetSelectionMap
    from millstream.transforms.grain_classes import (
        PackAndBatchOperation as PackAndBatchOperation,
    )
    from millstream.transforms.packing.bins import BestFitPack, FirstFitPack
    from millstream.transforms.packing.concat_then_split import BOSHandling, ConcatThenSplit
    from millstream.transforms.regrouping import Rebatch, WindowShuffle
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = [
    "BOSHandling",
    "Batch",
    "BestFitPack",
    "BucketBatch",
    "ConcatThenSplit",
    "DatasetSelectionMap",
    "Filter",
    "FirstFitPack",
    "FixedLengthFeature",
    "FlatMap",
    "Map",
    "MapWithIndex",
    "OnlyFor",
    "Pack",
    "PadTo",
    "PaddedBatch",
    "RaggedColumn",
    "RandomMap",
    "Rebatch",
    "TokenBudgetBatch",
    "Transformation",
    "VariableLengthFeature",
    "WindowShuffle",
    "WithComponent",
    "decode_example",
    "decode_examples",
    "encode_example",
]
