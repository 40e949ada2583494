"""Files of a conversion written by the workers of an Apache Beam pipeline, on one machine or many.

The unit is a file, as in a conversion by processes, and so is all that makes it restartable; Beam decides who writes
which. Sources and destination are on a file system that all workers share. At the end, each file is read and compared
with what was written to it, and `.NAME.contents.json` beside the files says what each one holds.

The DirectRunner waits for ever for a process of its own that was killed. So it runs in a worker process of millstream,
which ends when one of Beam's threads fails: all that it has started ends with it, and another one writes what is left.
"""

import contextlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from millstream.errors import WorkerDiedError, WorkerError
from millstream.loader import DataLoader, ReadOptions
from millstream.samplers import SequentialSampler
from millstream.sharding import NoSharding
from millstream.sources.storage.new_files import new_file
from millstream.tools.conversion_progress import RecordCounts
from millstream.tools.conversion_shards import compare_unit, noted_content, write_unit
from millstream.transforms import Map

if TYPE_CHECKING:
    from millstream.tools.conversion import Conversion

_LOCAL = "DirectRunner"

LOST_SECONDS = 10.0
"""How long Beam may take to say itself what came of a thread that failed; then its process ends."""

_AGAIN = "Files that are finished stay: the same command again writes the others."


@final
class BeamWriters:
    """What writes the files of a conversion by a Beam pipeline.

    Args:
        runner: the name of a runner, as Beam has it: `DirectRunner`, `FlinkRunner`, ….
        options: more options of the pipeline, `flink_master=localhost:8081`.
        jobs: how many processes the DirectRunner starts; other runners have options of their own.

    Raises:
        ImportError: `apache-beam` is not installed.
        ValueError: an option without a name.
    """

    def __init__(self, runner: str, options: Sequence[str], jobs: int) -> None:
        if importlib.util.find_spec("apache_beam") is None:
            raise ImportError("--runner needs `apache-beam`: pip install 'millstream[beam]'.")
        self._is_local = runner == _LOCAL
        flags = [f"--runner={runner}"]
        if self._is_local and jobs > 1:
            flags += ["--direct_running_mode=multi_processing", f"--direct_num_workers={jobs}"]
        for option in options:
            name, equals, _ = option.partition("=")
            if not (name and equals):
                raise ValueError(
                    f"--runner-option must be NAME=VALUE, as Beam has it without the dashes, got {option!r}."
                )
            flags.append(f"--{option}")
        # Beam takes what it does not know for the option of another runner, and would say nothing.
        self._flags = flags

    def __call__(self, conversion: "Conversion", counts: RecordCounts, todo: Sequence[int]) -> None:
        """Writes some files, compares all of them, and says beside them what they hold.

        Raises:
            WorkerError: the pipeline has failed: a file cannot be written, for instance, or was damaged.
            WorkerDiedError: processes of the DirectRunner were lost again and again.
        """
        self._for_each(todo, _Write(conversion, counts), "write")
        self._for_each(range(conversion.num_shards), _Compare(conversion), "compare")
        folder, name = os.path.split(conversion.destination)
        files = {
            os.path.basename(target): noted_content(conversion, shard)._asdict()  # noqa: PTH119
            for shard, target in enumerate(conversion.targets)
        }
        with new_file(os.path.join(folder, f".{name}.contents.json")) as file:  # noqa: PTH118
            file.write(json.dumps({"version": 1, "files": files}, indent=1).encode())

    def _for_each(self, shards: Sequence[int], action: Callable[[int], Any], name: str) -> None:
        pipeline = _Pipeline(self._flags, shards, action, name)
        try:
            if self._is_local:
                _in_a_worker_process(pipeline)
            else:
                pipeline.run()
        except WorkerDiedError as error:
            raise WorkerDiedError(f"Processes of the {_LOCAL} were lost, again and again. {_AGAIN}") from error
        except RuntimeError as error:
            # Beam's texts are whole tracebacks: the last line says what it was.
            *_, last = filter(None, map(str.strip, f"{type(error).__name__}\n{error}".splitlines()))
            raise WorkerError(f"The pipeline that is to {name} the files has failed: {last}. {_AGAIN}") from error


@final
class _Pipeline:
    """Does something for each of some files."""

    def __init__(self, flags: Sequence[str], shards: Sequence[int], action: Callable[[int], Any], name: str) -> None:
        self._flags = flags
        self._shards = shards
        self._action = action
        self._name = name

    def run(self) -> None:
        """Returns when it is done."""
        import apache_beam as beam  # noqa: PLC0415
        from apache_beam.options.pipeline_options import PipelineOptions  # noqa: PLC0415

        with beam.Pipeline(options=PipelineOptions(self._flags)) as pipeline:
            # Without the shuffle, one worker would get all of them: they come from one element.
            numbers = pipeline | beam.Create(list(self._shards)) | beam.Reshuffle()
            _ = numbers | self._name >> beam.Map(self._action)


def _in_a_worker_process(pipeline: _Pipeline) -> None:
    """Runs a pipeline where it can be ended with all that it has started, and anew.

    Raises:
        WorkerDiedError: it was lost twice.
    """
    loader = DataLoader(
        data_source=range(1),
        sampler=SequentialSampler(1),
        operations=[_Run(pipeline)],
        worker_count=1,
        shard_options=NoSharding(),
        read_options=ReadOptions(num_threads=0),
        stall_timeout=float("inf"),
    )
    with loader:
        for _ in loader:
            pass


@final
class _Run(Map[int, int]):
    """Runs a pipeline, and returns its number."""

    def __init__(self, pipeline: _Pipeline) -> None:
        self._pipeline = pipeline

    def map(self, number: int, /) -> int:
        """Returns when it is done, or ends this process."""
        with _ending_with_its_threads():
            self._pipeline.run()
        return number


@contextlib.contextmanager
def _ending_with_its_threads() -> Iterator[None]:
    """Ends this process some seconds after a thread has failed, unless the block is over by then.

    Each process of the DirectRunner has a thread here, which fails when it ends: what waits for it would wait for ever.
    """
    usual, failed, is_over = threading.excepthook, threading.Event(), threading.Event()

    def note(arguments: Any) -> None:
        usual(arguments)
        failed.set()

    def watch() -> None:
        failed.wait()
        if not is_over.wait(LOST_SECONDS):
            os._exit(1)

    threading.excepthook = note
    threading.Thread(target=watch, name="millstream-beam", daemon=True).start()
    try:
        yield
    finally:
        threading.excepthook = usual
        is_over.set()
        failed.set()


@final
class _Write:
    """Writes the file of a number, unless another worker has done so."""

    def __init__(self, conversion: "Conversion", counts: RecordCounts) -> None:
        self._conversion = conversion
        self._counts = counts

    def __call__(self, shard: int) -> int:
        """Returns the number."""
        if not os.path.exists(self._conversion.targets[shard]):  # noqa: PTH110
            write_unit(self._conversion, self._counts, shard)
        return shard


@final
class _Compare:
    """Compares the file of a number with what was written to it."""

    def __init__(self, conversion: "Conversion") -> None:
        self._conversion = conversion

    def __call__(self, shard: int) -> int:
        """Returns the number."""
        compare_unit(self._conversion, shard)
        return shard
