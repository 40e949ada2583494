"""The fields of many protocol buffer messages at once, by NumPy.

A message is a row of fields. Each begins with a varint, its tag: the field's number times 8 plus its wire type, which
says what follows: a varint (0), 8 bytes (1), a length and this many bytes (2), or 4 bytes (5). A varint has 7 bits in
each byte, the lowest first, and the highest bit set in all bytes but the last
(protobuf.dev/programming-guides/encoding).

The messages are walked through in step: the first field of all of them, then the second of all that have one. So the
cost is that of some calls of NumPy for each field of the message that has most.
"""

import dataclasses
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
"""Places in the data, or numbers of messages."""

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5

_MAX_VARINT_BYTES = 10

_MAX_SHORT_VARINT_BYTES = 4
"""Varints up to this length have less than 32 bits."""

_VARINTS_AT_ONCE = 1 << 15
"""How many numbers are decoded at once, so that what lies between stays in the processor's cache."""

_GATHERED_BYTES = 32
"""Spans up to this length are picked byte by byte, longer ones by slices: a slice costs as much."""


@final
class WireError(ValueError):
    """What is at some place is not a message.

    Attributes:
        message: the number of the message, from 0.
    """

    def __init__(self, message: int, reason: str) -> None:
        super().__init__(reason)
        self.message = message


