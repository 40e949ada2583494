"""Checks that a value is a source of records, with advice for values that are mistaken for one.

Tables of other libraries are recognised by the module of their class, so that nothing is imported.
"""

import functools
import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from millstream import grain_kinds
from millstream.core.checks import is_listed, is_scalar
from millstream.core.direct_copies import DirectCopies
from millstream.sources.base import HeldRecords, is_held, is_mapped

DirectRead = Callable[[Any, DirectCopies], Sequence[Any]]

_ROWS_OF_TABLES: Mapping[str, Callable[[Any, int], Any]] = {
    "arrow": lambda table, row: table.slice(row, 1),
    "pandas": lambda frame, row: frame.iloc[row : row + 1].reset_index(drop=True),
    "polars": lambda frame, row: frame.slice(row, 1),
}
"""For each table format of Hugging Face datasets, a row of a table in the form of a single record."""


def batched_read_of(source: Any) -> Callable[[Any], Sequence[Any]] | None:
    """Returns the function that reads records of a source in one call, or None if it has none.

    It is `__getitems__`, unless a more derived class defines `__getitem__` alone, which may decode. Hugging Face
    datasets have a `__getitems__` that fails if their format is a table.
    """
    read: Callable[[Any], Sequence[Any]] | None = getattr(source, "__getitems__", None)
    if read is None or not _is_up_to_date(source):
        return None
    if type(source).__module__.partition(".")[0] != "datasets" or not isinstance(getattr(source, "format", None), dict):
        return read
    row_of = _ROWS_OF_TABLES.get(source.format.get("type"))
    return read if row_of is None else functools.partial(_rows_of_table, source, row_of)


def read_directly_of(source: Any) -> DirectRead | None:
    """Returns the function that copies records, with large arrays in the memory of a batch, or None if none are."""
    source = HeldRecords(source) if is_held(source) else source
    is_own = type(source).__module__.startswith("millstream.")
    return source.copied_directly if is_own and getattr(source, "copies_large_arrays", False) else None


def reads_in_one_call(source: Any) -> bool:
    """Returns True if a source reads many records in one call that takes less time than as many calls.

    A source of other sources may have `__getitems__`, and yet read each record by itself. It says so by the attribute
    `reads_one_by_one`. Several threads can then share the records of a batch.
    """
    return batched_read_of(source) is not None and getattr(source, "reads_one_by_one", False) is not True


def reads_one_by_one(sources: Iterable[Any]) -> bool:
    """Returns True if each of several sources reads its records one by one, and not from memory."""
    return not any(is_in_memory(source) or reads_in_one_call(source) for source in sources)


def is_in_memory(source: Any) -> bool:
    """Returns True if reading waits for no disk or network, and runs no code of the user but operations.

    That is a plain list, tuple, range or array, or a source of the library that says so by the attribute
    `is_in_memory`.
    """
    if type(source) is range or is_held(source):
        return not is_mapped(source)
    return type(source).__module__.startswith("millstream.") and getattr(source, "is_in_memory", False) is True


def _is_up_to_date(source: Any) -> bool:
    """True if `__getitems__` is the object's own, or of a class as derived as the one that defines `__getitem__`."""
    if "__getitems__" in getattr(source, "__dict__", ()):
        return True
    defining = (
        vars(kind) for kind in type(source).__mro__ if "__getitem__" in vars(kind) or "__getitems__" in vars(kind)
    )
    return "__getitems__" in next(defining, ())


def _rows_of_table(source: Any, row_of: Callable[[Any, int], Any], keys: Sequence[int]) -> list[Any]:
    table = source[list(keys)]
    return [row_of(table, row) for row in range(len(keys))]


def advice_for(value: object) -> str | None:
    """Returns advice about a value that is not a source by itself, or None if there is none."""
    found = (advise(value) for advise in (_advice_for_path, _advice_for_open_arrays, _advice_for_kind))
    return next(filter(None, found), None)


def opened(value: Any) -> Any:
    """Returns the source of the files that a path selects, if their format is known, and any other value itself."""
    if not isinstance(value, str | os.PathLike):
        return value
    from millstream.sources.file_formats import open_path  # noqa: PLC0415  (lazy: only paths need it)

    source = open_path(os.fsdecode(value))
    return value if source is None else source


