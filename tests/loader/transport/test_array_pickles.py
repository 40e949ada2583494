"""Arrays that lie in files cross as file and offset: a worker maps the file, and sees what the trainer sees.

PyTorch's tensors cross by their memory, as arrays do; what only PyTorch knows how to send, it sends.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.transport.array_pickles import SMALLEST_BYTES
from millstream.loader.transport.pickling import ClassTable
from support.processes.pickles import sent
from support.processes.worker_pools import pool_of
from support.streams import comparable

NO_CLASSES = ClassTable()
NUM_BYTES = 4 * SMALLEST_BYTES
HEADER = 100
"""The offset of the array in the file: not at a page."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Returns a file of numbers, with a space and the end of a line in its name."""
    path = tmp_path / "some\ntokens .bin"
    np.arange(NUM_BYTES // 2, dtype=np.uint16).tofile(path)
    return path


def arrived(array: Any) -> Any:
    """Returns an array that has crossed without any of its bytes."""
    pickled, buffers = sent(array)
    assert len(pickled) < 1000
    assert not buffers
    return NO_CLASSES.loads(pickled)[0]


def mapped(file: Path, mode: Any = "r") -> Any:
    """Returns a file as a memory-mapped array that does not begin where the file does."""
    return np.memmap(file, dtype=np.uint16, mode=mode, offset=HEADER)


def by_mmap(file: Path) -> Any:
    with file.open("rb") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint16)


LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "whole": mapped,
    "slice": lambda file: mapped(file)[1000:],
    "steps": lambda file: mapped(file)[5:-5:2],
    "backwards": lambda file: mapped(file)[::-1],
    "rows": lambda file: mapped(file)[:120_000].reshape(-1, 100)[3:, ::-2],
    "transposed": lambda file: mapped(file)[:120_000].reshape(-1, 100).T,
    "broadcast": lambda file: np.broadcast_to(mapped(file)[7:9], (SMALLEST_BYTES, 2)),
    "another dtype": lambda file: mapped(file)[:120_000].view("M8[s]"),
    "fields": lambda file: np.memmap(file, [("a", "u1"), ("b", ">i4"), ("c", "u1")], "r", HEADER)["b"],
    "plain array": lambda file: np.asarray(mapped(file)),
    "Python's map": by_mmap,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_in_a_file_arrives_as_it_is(layout: str, file: Path) -> None:
    """Kind, dtype, shape, strides and values are the same, whatever part of the file it is and in what layout."""
    array = LAYOUTS[layout](file)
    copy = arrived(array)

    assert type(copy) is type(array)
    assert comparable(copy) == comparable(array)
    assert copy.strides == array.strides
    assert not copy.flags.writeable
    if isinstance(array, np.memmap):
        assert (copy.mode, str(copy.filename)) == ("r", str(file))


def test_a_file_is_mapped_once_for_all_its_arrays(file: Path) -> None:
    """Columns of one file cost one descriptor."""
    whole = mapped(file)
    half = len(whole) // 2
    first, second = arrived([whole[:half], whole[half:]])

    assert first.base is second.base
    assert comparable([first, second]) == comparable([whole[:half], whole[half:]])


def test_what_is_written_to_a_file_is_seen_everywhere(file: Path) -> None:
    """An array that may be written to lies in the file, in the trainer and in a worker."""
    array = mapped(file, "r+")
    copy = arrived(array)
    copy[3] = 77
    array[4] = 78

    assert (array[3], copy[4]) == (77, 78)
    assert copy.flags.writeable
    assert (copy.mode, array.mode) == ("r+", "r+")