@final
class WireData:
    """Messages laid end to end.

    Args:
        messages: the bytes of each.

    Attributes:
        starts: where each begins, shape (n,).
        stops: where each ends, shape (n,).
    """

    def __init__(self, messages: list[bytes]) -> None:
        self.stops = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        self.starts = np.concatenate([[0], self.stops[:-1]]).astype(np.int64)
        # Zeros at the end, so that whoever looks beyond a message finds something, and not the end of the array.
        self._bytes = b"".join([*messages, bytes(2 * _MAX_VARINT_BYTES)])
        self._array = np.frombuffer(self._bytes, np.uint8)

    def varints_at(self, places: Places) -> tuple[Places, Places]:
        """Returns the varints at some places, and the places after them: beyond all messages for one without an end."""
        byte = self._array.take(places)
        values, ends = byte.astype(np.int64), places + 1
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

    def gather(self, starts: Places, stops: Places) -> NDArray[np.uint8]:
        """Returns the bytes of some spans laid end to end, in an array of its own."""
        lengths = stops - starts
        total = int(lengths.sum())
        if total <= _GATHERED_BYTES * len(starts):
            shifts = starts - (np.cumsum(lengths) - lengths)
            return self._array[np.repeat(shifts, lengths) + np.arange(total)]
        return np.frombuffer(bytearray().join(self.slices(starts, stops)), np.uint8)

    def slices(self, starts: Places, stops: Places) -> list[bytes]:
        """Returns the bytes of each span."""
        data = self._bytes
        return [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def which(self, starts: Places, stops: Places, names: list[bytes]) -> Places:
        """Returns which of the names the bytes of each span are, or -1: shape (n,)."""
        found = np.full(len(starts), -1, np.int64)
        lengths = stops - starts
        for length in {len(name) for name in names}:
            candidates = np.flatnonzero(lengths == length)
            table = self._array[starts[candidates, np.newaxis] + np.arange(length)]
            # As one value each, so that they are compared at once.
            there = table.view(f"V{length}")[:, 0] if length else np.zeros(len(candidates), np.bool_)
            for number, name in enumerate(names):
                if len(name) == length:
                    same = there == np.frombuffer(name, f"V{length}")[0] if length else ~there
                    found[candidates[same]] = number
        return found


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """Fields of messages, one message after the other, those of each in their order. All arrays have shape (n,).

    Attributes:
        message: the number of the message that each field is of.
        number: its number in the message's definition.
        wire_type: how it is encoded.
        starts: where its value begins: after the length, if it has one.
        stops: where its value ends.
    """

    message: Places
    number: Places
    wire_type: Places
    starts: Places
    stops: Places

    def where(self, chosen: NDArray[np.bool_] | slice) -> "Fields":
        """Returns some of the fields."""
        return Fields(
            self.message[chosen], self.number[chosen], self.wire_type[chosen], self.starts[chosen], self.stops[chosen]
        )

    def of(self, number: int) -> "Fields":
        """Returns the fields of one number that hold bytes: text, or messages."""
        return self.where((self.number == number) & (self.wire_type == BYTES))

    def last_of_each(self, count: int) -> tuple[Places, Places]:
        """Returns where the last field of each of `count` messages begins and ends; an empty span where it has none."""
        starts, stops = np.zeros(count, np.int64), np.zeros(count, np.int64)
        # Of several values for one place, the last one stays.
        starts[self.message], stops[self.message] = self.starts, self.stops
        return starts, stops


def fields_of(data: WireData, starts: Places, stops: Places) -> Fields:
    """Returns the fields of the messages that lie at some spans of the data.

    Raises:
        WireError: one of the spans is not a message.
    """
    rounds: list[tuple[Any, ...]] = []
    active = (starts < stops).nonzero()[0]
    places, limits = starts[active], stops[active]
    while active.size:
        tags, begins = data.varints_at(places)
        wire_types = tags & 7
        begins, ends = _values(data, active, wire_types, begins)
        # What begins beyond its message ends there, too. A length of 2^63 or more is negative here.
        _check(active, (ends <= limits) & (ends >= begins), "a field of it is longer than the message")
        _check(active, tags >= 8, "it has a field whose number is 0")
        rounds.append((active, tags >> 3, wire_types, begins, ends))
        more = ends < limits
        going_on = np.count_nonzero(more)
        if not going_on:
            break
        if going_on == len(active):
            places = ends
        else:
            active, places, limits = active[more], ends[more], limits[more]
    if not rounds:
        return Fields(*[np.zeros(0, np.int64)] * 5)
    if len(rounds) == 1:
        return Fields(*rounds[0])
    arrays = [np.concatenate(parts) for parts in zip(*rounds, strict=True)]
    order = np.argsort(arrays[0], kind="stable")
    return Fields(*(array[order] for array in arrays))


def _values(data: WireData, active: Places, wire_types: Places, begins: Places) -> tuple[Places, Places]:
    """Returns where the values of fields begin and end, whose tags end where they begin."""
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
    _check(active, known, "a field of it has a wire type that there is not")
    return begins, ends


def _check(messages: Places, is_right: NDArray[np.bool_], reason: str) -> None:
    if np.count_nonzero(is_right) != len(is_right):
        raise WireError(int(messages[np.argmin(is_right)]), reason)


def varints_in(payload: NDArray[np.uint8]) -> tuple[Places, NDArray[np.bool_]]:
    """Returns the varints that fill an array of bytes, and which bytes are a varint's last one.

    Numbers of 64 bits come out with their sign. What follows the last whole varint is left out.

    Raises:
        WireError: a varint has more than 10 bytes; its `message` is the place in the payload.
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
    for first in range(0, len(ends), _VARINTS_AT_ONCE):
        some = ends[first : first + _VARINTS_AT_ONCE]
        begin, end = some[0] - lengths[first] + 1, some[-1] + 1
        values[first : first + len(some)] = _values_at(payload[begin:end], is_last[begin:end], longest)[some - begin]
    return values, is_last


def _values_at(payload: NDArray[np.uint8], is_last: NDArray[np.bool_], longest: int) -> NDArray[np.signedinteger[Any]]:
    """Returns, for each byte, the value of the varint as far as it has come with it: of a varint's last one, all of it.

    Neighbours are read in order, which takes half of the time of picking the bytes of each varint.
    """
    dtype = np.dtype(np.int32 if longest <= _MAX_SHORT_VARINT_BYTES else np.int64)
    bits = (payload & np.uint8(0x7F)).astype(dtype)
    values = bits.copy()
    # Whether the byte that is `back` bytes before is of the same varint: it and those between are none's last.
    belongs = ~is_last[:-1]
    for back in range(1, longest):
        factors = belongs.astype(dtype)
        values[back:] <<= 7 * factors
        values[back:] += bits[:-back] * factors
        belongs = belongs[1:] & ~is_last[: -back - 1]
    return values
