"""Renderings of a chain as text and as HTML: one line or box per node, with parallel branches for several parents."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from millstream.dataset.nodes.node import ENDLESS, Node
from millstream.dataset.nodes.source_node import Source
from millstream.dataset.step import Step, folded
from millstream.loader.pipeline.plan import may_be_stream

SHOWN_PARENTS = 8
"""Maximum number of parents that are shown; the others are counted."""
MAX_IDENTITIES = 2_000
"""The number of identities up to which a fingerprint lists a node as often as it is used."""
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
        return len(self.above) == 1

    @property
    def branches(self) -> bool:
        """True if it has several parents, or if the nodes that it follows do."""
        sketch = self
        while sketch.follows:
            sketch = sketch.above[0]
        return bool(sketch.above)


@final
class _Branches:
    """The branching parts of a chain that are used several times. Each is drawn once, and then named by its number.

    A chain of n nodes can have 2**n paths from its end to its sources.
    """

    def __init__(self, chain: Sketch) -> None:
        self._uses: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        pending = [chain]
        while pending:
            one = pending.pop()
            self._uses[id(one)] = self._uses.get(id(one), 0) + 1
            if self._uses[id(one)] == 1:
                pending += one.above[:SHOWN_PARENTS]

    def drawn(self, sketch: Sketch) -> Sketch:
        """Returns a node as it is to be drawn, with its number if it is used again; only its name the second time."""
        if self._uses[id(sketch)] == 1 or not sketch.branches:
            return sketch
        if (number := self._numbers.get(id(sketch))) is not None:
            return Sketch(f"({number}), as above")
        number = self._numbers[id(sketch)] = len(self._numbers) + 1
        return dataclasses.replace(sketch, text=f"({number}) {sketch.text}")


def _lines(chain: Sketch, branches: _Branches) -> Iterator[str]:
    """Yields one line per node, and one list item per parent if there are several."""
    sketch = branches.drawn(chain)
    if sketch.follows:
        yield from _lines(sketch.above[0], branches)
        yield from _own_lines(sketch)
        return
    yield from _own_lines(sketch)
    for parent in sketch.above[:SHOWN_PARENTS]:
        first, *others = _lines(parent, branches)
        yield f"- {first}"
        yield from (f"  {line}" for line in others)
    if len(sketch.above) > SHOWN_PARENTS:
        yield f"- and {len(sketch.above) - SHOWN_PARENTS} more"


def _own_lines(sketch: Sketch) -> Iterator[str]:
    yield sketch.text
    if sketch.element:
        yield f"    {sketch.element}"


def sketch_of(end: Step, first: Callable[[Step], Any] | None = None) -> Sketch:
    """Returns the chain of a step. With `first`, which computes the first element of a step, those are described."""
    from millstream.loader.reporting.preview import element_text  # noqa: PLC0415  (lazy: slow, and workers import this)

    def sketch(step: Step, parents: list[Sketch]) -> Sketch:
        element = "" if first is None else element_text(lambda: first(step))
        return Sketch(step.text, tuple(parents), tuple(step.shares), element)

    return folded(end, sketch)


def first_element(node: Node) -> Any:
    """Returns the first element of a node that is not absent; None if there is none among the first positions."""
    check_no_stream(node)
    positions = range(min(node.length, MAX_POSITIONS))
    return next((value for value in map(node.at, positions) if value is not None), None)


def check_no_stream(end: Step) -> None:
    """Raises TypeError if a source is a stream, from which an element cannot be computed without losing it."""

    def check(one: Step, _: list[None]) -> None:
        for source in (one.source,) if isinstance(one, Source) else ():
            if may_be_stream(source):
                raise TypeError(f"{type(source).__name__} may be a stream, whose records are read once")

    folded(end, check)


def extent_of(node: Node) -> str:
    count = "of endless length" if node.length == ENDLESS else f"of {node.length} element{'s'[: node.length != 1]}"
    return f"{count}, of which some may be absent" if node.is_sparse else count


def text_of(title: str, chain: Sketch) -> str:
    """Returns a chain as text, after a title.

    MapDataset of 25 elements
      source(list of 100 records)
      .shuffle(seed=0)
      .batch(batch_size=4)
    """
    return "\n".join([title, *(f"  {line}" for line in _lines(chain, _Branches(chain)))])


def html_of(title: str, chain: Sketch) -> str:
    """Returns a chain as HTML for a notebook, light or dark like the page around it."""
    from millstream.core import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)

    name, _, extent = title.partition(" ")
    return html_fragments.figure(html_fragments.card(name, extent, _boxes(chain, _Branches(chain))), style=_STYLE)


_STYLE = """
.millstream .ms-step{padding:.15em 0 .15em .6em;border-left:3px solid var(--ms-line);margin:.2em 0;
overflow-wrap:anywhere}
.millstream .ms-joined{display:flex;gap:.6em;flex-wrap:wrap;margin:.4em 0}
.millstream .ms-joined>*{flex:1 1 12rem;border:1px dashed var(--ms-line);border-radius:8px;padding:.3em .6em}
"""


def _boxes(whole: Sketch, branches: _Branches) -> str:
    from millstream.core.html_fragments import escaped, proportions  # noqa: PLC0415  (lazy: only notebooks need it)

    chain = branches.drawn(whole)
    if chain.follows:
        return f"{_boxes(chain.above[0], branches)}{_step(chain)}"
    if not chain.above:
        return _step(chain)
    shown: Sequence[str] = [f"<div>{_boxes(parent, branches)}</div>" for parent in chain.above[:SHOWN_PARENTS]]
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
    identities = _identities(node)
    content = {id(own): own.content().content for _, own in identities if own is not None}
    return {
        f"node{number}{path}": mark
        for number, (_, own) in enumerate(identities)
        if own is not None
        for path, mark in content[id(own)].items()
    }


def _identities(end: Node) -> list[tuple[str, Node | None]]:
    """Returns the identities of the nodes before a node, each after those that it draws from, and with its node.

    Nodes that are used several times are listed as often, so that it makes no difference whether a program uses one
    dataset twice or two that are equal. If that is long, each is listed once, with the numbers of its parents.
    """
    own: dict[int, list[str]] = {}
    counts: list[int] = []

    def count(one: Node, above: list[int]) -> int:
        own[id(one)] = list(one.identities())
        counts.append(len(own[id(one)]) + (len(above) > 1))
        return sum(above) + counts[-1]

    if folded(end, count) > max(MAX_IDENTITIES, sum(counts)):
        return _shared_identities(end, own)

    def listed(one: Node, above: list[list[tuple[str, Node | None]]]) -> list[tuple[str, Node | None]]:
        number = [(f"of {len(above)}", None)] if len(above) > 1 else []
        return [*itertools.chain.from_iterable(above), *((text, one) for text in own[id(one)]), *number]

    return folded(end, listed)


def _shared_identities(end: Node, own: dict[int, list[str]]) -> list[tuple[str, Node | None]]:
    """Returns the identity of each node once. Equal nodes over equal parents are one."""
    numbers: dict[str, int] = {}
    found: list[tuple[str, Node | None]] = []

    def number_of(one: Node, above: list[int]) -> int:
        if not own[id(one)] and len(above) == 1:
            # It does not change the elements.
            return above[0]
        text = f"{' '.join(own[id(one)])} of {above}"
        if text not in numbers:
            numbers[text] = len(found)
            found.append((text, one))
        return numbers[text]

    folded(end, number_of)
    return found
