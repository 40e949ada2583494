"""Numbers for the classes that a pipeline contains by value.

cloudpickle pickles a class of `__main__`, of a notebook or of a function by value, with its code. The pipeline needs
that. Outputs would be slow with it, and wrong: each output would overwrite the methods and attributes of the consumer's
class with the worker's copies. Therefore the classes that cross with the pipeline are numbered, and everything pickled
later, in either direction, refers to them by number.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from millstream.core.columnar import Allocate
from millstream.loader.transport.value_pickler import BufferCallback, ValuePickler


@final
class ClassTable:
    """The classes that crossed by value with pipelines, by their numbers, which are the same in every process."""

    def __init__(self, classes: Sequence[type] = ()) -> None:
        self._classes: dict[int, type] = {}
        # By identity: a metaclass may define equality as it likes.
        self._numbers: dict[int, int] = {}
        self.define(dict(enumerate(classes)))

    def __len__(self) -> int:
        return len(self._classes)

    def __iter__(self) -> Iterator[type]:
        return iter(self._classes.values())

    def define(self, classes: Mapping[int, type]) -> None:
        self._classes.update(classes)
        self._numbers.update((id(kind), number) for number, kind in classes.items())

    def number(self, classes: Sequence[type]) -> tuple[int, ...]:
        """Returns the numbers of classes. New ones get the next numbers."""
        for kind in classes:
            if id(kind) not in self._numbers:
                self.define({len(self._classes): kind})
        return tuple(self._numbers[id(kind)] for kind in classes)

    def dumps(self, value: Any, buffer_callback: BufferCallback | None = None, allocate: Allocate = np.empty) -> bytes:
        """Returns the pickle of a value. The classes of the table are replaced by their numbers."""
        file = io.BytesIO()
        _NumberingPickler(file, self._numbers, buffer_callback, allocate).dump(value)
        return file.getvalue()

    def loads(self, data: Any, buffers: Iterable[Any] = ()) -> Any:
        """Returns the value that `dumps` pickled, with this table or with its copy in another process."""
        return _NumberedUnpickler(io.BytesIO(data), self._classes, buffers).load()


def class_of_number(number: int) -> type:
    """Stands for a class of the table in a pickle. `ClassTable.loads` looks the class up instead of calling this."""
    raise pickle.UnpicklingError(f"Class {number} of the pipeline is known to a ClassTable only.")


@final
class _NumberingPickler(ValuePickler):
    def __init__(
        self, file: io.BytesIO, numbers: dict[int, int], buffer_callback: BufferCallback | None, allocate: Allocate
    ) -> None:
        super().__init__(file, buffer_callback, allocate)
        self._numbers = numbers

    def reducer_override(self, value: Any) -> Any:
        number = self._numbers.get(id(value)) if isinstance(value, type) else None
        return super().reducer_override(value) if number is None else (class_of_number, (number,))


@final
class _NumberedUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, classes: Mapping[int, type], buffers: Iterable[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == class_of_number.__name__:
            return self._classes.__getitem__
        return super().find_class(module, name)
