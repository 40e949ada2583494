"""Sources of records: files of many formats, memory, and several sources as one."""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.sources.base import DataSource
from millstream.sources.memory import InMemoryDataSource, RangeDataSource

RandomAccessDataSource = DataSource
SharedMemoryDataSource = InMemoryDataSource

if TYPE_CHECKING:
    from millstream.sources.concatenated import ConcatenatedDataSource
    from millstream.sources.file_formats import FileFormat
    from millstream.sources.files.file_cache import FileCache
    from millstream.sources.files.spans import SpanFormat
    from millstream.sources.formats.array_record import ArrayRecordDataSource
    from millstream.sources.formats.bagz import BagzDataSource
    from millstream.sources.formats.hdf5 import Hdf5DataSource
    from millstream.sources.formats.hugging_face import HuggingFaceDataSource
    from millstream.sources.formats.lance_rows import LanceDataSource
    from millstream.sources.formats.lines import CsvDataSource, JsonLinesDataSource, TextLineDataSource
    from millstream.sources.formats.mds import MdsDataSource
    from millstream.sources.formats.parquet import ParquetDataSource
    from millstream.sources.formats.tfds import TfdsDataSource
    from millstream.sources.formats.tfrecord import TFRecordDataSource
    from millstream.sources.formats.tokens import MegatronDataSource, TokenDataSource
    from millstream.sources.formats.webdataset import WebDatasetDataSource
    from millstream.sources.formats.whole_files import FileDataSource, ImageFolderDataSource
    from millstream.sources.formats.zarr_arrays import ZarrDataSource
    from millstream.sources.windows import WindowDataSource
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = [
    "ArrayRecordDataSource",
    "BagzDataSource",
    "ConcatenatedDataSource",
    "CsvDataSource",
    "DataSource",
    "FileCache",
    "FileDataSource",
    "FileFormat",
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
    "SpanFormat",
    "TFRecordDataSource",
    "TextLineDataSource",
    "TfdsDataSource",
    "TokenDataSource",
    "WebDatasetDataSource",
    "WindowDataSource",
    "ZarrDataSource",
]
