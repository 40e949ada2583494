"""Every row of the tables in docs/coming-from-pytorch.md is true: what stands beside a name does the same work."""

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import millstream as grain
from support.documents.document_tables import RowTests, first_cells

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-pytorch.md"
ROWS = RowTests()


@pytest.mark.parametrize("row", first_cells(DOCUMENT))
def test_a_row_is_true(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of each table has a test, and what it says holds."""
    monkeypatch.chdir(tmp_path)  # Where a row is about files, it writes them here.
    ROWS[row]()


def test_no_row_has_gone() -> None:
    """Each test here belongs to a row that exists."""
    assert ROWS.keys() == set(first_cells(DOCUMENT))


class Squares:
    """A dataset in PyTorch's sense."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: int) -> int:
        return key**2


def read(source: Any, operations: Sequence[Any] = (), **options: Any) -> list[Any]:
    """Returns the elements of one epoch; arrays as lists."""
    loader = grain.load(source, num_epochs=1, transformations=operations, **options)
    return [element.tolist() if isinstance(element, np.ndarray) else element for element in loader]


def write_numbers(path: str, numbers: Sequence[int]) -> None:
    """Writes an ArrayRecord file of one-byte records."""
    writer = ArrayRecordWriter(path, "group_size:1")
    for number in numbers:
        writer.write(bytes([number]))
    writer.close()


# ---- What maps to what ---------------------------------------------------------------------------------------------


@ROWS.of("`Dataset` with `__getitem__`, `__getitems__`")
def _() -> None:
    class Batched(Squares):
        def __getitems__(self, keys: Sequence[int]) -> list[int]:
            return [-(key**2) for key in keys]

    assert read(Squares()) == [0, 1, 4, 9]
    assert read(Batched(), batch_size=4) == [[0, -1, -4, -9]]


@ROWS.of("`TensorDataset(images, labels)`")
def _() -> None:
    images, labels = np.zeros((3, 8, 8)), np.arange(3)
    ((image_batch, label_batch),) = read(grain.InMemoryDataSource((images, labels)), batch_size=3)
    assert image_batch.shape == (3, 8, 8)
    assert label_batch.tolist() == [0, 1, 2]


@ROWS.of("`ConcatDataset` of files")
def _() -> None:
    write_numbers("a.array_record", [1, 2])
    write_numbers("b.array_record", [3])
    with grain.ArrayRecordDataSource(["a.array_record", "b.array_record"]) as source:
        assert read(source) == [b"\1", b"\2", b"\3"]


@ROWS.of("`Subset(dataset, indices)`, `random_split`")
def _() -> None:
    indices = [3, 1]
    sampler = grain.IndexSampler(len(indices), keys=indices, num_epochs=1)
    assert list(grain.DataLoader(data_source=Squares(), sampler=sampler)) == [9, 1]
    write_numbers("file.array_record", range(5))
    with grain.ArrayRecordDataSource("file.array_record[1:3]") as source:
        assert read(source) == [b"\1", b"\2"]


@ROWS.of("`IterableDataset`")
def _() -> None:
    class Letters(grain.IterDataset[str]):
        def __iter__(self) -> Any:
            return iter("abc")

    assert list(Letters().map(str.upper)) == ["A", "B", "C"]
    assert list(grain.IterDataset.source(Letters()).map(str.upper)) == ["A", "B", "C"]
    with pytest.raises(TypeError, match="has no random access"):
        grain.load(iter("abc"))  # type: ignore[arg-type]  # the mistake


@ROWS.of("transforms inside `__getitem__`")
def _() -> None:
    def fail(element: int) -> int:
        raise ValueError(element)

    with pytest.raises(ValueError, match="0") as caught:
        read(Squares(), [fail])
    assert "in operation 0, Map(fail" in caught.value.__notes__[0]


@ROWS.of("`random`, `np.random`, `torch.rand` in a transform")
def _() -> None:
    class Draw(grain.RandomMapTransform):
        def random_map(self, element: int, rng: np.random.Generator) -> tuple[int, float]:
            return element, rng.random()

    assert read(Squares(), [Draw()], seed=1) == read(Squares(), [Draw()], seed=1) != read(Squares(), [Draw()], seed=2)


@ROWS.of("`shuffle=True`, `generator=`")
def _() -> None:
    orders = [read(range(50), shuffle=True, seed=seed) for seed in (0, 1)]
    assert list(range(50)) == sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@ROWS.of("`for epoch in range(n): for batch in loader:`")
def _() -> None:
    loader = grain.load(list(range(50)), shuffle=True, seed=0)
    orders = [list(batches) for _, batches in loader.epochs(2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@ROWS.of("`sampler.set_epoch(epoch)`")
def _() -> None:
    keys = grain.IndexSampler(50, shuffle=True, seed=0).record_keys(0, 100)
    assert keys[:50].tolist() != keys[50:].tolist()


@ROWS.of("`WeightedRandomSampler`, samplers of your own")
def _() -> None:
    class Backwards:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, position: int) -> grain.RecordMetadata:
            return grain.RecordMetadata(index=position, record_key=3 - position)

    assert list(grain.DataLoader(data_source=Squares(), sampler=Backwards())) == [9, 4, 1, 0]


@ROWS.of("`batch_sampler`")
def _() -> None:
    assert read(Squares(), [grain.Batch(2)]) == [[0, 1], [4, 9]]


@ROWS.of("`batch_size`, `drop_last`")
def _() -> None:
    assert read(Squares(), [grain.Batch(3, drop_remainder=True)]) == [[0, 1, 4]]
    assert read(Squares(), [grain.Batch(3), np.sum]) == [5, 9]


@ROWS.of("`collate_fn`")
def _() -> None:
    assert read(Squares(), [grain.Batch(2, batch_fn=sum), lambda total: -total]) == [-1, -13]


@ROWS.of("`num_workers`")
@ROWS.of("`prefetch_factor`")
def _() -> None:
    assert read(list("ab"), worker_count=1) == ["a", "b"]
    sampler = grain.IndexSampler(2, num_epochs=1)
    loader = grain.DataLoader(data_source=list("ab"), sampler=sampler, worker_count=1, worker_buffer_size=4)
    assert loader.multiprocessing_options.per_worker_buffer_size == 4
    assert list(loader) == ["a", "b"]


@ROWS.of("`timeout`")
def _() -> None:
    assert inspect.signature(grain.DataLoader).parameters["stall_timeout"].default == 600


@ROWS.of("`persistent_workers`, `multiprocessing_context`, `worker_init_fn`")
@ROWS.of("`get_worker_info()`")
def _() -> None:
    loader = grain.load(list("ab"), num_epochs=1, worker_count=1)
    assert list(loader) == list(loader) == list(grain.load(list("ab"), num_epochs=1))


@ROWS.of("`pin_memory`, `batch.to(device, non_blocking=True)`")
def _() -> None:
    with grain.device_put(iter(grain.load(Squares(), batch_size=4)), jax.devices()[0]) as iterator:
        batch = next(iterator)
    assert isinstance(batch, jax.Array)
    assert batch.tolist() == [0, 1, 4, 9]


@ROWS.of("`DistributedSampler(dataset, num_replicas, rank)`")
def _() -> None:
    by_process = grain.ShardByJaxProcess(drop_remainder=True)
    assert read(Squares(), shard_options=by_process) == [0, 1, 4, 9]
    parts = [read(Squares(), batch_size=1, shard_options=grain.ShardOptions(rank, 2)) for rank in range(2)]
    assert parts == [[[0], [4]], [[1], [9]]]


@ROWS.of("torchdata's `StatefulDataLoader`: `state_dict()`, `load_state_dict()`")
def _() -> None:
    loader = grain.load(Squares())
    with iter(loader) as iterator, iter(loader) as resumed:
        next(iterator)
        resumed.load_state_dict(iterator.state_dict())
        assert next(resumed) == next(iterator) == 1


# ---- What `Batch` gives --------------------------------------------------------------------------------------------


def batched(*elements: Any) -> Any:
    (batch,) = grain.load(elements, num_epochs=1, batch_size=len(elements))
    return batch


@dataclasses.dataclass
class Point:
    """An element with a name for each of its leaves."""

    x: Any
    y: Any


@ROWS.of("`int`, `float`")
def _() -> None:
    assert batched(1, 2).dtype == np.int64
    assert batched(1.0, 2.0).dtype == np.float64


@ROWS.of("array, or tensor on the CPU")
def _() -> None:
    class Tensor:
        """What NumPy and a tensor on the CPU have agreed on."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return np.zeros(3, np.float32)

    for batch in (batched(np.zeros(3, np.float32), np.ones(3, np.float32)), batched(Tensor(), Tensor())):
        assert (batch.shape, batch.dtype) == ((2, 3), np.float32)


@ROWS.of("`str`")
def _() -> None:
    assert batched("a", "bc").dtype.kind in "UT"
    assert batched("a", "bc").tolist() == ["a", "bc"]


@ROWS.of("`bytes`")
def _() -> None:
    assert batched(b"a\0", b"bc").dtype == object
    assert batched(b"a\0", b"bc").tolist() == [b"a\0", b"bc"]


@ROWS.of("tuple")
def _() -> None:
    first, second = batched((1, 2), (3, 4))
    assert (first.tolist(), second.tolist()) == ([1, 3], [2, 4])
    assert type(batched((1, 2), (3, 4))) is tuple


@ROWS.of("dataclass")
def _() -> None:
    batch = batched(Point(1, 2), Point(3, 4))
    assert type(batch) is Point
    assert (batch.x.tolist(), batch.y.tolist()) == ([1, 3], [2, 4])


@ROWS.of("`None`")
def _() -> None:
    assert batched(Point(1, None), Point(2, None)).y is None


@ROWS.of("elements that differ in shape or dtype")
def _() -> None:
    for other in (np.zeros(4), np.zeros(3, np.int8)):
        with pytest.raises(grain.StackError) as caught:
            batched({"x": np.zeros(3)}, {"x": other})
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "x" in text
        assert str(other.dtype) in text
        assert "record key" in text
