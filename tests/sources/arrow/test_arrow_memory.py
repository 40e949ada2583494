"""Numbers, runs, bits and slices gathered from the buffers of Arrow, whichever larger ones they are parts of."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.sources.arrow.columns import Memory

DTYPES = st.sampled_from(["u1", "i2", "f4", "i8", "M8[us]"])
CUTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=5)
"""Buffers: at which multiple of 8 bytes each begins within a larger one; and how long the runs in it may be."""


def parts_of(dtype: str, cuts: list[tuple[int, int]], is_shared: bool) -> tuple[list[Any], list[Any]]:
    """Returns buffers, which are parts of one or of several, and what is in each, as an array."""
    values = np.random.default_rng(0).integers(0, 256, 64 * np.dtype(dtype).itemsize, np.uint8)
    whole = [pa.array(np.roll(values, 0 if is_shared else number)).buffers()[1] for number in range(len(cuts))]
    parts = [whole[0 if is_shared else number].slice(8 * start) for number, (start, _) in enumerate(cuts)]
    return parts, [np.frombuffer(part, dtype) for part in parts]


@given(dtype=DTYPES, cuts=CUTS, is_shared=st.booleans(), data=st.data())
def test_what_is_gathered_is_what_the_buffers_hold(
    dtype: str, cuts: list[tuple[int, int]], is_shared: bool, data: st.DataObject
) -> None:
    """Whichever of them, in any order: the oracle looks into each buffer alone."""
    buffers, arrays = parts_of(dtype, cuts, is_shared)
    memory = Memory()
    item = np.dtype(dtype).itemsize
    bases = np.array([memory.address_of(buffer) for buffer in buffers])
    length = min(length for _, length in cuts)
    which = np.array(data.draw(st.lists(st.integers(0, len(cuts) - 1), min_size=1, max_size=20)))
    within = np.array([data.draw(st.integers(0, len(arrays[part]) - length)) for part in which])
    places = bases[which] // item + within

    taken = memory.take(places, np.dtype(dtype))
    assert taken.tobytes() == b"".join(arrays[part][at].tobytes() for part, at in zip(which, within, strict=True))

    runs = np.empty((len(places), length), dtype)
    memory.take_runs(places, runs)
    expected = [arrays[part][at : at + length].tobytes() for part, at in zip(which, within, strict=True)]
    assert [run.tobytes() for run in runs] == expected

    lengths = within % (length + 1) * item
    slices = memory.slices(places * item, lengths)
    assert list(map(bytes, slices)) == [run[:size] for run, size in zip(expected, lengths.tolist(), strict=True)]

    bits = memory.bits(places * item * 8 + 3)
    assert bits.tolist() == [bool(run[0] >> 3 & 1) for run in expected]


def test_bytes_need_not_be_aligned() -> None:
    """A buffer of bytes at an odd address, below one of numbers, shifts none of them."""
    content = np.arange(4096, dtype=np.uint8)
    start = -content.ctypes.data % 64
    texts, numbers = pa.py_buffer(content[start + 3 : start + 50]), pa.py_buffer(content[start + 64 : start + 128])
    memory = Memory()
    first, second = memory.address_of(texts), memory.address_of(numbers)
    assert first % 8 == second % 8 == 0
    assert memory.take(np.array([first, second]), np.dtype(np.uint8)).tolist() == [
        content[start + 3],
        content[start + 64],
    ]
    other = memory.address_of(pa.array([7]).buffers()[1])
    taken = memory.take(np.array([other // 8, second // 8 + 1]), np.dtype(np.int64))
    assert taken.tolist() == [7, int(content[start + 64 : start + 128].view(np.int64)[1])]


def test_what_is_not_in_a_buffer_is_an_error() -> None:
    """Nothing else of the process's memory is ever looked at."""
    memory = Memory()
    buffer = pa.array([1, 2, 3], pa.int64()).buffers()[1]
    base = memory.address_of(buffer) // 8
    other = memory.address_of(pa.array([4], pa.int64()).buffers()[1]) // 8
    beyond = np.array([base, base + buffer.size // 8 + 100])
    dtype = np.dtype(np.int64)
    for places in (beyond, np.append(beyond, other)):
        with pytest.raises(ValueError, match="buffer"):
            memory.take(places, dtype)
        with pytest.raises(ValueError, match="buffer"):
            memory.take_runs(places, np.empty((len(places), 2), dtype))
        with pytest.raises(ValueError, match="buffer"):
            memory.slices(places * 8, np.full(len(places), 8))


def test_parts_of_one_mapping_are_one_region(tmp_path: Any) -> None:
    """However many record batches a mapped file has, a batch is gathered by one call; so it is for slices."""
    schema = pa.schema([("x", pa.int64())])
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number in range(50):
            stream.write_batch(pa.record_batch([pa.array([number] * 10)], schema))
    memory = Memory()
    with pa.memory_map(str(tmp_path / "a")) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
        places = [memory.address_of(batch["x"].buffers()[1]) // 8 for batch in table.to_batches()]
        assert memory.take(np.array(places), np.dtype(np.int64)).tolist() == list(range(50))
        assert len(memory._regions) == 2  # That of the file, and that of nothing.
