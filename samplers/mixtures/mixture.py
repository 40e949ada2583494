"""Several orders mixed into one, in exact proportions: which component stands at which position is arithmetic."""

import bisect
import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer_or_none, as_options, named_arguments
from millstream.core.randomness import Purpose, as_seed, derive_seed
from millstream.core.segments import Segments
from millstream.record import RecordMetadata
from millstream.samplers.base import (
    POSITION_LIMIT,
    AdaptedSampler,
    Located,
    VectorisedSampler,
    checked_positions,
    is_mixed,
    largest_key,
    position_limit,
)
from millstream.samplers.mixtures.components import (
    AbsentComponent,
    ComponentOrders,
    check_batches,
    checked_component,
    checked_row_length,
    checked_source_lengths,
    first_turns,
    label_of,
    mixture_fingerprint,
    named_components,
    with_absent_names,
)
from millstream.samplers.mixtures.mixing import (
    ALL_EXHAUSTED,
    FIRST_EXHAUSTED,
    Mixing,
    MixingSchedule,
    Phase,
    Weights,
    batches_in,
    checked_changes,
    checked_weights,
)
from millstream.samplers.order import Occurrences, Order, positions_between
from millstream.samplers.permutation import permute_blocks
from millstream.sharding import NoSharding, ShardOptions

REPR_LENGTH = 100
"""Longest description that lists weights; longer ones count the components and the changes."""

BARS_SHOWN = 4
"""The number of the latest changes of weights that a picture shows."""

_AT_ONCE = 1 << 14
"""The number of positions that are computed together, so that their arrays stay in a processor's cache."""


