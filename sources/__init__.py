"""Where records come from: ArrayRecord files, memory, a range, or anything with `len()` and `[]`."""

from millstream.sources.array_record import ArrayRecordDataSource
from millstream.sources.base import DataSource
from millstream.sources.memory import InMemoryDataSource, RangeDataSource
from millstream.sources.tfrecord import TFRecordDataSource

__all__ = ["ArrayRecordDataSource", "DataSource", "InMemoryDataSource", "RangeDataSource", "TFRecordDataSource"]