def test_a_file_of_a_relative_name_is_found_from_elsewhere(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array mapped from a relative path is the same file after the working folder has changed."""
    monkeypatch.chdir(tmp_path)
    array = mapped(Path(file.name))
    monkeypatch.chdir("/")

    assert comparable(arrived(array)) == comparable(array)


def deleted(file: Path) -> Any:
    """Returns an array of a file that is gone."""
    array = mapped(file)
    file.unlink()
    return array


def replaced(file: Path) -> Any:
    """Returns an array of a file whose name is another file's now."""
    array = mapped(file)
    other = file.with_name("other")
    other.write_bytes(bytes(NUM_BYTES))
    other.replace(file)
    return array


def changed_privately(file: Path) -> Any:
    """Returns an array with a change that is not in its file."""
    array = mapped(file, "c")
    array[5] = 99
    return array


@pytest.mark.parametrize("make", [deleted, replaced, changed_privately])
def test_what_is_not_in_a_file_crosses_as_bytes(make: Callable[[Path], Any], file: Path) -> None:
    """Arrays whose bytes no file has, or that are private, are sent as bytes in shared memory."""
    array = make(file)
    pickled, buffers = sent(array)
    copy = NO_CLASSES.loads(pickled, buffers)[0]

    assert [buffer.raw().nbytes for buffer in buffers] == [array.nbytes]
    assert type(copy) is np.memmap
    assert comparable(copy) == comparable(array)


def test_small_arrays_cross_as_bytes(file: Path) -> None:
    """A map for each of them would cost each worker a descriptor."""
    pickled, _ = sent(mapped(file)[:10])

    assert os.fsencode(file.name) not in pickled


def cut(file: Path) -> None:
    os.truncate(file, HEADER)


@pytest.mark.parametrize("change", [replaced, cut])
def test_a_file_that_changes_before_a_worker_maps_it_is_an_error(change: Callable[[Path], Any], file: Path) -> None:
    """A worker never reads other bytes than the trainer has promised it: the error names the file."""
    pickled, _ = sent(mapped(file))
    change(file)

    with pytest.raises(OSError, match=r"tokens .bin in a worker: the trainer has it memory-mapped"):
        NO_CLASSES.loads(pickled)


class Windows:
    """A source that maps a file itself."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, key: int) -> Any:
        return np.array(self.tokens[key])


@pytest.mark.parametrize("kind", ["columns", "array", "source", "operation"])
def test_workers_map_the_files_of_a_pipeline(kind: str, file: Path) -> None:
    """Wherever in a pipeline a mapped array is: the stream is the inline one, and what is sent stays small."""
    tokens = np.memmap(file, dtype=np.uint16, mode="r").reshape(-1, 64)
    source: Any = {"columns": millstream.InMemoryDataSource(tokens), "source": Windows(tokens), "array": tokens}.get(
        kind, np.arange(len(tokens)).tolist()
    )
    operations = [lambda key: key + tokens[key % len(tokens)]] if kind == "operation" else []

    def loader(worker_count: int) -> millstream.DataLoader:
        return millstream.load(
            source, shuffle=True, seed=1, num_epochs=1, batch_size=16, transformations=operations,
            worker_count=worker_count,
        )  # fmt: skip

    with iter(loader(1)) as iterator:
        batches = [next(iterator)]
        assert pool_of(iterator)._pipeline_file.file_bytes < NUM_BYTES // 4
        batches += iterator
    assert comparable(batches) == comparable(list(loader(0)))


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is no dependency; `make bench` installs it")


TENSORS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda torch: torch.arange(6.0).reshape(2, 3),
    "bfloat16": lambda torch: torch.arange(6).to(torch.bfloat16),
    "float8": lambda torch: torch.tensor([1, 2], dtype=torch.float8_e4m3fn),
    "complex": lambda torch: torch.tensor([1 + 2j]),
    "one number": lambda torch: torch.tensor(True),
    "transposed": lambda torch: torch.arange(12).reshape(3, 4).T,
    "a part": lambda torch: torch.arange(100)[10:20],
    "nothing": lambda torch: torch.zeros(0, 3),
    "conjugate": lambda torch: torch.tensor([1 + 2j]).conj(),
    "with a gradient": lambda torch: torch.ones(3, requires_grad=True),
    "parameter": lambda torch: torch.nn.Parameter(torch.ones(2)),
    "sparse": lambda torch: torch.ones(4).to_sparse(),
}
"""Tensors of all kinds, those that cross by their memory first."""


@pytest.mark.third_party
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_are(name: str, torch: Any) -> None:
    """Class, dtype, shape, layout, gradient and values are kept."""
    tensor = TENSORS[name](torch)
    pickled, buffers = sent(tensor)
    arrived = NO_CLASSES.loads(pickled, buffers)[0]

    assert type(arrived) is type(tensor)
    assert (arrived.dtype, arrived.shape, arrived.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert (arrived.requires_grad, arrived.is_conj()) == (tensor.requires_grad, tensor.is_conj())
    assert str(arrived) == str(tensor)


@pytest.mark.third_party
def test_the_memory_of_tensors_is_shared(torch: Any) -> None:
    """A pickle holds none of their bytes, and what arrives is a view of the memory that was sent."""
    pickled, (buffer,) = sent(torch.ones(1000, 1000))
    memory = bytearray(buffer.raw())
    arrived = NO_CLASSES.loads(pickled, [memory])[0]
    memory[:4] = bytes(4)

    assert len(pickled) < 1000
    assert (arrived[0, 0], arrived[0, 1]) == (0, 1)
