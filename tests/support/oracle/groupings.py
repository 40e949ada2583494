"""Operations that group elements as they come, as plainly as possible: element by element, token by token.

Each takes and gives elements as the oracle does: position, index, value. A document is a dict of lists or arrays.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from millstream.core.randomness import OF_GROUPS, Purpose, derive_seed, generator
from millstream.transforms import (
    BestFitPack,
    BucketBatch,
    ConcatThenSplit,
    FirstFitPack,
    Rebatch,
    TokenBudgetBatch,
    Transformation,
    WindowShuffle,
)
from millstream.transforms.grouping import MAX_FAN_OUT, GroupId

Element = tuple[int, int, Any]


def part_index(index: int, limit: int, number: int) -> int:
    """Returns the index of one of the parts that an element may become, of which there are fewer than a limit."""
    return (
        index * limit + number if index < (2**63 - 1) // limit else derive_seed(index, Purpose.CHILD_INDEX, number) >> 1
    )


def laid_out(
    length_struct: dict[str, int], documents: list[dict[str, Any]], alignments: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns the row of some documents: every token with the number of its document and its place in it."""
    row = {}
    for name, length in length_struct.items():
        cells = []
        for number, document in enumerate(documents, 1):
            cells += [(token, number, place) for place, token in enumerate(document[name])]
            cells += [(0, 0, 0)] * (-len(cells) % alignments.get(name, 1))
        cells += [(0, 0, 0)] * (length - len(cells))
        tokens, segments, places = zip(*cells, strict=True)
        row[name] = np.array(tokens, dtype=documents[0][name].dtype)
        row[f"{name}_segment_ids"] = np.array(segments, dtype=np.int32)
        row[f"{name}_positions"] = np.array(places, dtype=np.int32)
    return row


def within_rows(operation: FirstFitPack | BestFitPack, element: Element) -> Iterator[Element]:
    """Yields what goes into rows of a document."""
    position, index, document = element
    lengths = operation.length_struct
    splits = operation.overflow == "split"
    carried = {name: document[name] for name in operation.rows.carried}
    document = {name: np.asarray(document[name]) for name in lengths}
    number = 0
    while any(map(len, document.values())):
        head = {name: document[name][:length] for name, length in lengths.items()}
        tail = {name: document[name][length:] for name, length in lengths.items()}
        is_long = number == 0 and any(map(len, tail.values()))
        if is_long and operation.overflow == "error":
            raise ValueError(document)
        if not (is_long and operation.overflow == "drop"):
            yield position, part_index(index, MAX_FAN_OUT, number) if splits else index + number, head | carried
        if operation.overflow != "split":
            return
        document, number = tail, number + 1


def bins_in_order(
    operation: FirstFitPack | BestFitPack, rows: list[list[Element]], identity: GroupId
) -> list[list[Element]]:
    """Returns the rows of a set of bins, shuffled."""
    return [rows[number] for number in identity.generator(operation.seed).permutation(len(rows)).tolist()]


def bin_packed(operation: FirstFitPack | BestFitPack, elements: Iterable[Element]) -> Iterator[Element]:
    """Yields the rows of one set of bins after the other."""
    lengths, most = operation.length_struct, operation.max_sequences_per_bin

    alignments = operation.rows.alignments

    def used(row: list[Element], name: str) -> int:
        multiple = alignments.get(name, 1)
        return sum(math.ceil(len(document[name]) / multiple) * multiple for _, _, document in row)

    def fits(row: list[Element], document: dict[str, Any]) -> bool:
        has_room = all(used(row, name) + len(document[name]) <= length for name, length in lengths.items())
        return has_room and (most is None or len(row) < most)

    def given_out(bins: list[list[Element]]) -> Iterator[Element]:
        rows = [row for row in bins if row]
        if operation.shuffle_bins and rows:
            rows = bins_in_order(operation, rows, GroupId(*first[:2]))
        for row in rows:
            documents = [document for _, _, document in row]
            lists = {name: [document[name] for document in documents] for name in operation.rows.carried}
            yield row[0][0], row[0][1], laid_out(lengths, documents, alignments) | lists

    bins: list[list[Element]] = [[] for _ in range(operation.num_packing_bins)]
    for element in (piece for whole in elements for piece in within_rows(operation, whole)):
        room = [row for row in bins if fits(row, element[2])]
        if not room:
            yield from given_out(bins)
            bins = room = [[] for _ in range(operation.num_packing_bins)]
        if not any(bins):
            first = element
        is_best = isinstance(operation, BestFitPack)
        chosen = max(room, key=lambda row: sum(used(row, name) for name in lengths)) if is_best else room[0]
        chosen.append(element)
    yield from given_out(bins)


def cut(operation: ConcatThenSplit, document: dict[str, Any], part: slice) -> dict[str, Any]:
    """Returns the tokens of a part of a document, and all of its meta features that have one value."""
    whole = {name for name in operation.rows.meta_features if len(document[name]) == 1}
    return {name: tokens if name in whole else tokens[part] for name, tokens in document.items()}


