"""Pictures are whole, self-contained HTML about what is there; to look at something reads nothing."""

import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import cloudpickle
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import millstream
from millstream.core.html_fragments import card, document, figure, proportions
from millstream.loader.reporting.snapshot import StageLocation
from millstream.loader.reporting.summary import render_loader, render_text
from support.documents.html_pages import Page
from support.draw.loader_snapshots import snapshot_of_run, with_source, with_stage
from support.faults.user_faults import Unread
from support.processes.worker_pools import python

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_picture_is_of_source_order_stages_and_who_does_them() -> None:
    """All parts are there in their order, and a picture reads no record."""
    loader = millstream.load(Unread(), shuffle=True, seed=0, transformations=[abs], batch_size=4, worker_count=3)
    text = Page(loader._repr_html_()).text
    words = [
        "Unread of 10 records",
        "IndexSampler(",
        "3 worker processes",
        "keys",
        "operations[0]",
        "hand-over",
        "next(",
    ]
    assert sorted(words, key=text.index) == words
    assert "slowest" not in text
    lines = repr(loader).splitlines()
    assert [line for line in lines if line.startswith("  ┌")] == ["  ┌ 3 worker processes with up to 16 threads each"]


def test_what_the_trainer_does_beside_workers_is_in_a_frame_of_its_own() -> None:
    """A Batch after a Filter stands where it runs, after the hand-over, and the table of the summary says so."""
    loader = millstream.load(range(8), transformations=[millstream.Filter(bool)], batch_size=4, worker_count=1)
    lines = repr(loader).splitlines()
    first, second = [number for number, line in enumerate(lines) if line.startswith("  ┌")]
    assert "hand-over" in lines[second - 2]
    assert [lines[first], lines[second]] == ["  ┌ 1 worker process with up to 16 threads", "  ┌ the trainer's thread"]
    assert "operations[1], Batch" in lines[second + 1]
    table = str(loader.summary())
    assert re.search(r"^operations\[0\].* workers ", table, re.MULTILINE)
    assert re.search(r"^operations\[1\].* trainer ", table, re.MULTILINE)


def test_the_slowest_stage_is_marked_once_there_is_one() -> None:
    """In the terminal and in the notebook: one mark, at the stage that took longest, with its time and rate.

    A summary in a notebook has the sentences of its text.
    """
    snapshot = snapshot_of_run(read=1.0, augment=4.0, waits=3.0, trains=1.0)
    (line,) = [line for line in render_text(snapshot).splitlines() if "slowest" in line]
    assert line.split() == ["│", "operations[0],", "Augment", "40", "ms", "per", "batch", "80", "%", "<-", "slowest"]
    page = render_loader(snapshot)
    assert page.count("ms-stage ms-slowest") == 1
    text = Page(page).text
    assert "25 batches/s" in text
    assert "100 batches in 4 s, 75 % of it waiting" in text
    assert "ms-stage ms-slowest" not in render_loader(snapshot_of_run())
    assert "The trainer waited 75 % of the time." in Page(render_loader(snapshot, with_advice=True)).text


def test_a_mixture_shows_its_sizes_and_its_changes_of_weights() -> None:
    """Names, shares and the position of each change are in the sampler's text and in all views of the loader.

    The pictures of the source and of the loader show sizes, too.
    """
    sampler = millstream.MixtureSampler(
        {"web": millstream.IndexSampler(14, shuffle=True, seed=0), "books": millstream.IndexSampler(6)},
        {"web": 3, "books": 1},
    ).reweighted(800, {"web": 1, "books": 4})
    source = millstream.ConcatenatedDataSource({"web": range(14), "books": range(6)})
    loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[millstream.Batch(8)])
    line = "mixture web 75 %, books 25 %; from position 800: web 20 %, books 80 %"

    assert repr(sampler) == "MixtureSampler({'web': 3, 'books': 1}, changes=[(800, {'web': 1, 'books': 4})])"
    assert line in repr(loader)
    assert line in str(loader.summary())
    balanced = millstream.BalancedSampler(sampler, costs=np.ones(20), global_batch_size=8, parts=2)
    for picture in (loader._repr_html_(), sampler._repr_html_(), balanced._repr_html_()):
        text = Page(picture).text
        for words in ("web 75.0%", "from position 800", "web 20.0%", "books 80.0%"):
            assert words in text
    for picture in (loader._repr_html_(), source._repr_html_()):
        assert "web 70.0%" in Page(picture).text
    for position in range(900, 2000, 100):
        sampler = sampler.reweighted(position, {"web": position, "books": 1})
    assert repr(sampler) == "MixtureSampler(2 components, 12 changes of weights)"
    assert "from position 1,900" in sampler._repr_html_()


def test_samplers_and_sources_have_pictures() -> None:
    """A notebook shows of them the text of `repr`."""
    shown: Any
    for shown in (
        millstream.IndexSampler(10, shuffle=True, seed=3),
        millstream.SequentialSampler(10),
        millstream.HierarchicalSampler([5, 5], window_units=1, seed=0),
        millstream.PackingSampler(np.array([3, 2]), 4, seed=0, shuffle=True, num_epochs=1),
        millstream.RangeDataSource(0, 10, 1),
        millstream.InMemoryDataSource([1, 2]),
    ):
        assert type(shown).__name__ in Page(shown._repr_html_()).text