def _advice_for_path(value: object) -> str | None:
    if not isinstance(value, str | os.PathLike):
        return None
    from millstream.sources.file_formats import expression_for  # noqa: PLC0415  (lazy: only this error needs it)

    path = os.fsdecode(value)
    if expression := expression_for(path):
        return f"a path is not a source. Write {expression} to read its records."
    files = os.path.join(glob.escape(path), "**/*") if os.path.isdir(path) else path  # noqa: PTH112, PTH118
    return (
        f"a path is not a source. Write millstream.ImageFolderDataSource({path!r}) for a folder of images, "
        f"millstream.FileDataSource({files!r}) if each file is a record, or pass the source of its format."
    )


def _advice_for_kind(value: object) -> str | None:
    if isinstance(value, type):
        return f"it is a class. Pass an instance of it: {value.__name__}(...)."
    if isinstance(value, tuple) and _are_columns(value):
        return COLUMNS_ADVICE
    if isinstance(value, Mapping) and not is_numbered(value):
        return (
            "its keys are names, not record keys. If its values are columns, equally long NumPy arrays, write "
            "millstream.InMemoryDataSource(dict(columns)). If they are sources to be mixed, write "
            "millstream.load(dict(sources), weights={...})."
        )
    if hasattr(value, "__next__"):
        return (
            "an iterator has no random access. Pass list(iterator), if its records fit into memory. Or iterate "
            "over millstream.IterDataset.source(function).batch(n), with the function that returns it."
        )
    if isinstance(value, grain_kinds.IterDataset):
        return "a stream has no random access. Add .batch(n) to it, and iterate over it."
    return _advice_for_table(value)


COLUMNS_ADVICE = (
    "arrays of one length are columns, and would be records here. Write millstream.InMemoryDataSource({'x': x, 'y': "
    "y}) to have a record per row, or millstream.InMemoryDataSource([x, y]) if each array is a record."
)

_MAX_COLUMNS = 8


def _are_columns(values: Sequence[Any]) -> bool:
    """Returns True for a few arrays whose common length is larger than their number, as in `(images, labels)`."""
    if not 2 <= len(values) <= _MAX_COLUMNS or not all(hasattr(value, "dtype") for value in values):
        return False
    shapes = [tuple(getattr(value, "shape", ())) for value in values]
    return all(shapes) and len({shape[0] for shape in shapes}) == 1 and shapes[0][0] > len(shapes)


def check_no_columns(source: Any) -> None:
    """Raises TypeError for a list of columns.

    More than two arrays of one shape and dtype are taken for records, because they stack.
    """
    if type(source) is not list or not _are_columns(source):
        return
    if len(source) == 2 or len({(value.shape, value.dtype) for value in source}) > 1:
        raise TypeError(f"data_source must be a source of records, got list: {COLUMNS_ADVICE}")


def _advice_for_open_arrays(value: Any) -> str | None:
    """Returns the call that reads the files of an open array or group of h5py, Zarr, xarray, …, or None."""
    library = type(value).__module__.partition(".")[0]
    if library == "h5py" and hasattr(value, "file"):
        path = f"{value.file.filename}{value.name}".rstrip("/")
        path += "" if hasattr(value, "shape") else f"/{next(iter(value), 'NAME')}"
        return f"h5py's objects stay in their process. Write millstream.Hdf5DataSource({{'x': {path!r}}})."
    if library == "zarr" and hasattr(value, "store"):
        folder = getattr(value, "store_path", None) or f"{getattr(value.store, 'path', '')}/{value.path}"
        path = str(folder).removeprefix("file://").rstrip("/")
        path += "" if hasattr(value, "shape") else f"/{next(iter(value), 'NAME')}"
        return f"Zarr's objects read row by row. Write millstream.ZarrDataSource({{'x': {path!r}}})."
    if library == "tensorstore" and hasattr(value, "spec"):
        return "TensorStore's objects stay in their process. Write millstream.ZarrDataSource({'x': 'PATH'})."
    if library in {"xarray", "netCDF4"} and (hasattr(value, "dims") or hasattr(value, "dimensions")):
        return (
            "its rows are read from its files. Write millstream.ZarrDataSource({'x': 'FILE.zarr/NAME'}), "
            "millstream.Hdf5DataSource({'x': 'FILE.nc/NAME'}) for NetCDF 4, or "
            "millstream.InMemoryDataSource({'x': array.to_numpy()})."
        )
    return None


def _advice_for_table(value: object) -> str | None:
    libraries = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    if libraries & {"pandas", "polars"} and hasattr(value, "columns"):
        return _columns("table", "table.columns")
    if "pyarrow" in libraries and hasattr(value, "column_names"):
        return _columns("table", "table.column_names")
    if "pandas" in libraries and hasattr(value, "iloc"):
        return "its keys are labels. Pass series.to_numpy(), or series.tolist()."
    return None


