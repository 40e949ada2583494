"""The operations of a pipeline, which transform its elements."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.transforms.base import Filter, FlatMap, Map, MapWithIndex, RandomMap
from millstream.transforms.batch import Batch, PaddedBatch
from millstream.transforms.only_for import OnlyFor
from millstream.transforms.packing.pack import Pack
from millstream.transforms.transformation import Transformation
from millstream.transforms.with_component import WithComponent

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
    from millstream.transforms.batching.buckets import BucketBatch
    from millstream.transforms.batching.pad_to import PadTo
    from millstream.transforms.batching.rebatch import Rebatch
    from millstream.transforms.batching.token_budget import TokenBudgetBatch
    from millstream.transforms.dataset_selection import DatasetSelectionMap
    from millstream.transforms.example_decoding import decode_example, decode_examples
    from millstream.transforms.packing.best_fit import BestFitPack
    from millstream.transforms.packing.concat_then_split import BOSHandling, ConcatThenSplit
    from millstream.transforms.packing.first_fit import FirstFitPack
    from millstream.transforms.packing.pack_and_batch import (
        PackAndBatchOperation as PackAndBatchOperation,
    )
    from millstream.transforms.window_shuffle import WindowShuffle
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "BOSHandling": "millstream.transforms.packing.concat_then_split",
            "BestFitPack": "millstream.transforms.packing.best_fit",
            "BucketBatch": "millstream.transforms.batching.buckets",
            "ConcatThenSplit": "millstream.transforms.packing.concat_then_split",
            "DatasetSelectionMap": "millstream.transforms.dataset_selection",
            "FirstFitPack": "millstream.transforms.packing.first_fit",
            "FixedLengthFeature": "millstream.tf_example.features",
            "PackAndBatchOperation": "millstream.transforms.packing.pack_and_batch",
            "PadTo": "millstream.transforms.batching.pad_to",
            "RaggedColumn": "millstream.tf_example.features",
            "Rebatch": "millstream.transforms.batching.rebatch",
            "TokenBudgetBatch": "millstream.transforms.batching.token_budget",
            "VariableLengthFeature": "millstream.tf_example.features",
            "WindowShuffle": "millstream.transforms.window_shuffle",
            "decode_example": "millstream.transforms.example_decoding",
            "decode_examples": "millstream.transforms.example_decoding",
            "encode_example": "millstream.tf_example.encoding",
        },
    )

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
