"""Sets NumPy's Philox to the start of a stream, over and over, in some 0.15 microseconds.

NumPy's own way is to set the `state` property to a dict of dicts, which takes up to ten times as long: longer than most
draws. NumPy says where the state lies in memory (`ctypes.state_address`), but not what lies where. That is written here
as it is in NumPy's numpy/random/src/philox/philox.h and numpy/random/_philox.pyx; it was found to be so in the releases
1.26, 2.0 and 2.4:

    at state_address    pointers to the counter and to the key
    + 16                int buffer_pos, 4 words of 64 bits of buffer, int has_uint32, 32 bits of uinteger
    + 64                the key, 2 words of 64 bits
    + 80                the counter, 4 words of 64 bits

Guarantees:
    * Nothing is written to memory that is not known to be this: the two pointers must point to where key and counter
      are expected, and once in each process a generator that was set in this way must draw what a new one draws.
      Otherwise the `state` property is set.
"""

import ctypes
import functools
import struct
import sys
from collections.abc import Callable

import numpy as np

Start = Callable[[int, int, int, int, int, int], None]
"""Takes the two words of a key and the four of a counter."""

_STATE = struct.Struct("@i36xiI2Q4Q")
_STATE_OFFSET, _KEY_OFFSET, _COUNTER_OFFSET = 16, 64, 80
_NOTHING_BUFFERED = 4


def starter(bit_generator: "np.random.BitGenerator") -> Start:
    """Returns the function that sets a Philox to the start of the stream of a key and a counter."""
    if _layout_is_known():
        start = _start_in_memory(bit_generator)
        if start is not None:
            return start
    return functools.partial(_start_by_property, bit_generator)


def _start_by_property(bit_generator: "np.random.BitGenerator", *words: int) -> None:
    state: dict[str, object] = {
        "bit_generator": "Philox",
        "state": {"key": words[:2], "counter": words[2:]},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": _NOTHING_BUFFERED,
        "has_uint32": 0,
        "uinteger": 0,
    }
    bit_generator.state = state


class _Memory(ctypes.Structure):
    """The state of a bit generator, without the pointers."""

    _fields_ = (("state", ctypes.c_char * _STATE.size),)
    owner: "np.random.BitGenerator"


def _start_in_memory(bit_generator: "np.random.BitGenerator") -> Start | None:
    """Returns what writes to the memory of a bit generator, None if its pointers are not as expected."""
    address = id(bit_generator) + _address_offset()
    if list((ctypes.c_uint64 * 2).from_address(address)) != [address + _COUNTER_OFFSET, address + _KEY_OFFSET]:
        return None
    memory = _Memory.from_address(address + _STATE_OFFSET)
    # The memory must not outlive the object that it is in.
    memory.owner = bit_generator
    return functools.partial(_STATE.pack_into, memory, 0, _NOTHING_BUFFERED, 0, 0)


@functools.cache
def _address_offset() -> int:
    """Returns how far behind the beginning of the object its state is: NumPy takes too long to be asked each time."""
    probe = np.random.Philox(0)
    return int(probe.ctypes.state_address) - id(probe)


@functools.cache
def _layout_is_known() -> bool:
    """Returns whether a bit generator that is set in memory draws what it should."""
    if sys.implementation.name != "cpython":
        # There the number of an object is not its address.
        return False
    key, counter = (3, 2**64 - 1), (2**63, 5, 2**32 + 7, 11)
    expected = np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
    probe = np.random.Philox(0)
    # Something in every field.
    np.random.Generator(probe).integers(0, 9, size=3, dtype=np.uint32)
    start = _start_in_memory(probe)
    if start is None:
        return False
    start(*key, *counter)
    return repr(probe.state) == repr(expected.state) and np.array_equal(probe.random_raw(9), expected.random_raw(9))
