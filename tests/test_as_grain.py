"""Programs that import Grain run on millstream without a change, in worker processes too."""

import subprocess
from pathlib import Path

import pytest

import millstream
from millstream import grain_imports
from support.files.record_files import write_tfrecord
from support.processes.worker_pools import python

LIBRARY = """
import grain.python as pygrain
from grain import transforms
from grain._src.python.dataset import dataset
from grain._src.python.dataset.transformations import flatmap


class Double(transforms.Map):
    def map(self, element):
        import grain
        return 2 * element + (not hasattr(grain, "__file__"))  # a worker has no other grain


class Evens(dataset.MapDataset):
    def __len__(self):
        return len(self._parent) // 2

    def __getitem__(self, position):
        return self._parent[2 * position]
"""

SCRIPT = """
import sys
import grain
import library
import millstream

assert grain.MapDataset is millstream.MapDataset is library.dataset.MapDataset
assert library.flatmap.FlatMapIterDataset is millstream.experimental.FlatMapIterDataset
assert grain.experimental.FlatMapIterDataset is library.flatmap.FlatMapIterDataset
source = library.Evens(library.pygrain.MapDataset.source(range(8)))
loader = grain.DataLoader(
    data_source=source,
    sampler=grain.samplers.SequentialSampler(len(source)),
    operations=[library.Double(), grain.transforms.Batch(4)],
    worker_count=int(sys.argv[1]),
)
print(sys.argv[1:], [batch.tolist() for batch in loader])
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder that holds the script and the library."""
    (folder / "library.py").write_text(LIBRARY)
    (folder / "script.py").write_text(SCRIPT)
    return python(*arguments, cwd=folder)


@pytest.mark.parametrize("arguments", [["script.py", "0"], ["-m", "script", "1"]])
def test_an_unmodified_program_runs_on_millstream(tmp_path: Path, arguments: list[str]) -> None:
    """Script and library import `grain` alone; their operations and datasets work in the trainer and in workers."""
    ended = run(tmp_path, "-m", "millstream.as_grain", *arguments)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"['{arguments[-1]}'] [[1, 5, 9, 13]]\n"


def test_the_installation_is_refused_if_grain_is_there_already(tmp_path: Path) -> None:
    """A program that has imported another Grain is told to install earlier; twice is once."""
    (tmp_path / "grain").mkdir()
    (tmp_path / "grain" / "__init__.py").touch()
    late = run(tmp_path, "-c", "import grain, millstream; millstream.install_as_grain()")
    twice = run(
        tmp_path, "-c", "import millstream as m; m.install_as_grain(); m.install_as_grain(); import grain.python"
    )

    assert "RuntimeError: install_as_grain() must be called before grain is imported" in late.stderr
    assert (twice.returncode, twice.stderr) == (0, "")


def test_names_that_are_not_served_are_errors(tmp_path: Path) -> None:
    """An unknown module or name says that millstream serves Grain; the names that projects use privately are there."""
    ended = run(
        tmp_path,
        "-c",
        """
import millstream
millstream.install_as_grain()
import grain
from grain._src.core import sharding
from grain._src.python import data_loader
from grain._src.python.dataset.transformations.source import SourceMapDataset
from grain._src.python.ipc.shared_memory_array import SharedMemoryArrayMetadata
print([sharding.even_split(10, grain.ShardOptions(index, 4)) for index in range(4)])
print([sharding.even_split(10, grain.ShardOptions(index, 4, drop_remainder=True)) for index in range(4)])
print(data_loader._determine_worker_count(3), list(SourceMapDataset([5])), isinstance(b"", SharedMemoryArrayMetadata))
for name in ("import grain.tensorflow", "grain.NoSuchName", "from grain._src.core.sharding import no_such"):
    try:
        exec(name)
    except (ImportError, AttributeError) as error:
        print(error)
""",
    )

    assert ended.stderr == ""
    modules = ", ".join(grain_imports._PUBLIC)
    assert ended.stdout.splitlines() == [
        "[(0, 3), (3, 6), (6, 8), (8, 10)]",
        "[(0, 2), (2, 4), (4, 6), (6, 8)]",
        "3 [5] False",
        f"millstream serves grain, but has no 'grain.tensorflow'. It has {modules}.",
        "module 'grain', served by millstream, has no attribute 'NoSuchName'",
        "cannot import name 'no_such' from 'grain._src.core.sharding' (unknown location)",
    ]


FILES_OF_A_STORE = """
import grain.python as grain
import millstream
from grain._src.python.dataset.sources.tfrecord_dataset import _TFRecordDatasetIterator, _TFRecordReader
from grain.experimental import TFRecordIterDataset


class StoreReader(_TFRecordReader):
    def __init__(self, path):
        self._reader = open(path, "rb")


class StoreIterator(_TFRecordDatasetIterator):
    def __init__(self, path):
        grain.DatasetIterator.__init__(self)
        self._reader = StoreReader(path)


class StoreDataset(TFRecordIterDataset):
    def __iter__(self):
        return StoreIterator(self._path)


records = iter(StoreDataset("numbers").map(int).batch(2))
state = [next(records), records.get_state()][1]
print([batch.tolist() for batch in records], _TFRecordDatasetIterator("numbers").get_state())
records.set_state(state)
print(next(records).tolist())
for damaged in ("short", "other"):
    try:
        list(_TFRecordDatasetIterator(damaged))
    except millstream.DataSourceError as error:
        print(error)
"""


def test_readers_of_tfrecord_files_can_be_derived(tmp_path: Path) -> None:
    """A project opens TFRecord files of its store by subclasses of Grain's private classes, as MaxText does."""
    content = write_tfrecord(tmp_path / "numbers", [b"%d" % number for number in range(6)]).read_bytes()
    (tmp_path / "short").write_bytes(content[:-1])
    (tmp_path / "other").write_bytes(content[1:])
    (tmp_path / "files.py").write_text(FILES_OF_A_STORE)
    ended = run(tmp_path, "-m", "millstream.as_grain", "files.py")

    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "[[2, 3], [4, 5]] {'reader_offset': 0}",
        "[2, 3]",
        "<_io.BufferedReader name='short'> ends within the record at byte 85. Restore the file.",
        "<_io.BufferedReader name='other'> has no TFRecord at byte 0: the length is damaged.",
    ]


def test_the_loader_has_the_private_names_of_grains() -> None:
    """Keras rebuilds a loader from them, and programs take the length of the source."""
    loader = millstream.load(range(8), batch_size=2, worker_count=0)

    assert len(loader._data_source) == 8
    assert (loader._sampler, loader._operations) == (loader.sampler, loader.operations)
    assert (loader._shard_options, loader._read_options) == (loader.shard_options, loader.read_options)
    assert loader._multiprocessing_options.num_workers == 0
    for kind in (millstream.DataLoader, millstream.IterDataset, millstream.MapDataset):
        assert any(base.__name__ == kind.__name__ and "grain" in base.__module__ for base in kind.__mro__)


def test_without_a_script_the_usage_is_shown(tmp_path: Path) -> None:
    """No script is an error of usage, and help is not."""
    statuses = {"": 2, "-m": 2, "-h": 0}
    for given, status in statuses.items():
        assert run(tmp_path, "-m", "millstream.as_grain", *given.split()).returncode == status
