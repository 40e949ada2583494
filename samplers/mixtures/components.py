"""The components of a mixture: their checks, lookups at positions of their own orders, and their fingerprint."""

import dataclasses
import operator
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.core.segments import Segments
from millstream.record import RecordMetadata
from millstream.samplers.base import (
    AdaptedSampler,
    VectorisedSampler,
    checked_keys_at,
    has_varying_batches,
    is_mixed,
    is_mixed_and_packed,
    is_packed,
    largest_key,
    vectorised,
)
from millstream.samplers.index import can_join
from millstream.samplers.mixtures.mixing import Phase
from millstream.samplers.order import by_number
from millstream.samplers.permutation import permute
from millstream.sharding import NoSharding


@dataclasses.dataclass(frozen=True)
class AbsentComponent:
    """The order of a component that was left out after its last turn. It has no record key."""

    name: str
    seed: int = 0
    num_records: None = None
    length: None = None

    def __getitem__(self, position: int) -> RecordMetadata:
        self._refuse()

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        del start, stop
        self._refuse()

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        del positions
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"The records of component {self.name!r} are not known: it was left out of the samplers. To read positions "
            "at which it has a turn, pass its sampler and its source again."
        )


def named_components(given: Any, what: str) -> tuple[tuple[Any, ...], list[Any]]:
    if isinstance(given, Mapping):
        names, values = list(given), list(given.values())
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"{what} must be named by strings, got the name {wrong[0]!r}.")
    elif isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"{what} must be a list, or a mapping by name, got {type(given).__name__}.")
    else:
        names, values = list(range(len(given))), list(given)
    if not values:
        raise ValueError(f"{what} must have at least one component, got none.")
    return tuple(names), values


