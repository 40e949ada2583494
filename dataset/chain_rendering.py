"""Renderings of a chain as text and as HTML: one line or box per node, with parallel branches for several parents."""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, final

from millstream.dataset.nodes.node import ENDLESS, Node
from millstream.loader.operations.reading import MAX_HELD_RECORDS, may_depend_on_thread
from millstream.loader.visualization import element_text

SHOWN_PARENTS = 8
"""Maximum number of parents that are shown; the others are counted."""
MAX_POSITIONS = 1_000
"""The number of positions in which an element is searched for, to display its structure."""


@final
@dataclasses.dataclass(frozen=True)
class Sketch:
    """A node of a chain, with all nodes before it.

    Attributes:
        text: its description: `.shuffle(seed=0)`, without the dot if it has several parents.
        above: the parents.
        shares: the names of the parents, with weights or lengths, if these differ.
        element: the structure of its elements; "" if it is not displayed.
    """

    text: str
    above: "tuple[Sketch, ...]" = ()
    shares: tuple[tuple[str, float], ...] = ()
    element: str = ""

    @property
    def follows(self) -> bool:
        """True if it has exactly one parent."""
        return len(self.above) == 1

    def lines(self) -> Iterator[str]:
        """Yields one line per node, and one list item per parent if there are several."""
        if self.follows:
            yield from self.above[0].lines()
            yield from self._own_lines()
            return
        yield from self._own_lines()
        for parent in self.above[:SHOWN_PARENTS]:
            first, *others = parent.lines()
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
        if len(self.above) > SHOWN_PARENTS:
            yield f"- and {len(self.above) - SHOWN_PARENTS} more"

    def _own_lines(self) -> Iterator[str]:
        yield self.text
        if self.element:
            yield f"    {self.element}"


def sketch_of(node: Node, *, with_elements: bool = False) -> Sketch:
    """Returns the chain of a node of a `MapDataset`. With elements, the first one of each node is computed."""
    parents = tuple(sketch_of(parent, with_elements=with_elements) for parent in node.parents)
    element = element_text(lambda: _first_element(node)) if with_elements else ""
    return Sketch(node.text, parents, tuple(node.shares), element)


def _first_element(node: Node) -> Any:
    """Returns the first element of a node that is not absent; None if there is none among the first positions."""
    check_no_stream(node)
    positions = range(min(node.length, MAX_POSITIONS))
    return next((value for value in map(node.at, positions) if value is not None), None)


def check_no_stream(node: Node) -> None:
    """Raises TypeError if a source is a stream, from which an element cannot be computed without losing it."""
    for parent in node.parents:
        check_no_stream(parent)
    for source in node.sources or ():
        if len(source) >= MAX_HELD_RECORDS and may_depend_on_thread(source):
            raise TypeError(f"{type(source).__name__} may be a stream, whose records are read once")


def extent_of(node: Node) -> str:
    """Returns a description of a node's number of elements."""
    count = "of endless length" if node.length == ENDLESS else f"of {node.length} element{'s'[: node.length != 1]}"
    return f"{count}, of which some may be absent" if node.is_sparse else count


def text_of(title: str, chain: Sketch) -> str:
    """Returns a chain as text, after a title.

    MapDataset of 25 elements
      source(list of 100 records)
      .shuffle(seed=0)
      .batch(batch_size=4)
    """
    return "\n".join([title, *(f"  {line}" for line in chain.lines())])


def html_of(title: str, chain: Sketch) -> str:
    """Returns a chain as HTML for a notebook, light or dark like the page around it."""
    from millstream.core import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)

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
    from millstream.core.html_fragments import escaped, proportions  # noqa: PLC0415  (lazy: only notebooks need it)

    if chain.follows:
        return f"{_boxes(chain.above[0])}{_step(chain)}"
    if not chain.above:
        return _step(chain)
    shown: Sequence[str] = [f"<div>{_boxes(parent)}</div>" for parent in chain.above[:SHOWN_PARENTS]]
    if (more := len(chain.above) - len(shown)) > 0:
        shown = [*shown, f'<div class="ms-soft">{escaped(f"and {more} more")}</div>']
    bar = proportions(chain.shares) if chain.shares else ""
    return f'<div class="ms-joined">{"".join(shown)}</div>{bar}{_step(chain)}'


def _step(chain: Sketch) -> str:
    from millstream.core.html_fragments import escaped  # noqa: PLC0415  (lazy: only notebooks need it)

    element = f'<div class="ms-soft"><code>{escaped(chain.element)}</code></div>' if chain.element else ""
    return f'<div class="ms-step"><code>{escaped(chain.text)}</code>{element}</div>'


def fingerprint_of(node: Node) -> str:
    """Returns one line that identifies the elements of a chain; equal in every process.

    The identities of the nodes are numbered, and a CRC over all of them comes last.
    """
    identities = [text for text, _ in _identities(node)]
    named = [f"node{number}={text}" for number, text in enumerate(identities)]
    return " ".join(["MapDataset", *named, f"crc={zlib.crc32(repr(identities).encode()):08x}"])


def content_marks_of(node: Node) -> dict[str, str]:
    """Returns digests of the code and the objects of a chain, by the node numbers of `fingerprint_of`."""
    return {
        f"node{number}{path}": mark
        for number, (_, own) in enumerate(_identities(node))
        if own is not None
        for path, mark in own.content().content.items()
    }


def _identities(node: Node) -> Iterator[tuple[str, Node | None]]:
    for parent in node.parents:
        yield from _identities(parent)
    for text in node.identities():
        yield text, node
    if len(node.parents) > 1:
        yield f"of {len(node.parents)}", None
