"""The exceptions of millstream, each a subclass of the builtin that callers expect.

    ValueError
    ├── CheckpointError   a state is unreadable, or belongs to another stream
    └── StackError        elements do not stack into one batch
    OSError
    └── DataSourceError   a record cannot be read; with its file and number
    RuntimeError
    ├── WorkerDiedError     worker processes keep dying at the same records
    ├── WorkerError         an exception of a worker process cannot be pickled
    └── WorkerStalledError  a worker process makes no progress

All other errors are plain builtins: `ValueError` and `TypeError` for arguments, `IndexError` for positions beyond the
end. An exception in user code keeps its type; a note names the operation and the record.
"""

from typing import final


@final
class CheckpointError(ValueError):
    """A state is unreadable, has an unknown version, or belongs to a different stream.

    The message names the fields that differ, with the saved and the current values. The iterator does not change.

    Examples:
        >>> state = iter(millstream.load(range(8), shuffle=True, seed=0)).get_state()
        >>> try:
        ...     iter(millstream.load(range(8), shuffle=True, seed=1)).set_state(state)
        ... except millstream.CheckpointError as error:
        ...     print(str(error).splitlines()[1])
          sampler.seed: saved 0, here 1
    """


@final
class StackError(ValueError):
    """Two elements differ in structure, shape or dtype, or contain a value that does not stack.

    Attributes:
        path: the path in the element, for instance `['image']` or `.tokens[2]`; empty for the element itself.
        rows: the rows of the two elements in the batch, from 0; a single row if one element is at fault.

    Examples:
        >>> records = [{"x": np.zeros(2)}, {"x": np.zeros(3)}]
        >>> try:
        ...     next(iter(millstream.load(records, batch_size=2)))
        ... except millstream.StackError as error:
        ...     print(error.path, error.rows)
        ['x'] (0, 1)
    """

    def __init__(self, message: str, path: str = "", rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.rows = rows

    def __reduce__(self) -> tuple[type["StackError"], tuple[str, str, tuple[int, ...]], dict[str, object]]:
        return StackError, (str(self), self.path, self.rows), vars(self)  # vars contains the notes.


@final
class DataSourceError(OSError):
    """A record cannot be read. The message names the file, the record in it, and the cause.

    Examples:
        >>> source = millstream.JsonLinesDataSource("damaged.jsonl")
        >>> source[1]
        Traceback (most recent call last):
            ...
        millstream.errors.DataSourceError: Cannot read record 1 of '...damaged.jsonl' (record key 1): ...
    """


@final
class WorkerDiedError(RuntimeError):
    """Worker processes keep dying at the same records. The message names these and the likely cause.

    Examples:
        >>> import os
        >>> operations = [lambda record: os._exit(1)]
        >>> loader = millstream.load(range(8), transformations=operations, batch_size=4, worker_count=1)
        >>> with iter(loader) as batches:
        ...     try:
        ...         next(batches)
        ...     except millstream.WorkerDiedError as error:
        ...         print(error)
        2 worker processes died while computing the same outputs, from the records 0, 1, 2, 3 ...
    """


@final
class WorkerError(RuntimeError):
    """An exception of a worker process cannot be pickled: its type, message and traceback as text.

    Examples:
        >>> import threading
        >>> def fail(record):
        ...     raise ValueError("with something that cannot be pickled", threading.Lock())
        >>> with iter(millstream.load(range(8), transformations=[fail], worker_count=1)) as batches:
        ...     try:
        ...         next(batches)
        ...     except millstream.WorkerError as error:
        ...         print(error)
        builtins.ValueError: ('with something that cannot be pickled', <unlocked _thread.lock object at ...>)
    """


@final
class WorkerStalledError(RuntimeError):
    """A worker process has been running the same call for longer than the stall timeout.

    The message names the records, the state of the process and the line that it was executing.

    Examples:
        >>> import threading
        >>> loader = millstream.DataLoader(
        ...     data_source=range(8),
        ...     sampler=millstream.SequentialSampler(8),
        ...     operations=[lambda record: threading.Event().wait(), millstream.Batch(4)],
        ...     worker_count=1,
        ...     stall_timeout=0.5,
        ... )
        >>> with iter(loader) as batches:
        ...     try:
        ...         next(batches)
        ...     except millstream.WorkerStalledError as error:
        ...         print(error)
        Worker process ... has made no progress for 0.5 s (stall_timeout), with the records 0, 1, 2, 3 ...
    """
