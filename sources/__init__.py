"""Where records come from: ArrayRecord files, memory, a range, several sources end to end, or anything with `len()`."""

from millstream.sources.array_record import ArrayRecordDataSource
from millstream.sources.base import DataSource
from millstream.sources.concatenated import ConcatenatedDataSource
from millstream.sources.memory import InMemoryDataSource, RangeDataSource

__all__ = ["ArrayRecordDataSource", "ConcatenatedDataSource", "DataSource", "InMemoryDataSource", "RangeDataSource"]
