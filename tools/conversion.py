"""Records of any source written to files of bytes: in parts, by several processes, resumable.

The files are written in a hidden folder beside them, `.NAME.conversion`, and get their names when they are whole. The
folder has the plan: what is converted, and how. As long as it is there, each file under its final name is finished work
of that plan. It goes with the last file.

Guarantees:
    - No file is under its final name before it is whole and on disk.
    - After any end, of a process or of the machine, the same command does what is left to do.
    - A conversion is resumed only with the same records and options; two at once with one destination are refused.
    - The hidden folder is this user's and closed to other writers, and nothing is written through a link.
    - Worker processes outlive one that was killed for up to a second. Nothing is begun before they are gone: each holds
      a lock while it writes a file.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from millstream.loader import DataLoader, ReadOptions
from millstream.samplers import SequentialSampler
from millstream.sharding import NoSharding
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.private_folders import check_private, open_private
from millstream.tools.conversion_progress import RecordCounts, shown_progress
from millstream.tools.conversion_shards import write_unit
from millstream.tools.lengths_cache import forget_lengths
from millstream.tools.record_sizes import sizes_mark
from millstream.tools.record_writers import compression_level
from millstream.transforms import Map

_LAYOUT = 2
"""The version of a plan."""

_LAST_WRITERS_SECONDS = 20.0
"""How long workers whose parent is gone may take to notice."""


@final
@dataclasses.dataclass(frozen=True)
class Conversion:
    """What is converted, and how.

    Attributes:
        source: the records.
        destination: the file to write, or the name that those of the parts are made of.
        encoding: what records become, one of `ENCODINGS`.
        compression: as `new_writer` takes it.
        num_shards: how many files there will be.

    Raises:
        ValueError: more files than records, or a compression that the format lacks.
    """

    source: Any
    destination: str
    encoding: str
    compression: str | None
    num_shards: int

    def __post_init__(self) -> None:
        compression_level(self.extension, self.compression)
        if not 1 <= self.num_shards <= len(self.source):
            raise ValueError(
                f"The {len(self.source):,} records cannot be written to {self.num_shards:,} files: each needs one at "
                "least."
            )
        if own := set(map(os.path.realpath, self.targets)) & set(map(os.path.realpath, self.source.files)):
            raise ValueError(f"{own.pop()!r} would be written to while it is read. Choose another name.")

    @property
    def extension(self) -> str:
        """What the files' names end in."""
        return os.path.splitext(self.destination)[1]  # noqa: PTH122  (paths are strings throughout)

    @property
    def targets(self) -> list[str]:
        """The files, in the order of their records."""
        if self.num_shards == 1:
            return [self.destination]
        stem = self.destination.removesuffix(self.extension)
        return [f"{stem}-{n:05}-of-{self.num_shards:05}{self.extension}" for n in range(self.num_shards)]

    @property
    def folder(self) -> str:
        """Where unfinished files are."""
        folder, name = os.path.split(self.destination)
        return os.path.join(folder, f".{name}.conversion")  # noqa: PTH118

    @property
    def writers(self) -> str:
        """The file that each process which writes has a lock on."""
        return os.path.join(self.folder, "writers")  # noqa: PTH118

    def range_of(self, shard: int) -> range:
        """Returns the keys of the records of one file."""
        count = len(self.source)
        return range(count * shard // self.num_shards, count * (shard + 1) // self.num_shards)

    def plan(self) -> dict[str, Any]:
        """Returns what must be the same to resume, in words."""
        return {
            "version": _LAYOUT,
            "source": self.source.fingerprint(),
            "files": [[identity.size, identity.modified] for identity in self.source.files.values()],
            "encode": self.encoding,
            "compression": self.compression,
            "shards": self.num_shards,
        }


Writers = Callable[[Conversion, RecordCounts, Sequence[int]], None]
"""What writes the files of some numbers, in any order."""


def convert(conversion: Conversion, writers: Writers, *, overwrite: bool) -> None:
    """Writes the files that are not there yet; their folder is made if it is missing.

    Args:
        conversion: what to do.
        writers: what writes them: `ProcessWriters`, or the workers of an engine.
        overwrite: whether files of these names, and what another conversion has begun, are removed first.

    Raises:
        FileExistsError: a file of that name is there.
        BlockingIOError: another process is at it.
        PermissionError: the folder for unfinished files belongs to another user, or others may write to it.
        ValueError: an unfinished conversion with other records or options is there.
        OSError: a file cannot be read, DataSourceError if it is damaged; or cannot be written.
    """
    folder = conversion.folder
    os.makedirs(os.path.dirname(folder), exist_ok=True)  # noqa: PTH103, PTH120
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)  # noqa: PTH102
    with _alone_in(folder, conversion.destination):
        _wait_for_writers(conversion)
        try:
            _begin_or_resume(conversion, overwrite=overwrite)
            todo = [number for number, target in enumerate(conversion.targets) if not os.path.exists(target)]  # noqa: PTH110
            _write(conversion, todo, writers)
        except FileExistsError:
            shutil.rmtree(folder)
            raise
        except BaseException:
            if not any(map(os.path.exists, conversion.targets)):  # There is nothing to resume.
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def _begin_or_resume(conversion: Conversion, *, overwrite: bool) -> None:
    """Sees to it that the folder has the plan, and that each file that is there is of this plan."""
    place = os.path.join(conversion.folder, "plan.json")  # noqa: PTH118
    plan = conversion.plan()
    try:
        with open(place, encoding="utf-8") as file:  # noqa: PTH123
            begun = json.load(file)
    except FileNotFoundError:
        begun = None
    if begun == plan:
        return
    there = [target for target in conversion.targets if os.path.lexists(target)]
    if begun is not None and there and not overwrite:
        other = next((name for name in plan if begun.get(name) != plan[name]), "version")
        raise ValueError(
            f"A conversion to {conversion.destination!r} was begun with a different {other}: {begun.get(other)}, here "
            f"{plan[other]}. Resume it with the same {other}, or pass --overwrite to start over."
        )
    if there and not overwrite:
        raise FileExistsError(f"{there[0]!r} exists already. Pass --overwrite to replace it, or choose another name.")
    for target in there:
        if os.path.isfile(target):  # noqa: PTH113
            forget_lengths(target, sizes_mark(FileIdentity.of(target)))
        os.unlink(target)  # noqa: PTH108
    with new_file(place) as file:
        file.write(json.dumps(plan).encode())


