"""Files of a conversion written by the workers of an Apache Beam pipeline, on one machine or many.

The unit is a file, as in a conversion by processes, and so is all that makes it restartable; Beam decides who writes
which. Sources and destination are on a file system that all workers share. At the end, each file is read and compared
with what was written to it, and `.NAME.contents.json` beside the files says what each one holds.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from millstream.sources.storage.new_files import new_file
from millstream.tools.conversion_progress import RecordCounts
from millstream.tools.conversion_units import compare_unit, noted_content, write_unit

if TYPE_CHECKING:
    from millstream.tools.conversion import Conversion

_LOCAL = "DirectRunner"


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
        try:
            from apache_beam.options.pipeline_options import PipelineOptions  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("--runner needs `apache-beam`: pip install 'millstream[beam]'.") from error
        flags = [f"--runner={runner}"]
        if runner == _LOCAL and jobs > 1:
            flags += ["--direct_running_mode=multi_processing", f"--direct_num_workers={jobs}"]
        for option in options:
            name, equals, _ = option.partition("=")
            if not (name and equals):
                raise ValueError(
                    f"--runner-option must be NAME=VALUE, as Beam has it without the dashes, got {option!r}."
                )
            flags.append(f"--{option}")
        # Beam takes what it does not know for the option of another runner, and would say nothing.
        self._options = PipelineOptions(flags)

    def __call__(self, conversion: "Conversion", counts: RecordCounts, todo: Sequence[int]) -> None:
        """Writes some files, compares all of them, and says beside them what they hold.

        Raises:
            RuntimeError: a worker has failed again and again; DataSourceError, a file was damaged.
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
        import apache_beam as beam  # noqa: PLC0415

        with beam.Pipeline(options=self._options) as pipeline:
            # Without the shuffle, one worker would get all of them: they come from one element.
            numbers = pipeline | beam.Create(list(shards)) | beam.Reshuffle()
            _ = numbers | name >> beam.Map(action)


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
