"""A chain as text: one node a line, and beside each other what is joined."""

import zlib
from collections.abc import Iterator

from millstream.dataset.node import ENDLESS, Node

_SHOWN_PARENTS = 8
"""Of more parents, the first ones are shown and the others counted."""


def text_of(node: Node, name: str) -> str:
    """Returns the chain of a node, a node a line, after a line that says what it is and how long.

        MapDataset of 25 elements
          source(list of 100 records)
          .shuffle(seed=0)
          .batch(batch_size=4)

    Where several datasets are joined, each is a list item.
    """
    count = "without end" if node.length == ENDLESS else f"of {node.length} element{'s'[: node.length != 1]}"
    sparse = ", of which some may be absent" if node.is_sparse else ""
    return "\n".join([f"{name} {count}{sparse}", *(f"  {line}" for line in _lines(node))])


def _lines(node: Node) -> Iterator[str]:
    if len(node.parents) == 1 and node.text.startswith((".", "[")):
        yield from _lines(node.parents[0])
        yield node.text
        return
    yield node.text
    for parent in node.parents[:_SHOWN_PARENTS]:
        first, *others = _lines(parent)
        yield f"- {first}"
        yield from (f"  {line}" for line in others)
    if len(node.parents) > _SHOWN_PARENTS:
        yield f"- and {len(node.parents) - _SHOWN_PARENTS} more"


def fingerprint_of(node: Node) -> str:
    """Returns what decides the elements of a chain, in one line, equal in every process.

    The words of each node have a name of their own, and a CRC over all of them comes last.
    """
    words = list(_words(node))
    named = [f"node{number}={text}" for number, text in enumerate(words)]
    return " ".join(["MapDataset", *named, f"crc={zlib.crc32(repr(words).encode()):08x}"])


def _words(node: Node) -> Iterator[str]:
    for parent in node.parents:
        yield from _words(parent)
    yield from node.words()
    if len(node.parents) > 1:
        yield f"of {len(node.parents)}"