def _write(conversion: Conversion, todo: list[int], writers: Writers) -> None:
    """Has some of the files written, and shows how far that is."""
    counts = RecordCounts.new(os.path.join(conversion.folder, "counts"), conversion.num_shards)  # noqa: PTH118
    for shard in set(range(conversion.num_shards)) - set(todo):
        counts.set(shard, len(conversion.range_of(shard)))
    with shown_progress(counts, f"Writing {conversion.destination!r}", len(conversion.source)):
        writers(conversion, counts, todo)


@final
@dataclasses.dataclass(frozen=True)
class ProcessWriters:
    """Writes files in worker processes.

    Attributes:
        jobs: how many write at the same time; with 1, it is this process.
    """

    jobs: int

    def __call__(self, conversion: Conversion, counts: RecordCounts, todo: Sequence[int]) -> None:
        """Writes them."""
        if not todo:
            return
        jobs = min(self.jobs, len(todo))
        loader = DataLoader(
            data_source=todo,
            sampler=SequentialSampler(len(todo)),
            operations=[_WriteShard(conversion, counts)],
            worker_count=jobs if jobs > 1 else 0,
            shard_options=NoSharding(),
            read_options=ReadOptions(num_threads=0),
            stall_timeout=float("inf"),
        )
        with loader:
            for _ in loader:
                pass


@final
class _WriteShard(Map[int, int]):
    """Writes the file of a number, and returns the number."""

    def __init__(self, conversion: Conversion, counts: RecordCounts) -> None:
        self._conversion = conversion
        self._counts = counts

    def map(self, shard: int, /) -> int:
        """Writes one file."""
        write_unit(self._conversion, self._counts, shard)
        return shard


def _wait_for_writers(conversion: Conversion) -> None:
    """Returns when the workers of a process that was killed are gone."""
    deadline = time.monotonic() + _LAST_WRITERS_SECONDS
    with os.fdopen(open_private(conversion.writers, os.O_RDWR | os.O_CREAT), "r+b") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BlockingIOError(
                        f"Processes of an earlier conversion are still writing {conversion.destination!r}."
                    ) from error
                time.sleep(0.02)
            else:
                return


@contextlib.contextmanager
def _alone_in(folder: str, destination: str) -> Iterator[None]:
    """Holds a lock that ends with this process, however it ends."""
    remedy = "Remove it, or choose another destination"
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise NotADirectoryError(error.errno, f"This must be a folder of this user. {remedy}", folder) from None
    try:
        check_private(descriptor, folder, remedy)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"Another process is writing {destination!r} right now.") from error
        yield
    finally:
        os.close(descriptor)
