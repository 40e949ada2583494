"""Parsing of many protocol buffer messages together, with NumPy.

A message is a sequence of fields. Each begins with a varint, its tag: 8 times the field's number plus its wire type,
which selects the encoding of the value: a varint (0), 8 bytes (1), a length followed by bytes (2), or 4 bytes (5). A
varint has 7 bits per byte, the lowest first, and the highest bit is set in all bytes but the last
(protobuf.dev/programming-guides/encoding).

Messages are parsed in parallel: the first field of all messages, then the second field of all that have one. The cost
is therefore some NumPy calls for each field of the message with the most fields.
"""

import dataclasses
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
"""Offsets into the data, or numbers of messages."""

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5

_MAX_VARINT_BYTES = 10

_MAX_SHORT_VARINT_BYTES = 4
"""Longest varint whose value has less than 32 bits."""

_VARINTS_PER_STEP = 1 << 15
"""Number of varints that are decoded in one step, so that intermediate arrays stay in the processor's cache."""

_GATHERED_BYTES = 32
"""Longest span that is copied byte by byte; longer ones are sliced, because a slice costs as much."""


@final
class WireError(ValueError):
    """The bytes are not a message: the one with this number, from 0."""

    def __init__(self, message: int, reason: str) -> None:
        super().__init__(reason)
        self.message = message