def with_absent_names(names: tuple[Any, ...], changes: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Returns the names of all components: those given, and between them those that only changes of weights name.

    A component without a sampler comes before the one that follows it in the first weights that name it.
    """
    if not isinstance(names[0], str):
        return names
    found = list(names)
    for _, weights in changes:
        named = [name for name in weights if isinstance(name, str)] if isinstance(weights, Mapping) else []
        for row, name in enumerate(named):
            if name not in found:
                later = [found.index(other) for other in named[row + 1 :] if other in found]
                found.insert(later[0] if later else len(found), name)
    return tuple(found)


def checked_component(name: Any, sampler: Any) -> VectorisedSampler | AdaptedSampler:
    try:
        ready = vectorised(sampler)
    except TypeError as error:
        error.add_note(f"millstream: in component {name!r} of the mixture.")
        raise
    shard = getattr(sampler, "shard_options", None)
    if shard is not None and type(shard).__name__ != NoSharding.__name__:
        raise ValueError(
            f"The sampler of component {name!r} has shard_options={shard}, but the mixture is sharded, "
            "not its components: give shard_options to the MixtureSampler, or to the DataLoader."
        )
    if ready.length == 0:
        raise ValueError(f"The sampler of component {name!r} has no positions: leave the component out.")
    return ready


def check_batches(components: Mapping[Any, Any], batches_of: int | None) -> None:
    """Refuses components that decide which records a global batch has, unless the batches are theirs."""
    for name, sampler in components.items():
        given = getattr(sampler, "given_batch", None)
        if has_varying_batches(sampler):
            raise ValueError(
                f"The sampler of component {name!r}, {type(sampler).__name__}, has a global batch per class, and a "
                "mixture has one size. Pass one global_batch_size."
            )
        if given is not None and given[1] != batches_of:
            raise ValueError(
                f"batches_of must be {given[1]}, because the {type(sampler).__name__} of component {name!r} has "
                f"{given[0]}={given[1]}, got {batches_of}."
            )


def checked_row_length(names: Sequence[Any], samplers: Sequence[VectorisedSampler | AdaptedSampler]) -> int | None:
    row_lengths = [sampler.row_length if is_packed(sampler) else None for sampler in samplers]
    for name, row_length in zip(names, row_lengths, strict=True):
        if row_length != row_lengths[0]:
            made = ["no rows" if length is None else f"rows of {length}" for length in (row_length, row_lengths[0])]
            raise ValueError(
                f"The sampler of component {name!r} makes {made[0]}, and that of component {names[0]!r} {made[1]}: "
                "give each a PackingSampler of one row_length, or none."
            )
    return row_lengths[0]


def checked_source_lengths(
    components: Mapping[Any, Any], given: Sequence[int] | Mapping[str, int] | None
) -> tuple[int, ...]:
    if given is None:
        return tuple(_own_source_length(name, sampler) for name, sampler in components.items())
    names, lengths = named_components(given, "source_lengths")
    if len(names) != len(components) or (isinstance(given, Mapping) and set(names) != set(components)):
        raise ValueError(f"source_lengths must have one number for each of {list(components)}, got {list(names)}.")
    by_name = dict(zip(names if isinstance(given, Mapping) else components, lengths, strict=True))
    checked = []
    for name, sampler in components.items():
        length = as_integer(by_name[name], f"The source length of component {name!r}", minimum=1)
        if is_packed(sampler) and sampler.num_source_records != length:
            raise ValueError(
                f"The lengths of component {name!r} are of {sampler.num_source_records} documents, but source_lengths "
                f"says that its source has {length}."
            )
        largest = largest_key(sampler)
        if largest is not None and largest >= length:
            raise ValueError(
                f"The sampler of component {name!r} asks for record keys up to {largest}, but source_lengths says that "
                f"its source has {length} records."
            )
        checked.append(length)
    return tuple(checked)


def _own_source_length(name: Any, sampler: Any) -> int:
    # A mixture and a sampler of rows know it.
    known = getattr(sampler, "num_source_records", None)
    if known is not None:
        return operator.index(known)
    num_records = getattr(sampler, "num_records", None)
    if num_records is None or largest_key(sampler) != operator.index(num_records) - 1:
        raise ValueError(
            f"It is not known how many records the source of component {name!r} has: its sampler "
            + ("has no num_records" if num_records is None else "leaves some out")
            + ". Give source_lengths=[len(source), ...]."
        )
    return operator.index(num_records)


Answers = Iterator[tuple[int, NDArray[np.intp] | slice, tuple[NDArray[np.int64], Any]]]


@final
class ComponentOrders:
    """The samplers of a mixture, whose sources are concatenated: `offsets` are the keys of their first records.

    If `are_joined`, all components are computed together.
    """

    def __init__(self, names: Sequence[Any], samplers: Sequence[Any], offsets: Sequence[int]) -> None:
        self._names, self._samplers = names, samplers
        self._starts = np.array(offsets, dtype=np.int64)
        # No position of a component that was left out is looked up.
        self._is_joined = np.array([can_join(each) or isinstance(each, AbsentComponent) for each in samplers])
        self._sizes = np.ones(len(samplers), dtype=np.uint64)
        self._seeds = np.zeros(len(samplers), dtype=np.uint64)
        self._is_shuffled = np.zeros(len(samplers), dtype=np.bool_)
        for number, sampler in enumerate(samplers):
            if can_join(sampler):
                self._sizes[number], self._seeds[number] = sampler.num_records, sampler.seed or 0
                self._is_shuffled[number] = sampler.shuffle
        self.are_joined = bool(self._is_joined.all())

    def records(
        self, components: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the positions in the innermost orders and the record keys, both of shape (m,)."""
        if self.are_joined:
            return indices, self._joined_keys(components, indices) + self._starts[components]
        keys, innermost = np.empty(len(components), dtype=np.int64), indices.copy()
        is_joined = self._is_joined[components]
        joined, others = np.flatnonzero(is_joined), np.flatnonzero(~is_joined)
        if len(joined):
            keys[joined] = self._joined_keys(components[joined], indices[joined])
        for component, rows, (own_indices, own_keys) in self._ask(components[others], indices[others], _records):
            keys[others[rows]] = own_keys
            if is_mixed(self._samplers[component]):
                innermost[others[rows]] = own_indices
        return innermost, keys + self._starts[components]

    def rows(self, components: NDArray[np.int64], indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], Segments]:
        """Returns the positions in the innermost orders, shape (m,), and the documents of the rows there."""
        innermost, found = indices.copy(), []
        for component, rows, (own_indices, segments) in self._ask(components, indices, _rows):
            innermost[rows] = own_indices
            found.append((rows, segments._replace(elements=segments.elements + self._starts[component])))
        return innermost, Segments.scattered(found)

    def lengths_at(self, record_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = np.empty(len(record_keys), dtype=np.int64)
        components = np.searchsorted(self._starts, record_keys, side="right") - 1
        for component, rows in by_number(components):
            lengths[rows] = self._samplers[component].lengths_at(record_keys[rows] - self._starts[component])
        return lengths

    def _joined_keys(self, components: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        # By component, because neighbours of one epoch share most of the work.
        # Sorted as small integers, which takes a tenth of the time.
        order = np.argsort(components.astype(np.min_scalar_type(len(self._names))), kind="stable")
        components, indices = components[order], indices[order]
        sizes = self._sizes[components]
        # A division without signs takes half of the time.
        epochs = indices.view(np.uint64) // sizes
        keys = (indices.view(np.uint64) - epochs * sizes).view(np.int64)
        is_shuffled = self._is_shuffled[components]
        rows = slice(None) if is_shuffled.all() else np.flatnonzero(is_shuffled)
        keys[rows] = permute(keys[rows], sizes[rows], self._seeds[components[rows]], epochs[rows])
        in_order = np.empty_like(keys)
        in_order[order] = keys
        return in_order

    def _ask(
        self,
        components: NDArray[np.int64],
        indices: NDArray[np.int64],
        ask: Callable[[Any, NDArray[np.int64]], tuple[NDArray[np.int64], Any]],
    ) -> Answers:
        for component, rows in by_number(components):
            asked = indices[rows]
            asked.flags.writeable = False
            try:
                answer = ask(self._samplers[component], asked)
            except Exception as error:
                error.add_note(f"millstream: in component {self._names[component]!r} of the mixture.")
                raise
            yield component, rows, answer


def _records(sampler: Any, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if is_mixed(sampler):
        return sampler.located(positions)[1:]
    return positions, checked_keys_at(sampler, positions)


def _rows(sampler: Any, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Segments]:
    if is_mixed_and_packed(sampler):
        return sampler.located_segments(positions)[1:]
    return positions, sampler.segments_at(positions)


_SHOWN_COMPONENTS, _SHOWN_WEIGHTS = 280, 64
"""The maximum number of characters for the components, and for the weights of a phase; more are checksums."""

MAX_LISTED_COMPONENTS = 20
"""The maximum number of components of which each has a text of its own; more are one checksum."""


def first_turns(phases: Sequence[Phase], count: int) -> tuple[int | None, ...]:
    """Returns for each component the start of the first phase in which it has a turn; None if it never has one."""
    return tuple(next((phase.start for phase in phases if phase.weights[number]), None) for number in range(count))


def mixture_fingerprint(
    names: Sequence[Any],
    samplers: Mapping[Any, Any],
    lengths: Sequence[int | None],
    phases: Sequence[Phase],
    always: Sequence[str],
) -> tuple[str, dict[str, int]]:
    """Returns the fingerprint of a mixture, and by name the positions from which on some of its texts count.

    A component counts from its first turn on, by its name, wherever it is in the list: the order before is the same
    without it. The order of the components that have a turn counts as that of their weights.

    Args:
        names: the names of all components.
        samplers: the samplers of the components by name, without those that were left out.
        lengths: the number of elements of each component that begins again, unless its fingerprint has it.
        phases: the phases of the schedule, by positions of records.
        always: further texts.
    """
    starts: dict[str, int] = {}
    first, later = [], []
    turns = first_turns(phases, len(names))
    for name, turn, length in zip(names, turns, lengths, strict=True):
        if turn is None or name not in samplers:
            continue
        label, own = f"component_{label_of(name)}", _component_text(samplers[name], length)
        if turn == 0:
            first.append((label, own))
        else:
            starts[f"{label}_from_{turn}"] = turn
            later.append((f"{label}_from_{turn}", own))
    if sum(len(label) + len(own) for label, own in first) > _SHOWN_COMPONENTS:
        first = [(label, _crc([own])) for label, own in first]
    if len(first) > MAX_LISTED_COMPONENTS:
        first = [("components", f"{len(first)}{_crc([f'{label}={own}' for label, own in first])}")]
    weights = [(f"weights_from_{phase.start}", _weights_text(names, phase.weights)) for phase in phases]
    starts |= {f"weights_from_{phase.start}": phase.start for phase in phases}
    texts = [f"{name}={text}" for name, text in (*first, *later, *weights)]
    return " ".join(["MixtureSampler", *always, *texts]), starts


def _weights_text(names: Sequence[Any], weights: Sequence[int]) -> str:
    """Returns the weights above 0 by name, or how many there are and a checksum.

    Of components without names it returns all weights, but for zeros at the end.
    """
    if isinstance(names[0], str):
        shown = [f"{label_of(name)}:{weight}" for name, weight in zip(names, weights, strict=True) if weight]
        text = ",".join(shown)
    else:
        shown = list(map(str, weights[: 1 + max(number for number, weight in enumerate(weights) if weight)]))
        text = ":".join(shown)
    return text if len(text) <= _SHOWN_WEIGHTS else f"{len(shown)}{_crc([text])}"


def _component_text(sampler: Any, length: int | None) -> str:
    own = getattr(sampler, "fingerprint", None)
    first, *rest = str(own() if callable(own) else type(sampler).__qualname__).split(" ")
    rest += [] if length is None else [f"length={length}"]
    return f"{first}({','.join(rest)})"


def _crc(texts: Sequence[str]) -> str:
    return f"#{zlib.crc32(' '.join(texts).encode()):08x}"


def label_of(name: object) -> str:
    """Returns the name of a component as a part of an identifier: with a checksum if other characters are left out."""
    text = str(name)
    plain = re.sub(r"[^0-9A-Za-z]+", "_", text)
    return plain if plain == text else f"{plain}_{zlib.crc32(text.encode()):08x}"