def filled(operation: ConcatThenSplit, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row, without segments and positions of meta features."""
    companions = {name + ending for name in operation.rows.meta_features for ending in ("_segment_ids", "_positions")}
    row = laid_out(operation.length_struct, documents)
    return {name: array for name, array in row.items() if name not in companions}


def concatenated(operation: ConcatThenSplit, elements: Iterable[Element]) -> Iterator[Element]:
    """Yields rows of all tokens laid end to end."""
    lengths = operation.length_struct
    first = next(name for name in lengths if name not in operation.rows.meta_features)
    length = lengths[first]
    row: list[dict[str, Any]] = []
    position = index = room = 0

    def begun(document: dict[str, Any]) -> dict[str, Any]:
        replaced = {name: np.array(tokens) for name, tokens in document.items()}
        for name in operation.bos_features:
            replaced[name][0] = operation.bos_token_id
        return replaced

    for document_position, document_index, document in elements:
        rest, used = {name: np.atleast_1d(document[name]) for name in lengths}, 0
        while len(rest[first]):
            if not row:
                position, room = document_position, length
                index = part_index(document_index, MAX_FAN_OUT, used // length)
            row.append(begun(cut(operation, rest, slice(room))))
            taken = len(row[-1][first])
            rest = cut(operation, rest, slice(room, None))
            used, room = used + taken, room - taken
            if not room:
                yield position, index, filled(operation, row)
                row = []
    if row:
        yield position, index, filled(operation, row)


def rebatched(operation: Rebatch, elements: Iterable[Element]) -> Iterator[Element]:
    """Yields batches of all rows, one after the other."""
    size = operation.batch_size
    some: list[Element] = []

    def batch() -> Element:
        return *some[0][:2], {name: np.array([row[name] for _, _, row in some]) for name in some[0][2]}

    for position, index, whole in elements:
        for row in range(len(whole["x"])):
            part = {name: array[row] for name, array in whole.items()}
            some.append((position, part_index(index, MAX_FAN_OUT, row // size), part))
            if len(some) == size:
                yield batch()
                some = []
    if some and not operation.drop_remainder:
        yield batch()


def windows(elements: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Yields elements in lists of a size, the last one perhaps shorter."""
    stream = iter(elements)
    while window := list(itertools.islice(stream, size)):
        yield window


def shuffled(operation: WindowShuffle, elements: Iterable[Element]) -> Iterator[Element]:
    for window in windows(elements, operation.window_size):
        position, index, _ = window[0]
        for number in generator(operation.seed or 0, position, index, OF_GROUPS).permutation(len(window)):
            yield window[number]


def longest(operation: TokenBudgetBatch | BucketBatch, element: Element) -> int:
    return max(len(element[2][name]) for name in operation.features.names)


def padded_batch(operation: TokenBudgetBatch | BucketBatch, batch: list[Element], length: int) -> Element:
    """Returns a batch of elements padded to a length, where the first of them was."""
    padding = operation.features.padding_struct
    rows = [
        {
            name: np.pad(value, (0, length - len(value)), constant_values=padding.get(name, 0))
            if name in operation.features.names
            else value
            for name, value in element.items()
        }
        for _, _, element in batch
    ]
    return *batch[0][:2], {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def budgeted(operation: TokenBudgetBatch, elements: Iterable[Element]) -> Iterator[Element]:
    """Yields batches that are full before the element comes that does not fit."""
    batch: list[Element] = []

    def made() -> Element:
        return padded_batch(operation, batch, max(longest(operation, one) for one in batch))

    for element in elements:
        lengths = [longest(operation, one) for one in [*batch, element]]
        if max(1, *lengths) * len(lengths) > operation.budget or len(batch) == operation.max_batch_size:
            yield made()
            batch = []
        batch.append(element)
    if batch:
        yield made()


def bucketed(operation: BucketBatch, elements: Iterable[Element]) -> Iterator[Element]:
    """Yields the batches of each window as they become complete, then what is left."""
    buckets = list(zip(operation.boundaries, operation.batch_sizes, strict=True))
    for window in windows(elements, operation.window_size):
        batches: list[list[int]] = []
        left: list[int] = []
        shortest = -1
        for boundary, size in buckets:
            inside = [row for row, one in enumerate(window) if shortest < longest(operation, one) <= boundary]
            left, shortest = sorted(left + inside), boundary
            while len(left) >= size:
                batches.append(left[:size])
                left = left[size:]
        for batch in [*sorted(batches, key=max), *([left] if left else [])]:
            chosen = [window[row] for row in batch]
            possible = [each for each in buckets if each[0] >= max(longest(operation, one) for one in chosen)]
            exact = [each for each in possible if each[1] == len(batch)]
            yield padded_batch(operation, chosen, (exact or possible)[0][0])


PLAIN: dict[type[Transformation], Callable[[Any, Iterable[Element]], Iterator[Element]]] = {
    FirstFitPack: bin_packed,
    BestFitPack: bin_packed,
    ConcatThenSplit: concatenated,
    Rebatch: rebatched,
    WindowShuffle: shuffled,
    TokenBudgetBatch: budgeted,
    BucketBatch: bucketed,
}
"""The plain version of each operation."""
