"""The pipelines of a pool: those that its workers start with, and those that they get while they run."""

from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple, final

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.processes.channel import close_all
from millstream.loader.processes.messages import Load, Unload
from millstream.loader.processes.pool_processes import Worker
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.pipeline_file import pack_pipelines
from millstream.loader.workers.process_settings import variables_of

MAX_IDLE_PIPELINES = 64
"""The maximum number of pipelines without calls that workers keep, of those that they got while they ran."""


class _Loaded(NamedTuple):
    """A pipeline that the workers get while they run: the message to each, and the descriptor of its file."""

    message: Load
    file: list[int]
    has_new_classes: bool  # Replacements need it, because later elements may have a class that crossed with it.


@final
class LoadedPipelines:
    """The numbers of pipelines by name. Those that each worker starts with have the numbers 0, 1, …."""

    def __init__(self, names: Iterable[Hashable]) -> None:
        self._first = {name: number for number, name in enumerate(names)}
        self._next_number = len(self._first)
        # The one used last comes last.
        self._loaded: dict[Hashable, _Loaded] = {}
        # Those that workers have dropped, and replacements get for their classes.
        self._dropped: list[_Loaded] = []

    def find(self, name: Hashable) -> int | None:
        """Returns the number of a pipeline, or None if the workers lack it."""
        if name in self._loaded:
            loaded = self._loaded[name] = self._loaded.pop(name)
            return loaded.message.number
        return self._first.get(name)

    def pack(self, pipeline: Pipeline, classes: ClassTable) -> tuple[list[memoryview], Load, bool]:
        """Returns the content of the file of a new pipeline, the message to each worker, and True if it has classes.

        These are new classes that cross by value with it. They are added to `classes`.
        """
        content, file, crossed = pack_pipelines([pipeline])
        number, num_known = self._next_number, len(classes)
        self._next_number += 1
        message = Load(number, file, classes.number(list(crossed)), variables_of([pipeline]))
        return content, message, len(classes) > num_known

    def add(self, name: Hashable, message: Load, file: list[int], workers: Iterable[Worker], *, has_new: bool) -> None:
        """Adds a pipeline, and sends it to the workers. They, and their replacements, share its file."""
        self._loaded[name] = loaded = _Loaded(message, file, has_new)
        _send(loaded, workers)

    def send_all(self, worker: Worker) -> None:
        """Sends a new worker the pipelines that it does not start with."""
        for loaded in [*self._dropped, *self._loaded.values()]:
            _send(loaded, [worker])
        for loaded in self._dropped:
            worker.channel.send(Unload(loaded.message.number))

    def forget(self, name: Hashable) -> None:
        """Forgets a pipeline that workers may lack, because sending it has failed."""
        if (loaded := self._loaded.pop(name, None)) is not None:
            self._drop(loaded)

    def drop_idle(self, in_use: Collection[int], workers: Collection[Worker]) -> None:
        """Drops the oldest pipelines, if more than MAX_IDLE_PIPELINES are not in use."""
        idle = [name for name, loaded in self._loaded.items() if loaded.message.number not in in_use]
        for name in idle[: max(0, len(idle) - MAX_IDLE_PIPELINES)]:
            loaded = self._loaded.pop(name)
            self._drop(loaded)
            for worker in workers:
                worker.channel.send(Unload(loaded.message.number))

    def _drop(self, loaded: _Loaded) -> None:
        if loaded.has_new_classes:
            self._dropped.append(loaded)
        else:
            close_all(loaded.file)


def _send(loaded: _Loaded, workers: Iterable[Worker]) -> None:
    # Closed by another thread that stops the pool.
    for worker in workers if loaded.file else ():
        worker.channel.send(loaded.message, loaded.file)