def test_an_iterator_shows_its_position() -> None:
    """Step, epoch and how many batches are left, where that is known."""
    with iter(millstream.load(range(10), batch_size=2, num_epochs=2)) as batches:
        next(batches)
        text = Page(batches._repr_html_()).text
    assert "step 1 · epoch 0 · batches left 9" in text
    with iter(millstream.load(range(10), batch_size=2)) as batches:
        assert "batches left" not in batches._repr_html_()


def test_own_attributes_of_a_source_mean_nothing() -> None:
    """A class of the user's may have `parts` and `weights` of any kind: a picture of the loader does without."""

    class Own(list[int]):
        parts: ClassVar[Any] = {"a": 1}
        weights: ClassVar[Any] = "heavy"

    assert "Own of 3 records" in repr(millstream.load(Own([1, 2, 3]), batch_size=1))


def test_a_trace_tells_types_shapes_and_dtypes_between_operations() -> None:
    """They are those of one batch, after each operation, groupings too; the loader's picture has them from then on."""

    def widen(value: int) -> dict[str, Any]:
        return {"x": np.full((2, 3), value, np.int16), "name": "abc"}

    loader = millstream.load(range(8), transformations=[widen, millstream.Filter(bool)], batch_size=4, num_epochs=1)
    assert "int16" not in repr(loader)
    trace = loader.trace()
    element = ("['x']: int16 (2, 3)", "['name']: str of 3 characters")
    assert list(trace.leaves.values()) == [
        ("element: int",),
        element,
        element,
        ("['x']: int16 (4, 2, 3)", "['name']: <U3 (4,)"),
    ]
    assert "    ['x']: int16 (4, 2, 3)" in repr(trace).splitlines()
    assert "int16 (4, 2, 3)" in Page(trace._repr_html_()).text
    assert "int16 (4, 2, 3)" in Page(loader._repr_html_()).text
    assert loader.profile()["next"] == 0.0


def test_a_trace_of_a_packer_tells_its_rows() -> None:
    """The picture describes the output of an operation, not the elements that its sizes were measured of."""
    documents = [{"tokens": np.arange(length)} for length in (3, 2, 4)]
    pack = millstream.FirstFitPack({"tokens": 8}, num_packing_bins=1)
    loader = millstream.DataLoader(
        data_source=documents, sampler=millstream.IndexSampler(3, num_epochs=1), operations=[pack]
    )
    last = list(loader.trace().leaves.values())[-1]
    assert "['tokens']: int64 (8,)" in last
    assert any("segment_ids" in leaf for leaf in last)


def test_a_trace_raises_what_the_pipeline_raises() -> None:
    """With its note of where, and the loader is as it was."""
    loader = millstream.load(range(1, 3), transformations=[lambda value: 1 // (value - 1)], batch_size=1)
    with pytest.raises(ZeroDivisionError) as caught:
        loader.trace()
    assert "operation 0" in "".join(caught.value.__notes__)
    assert "no batch yet" in repr(loader)


def test_looking_in_the_middle_of_a_pass_changes_nothing() -> None:
    """Every picture, and a trace, between any two batches: the stream is the same."""
    loader = millstream.load(range(64), shuffle=True, seed=1, transformations=[abs], batch_size=4, num_epochs=1)
    expected = [batch.tolist() for batch in loader]
    seen = []
    with iter(loader) as batches:
        for batch in batches:
            seen.append(batch.tolist())
            repr(loader), loader._repr_html_(), batches._repr_html_(), loader.trace(), loader.summary()
    assert seen == expected


@hypothesis.given(
    strategies.text(),
    strategies.text(),
    strategies.lists(strategies.tuples(strategies.text(), strategies.floats(0, 1e9)), max_size=20),
)
def test_any_name_is_shown_as_it_is(name: str, leaf: str, parts: Sequence[tuple[str, float]]) -> None:
    """Tags and quotes in names are text: a picture of anything is whole HTML."""
    snapshot = with_source(snapshot_of_run(augment=1.0, waits=1.0, trains=1.0), name=name, bars=((leaf, tuple(parts)),))
    snapshot = with_stage(snapshot, "operations[0]", label=name, structure=(leaf,), location=StageLocation.TRAINER)
    for page in (render_loader(snapshot), document(name, figure(card(name, leaf, proportions(parts, name))))):
        Page(page)
    if name.strip() and "\r" not in name and "\0" not in name:
        assert name in Page(render_loader(snapshot)).text


def test_what_makes_pictures_is_imported_by_those_who_look() -> None:
    """A training run pays for none of it: a loop leaves the room of pictures closed."""
    code = (
        "import sys, millstream\n"
        "for _ in millstream.load(range(8), batch_size=4, num_epochs=1): pass\n"
        "print([name for name in sys.modules if '.reporting.' in name or name.endswith('.html_fragments')])"
    )

    done = python("-c", code, cwd="/", check=True)
    assert done.stdout == "[]\n"
