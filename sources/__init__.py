"""Sources of records: files of many formats, memory, and several sources as one."""

from typing import TYPE_CHECKING

from millstream import lazy_imports
from millstream.sources.base import DataSource
from millstream.sources.memory import InMemoryDataSource, RangeDataSource

RandomAccessDataSource = DataSource
SharedMemoryDataSource = InMemoryDataSource

if TYPE_CHECKING:
    from millstream.sources.array_record import ArrayRecordDataSource
    from millstream.sources.bagz import BagzDataSource
    from millstream.sources.concatenated import ConcatenatedDataSource
    from millstream.sources.csv_rows import CsvDataSource
    from millstream.sources.hdf5 import Hdf5DataSource
    from millstream.sources.hugging_face import HuggingFaceDataSource
    from millstream.sources.image_folder import ImageFolderDataSource
    from millstream.sources.json_lines import JsonLinesDataSource
    from millstream.sources.lance_rows import LanceDataSource
    from millstream.sources.mds import MdsDataSource
    from millstream.sources.megatron import MegatronDataSource
    from millstream.sources.parquet import ParquetDataSource
    from millstream.sources.storage.file_cache import FileCache
    from millstream.sources.text_lines import TextLineDataSource
    from millstream.sources.tfds import TfdsDataSource
    from millstream.sources.tfrecord import TFRecordDataSource
    from millstream.sources.tokens import TokenDataSource
    from millstream.sources.webdataset import WebDatasetDataSource
    from millstream.sources.whole_files import FileDataSource
    from millstream.sources.zarr_arrays import ZarrDataSource
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "ArrayRecordDataSource": "millstream.sources.array_record",
            "BagzDataSource": "millstream.sources.bagz",
            "ConcatenatedDataSource": "millstream.sources.concatenated",
            "CsvDataSource": "millstream.sources.csv_rows",
            "FileCache": "millstream.sources.storage.file_cache",
            "FileDataSource": "millstream.sources.whole_files",
            "Hdf5DataSource": "millstream.sources.hdf5",
            "HuggingFaceDataSource": "millstream.sources.hugging_face",
            "ImageFolderDataSource": "millstream.sources.image_folder",
            "JsonLinesDataSource": "millstream.sources.json_lines",
            "LanceDataSource": "millstream.sources.lance_rows",
            "MdsDataSource": "millstream.sources.mds",
            "MegatronDataSource": "millstream.sources.megatron",
            "ParquetDataSource": "millstream.sources.parquet",
            "TFRecordDataSource": "millstream.sources.tfrecord",
            "TextLineDataSource": "millstream.sources.text_lines",
            "TfdsDataSource": "millstream.sources.tfds",
            "TokenDataSource": "millstream.sources.tokens",
            "WebDatasetDataSource": "millstream.sources.webdataset",
            "ZarrDataSource": "millstream.sources.zarr_arrays",
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
