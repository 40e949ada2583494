"""The exceptions of millstream, each a subclass of the builtin that a caller would expect.

    ValueError
    ├── CheckpointError   a state that cannot be read, or belongs to another stream
    └── StackError        elements that cannot be stacked into one batch
    OSError
    └── DataSourceError   a record that could not be read, with its file and number
    RuntimeError
    ├── WorkerDiedError     worker processes keep dying at the same records
    ├── WorkerError         an exception of a worker process that could not be sent as it was
    └── WorkerStalledError  a worker process makes no progress

Everything else that millstream raises is a plain builtin: `ValueError` and `TypeError` for arguments, `IndexError`
for positions beyond the end. An exception of the user's code keeps its type; a note says which operation and
which record it came from.
"""

from typing import final


@final
class CheckpointError(ValueError):
    """A state is unreadable, of an unknown version, or of a stream that differs from this one.

    The message names the field, what was saved and what is here. The iterator is as it was before the attempt.
    """


@final
class StackError(ValueError):
    """Two elements differ in structure, shape or dtype, or hold something that does not stack.

    Attributes:
        path: where in the element, for instance `['image']` or `.tokens[2]`; empty for the element itself.
        rows: which rows of the batch the two elements are, from 0; a single one if one element is at fault.
    """

    def __init__(self, message: str, path: str = "", rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.rows = rows

    def __reduce__(self) -> tuple[type["StackError"], tuple[str, str, tuple[int, ...]], dict[str, object]]:
        return StackError, (str(self), self.path, self.rows), vars(self)  # vars has the notes.


@final
class DataSourceError(OSError):
    """A record could not be read: the message names the file, the record in it, and what was wrong."""


@final
class WorkerDiedError(RuntimeError):
    """Worker processes keep dying at the same records: the message names these and the likely cause."""


@final
class WorkerError(RuntimeError):
    """An exception of a worker that could not be sent as it was: its type, message and traceback as text."""


@final
class WorkerStalledError(RuntimeError):
    """A worker process has been making the same call for longer than the stall timeout.

    The message names the records, the state of the process and what it was executing.
    """
