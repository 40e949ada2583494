"""Sets NumPy's Philox to the start of successive streams, in less than a tenth of a microsecond each.

NumPy's own way is to set the `state` property to a dict of dicts, which takes more than ten times as long: longer than
most draws. NumPy documents the address of the state (`ctypes.state_address`), but not its layout. The layout is taken
from NumPy's numpy/random/src/philox/philox.h and numpy/random/_philox.pyx, and was checked in the releases 1.26, 2.0
and 2.4:

    at state_address    pointers to the counter and to the key
    + 16                int buffer_pos, 4 words of 64 bits of buffer, int has_uint32, 32 bits of uinteger
    + 64                the key, 2 words of 64 bits
    + 80                the counter, 4 words of 64 bits

Guarantees:
    * Nothing is written to memory whose layout is not verified: the two pointers must point to the expected key and
      counter, and once per process a generator that was set in this way must draw the same numbers as a new one.
      Otherwise the `state` property is set.
"""

import ctypes
import functools
import io
import itertools
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_POINTERS, _KEY, _COUNTER = 16, 48, 64
"""The size of the two pointers in bytes, and the offsets of key and counter after them, which are adjacent."""

_STATE_LENGTH, _FIRST_WORD = 12, _KEY // 8
"""The number of words of 64 bits after the pointers, and of those before the key. At the start of a stream, all fields
but `buffer_pos`, key and counter are zero.
"""

_NOTHING_BUFFERED = 4

_Memory = ctypes.Array[ctypes.c_char]


def at_streams(generator: "np.random.Generator", words: NDArray[np.uint64]) -> Iterator["np.random.Generator"]:
    """Returns an iterator of the same generator, of a Philox, which is each time at the start of the next stream.

    A stream is a row of `words`, shape (n, 6): the two words of the key and the four of the counter.
    """
    memory = _memory_of(generator.bit_generator) if _layout_is_known() else None
    if memory is None:
        return _by_property(generator, words)
    # No frame of Python runs per stream: `readinto` copies the next state, and returns its size, which is true.
    set_next = map(io.BytesIO(_states(words)).readinto, itertools.repeat(memory, len(words)))
    return itertools.compress(itertools.repeat(generator), set_next)


def _by_property(generator: "np.random.Generator", words: NDArray[np.uint64]) -> Iterator["np.random.Generator"]:
    for stream in words.tolist():
        _set_property(generator.bit_generator, stream)
        yield generator


def _set_property(bit_generator: "np.random.BitGenerator", stream: list[int]) -> None:
    state: dict[str, object] = {
        "bit_generator": "Philox",
        "state": {"key": stream[:2], "counter": stream[2:]},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": _NOTHING_BUFFERED,
        "has_uint32": 0,
        "uinteger": 0,
    }
    bit_generator.state = state


def _states(words: NDArray[np.uint64]) -> bytes:
    states = np.zeros((len(words), _STATE_LENGTH), np.uint64)
    states.view(np.intc)[:, 0] = _NOTHING_BUFFERED
    states[:, _FIRST_WORD:] = words
    return states.tobytes()


def _memory_of(bit_generator: "np.random.BitGenerator") -> _Memory | None:
    """Returns the memory of a bit generator after its pointers, None if the pointers are not as expected.

    It is valid as long as the bit generator exists.
    """
    address = id(bit_generator) + _address_offset()
    state = address + _POINTERS
    if list((ctypes.c_uint64 * 2).from_address(address)) != [state + _COUNTER, state + _KEY]:
        return None
    return (ctypes.c_char * (8 * _STATE_LENGTH)).from_address(state)


@functools.cache
def _address_offset() -> int:
    """Returns the offset of the state from the start of the object, because asking NumPy each time takes too long."""
    probe = np.random.Philox(0)
    return int(probe.ctypes.state_address) - id(probe)


@functools.cache
def _layout_is_known() -> bool:
    """Returns True if a bit generator that is set in memory draws the expected numbers."""
    if sys.implementation.name != "cpython":
        # `id` is not an address there.
        return False
    stream = np.array([3, 2**64 - 1, 2**63, 5, 2**32 + 7, 11], np.uint64)
    expected = np.random.Philox(key=stream[:2], counter=stream[2:])
    probe = np.random.Philox(0)
    # To leave no field zero.
    np.random.Generator(probe).integers(0, 9, size=3, dtype=np.uint32)
    memory = _memory_of(probe)
    if memory is None:
        return False
    memory.raw = _states(stream[np.newaxis])
    return repr(probe.state) == repr(expected.state) and np.array_equal(probe.random_raw(9), expected.random_raw(9))
