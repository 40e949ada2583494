"""The interface of every adapter."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from suite.array_files import ROW_SHAPE, TOKENS
from suite.case import Contender, UnsupportedError
from suite.work import Columns, Files, Records, Work


class Position(Protocol):
    """The functions by which a stream reports and changes its position."""

    def get_state(self) -> Any:
        """Returns the position in the loader's own form."""

    def set_state(self, state: Any) -> None: ...

    def state_at(self, step: int) -> Any: ...


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Stream:
    """A running loader.

    Attributes:
        batches: the loader's own iterator, with nothing of the suite around it where possible.
        close: ends it.
        position: how it is saved and resumed; None where the peer has no such thing.
        loader: the loader object.
    """

    batches: Iterator[Any]
    close: Callable[[], None] = _nothing
    position: Position | None = None
    loader: Any = None


class Adapter(Protocol):
    """A peer. What else a case asks of some of them is in their own classes."""

    def open(self, work: Work, contender: Contender) -> Stream:
        """Returns a new stream; everything that a user would do to get one happens in here."""


def our_source(files: Files) -> Any:
    """Returns millstream's source for files, for peers that have none for the format but take any object with `[]`."""
    import millstream  # noqa: PLC0415  (for the adapters that ask for it)

    paths = list(files.paths)
    path = paths[0]
    # Room for a sixteenth of the rows, so that the order has windows.
    window_bytes = max(1 << 22, files.records_per_file * int(np.prod(ROW_SHAPE)) // 16)
    sources: dict[str, Callable[[], Any]] = {
        "array_record": lambda: millstream.ArrayRecordDataSource(paths),
        "tfrecord": lambda: millstream.TFRecordDataSource(paths),
        "bagz": lambda: millstream.BagzDataSource(paths),
        "text": lambda: millstream.TextLineDataSource(paths),
        "json_lines": lambda: millstream.JsonLinesDataSource(paths),
        "csv": lambda: millstream.CsvDataSource(paths),
        "webdataset": lambda: millstream.WebDatasetDataSource(paths),
        "parquet": lambda: millstream.ParquetDataSource(paths, columns=files.columns),
        "arrow": lambda: millstream.HuggingFaceDataSource(huggingface_dataset(files)),
        "hdf5": lambda: millstream.Hdf5DataSource({"x": f"{path}/x"}, cache_bytes=window_bytes),
        "hdf5_gzip": lambda: millstream.Hdf5DataSource({"x": f"{path}/x"}, cache_bytes=window_bytes),
        "zarr": lambda: millstream.ZarrDataSource({"x": path}, cache_bytes=window_bytes),
        "lance": lambda: millstream.LanceDataSource(path),
        "mds": lambda: millstream.MdsDataSource(path, cache=millstream.FileCache(1 << 32, f"{path}.copies")),
        "token_windows": lambda: millstream.TokenDataSource(path, TOKENS, dtype="uint16"),
    }
    return sources[files.format]()


def huggingface_dataset(files: Files) -> Any:
    """Returns the dataset of HF datasets that some Arrow files are, mapped into memory."""
    import datasets  # noqa: PLC0415  (only where it is a contender)

    return datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files.paths])


def bagz_reader(files: Files) -> Any:
    import bagz  # noqa: PLC0415  (only where it is a contender)

    return bagz.Reader(",".join(files.paths))


def columns_of(work: Work) -> Any:
    """Returns the records in memory as arrays of many rows, in the structure of a record."""
    if isinstance(work.source, Columns):
        return work.source.arrays
    if isinstance(work.source, Records) and isinstance(work.source.values, list):
        return _stacked(work.source.values)
    raise UnsupportedError("the source is Python, and not data in memory")


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _stacked([value[name] for value in values]) for name in values[0]}
    return np.array(values)