@final
class WireData:
    """Concatenated messages."""

    def __init__(self, messages: list[bytes]) -> None:
        self.stops = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        self.starts = np.concatenate([[0], self.stops[:-1]]).astype(np.int64)
        # Zeros at the end, because reads may go beyond the last message.
        self._bytes = b"".join([*messages, bytes(2 * _MAX_VARINT_BYTES)])
        self._array = np.frombuffer(self._bytes, np.uint8)

    def varints_at(self, offsets: Integers) -> tuple[Integers, Integers]:
        """Returns the varints at offsets, and their ends. The end of an endless varint is beyond all messages."""
        byte = self._array.take(offsets)
        values, ends = byte.astype(np.int64), offsets + 1
        longer = (byte >= 0x80).nonzero()[0]
        if not longer.size:
            return values, ends
        values &= 0x7F
        for shift in range(7, 7 * _MAX_VARINT_BYTES, 7):
            byte = self._array.take(ends[longer])
            values[longer] |= (byte & 0x7F).astype(np.int64) << shift
            ends[longer] += 1
            longer = longer[byte >= 0x80]
            if not longer.size:
                return values, ends
        ends[longer] = len(self._array) - _MAX_VARINT_BYTES
        return values, ends

    def gather(self, starts: Integers, stops: Integers) -> NDArray[np.uint8]:
        """Returns the concatenated bytes of spans, as a new array."""
        lengths = stops - starts
        total = int(lengths.sum())
        if total <= _GATHERED_BYTES * len(starts):
            shifts = starts - (np.cumsum(lengths) - lengths)
            return self._array[np.repeat(shifts, lengths) + np.arange(total)]
        return np.frombuffer(bytearray().join(self.slices(starts, stops)), np.uint8)

    def slices(self, starts: Integers, stops: Integers) -> list[bytes]:
        """Returns the bytes of each span."""
        data = self._bytes
        return [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def match(self, starts: Integers, stops: Integers, names: list[bytes]) -> Integers:
        """Returns the index of the name that each span equals, or -1; shape (n,)."""
        found = np.full(len(starts), -1, np.int64)
        lengths = stops - starts
        for length in {len(name) for name in names}:
            candidates = np.flatnonzero(lengths == length)
            table = self._array[starts[candidates, np.newaxis] + np.arange(length)]
            # As one value per span, which is compared in one operation.
            spans = table.view(f"V{length}")[:, 0] if length else np.zeros(len(candidates), np.bool_)
            for number, name in enumerate(names):
                if len(name) == length:
                    same = spans == np.frombuffer(name, f"V{length}")[0] if length else ~spans
                    found[candidates[same]] = number
        return found


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """Fields of messages, ordered by message. All arrays have shape (n,).

    Attributes:
        message: the number of the message of each field.
        number: the field's number in the definition of the message.
        wire_type: the encoding of its value.
        starts: the start of its value, after the length if there is one.
        stops: the end of its value, exclusive.
    """

    message: Integers
    number: Integers
    wire_type: Integers
    starts: Integers
    stops: Integers

    def where(self, chosen: NDArray[np.bool_] | slice) -> "Fields":
        """Returns the chosen fields."""
        return Fields(
            self.message[chosen], self.number[chosen], self.wire_type[chosen], self.starts[chosen], self.stops[chosen]
        )

    def of(self, number: int) -> "Fields":
        """Returns the fields with a number that contain bytes: text, or messages."""
        return self.where((self.number == number) & (self.wire_type == BYTES))

    def last_of_each(self, count: int) -> tuple[Integers, Integers]:
        """Returns the span of the last field of each of `count` messages; an empty span if it has none."""
        starts, stops = np.zeros(count, np.int64), np.zeros(count, np.int64)
        # If several values are assigned to one index, the last one stays.
        starts[self.message], stops[self.message] = self.starts, self.stops
        return starts, stops


def fields_of(data: WireData, starts: Integers, stops: Integers) -> Fields:
    """Returns the fields of the messages at spans of the data."""
    rounds: list[tuple[Any, ...]] = []
    active = (starts < stops).nonzero()[0]
    offsets, limits = starts[active], stops[active]
    while active.size:
        tags, begins = data.varints_at(offsets)
        wire_types = tags & 7
        begins, ends = _values(data, active, wire_types, begins)
        # A value that begins beyond its message ends there, too. A length of 2^63 or more is negative here.
        _check(active, (ends <= limits) & (ends >= begins), "it has a field that is longer than the message")
        _check(active, tags >= 8, "it has a field with the number 0")
        rounds.append((active, tags >> 3, wire_types, begins, ends))
        more = ends < limits
        num_active = np.count_nonzero(more)
        if not num_active:
            break
        if num_active == len(active):
            offsets = ends
        else:
            active, offsets, limits = active[more], ends[more], limits[more]
    if not rounds:
        return Fields(*[np.zeros(0, np.int64)] * 5)
    if len(rounds) == 1:
        return Fields(*rounds[0])
    arrays = [np.concatenate(arrays_of_rounds) for arrays_of_rounds in zip(*rounds, strict=True)]
    order = np.argsort(arrays[0], kind="stable")
    return Fields(*(array[order] for array in arrays))


def _values(data: WireData, active: Integers, wire_types: Integers, begins: Integers) -> tuple[Integers, Integers]:
    """Returns the spans of values, given the ends of their tags."""
    if np.count_nonzero(wire_types == BYTES) == len(active):
        lengths, begins = data.varints_at(begins)
        return begins, begins + lengths
    begins, ends = begins.copy(), begins.copy()
    known = np.zeros(len(active), np.bool_)
    for wire_type in (VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES):
        chosen = np.flatnonzero(wire_types == wire_type)
        known[chosen] = True
        if wire_type == VARINT:
            ends[chosen] = data.varints_at(begins[chosen])[1]
        elif wire_type == BYTES:
            lengths, begins[chosen] = data.varints_at(begins[chosen])
            ends[chosen] = begins[chosen] + lengths
        else:
            ends[chosen] += 8 if wire_type == EIGHT_BYTES else 4
    _check(active, known, "it has a field with an invalid wire type")
    return begins, ends


def _check(messages: Integers, is_right: NDArray[np.bool_], reason: str) -> None:
    if np.count_nonzero(is_right) != len(is_right):
        raise WireError(int(messages[np.argmin(is_right)]), reason)


def varints_in(payload: NDArray[np.uint8]) -> tuple[Integers, NDArray[np.bool_]]:
    """Returns the varints that fill an array of bytes, and the mask of the bytes that end one.

    Values of 64 bits are signed. An incomplete varint at the end is ignored.

    Raises:
        WireError: a varint has more than 10 bytes; its `message` is the offset in the payload.
    """
    is_last = payload < 0x80
    if np.count_nonzero(is_last) == len(payload):
        return payload.astype(np.int64), is_last
    ends = is_last.nonzero()[0]
    lengths = np.diff(ends, prepend=-1)
    longest = int(lengths.max(initial=0))
    if longest > _MAX_VARINT_BYTES:
        raise WireError(int(ends[np.argmax(lengths)]), "a number in it has more than 64 bits")
    values = np.empty(len(ends), np.int64)
    for first in range(0, len(ends), _VARINTS_PER_STEP):
        chosen = ends[first : first + _VARINTS_PER_STEP]
        begin, end = chosen[0] - lengths[first] + 1, chosen[-1] + 1
        decoded = _values_at(payload[begin:end], is_last[begin:end], longest)
        values[first : first + len(chosen)] = decoded[chosen - begin]
    return values, is_last


def _values_at(payload: NDArray[np.uint8], is_last: NDArray[np.bool_], longest: int) -> NDArray[np.signedinteger[Any]]:
    """Returns, for each byte, the value of its varint up to it. At a varint's last byte, that is its value.

    Neighbouring bytes are read in order, which takes half the time of picking the bytes of each varint.
    """
    dtype = np.dtype(np.int32 if longest <= _MAX_SHORT_VARINT_BYTES else np.int64)
    bits = (payload & np.uint8(0x7F)).astype(dtype)
    values = bits.copy()
    # True if the byte `back` positions before belongs to the same varint: no byte from there on is a last one.
    belongs = ~is_last[:-1]
    for back in range(1, longest):
        factors = belongs.astype(dtype)
        values[back:] <<= 7 * factors
        values[back:] += bits[:-back] * factors
        belongs = belongs[1:] & ~is_last[: -back - 1]
    return values