@final
class MixtureSampler(Order):
    """The records of several sources in the proportions of the weights, each source in its own sampler's order.

    It goes with `ConcatenatedDataSource(sources)`, the sources in the same order or under the same names. Every prefix
    of the order is less than one record away from the weights, for each component. (Weights of many digits, whose
    ratios repeat only after 65,536 positions or more, may be up to 1.7 records away.) Any position is computed
    directly, nothing is drawn or stored, and hosts, workers and resumes see one order, as with every sampler.

    A component yields the same elements as a loader of it alone: its sampler determines the order of its
    records, its epochs and, by its seed, the draws of random operations: give components different seeds, so that the
    first record of one does not draw what the first of another draws. The index that `MapWithIndex` sees is the
    position in that sampler's order.

    If the components' samplers are PackingSamplers, of one row_length, it is a mixture of rows, each of documents of
    one component: the weights count rows, and a `Pack` lays them out.

    Args:
        samplers: the components' samplers: a list, or a mapping that names the components. A sampler may be any that a
            loader takes, another mixture too. shard_options belong to the mixture, not to them.
        weights: the proportion of each component's records: numbers from 0 on, in a list or by name.
            Decimals count as they are written: 0.3 and 0.7 are 3 and 7. A component of weight 0 has no turn.
        stop: the end of the order. "first_exhausted": when a component has a turn and no record left for it.
            "all_exhausted": when each component has ended; one that ends earlier starts over, with new epochs if
            its sampler has them. "drop_exhausted": when all are exhausted; an exhausted component is skipped, and the
            others continue in their proportions, so that every record comes once. If samplers are endless
            (num_epochs=None), the first looks at the others only; with the second and third, the order is endless.
        shard_options: the shard of every global batch that this process reads; None for all of it.
        source_lengths: the number of records of each source, in a list or by name; None for the samplers'
            `num_records`. It is required if a sampler leaves out records of its source.
        batches_of: the number of records of a global batch, over all shards, for batches that have records of one
            component each: then the weights count batches, and every prefix of the batches keeps to them. The loader
            must have this global batch, and a 1:1 pipeline. Records of a component that do not fill a last batch are
            left out, unless stop is "all_exhausted". None to mix the records of each batch.
        changes: the weights from later positions on: pairs of a position and weights, positions ascending, as
            `reweighted` would set them. The `changes` of another mixture are accepted, also after a round trip through
            JSON. A change at position 0 replaces `weights`. Weights by name may leave out components whose weight is
            0, and may name components that have no sampler any more, if the last change does not: see `reweighted`.
        rows_seed: the seed that permutes the rows of each global batch, and of operations that shuffle without a seed
            of their own: 0 … 2**64 - 1. None for that of the first component with a turn at position 0. It is required
            if that component was left out; a mixture that has it still knows it as `rows_seed`.

    Attributes:
        names: the components' names; of a list, their numbers from 0 on. Those that were left out are among them.
        parts: the components' samplers by name, as they were given.
        samplers: the same, adapted to compute many positions in one call.
        source_lengths: the number of records of each source; 0 for components that were left out.
        row_length: the number of tokens per row; None if the components' samplers have no rows.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a weight is negative, infinite or nan, all are 0, names do not match, a component has no records, or
            the number of records of its source is unknown.

    Examples:
        >>> sources = {"web": ["a", "b", "c", "d"], "books": ["X", "Y"]}
        >>> samplers = {name: millstream.IndexSampler(len(source)) for name, source in sources.items()}
        >>> mixture = millstream.MixtureSampler(samplers, {"web": 0.75, "books": 0.25})
        >>> source = millstream.ConcatenatedDataSource(sources)
        >>> loader = millstream.DataLoader(data_source=source, sampler=mixture, operations=[millstream.Batch(8)])
        >>> next(iter(loader))
        array(['Y', 'X', 'a', 'a', 'b', 'd', 'b', 'c'], dtype='<U1')
    """

    seed: None = None
    """Each component has its own."""
    num_records: None = None
    """Each component has epochs of its own."""
    _global_batch_size, _batch_seed = 1, 0
    # The number of the component whose seed is `rows_seed`: the first one with a turn in the first epoch.
    _leader = 0

    @named_arguments()
    def __init__(
        self,
        samplers: Sequence[Any] | Mapping[str, Any],
        weights: Weights,
        *,
        stop: str = FIRST_EXHAUSTED,
        batches_of: int | None = None,
        shard_options: ShardOptions | None = None,
        source_lengths: Sequence[int] | Mapping[str, int] | None = None,
        changes: Sequence[tuple[int, Weights]] | Sequence[Sequence[Any]] = (),
        rows_seed: int | None = None,
    ) -> None:
        present, given = named_components(samplers, "samplers")
        self.parts: dict[Any, Any] = dict(zip(present, given, strict=True))
        self._mixing = Mixing((), (), stop)
        self.batches_of = as_integer_or_none(batches_of, "batches_of")
        own = NoSharding() if shard_options is None else shard_options
        self.shard_options = as_options(own, "shard_options", ShardOptions)
        orders = [checked_component(name, sampler) for name, sampler in self.parts.items()]
        self.row_length = checked_row_length(present, orders)
        check_batches(self.parts, self.batches_of)
        own_weights, later = checked_weights(weights, present), checked_changes(changes)
        self._mixing = Mixing(with_absent_names(present, later), (), stop)
        self._complete(orders, checked_source_lengths(self.parts, source_lengths))
        by_name = dict(zip(present, own_weights, strict=True))
        if not later or later[0][0]:
            later = [(0, by_name if isinstance(present[0], str) else own_weights), *later]
        self._schedule = self._scheduled([(0, checked_weights(later[0][1], self.names, self.names))])
        for position, changed in later:
            vars(self).update(self._changed(position, changed, optional=self.names))
        self._check_absent()
        self._given_seed = None if rows_seed is None else as_seed(rows_seed, "rows_seed")
        _ = self.rows_seed
        if self.num_source_records > POSITION_LIMIT:
            raise ValueError(f"The sources of a mixture can have 2**63 records at most, got {self.num_source_records}.")

    def _check_absent(self) -> None:
        absent = [name for name in self.names if name not in self.parts]
        position, weights = self._changes[-1]
        for name, weight in zip(self.names, weights, strict=True):
            if name in absent and weight:
                raise ValueError(
                    f"samplers must have component {name!r}, whose weight is {weight} from position "
                    f"{position} on. Pass its sampler, or leave it out of the last weights."
                )

    def _complete(self, orders: Sequence[VectorisedSampler | AdaptedSampler], lengths: Sequence[int]) -> None:
        """Sets the samplers and lengths of all components, given those of the components that have a sampler."""
        known = dict(zip(self.parts, zip(orders, lengths, strict=True), strict=True))
        completed = [known.get(name, (AbsentComponent(name), 0)) for name in self.names]
        self.samplers: tuple[Any, ...] = tuple(order for order, _ in completed)
        self.source_lengths = tuple(length for _, length in completed)

    @property
    def rows_seed(self) -> int | None:
        """The seed of draws that belong to no single component; None if there is none."""
        first: Any = self.samplers[self._leader]
        if self._given_seed is not None:
            return self._given_seed
        if isinstance(first, AbsentComponent):
            raise ValueError(  # noqa: TRY004  (an argument is missing)
                f"rows_seed must be given, because component {first.name!r}, whose seed it was, was left out. Pass the "
                "rows_seed of the mixture that has this component, by default the seed of its sampler."
            )
        own: int | None = first.rows_seed if is_mixed(first) else first.seed
        return derive_seed(own, Purpose.MIXTURE) if is_mixed(first) and own is not None else own

    def __repr__(self) -> str:
        (_, first), *later = self.changes
        stop = "" if self.stop == FIRST_EXHAUSTED else f", stop={self.stop!r}"
        stop += "" if self.batches_of is None else f", batches_of={self.batches_of}"
        text = f"MixtureSampler({first}{stop}{f', changes={later}' if later else ''})"
        if len(text) <= REPR_LENGTH:
            return text
        changes = f", {len(later)} change{'s'[: len(later) != 1]} of weights" if later else ""
        return f"MixtureSampler({len(self.names)} components{stop}{changes})"

    def _card_bars(self) -> Sequence[tuple[str, Sequence[tuple[str, float]]]]:
        return [
            (
                f"from position {position:,}" if position else "",
                [(str(name), weight) for name, weight in zip(self.names, weights, strict=True)],
            )
            for position, weights in self._changes[-BARS_SHOWN:]
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Not what is computed from these: it is as quickly computed again.
        given = ("parts", "samplers", "row_length", "source_lengths", "batches_of", "shard_options")
        own = ("_given_seed", "_leader", "_mixing", "_schedule", "_global_batch_size", "_batch_seed")
        return {name: getattr(self, name) for name in (*given, *own)}

    def _copied(self, **changes: Any) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(self.__getstate__() | changes)
        return copied

    @property
    def names(self) -> tuple[Any, ...]:
        """The names of the components, or their numbers without names."""
        return self._mixing.names

    @property
    def stop(self) -> str:
        """The end of the mixture, as passed."""
        return self._mixing.stop

    @property
    def _changes(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return self._mixing.changes

    @property
    def length(self) -> int | None:
        """The number of positions; None if the order is endless."""
        return None if self._schedule.length is None else self._schedule.length * self._batch

    @property
    def given_batch(self) -> tuple[str, int] | None:
        return None if self.batches_of is None else ("batches_of", self.batches_of)

    @property
    def _batch(self) -> int:
        """The number of records for which the schedule has one position."""
        return self.batches_of or 1

    def _scheduled(self, changes: Sequence[tuple[int, tuple[int, ...]]]) -> MixingSchedule:
        lengths = [sampler.length for sampler in self.samplers]
        if (size := self.batches_of) is not None:
            pairs = zip(lengths, self.names, strict=True)
            lengths = [batches_in(length, size, self.stop, name) for length, name in pairs]
        return MixingSchedule(changes, lengths, self.stop, batch=self._batch)

    @functools.cached_property
    def largest_key(self) -> int:
        """No record key is larger."""
        number = max(number for number, length in enumerate(self.source_lengths) if length)
        largest = largest_key(self.samplers[number])
        return self._offsets[number] + (self.source_lengths[number] - 1 if largest is None else largest)

    @property
    def num_source_records(self) -> int:
        """The number of records of all sources together."""
        return sum(self.source_lengths)

    def reweighted(
        self,
        position: int,
        weights: Weights,
        *,
        samplers: Mapping[str, Any] | None = None,
        source_lengths: Mapping[str, int] | None = None,
    ) -> Self:
        """Returns the mixture that has other weights from a position on, and is the same before.

        No component starts over: each continues with the record after its last one. A state that was saved at the
        position or before it can be resumed with either, so a run can change its mixture at its current position:

            position = step * global_batch_size
            sampler = sampler.reweighted(position, {"web": 0.5, "books": 0.5})

        Keep these calls in the training code, because they are the record of what the run has read, or keep `changes`.
        Weights that an earlier call set for this position, or for later ones, are replaced.

        With samplers, the mixture has more components from there on, for instance the files by which a corpus has
        grown:

            sampler = sampler.reweighted(position, {"web": 3, "books": 1, "code": 1}, samplers={"code": code})

        A component whose weight is 0 from a position on may be left out of a new program. Its sampler and source are
        then not needed, only its name in `changes`. States from that position on resume there.

        Args:
            position: the first position with these weights, 0 … 2**63 - 1, a multiple of batches_of: counted over all
                shards, so that the step is multiplied by the size of the global batch, and over all epochs of
                `loader.epochs`. For a position in a later epoch, the components' samplers need a larger `num_epochs`,
                or None.
            weights: as for the constructor, also with zeros.
            samplers: the samplers of further components, by name. They come after the others, as their sources must in
                the ConcatenatedDataSource. For another order, name all components in it. None for no others.
            source_lengths: the number of records of the sources of further components, as for the constructor.

        Raises:
            TypeError: components are added to a list, whose components have no names.
            ValueError: the weights are not valid, the mixture ends before the position, or a component that exists
                has another sampler.
        """
        extended = self if samplers is None else self._extended(samplers, source_lengths or {})
        return extended._copied(**extended._changed(position, weights))  # noqa: SLF001  (of this class)

    def _extended(self, samplers: Mapping[str, Any], source_lengths: Mapping[str, int]) -> Self:
        """Returns the mixture with further components, whose weight is 0."""
        if not isinstance(samplers, Mapping) or not isinstance(self.names[0], str):
            raise TypeError("samplers must be a mapping by name, and those of the mixture as well, to add components.")
        named_components(samplers, "samplers")
        for name, sampler in samplers.items():
            if name in self.parts and self.parts[name] is not sampler and self.parts[name] != sampler:
                raise ValueError(
                    f"samplers must have new components, got another sampler of {name!r}. A source that has grown "
                    "keeps its sampler, and the records that are new become a component with a name of their own."
                )
        names = (*self.names, *(name for name in samplers if name not in self.names))
        names = tuple(samplers) if set(samplers) >= set(names) else names
        parts = {**self.parts, **samplers}
        rows = [self.names.index(name) if name in self.names else None for name in names]
        changes = tuple(
            (position, tuple(0 if row is None else weights[row] for row in rows)) for position, weights in self._changes
        )
        mixing = Mixing(names, changes, self.stop)
        extended = self._copied(_mixing=mixing, parts={name: parts[name] for name in names if name in parts})
        orders = [checked_component(name, sampler) for name, sampler in extended.parts.items()]
        check_batches(extended.parts, self.batches_of)
        lengths = dict(zip(self.names, self.source_lengths, strict=True))
        for name in samplers.keys() - self.parts.keys():
            given = {name: source_lengths[name]} if name in source_lengths else None
            (lengths[name],) = checked_source_lengths({name: samplers[name]}, given)
        extended.row_length = checked_row_length(tuple(extended.parts), orders)
        extended._complete(orders, [lengths[name] for name in extended.parts])  # noqa: SLF001  (of this class)
        by_batch = [(position // self._batch, weights) for position, weights in changes]
        leader, schedule = names.index(self.names[self._leader]), extended._scheduled(by_batch)  # noqa: SLF001
        return extended._copied(_schedule=schedule, _leader=leader)  # noqa: SLF001

    @property
    def changes(self) -> list[tuple[int, Any]]:
        """The positions from which on other weights hold, ascending from 0, and the weights.

        The weights are whole numbers in their ratios: a dict by name, or a list if the components have no names. It
        can be kept as JSON, in a checkpoint for instance, and given to the constructor:

            MixtureSampler(samplers, weights, changes=json.loads(kept))
        """
        return self._mixing.described_changes

    def of_epoch(self, number: int) -> Self:
        """Returns the mixture of one epoch of each component, to the end that `stop` decides.

        The positions of changes of weights are counted over all epochs, one after another: with epochs of 100 records,
        position 250 is in the middle of epoch 2, and the weights that hold there hold in the epochs after it.

        Args:
            number: the number of the epoch, from 0 on. In each, the components have their own order.

        Raises:
            TypeError: the sampler of a component has no `of_epoch`.
        """
        missing = [name for name, sampler in self.parts.items() if not callable(getattr(sampler, "of_epoch", None))]
        if missing:
            raise TypeError(
                f"Cannot divide a mixture into epochs: the sampler of component {missing[0]!r}, a "
                f"{type(self.parts[missing[0]]).__name__}, has no of_epoch(number). Give it that method, which returns "
                "the sampler of one epoch, with a len."
            )
        changes = self._changes
        for earlier in range(number):
            if len(changes) == 1:
                break
            length = self._of_epoch(earlier, changes).length
            if length is None:
                raise ValueError(f"Cannot begin epoch {number} of a mixture: epoch {earlier} is endless.")
            held = bisect.bisect_right(changes, length, key=operator.itemgetter(0)) - 1
            changes = ((0, changes[held][1]), *((position - length, own) for position, own in changes[held + 1 :]))
        return self._of_epoch(number, changes)

    def _of_epoch(self, number: int, changes: tuple[tuple[int, tuple[int, ...]], ...]) -> Self:
        epoch = self._copied(parts={name: sampler.of_epoch(number) for name, sampler in self.parts.items()})
        if self._given_seed is not None and number:
            epoch._given_seed = derive_seed(self._given_seed, Purpose.EPOCH, number)  # noqa: SLF001  (of this class)
        lengths = dict(zip(self.names, self.source_lengths, strict=True))
        orders = [checked_component(name, sampler) for name, sampler in epoch.parts.items()]
        epoch._complete(orders, [lengths[name] for name in epoch.parts])  # noqa: SLF001  (of this class)
        schedule, count = epoch._scheduled(changes[:1]), 1  # noqa: SLF001  (of this class)
        for position, weights in changes[1:]:
            if schedule.length is not None and position >= schedule.length * self._batch:
                break
            schedule, count = schedule.changed(position // self._batch, weights), count + 1
        mixing = dataclasses.replace(self._mixing, changes=changes[:count])
        return epoch._copied(_schedule=schedule, _mixing=mixing)  # noqa: SLF001  (of this class)

    def shuffled_within(self, global_batch_size: int, seed: int) -> Self:
        """Returns the mixture with the rows of each global batch permuted, as a loader reads it.

        Without this, a host whose share of a batch divides the period of the weights would read one component only.
        Each global batch has the same rows as before, so steps and changes of weights keep their meaning. Rows after
        the last complete global batch keep their order.

        Args:
            global_batch_size: the number of rows per step, over all shards, at least 1.
            seed: selects the permutations, 0 … 2**64 - 1.
        """
        if self.batches_of is not None:
            # A batch has records of one component, whatever their order.
            return self
        return self._copied(_global_batch_size=global_batch_size, _batch_seed=seed)

    def _permuted(self, positions: NDArray[np.int64], *, inverse: bool = False) -> NDArray[np.int64]:
        """Returns the positions in the unpermuted order, or the inverse, shape (m,)."""
        size = self._global_batch_size
        if size == 1 or not len(positions):
            return positions
        permuted = permute_blocks(positions, size, self._batch_seed, inverse=inverse)
        return np.where(positions <= position_limit(self.length) // size * size - 1, permuted, positions)

    def _changed(self, position: int, weights: Weights, optional: Sequence[Any] | None = None) -> dict[str, Any]:
        """Returns the attributes of the mixture that has other weights from a position on."""
        absent = [name for name in self.names if name not in self.parts]
        mixing = self._mixing.reweighted(position, weights, absent if optional is None else optional)
        if position % self._batch:
            raise ValueError(
                f"position must be a multiple of batches_of={self.batches_of}, because a batch has one component, got "
                f"{position}. Multiply the step by the global batch."
            )
        kept, (_, here) = self._mixing.changes_before(position), mixing.changes[-1]
        if optional is None and any(here[self.names.index(name)] for name in absent):
            raise ValueError(f"weights must be 0 for {absent[0]!r}, which was left out. Pass its sampler again.")
        schedule = self._schedule.changed(position // self._batch, None if mixing.changes == kept else here)
        leader = self._leader if kept else next(itertools.compress(itertools.count(), mixing.weights))
        return {"_schedule": schedule, "_mixing": mixing, "_leader": leader}

    def fingerprint(self) -> str:
        """Returns the components and, for each position from which on the weights are others, the weights.

        `weights_from_500=2:1` holds from position 500 on: a state from before does not depend on it. Components whose
        samplers have no `fingerprint()` are named by their class.
        """
        return self._fingerprint[0]

    @property
    def fingerprint_starts(self) -> dict[str, int]:
        """The positions from which on some texts of the fingerprint count, by the name of the text."""
        return self._fingerprint[1]

    @functools.cached_property
    def _fingerprint(self) -> tuple[str, dict[str, int]]:
        lengths = [sampler.length if self.stop == ALL_EXHAUSTED else None for sampler in self._continued]
        always = ["batches=permuted" if self.batches_of is None else f"batches_of={self.batches_of}"]
        always += [] if self.rows_seed is None else [f"rows_seed={self.rows_seed}"]
        return mixture_fingerprint(self.names, self.parts, lengths, self._phases, always)

    @functools.cached_property
    def first_turns(self) -> tuple[int | None, ...]:
        """For each component the position from which on it has a weight above 0; None if it never has one."""
        return first_turns(self._phases, len(self.names))

    @functools.cached_property
    def absent(self) -> dict[str, int]:
        """The position from which on it is not needed, for each component that was left out."""
        until = {}
        for number, name in enumerate(self.names):
            if name not in self.parts:
                rows = [row for row, phase in enumerate(self._phases) if phase.weights[number]]
                following = [*(phase.start for phase in self._phases), POSITION_LIMIT][1:]
                until[name] = following[rows[-1]] if rows else 0
        return until

    @property
    def absent_labels(self) -> dict[str, int]:
        """The same, by the beginnings of the names of texts in the fingerprints of mixtures that have them."""
        return {f"component_{label_of(name)}": until for name, until in self.absent.items()}

    @property
    def _phases(self) -> Sequence[Phase]:
        """The phases of the schedule, by positions of records."""
        phases = self._schedule.phases
        if self.batches_of is None:
            return phases
        return [dataclasses.replace(phase, start=phase.start * self.batches_of) for phase in phases]

    def drawn_before(self, position: int) -> tuple[int, ...]:
        """Returns the number of elements of each component before a position: 0 … length, and between global batches.

        Within a global batch, whose rows a loader permutes, it is that of the unpermuted order.
        """
        if self.batches_of is None:
            return self._schedule.drawn_at(position)
        batch, rows = divmod(position, self.batches_of)
        drawn = [count * self.batches_of for count in self._schedule.drawn_at(batch)]
        if rows:
            drawn[int(self._schedule.locate(np.array([batch]))[0][0])] += rows
        return tuple(drawn)

    def components(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the number of the component at each of the positions [start, stop), shape (stop - start,).

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one.

        Raises:
            IndexError: start is negative or above stop, or stop is beyond the end.
        """
        return self.locate(positions_between(start, stop, self.length))[0]

    def __getitem__(self, position: int) -> RecordMetadata:
        position = operator.index(position)
        (component,), (index,) = (
            row.tolist() for row in self._located_present(positions_between(position, position + 1, self.length))
        )
        metadata: RecordMetadata = self._continued[component][index]
        return RecordMetadata(position, self._offsets[component] + metadata.record_key, metadata.rng)

    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.located(positions).record_keys

    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        found = []
        for component, count in enumerate(self.drawn_before(stop)):
            own = keys - self._offsets[component]
            rows = np.flatnonzero((own >= 0) & (own < self.source_lengths[component]))
            if not count or not len(rows):
                continue
            sampler = self._continued[component]
            if not hasattr(sampler, "occurrences"):
                raise TypeError(
                    f"The positions of records of component {self.names[component]!r} are not known: its sampler, "
                    f"{type(sampler).__name__}, has no positions_of."
                )
            turn = count if self._turns is None else min(count, int(self._turns[component]))
            within, elements = sampler.occurrences(own[rows], turn)
            for start in range(0, count, turn):
                is_drawn = elements + start < count
                positions = self._scheduled_at(component, elements[is_drawn] + start)
                found.append(Occurrences(rows[within[is_drawn]], self._permuted(positions, inverse=True)))
        return Occurrences.concatenate(found)

    def _scheduled_at(self, component: int, elements: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.batches_of is None:
            return self._schedule.positions_of(component, elements)
        batches, rows = np.divmod(elements, self.batches_of)
        return self._schedule.positions_of(component, batches) * self.batches_of + rows

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the component at each position, and the position in the component's own order; both of shape (m,).

        Args:
            positions: any positions, from 0 on, an array of shape (m,), in any order; they may repeat.

        Raises:
            IndexError: a position is negative or beyond the end.
        """
        positions = self._permuted(checked_positions(positions, self.length))
        if self.batches_of is None:
            components, indices = self._schedule.locate(positions)
        else:
            batches, rows = np.divmod(positions, self.batches_of)
            components, indices = self._schedule.locate(batches)
            indices = indices * self.batches_of + rows
        if self._turns is not None:
            indices = indices % self._turns[components]
        return components, indices

    def _located_present(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the components and indices at positions, none of which is of a component that was left out."""
        components, indices = self.locate(positions)
        if (
            self.absent
            and len(positions)
            and int(positions.min()) < max(self.absent.values()) + self._global_batch_size
        ):
            for number in np.unique(components).tolist():
                if isinstance(self.samplers[number], AbsentComponent):
                    self.samplers[number].record_keys(0, 1)
        return components, indices

    def located(self, positions: NDArray[np.int64]) -> Located:
        """Returns the component, the index and the record key of any positions.

        Raises:
            Exception: as `locate`, or whatever a component's sampler raises, with a note that names the component.
        """
        if len(positions) <= _AT_ONCE or not self._orders.are_joined:
            components, indices = self._located_present(positions)
            return Located(components, *self._orders.records(components, indices))
        found = np.empty((3, len(positions)), dtype=np.int64)
        for start in range(0, len(positions), _AT_ONCE):
            chunk = slice(start, start + _AT_ONCE)
            found[:, chunk] = self.located(positions[chunk])
        return Located(*found)

    def segments_at(self, positions: NDArray[np.int64]) -> Segments:
        """Returns the documents of the rows at any positions, in their order; keys are in the concatenated sources.

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat.

        Raises:
            IndexError: a position is negative or beyond the end.
            TypeError: the components' samplers make no rows.
        """
        return self.located_segments(positions)[2]

    def located_segments(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], Segments]:
        """Returns the component, the index and the rows at any positions; raises as `segments_at` does."""
        self._check_rows()
        components, indices = self._located_present(positions)
        return components, *self._orders.rows(components, indices)

    def lengths_at(self, record_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of tokens of documents, shape (m,), if the components have rows of documents.

        Args:
            record_keys: the documents, shape (m,): keys in the concatenated sources.

        Raises:
            TypeError: the components' samplers make no rows.
        """
        self._check_rows()
        return self._orders.lengths_at(record_keys)

    def _check_rows(self) -> None:
        if self.row_length is None:
            raise TypeError("This mixture makes no rows: its components' samplers must be PackingSamplers.")

    @functools.cached_property
    def _offsets(self) -> list[int]:
        ends = np.cumsum(np.array(self.source_lengths, dtype=object))
        return [int(end) - length for end, length in zip(ends, self.source_lengths, strict=True)]

    @functools.cached_property
    def _orders(self) -> ComponentOrders:
        return ComponentOrders(self.names, self._continued, self._offsets)

    @functools.cached_property
    def _continued(self) -> tuple[Any, ...]:
        """The samplers; if components start over, those with epochs continue after their last one."""
        if self.stop != ALL_EXHAUSTED:
            return self.samplers
        return tuple(sampler.endless() if hasattr(sampler, "endless") else sampler for sampler in self.samplers)

    @functools.cached_property
    def _turns(self) -> NDArray[np.int64] | None:
        """The number of elements after which a component repeats its first one; None if no component does."""
        if self.stop != ALL_EXHAUSTED or all(sampler.length is None for sampler in self._continued):
            return None
        lengths = [sampler.length for sampler in self._continued]
        return np.array([min(length or POSITION_LIMIT, POSITION_LIMIT - 1) for length in lengths], dtype=np.int64)
