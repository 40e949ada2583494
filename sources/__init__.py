"""Where records come from: files of many formats, memory, several sources end to end, or anything with `len()`."""

from millstream.sources.array_record import ArrayRecordDataSource
from millstream.sources.bagz import BagzDataSource
from millstream.sources.base import DataSource
from millstream.sources.concatenated import ConcatenatedDataSource
from millstream.sources.csv_rows import CsvDataSource
from millstream.sources.file_cache import FileCache
from millstream.sources.json_lines import JsonLinesDataSource
from millstream.sources.megatron import MegatronDataSource
from millstream.sources.memory import InMemoryDataSource, RangeDataSource
from millstream.sources.text_lines import TextLineDataSource
from millstream.sources.tfrecord import TFRecordDataSource
from millstream.sources.webdataset import WebDatasetDataSource

__all__ = [
    "ArrayRecordDataSource",
    "BagzDataSource",
    "ConcatenatedDataSource",
    "CsvDataSource",
    "DataSource",
    "FileCache",
    "InMemoryDataSource",
    "JsonLinesDataSource",
    "MegatronDataSource",
    "RangeDataSource",
    "TFRecordDataSource",
    "TextLineDataSource",
    "WebDatasetDataSource",
]
