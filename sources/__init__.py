"""Sources of records: files of many formats, memory, and several sources as one."""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.sources.base import DataSource
from millstream.sources.memory import InMemoryDataSource, RangeDataSource

RandomAccessDataSource = DataSource
SharedMemoryDataSource = InMemoryDataSource

if TYPE_CHECKING:
    from millstream.sources.arrays.hdf5 import Hdf5DataSource
    from millstream.sources.arrays.megatron import MegatronDataSource
    from millstream.sources.arrays.tokens import TokenDataSource
    from millstream.sources.arrays.zarr_arrays import ZarrDataSource
    from millstream.sources.concatenated import ConcatenatedDataSource
    from millstream.sources.files.image_folder import ImageFolderDataSource
    from millstream.sources.files.whole_files import FileDataSource
    from millstream.sources.lines.csv_rows import CsvDataSource
    from millstream.sources.lines.json_lines import JsonLinesDataSource
    from millstream.sources.lines.text_lines import TextLineDataSource
    from millstream.sources.records.array_record import ArrayRecordDataSource
    from millstream.sources.records.bagz import BagzDataSource
    from millstream.sources.records.mds import MdsDataSource
    from millstream.sources.records.tfds import TfdsDataSource
    from millstream.sources.records.tfrecord import TFRecordDataSource
    from millstream.sources.records.webdataset import WebDatasetDataSource
    from millstream.sources.storage.file_cache import FileCache
    from millstream.sources.tables.hugging_face import HuggingFaceDataSource
    from millstream.sources.tables.lance_rows import LanceDataSource
    from millstream.sources.tables.parquet import ParquetDataSource
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "ArrayRecordDataSource": "millstream.sources.records.array_record",
            "BagzDataSource": "millstream.sources.records.bagz",
            "ConcatenatedDataSource": "millstream.sources.concatenated",
            "CsvDataSource": "millstream.sources.lines.csv_rows",
            "FileCache": "millstream.sources.storage.file_cache",
            "FileDataSource": "millstream.sources.files.whole_files",
            "Hdf5DataSource": "millstream.sources.arrays.hdf5",
            "HuggingFaceDataSource": "millstream.sources.tables.hugging_face",
            "ImageFolderDataSource": "millstream.sources.files.image_folder",
            "JsonLinesDataSource": "millstream.sources.lines.json_lines",
            "LanceDataSource": "millstream.sources.tables.lance_rows",
            "MdsDataSource": "millstream.sources.records.mds",
            "MegatronDataSource": "millstream.sources.arrays.megatron",
            "ParquetDataSource": "millstream.sources.tables.parquet",
            "TFRecordDataSource": "millstream.sources.records.tfrecord",
            "TextLineDataSource": "millstream.sources.lines.text_lines",
            "TfdsDataSource": "millstream.sources.records.tfds",
            "TokenDataSource": "millstream.sources.arrays.tokens",
            "WebDatasetDataSource": "millstream.sources.records.webdataset",
            "ZarrDataSource": "millstream.sources.arrays.zarr_arrays",
        },
    )

__all__ = [
    "ArrayRecordDataSource",
    "BagzDataSource",
    "ConcatenatedDataSource",
    "CsvDataSource",
    "DataSource",
    "FileCache",
    "FileDataSource",
    "Hdf5DataSource",
    "HuggingFaceDataSource",
    "ImageFolderDataSource",
    "InMemoryDataSource",
    "JsonLinesDataSource",
    "LanceDataSource",
    "MdsDataSource",
    "MegatronDataSource",
    "ParquetDataSource",
    "RandomAccessDataSource",
    "RangeDataSource",
    "SharedMemoryDataSource",
    "TFRecordDataSource",
    "TextLineDataSource",
    "TfdsDataSource",
    "TokenDataSource",
    "WebDatasetDataSource",
    "ZarrDataSource",
]
