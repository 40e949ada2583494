"""A chain shows itself as text and as a picture, and reads nothing for it."""

from typing import Any

import hypothesis
from hypothesis import strategies

from millstream import IterDataset, MapDataset, ReadOptions, experimental
from millstream.dataset.chain_rendering import SHOWN_PARENTS, Sketch, html_of, text_of
from millstream.experimental import LimitIterDataset, ZipIterDataset
from support.documents.html_pages import Page
from support.faults.user_faults import Unread


def mixture() -> IterDataset[Any]:
    """Returns two streams mixed three to one, in batches by two workers."""
    web = MapDataset.source(Unread()).shuffle(seed=1).to_iter_dataset()
    books = LimitIterDataset(MapDataset.range(50).to_iter_dataset().map(abs), 20)
    return IterDataset.mix({"web": web, "books": books}, {"web": 3, "books": 1}).batch(4).mp_prefetch(2)


def test_a_stream_is_shown_line_by_line() -> None:
    """Several parents are a list; a node with one parent follows it on the next line."""
    assert repr(mixture()).splitlines() == [
        "IterDataset",
        "  mix(weights={'web': 3, 'books': 1})",
        "  - source(Unread of 10 records)",
        "    .shuffle(seed=1)",
        "    .to_iter_dataset()",
        "  - source(range(0, 50))",
        "    .to_iter_dataset()",
        "    .apply(Map(abs))",
        "    .take(20)",
        "  .apply(Batch(batch_size=4))",
        "  .mp_prefetch(num_workers=2)",
    ]


def test_a_picture_goes_from_the_sources_down() -> None:
    """Each node is in it, after those that it draws from, with the shares of a mixture."""
    text = Page(mixture()._repr_html_()).text
    words = ["IterDataset", "source(Unread", ".shuffle(", "source(range", "web 75.0%", "books 25.0%", "mix(", "Batch("]
    assert sorted(words, key=text.index) == words
    mixed = MapDataset.mix([MapDataset.range(10), MapDataset.range(5)], [1, 4]).filter(bool)
    text = Page(mixed._repr_html_()).text
    words = ["MapDataset", "of 6 elements, of which some may be absent", "range(0, 10)", "1 80.0%", "mix(", ".filter("]
    assert sorted(words, key=text.index) == words


def test_of_many_parents_the_first_are_shown() -> None:
    """A picture of a mixture of hundreds stays small, and says how many there are."""
    many = ZipIterDataset([MapDataset.range(3).to_iter_dataset()] * 100)
    assert repr(many).splitlines()[-1] == f"  - and {100 - SHOWN_PARENTS} more"
    page = many._repr_html_()
    assert page.count("range(0, 3)") == SHOWN_PARENTS
    assert f"and {100 - SHOWN_PARENTS} more" in Page(page).text


class FromNowhere(IterDataset[int]):
    """A stream over something that is no dataset."""


def test_parents_of_any_kind_are_named() -> None:
    """An own stream may draw from anything."""
    assert repr(FromNowhere({"url": 1})) == "IterDataset\n  {'url': 1}\n  FromNowhere"


CHAINS = strategies.recursive(
    strategies.builds(Sketch, strategies.text()),
    lambda chains: strategies.builds(
        lambda text, above: Sketch(text, tuple(above), tuple((parent.text, 1.0) for parent in above)),
        strategies.text(),
        strategies.lists(chains, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@hypothesis.settings(max_examples=30)
@hypothesis.given(CHAINS)
def test_any_text_is_shown_as_it_is(chain: Sketch) -> None:
    """Every node, with any name, is in the text and in the HTML once, and the page stays valid."""

    def texts(node: Sketch) -> list[str]:
        return [node.text, *(text for parent in node.above for text in texts(parent))]

    page = Page(html_of("MapDataset of 1 element", chain))
    assert page.tags.count("code") == len(texts(chain)) + 1
    assert all(text.strip() in page.text for text in texts(chain) if text.isalnum())
    if all(text.isalnum() for text in texts(chain)):
        assert len(text_of("", chain).splitlines()) == len(texts(chain)) + 1


def test_an_iterator_says_where_it_is() -> None:
    """Its step and whether it runs, in a notebook with what it runs; and a trace shows an element that is there."""
    batches: Any = iter(MapDataset.range(20).filter(lambda number: number % 7).to_iter_dataset().batch(4))
    next(batches)
    text = Page(batches._repr_html_()).text
    assert "at step 1, running" in text
    words = ["iterator", "runs", "in order, 20 positions", "operations[0], Batch(batch_size=4)", "next("]
    assert sorted(words, key=text.index) == words
    assert "1 batch of 32 bytes" in text
    assert "in order, 20 positions" in str(batches.summary())
    assert batches.trace().leaves["read"] == ("element: int",)
    batches.close()


def test_options_and_threads_are_shown_as_they_were_given() -> None:
    """A step that only sets options or threads has a line of its own."""
    stream = MapDataset.range(3).to_iter_dataset()
    options = experimental.DatasetOptions(on_error="skip", max_errors=3)
    steps = {
        ".options(on_error='skip', max_errors=3)": experimental.WithOptionsIterDataset(stream, options),
        f".prefetch({ReadOptions(1, 8)})": experimental.ThreadPrefetchIterDataset(
            IterDataset.source("abc").map(str.upper), prefetch_buffer_size=8
        ),
        # It prefetches by itself.
        ".to_iter_dataset()": experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=8),
    }
    for line, dataset in steps.items():
        assert repr(dataset).splitlines()[-1].strip() == line
