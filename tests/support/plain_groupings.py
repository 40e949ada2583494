"""What operations that group elements as they come do, said as plainly as possible: element by element, token by token.

Each takes and gives elements as the oracle does: position, index, value. A document is a dict of lists or arrays.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from millstream.randomness import generator
from millstream.transforms import BestFitPack, FirstFitPack, Transformation
from millstream.transforms.grouping import MOST_PIECES

Element = tuple[int, int, Any]


def laid_out(length_struct: dict[str, int], documents: list[dict[str, Any]], **fill: Any) -> dict[str, Any]:
    """Returns the row of some documents: every token with the number of its document and its place in it."""
    row = {}
    for name, length in length_struct.items():
        cells = [
            (token, number, place)
            for number, document in enumerate(documents, 1)
            for place, token in enumerate(document[name])
        ]
        cells += [(fill.get(name, 0), 0, 0)] * (length - len(cells))
        tokens, segments, places = zip(*cells, strict=True)
        row[name] = np.array(tokens, dtype=documents[0][name].dtype)
        row[f"{name}_segment_ids"] = np.array(segments, dtype=np.int32)
        row[f"{name}_positions"] = np.array(places, dtype=np.int32)
    return row


def within_rows(operation: FirstFitPack | BestFitPack, element: Element) -> Iterator[Element]:
    """Yields what goes into rows of a document."""
    position, index, document = element
    lengths = operation.length_struct
    if operation.overflow == "split":
        index *= MOST_PIECES
    document = {name: np.asarray(document[name]) for name in lengths}
    number = 0
    while any(map(len, document.values())):
        head = {name: document[name][:length] for name, length in lengths.items()}
        tail = {name: document[name][length:] for name, length in lengths.items()}
        is_long = number == 0 and any(map(len, tail.values()))
        if is_long and operation.overflow == "error":
            raise ValueError(document)
        if not (is_long and operation.overflow == "drop"):
            yield position, index + number, head
        if operation.overflow != "split":
            return
        document, number = tail, number + 1


def bin_packed(operation: FirstFitPack | BestFitPack, elements: Iterable[Element]) -> Iterator[Element]:
    """Yields the rows of one set of bins after the other."""
    lengths, most = operation.length_struct, operation.max_sequences_per_bin

    def used(row: list[Element], name: str) -> int:
        return sum(len(document[name]) for _, _, document in row)

    def fits(row: list[Element], document: dict[str, Any]) -> bool:
        has_room = all(used(row, name) + len(document[name]) <= length for name, length in lengths.items())
        return has_room and (most is None or len(row) < most)

    def given_out(bins: list[list[Element]]) -> Iterator[Element]:
        rows = [row for row in bins if row]
        if operation.shuffle_bins and rows:
            position, index, _ = first
            order = generator(operation.seed, position, index).permutation(len(rows))
            rows = [rows[number] for number in order]
        for row in rows:
            yield row[0][0], row[0][1], laid_out(lengths, [document for _, _, document in row])

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


PLAIN: dict[type[Transformation], Callable[[Any, Iterable[Element]], Iterator[Element]]] = {
    FirstFitPack: bin_packed,
    BestFitPack: bin_packed,
}
"""What each of the operations does."""
