"""A chain as something to look at: one node a line, or a box, and beside each other what is joined."""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import final

from millstream.dataset.nodes.node import ENDLESS, Node

SHOWN_PARENTS = 8
"""Of more parents, the first ones are shown and the others counted."""


@final
@dataclasses.dataclass(frozen=True)
class Sketch:
    """A node of a chain, with all that is above it.

    Attributes:
        text: what it is: `.shuffle(seed=0)`; of one that joins several, without the dot.
        above: the parents.
        shares: the names of the parents, with weights or lengths, where these differ.
    """

    text: str
    above: "tuple[Sketch, ...]" = ()
    shares: tuple[tuple[str, float], ...] = ()

    @property
    def follows(self) -> bool:
        """Whether it stands under its parent, and not around several."""
        return len(self.above) == 1

    def lines(self) -> Iterator[str]:
        """Yields a node a line; where several are joined, each is a list item."""
        if self.follows:
            yield from self.above[0].lines()
            yield self.text
            return
        yield self.text
        for parent in self.above[:SHOWN_PARENTS]:
            first, *others = parent.lines()
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
        if len(self.above) > SHOWN_PARENTS:
            yield f"- and {len(self.above) - SHOWN_PARENTS} more"


def sketch_of(node: Node) -> Sketch:
    """Returns the chain of a node of a `MapDataset`."""
    return Sketch(node.text, tuple(map(sketch_of, node.parents)), tuple(node.shares))


def extent_of(node: Node) -> str:
    """Returns how many elements a node has, in words."""
    count = "without end" if node.length == ENDLESS else f"of {node.length} element{'s'[: node.length != 1]}"
    return f"{count}, of which some may be absent" if node.is_sparse else count


def text_of(title: str, chain: Sketch) -> str:
    """Returns a chain as text, after a line that says what it is.

    MapDataset of 25 elements
      source(list of 100 records)
      .shuffle(seed=0)
      .batch(batch_size=4)
    """
    return "\n".join([title, *(f"  {line}" for line in chain.lines())])


def picture_of(title: str, chain: Sketch) -> str:
    """Returns a chain as HTML for a notebook, light or dark as the page around it."""
    from millstream import html_fragments  # noqa: PLC0415  (for notebooks)

    name, _, extent = title.partition(" ")
    return html_fragments.figure(html_fragments.card(name, extent, _boxes(chain)), style=_STYLE)


_STYLE = """
.millstream .ms-step{padding:.15em 0 .15em .6em;border-left:3px solid var(--ms-line);margin:.2em 0;
overflow-wrap:anywhere}
.millstream .ms-joined{display:flex;gap:.6em;flex-wrap:wrap;margin:.4em 0}
.millstream .ms-joined>*{flex:1 1 12rem;border:1px dashed var(--ms-line);border-radius:8px;padding:.3em .6em}
"""


def _boxes(chain: Sketch) -> str:
    """Returns the boxes of a chain, from its sources down."""
    from millstream.html_fragments import escaped, proportions  # noqa: PLC0415  (for notebooks)

    if chain.follows:
        return f"{_boxes(chain.above[0])}{_step(chain.text)}"
    if not chain.above:
        return _step(chain.text)
    shown: Sequence[str] = [f"<div>{_boxes(parent)}</div>" for parent in chain.above[:SHOWN_PARENTS]]
    if (more := len(chain.above) - len(shown)) > 0:
        shown = [*shown, f'<div class="ms-soft">{escaped(f"and {more} more")}</div>']
    bar = proportions(chain.shares) if chain.shares else ""
    return f'<div class="ms-joined">{"".join(shown)}</div>{bar}{_step(chain.text)}'


def _step(text: str) -> str:
    from millstream.html_fragments import escaped  # noqa: PLC0415  (for notebooks)

    return f'<div class="ms-step"><code>{escaped(text)}</code></div>'


def fingerprint_of(node: Node) -> str:
    """Returns what decides the elements of a chain, in one line, equal in every process.

    The words of each node have a name of their own, and a CRC over all of them comes last.
    """
    words = [text for text, _ in _words(node)]
    named = [f"node{number}={text}" for number, text in enumerate(words)]
    return " ".join(["MapDataset", *named, f"crc={zlib.crc32(repr(words).encode()):08x}"])


def content_marks_of(node: Node) -> dict[str, str]:
    """Returns marks of the code and the objects of a chain, by the numbers that `fingerprint_of` gives its nodes."""
    return {
        f"node{number}{path}": mark
        for number, (_, own) in enumerate(_words(node))
        if own is not None
        for path, mark in own.content().content.items()
    }


def _words(node: Node) -> Iterator[tuple[str, Node | None]]:
    for parent in node.parents:
        yield from _words(parent)
    for text in node.identities():
        yield text, node
    if len(node.parents) > 1:
        yield f"of {len(node.parents)}", None