def _columns(table: str, names: str) -> str:
    return (
        "its columns are not records. Write millstream.InMemoryDataSource("
        f"{{name: {table}[name].to_numpy() for name in {names}}})."
    )


def is_numbered(mapping: Mapping[object, object]) -> bool:
    """Returns True if the keys of a mapping are record keys, judged by the first and the last one."""
    return not mapping or (0 in mapping and len(mapping) - 1 in mapping)


def check_source(source: Any, name: str) -> None:
    check_readable(source, name)
    if len(source) == 0:
        raise ValueError(f"{name} must have at least one record, got an empty {type(source).__name__}.")


def check_readable(source: Any, name: str) -> None:
    """Raises unless the value is a source, which may have no records. The arguments are those of `check_source`."""
    if advice := advice_for(source):
        raise TypeError(f"{name} must be a source of records, got {type(source).__name__}: {advice}")
    is_readable = hasattr(source, "__len__") and hasattr(source, "__getitem__") and not is_scalar(source)
    if not is_readable and is_listed(source):
        raise TypeError(
            f"{name} must have len(source) and source[key], got {type(source).__name__}, which is read in order. Write "
            "millstream.IterDataset.source(stream).batch(n) to iterate over batches of it, or pass a list."
        )
    if not is_readable and callable(source):
        called = getattr(source, "__name__", "function")
        raise TypeError(
            f"{name} must have len(source) and source[key], got the function {called}. If it returns an iterator, like "
            f"a generator function, iterate over millstream.IterDataset.source({called}).batch(n). If it returns a "
            f"source, pass {called}()."
        )
    if not is_readable:
        raise TypeError(
            f"{name} must have len(source) and source[key], got {type(source).__name__}. "
            "A list of records is a source; so is any class with __len__ and __getitem__."
        )


def check_range(numbers: range) -> None:
    """Raises ValueError for a range that is longer than a source may be."""
    try:
        len(numbers)
    except OverflowError:
        raise ValueError(f"A range must have fewer than 2**63 integers, got {numbers}.") from None


def checked_columns(columns: Any) -> tuple[str, ...] | None:
    """Returns the argument `columns` as a tuple: at least one name, each once, or None for all columns."""
    if columns is None:
        return None
    if not is_listed(columns) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns must be a sequence of names, or None for all columns, got {columns!r}.")
    if not len(set(columns)) == len(columns) > 0:
        raise ValueError(f"columns must be different names, at least one, or None for all columns, got {columns!r}.")
    return tuple(columns)


def check_file_columns(
    path: str, names: Sequence[str], wanted: Sequence[str], *, is_all: bool, remedy: str = ""
) -> None:
    """Raises ValueError unless a file has the wanted columns, once each.

    Args:
        path: the file.
        names: the names of its columns.
        wanted: the names of the wanted columns.
        is_all: True if these are all columns of the first file: the file must then not have any other.
        remedy: the end of the advice if columns differ, for sources with another remedy than columns.
    """
    missing = [name for name in wanted if name not in names]
    others = [name for name in names if name not in wanted] if is_all else []
    if missing or others:
        origin = "are those of the first file" if is_all else "are wanted"
        raise ValueError(
            f"{path!r} has the columns {', '.join(map(repr, names))}, but {', '.join(map(repr, wanted))} {origin}. "
            f"Pass columns=[...] that all have{remedy}."
        )
    twice = [name for name in wanted if names.count(name) > 1]
    if twice:
        raise ValueError(f"{path!r} has the column {twice[0]!r} twice. Pass columns=[...] without it.")
    if not names:
        raise ValueError(f"{path!r} has no columns.")


def check_no_columns_beside(columns: Any, name: str) -> None:
    if columns is not None:
        raise ValueError(f"columns are for the path of a group; the keys of a mapping of {name} are the columns.")


def paths_of_columns(paths: Any, name: str, example: str) -> dict[str, str]:
    if not isinstance(paths, Mapping) or not all(
        isinstance(column, str) and isinstance(path, str | os.PathLike) for column, path in paths.items()
    ):
        raise TypeError(
            f"{name} must be a mapping of columns to the paths of their {name}, such as {{'x': {example!r}}}, got "
            f"{paths!r}."
        )
    if not paths:
        raise ValueError(f"{name} must have at least one column, got none.")
    return {column: os.fsdecode(path) for column, path in paths.items()}
