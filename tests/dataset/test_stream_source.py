"""`IterDataset.source`: any iterable is a stream, and resumes by its own states if it has them."""

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import IterDataset

DRAWN: list[int] = []
"""The numbers that were drawn from all streams below."""


class Counting:
    """Numbers from 0, in a form without states."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[int]:
        for number in range(self.stop):
            DRAWN.append(number)
            yield number


class HasStates:
    """States as Hugging Face datasets and torchdata have them: a position."""

    position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Stateful(HasStates, Counting):
    """The same with states of the iterator that was begun last, as Hugging Face datasets have them."""

    start = 0

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[int]:
        self.position, self.start = self.start, 0
        while self.position < self.stop:
            DRAWN.append(self.position)
            self.position += 1
            yield self.position - 1


class StatefulIterators(Counting):
    """The same with states of the iterators, as torchdata has them."""

    def __iter__(self) -> "Own":
        return Own(self.stop)


class Own(HasStates):
    """An iterator with states."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def __iter__(self) -> "Own":
        return self

    def __next__(self) -> int:
        if self.position == self.stop:
            raise StopIteration
        self.position += 1
        return self.position - 1


def hugging_face(stop: int) -> Any:
    return datasets.Dataset.from_dict({"number": range(stop)}).to_iterable_dataset(num_shards=min(3, stop))


KINDS = {
    "list": lambda stop: list(range(stop)),
    "iterable": Counting,
    "stateful": Stateful,
    "stateful iterators": StatefulIterators,
    "loader": lambda stop: millstream.load(range(stop), num_epochs=1),
    "hugging face": hugging_face,
}


def number_of(element: Any) -> int:
    return int(element["number"] if isinstance(element, dict) else element)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_stream_resumes_at_every_element(kind: str, length: int, step: int, ahead: int) -> None:
    """A state fits another iterator, and this one, wherever it has gone meanwhile; iterators share nothing."""
    dataset = IterDataset.source(KINDS[kind](length)).map(number_of)
    step = min(step, length)
    with iter(dataset) as iterator, iter(dataset) as other:
        assert list(itertools.islice(iterator, step)) == list(range(step))
        state = json.loads(json.dumps(iterator.get_state()))
        assert list(itertools.islice(iterator, ahead)) == list(range(step, min(length, step + ahead)))
        next(other, None)
        other.set_state(state)
        assert list(other) == list(range(step, length))
        iterator.set_state(state)
        assert list(iterator) == list(range(step, length))


@pytest.mark.parametrize("kind", ["iterable", "stateful", "hugging face"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_operations_run_after_any_stream(kind: str, num_workers: int) -> None:
    """Batches and draws are those of the same elements in a MapDataset's stream, and resume."""
    expected = [batch.tolist() for batch in millstream.MapDataset.range(20).to_iter_dataset().map(str).batch(6)]
    dataset = IterDataset.source(KINDS[kind](20)).map(number_of).map(str).batch(6).mp_prefetch(num_workers)
    with iter(dataset) as iterator:
        assert [batch.tolist() for batch in itertools.islice(iterator, 2)] == expected[:2]
        state = iterator.get_state()
        assert [batch.tolist() for batch in iterator] == expected[2:]
        iterator.set_state(state)
        assert [batch.tolist() for batch in iterator] == expected[2:]


@pytest.mark.parametrize(("stream", "num_drawn"), [(Stateful(5000), 1), (Counting(5000), 4001)])
def test_own_states_draw_nothing_again(stream: Any, num_drawn: int) -> None:
    """A position far in the stream is reached without the elements before it; without states, they are drawn again."""
    dataset = IterDataset.source(stream)
    with iter(dataset) as iterator, iter(dataset) as resumed:
        assert len(list(itertools.islice(iterator, 4000))) == 4000
        del DRAWN[:]
        resumed.set_state(iterator.get_state())
        assert next(resumed) == 4000
    assert len(DRAWN) == num_drawn


class Failing(Stateful):
    """Fails once at an element."""

    failures = 1

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 1500 and Failing.failures:
                Failing.failures -= 1
                raise ConnectionError("once")
            yield number


def test_a_stream_goes_on_after_an_error() -> None:
    """The element at which it failed comes next."""
    with iter(IterDataset.source(Failing(1600))) as iterator:
        assert len(list(itertools.islice(iterator, 1500))) == 1500
        state = iterator.get_state()
        with pytest.raises(ConnectionError, match="once"):
            next(iterator)
        assert iterator.get_state() == state
        assert list(iterator) == list(range(1500, 1600))


def test_what_cannot_begin_again_is_refused() -> None:
    """An iterator is read once; other objects are not iterables."""
    with pytest.raises(TypeError, match="got generator, an iterator that is read once"):
        IterDataset.source(number for number in range(3))
    with pytest.raises(TypeError, match="iterable must be an iterable, got 3 of type int"):
        IterDataset.source(3)  # type: ignore[arg-type]


def numbers(stop: int = 100) -> Iterator[int]:
    yield from range(stop)


def needs_arguments(stop: int, *, step: int) -> Iterator[int]:
    yield from range(0, stop, step)


@pytest.mark.parametrize(
    "function",
    [
        numbers,
        lambda: iter(range(100)),
        lambda: range(100),
        functools.partial(needs_arguments, 100, step=1),
        StatefulIterators(100).__iter__,
        functools.partial(map, int, [*map(str, range(100))]),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_is_called_for_each_iterator(function: Any, num_workers: int) -> None:
    """A function without arguments that returns iterators is a stream, which resumes, repeats, and goes to workers."""
    dataset = IterDataset.source(function).map(float).batch(8).mp_prefetch(num_workers)
    expected = [list(map(float, range(start, min(start + 8, 100)))) for start in range(0, 100, 8)]
    for _ in range(2):
        assert [batch.tolist() for batch in dataset] == expected
    with iter(dataset) as iterator, iter(dataset) as resumed:
        for _ in range(5):
            next(iterator)
        resumed.set_state(json.loads(json.dumps(iterator.get_state())))
        assert [batch.tolist() for batch in resumed] == expected[5:]


class Looked(list[int]):
    """A list that counts the numbers that are read by their positions."""

    num_looked = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_looked += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("follow", [lambda dataset: dataset, lambda dataset: dataset.map(float).seed(0).batch(2)])
def test_a_stream_is_described_once_and_in_part(follow: Any) -> None:
    """The first iterator reads a bounded sample of any list, later ones hardly any of it. States are copies."""
    reads = []
    for count in (10**4, 10**5, 10**6):
        numbers = Looked(range(count))
        dataset = follow(IterDataset.source(numbers))
        states = []
        for _ in range(3):
            numbers.num_looked = 0
            with iter(dataset) as iterator:
                next(iterator)
                states.append(json.dumps(iterator.get_state()))
                state = iterator.get_state()
                if state["stream"] is not None:
                    state["stream"]["fingerprint"]["identity"].clear()
            reads.append(numbers.num_looked)
        assert len(set(states)) == 1
    assert max(reads[::3]) < 11_000
    assert max(reads[1::3] + reads[2::3]) < 600


def test_another_function_is_another_stream(caplog: pytest.LogCaptureFixture) -> None:
    """A state tells functions by their code and by what they hold; strict=True refuses."""

    def stream(function: Any) -> Any:
        return iter(IterDataset.source(function))

    iterator = stream(numbers)
    next(iterator)
    stream(numbers).set_state(iterator.get_state())
    assert not caplog.messages
    stream(lambda: iter(range(7))).set_state(iterator.get_state())
    assert "iterable" in caplog.text
    assert repr(IterDataset.source(numbers)) == "IterDataset\n  stream(numbers)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (needs_arguments, r"needs_arguments needs stop, step\. Write functools\.partial\(needs_arguments, \.\.\.\)"),
        (numbers(), r"got generator, .* Pass the function that returns it, .* without the parentheses"),
        (Counting, r"got a class\. Pass an instance: Counting\(\.\.\.\)"),
    ],
)
def test_what_is_no_function_of_iterators_is_refused_at_construction(given: Any, message: str) -> None:
    """The error says what to pass instead; a function that returns no iterator is named when it is called."""
    with pytest.raises(TypeError, match=message):
        IterDataset.source(given)
    with pytest.raises(TypeError, match=r"<lambda>\(\) must return an iterator, got None\. Write yield"):
        iter(IterDataset.source(lambda: None))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "construct",
    [
        millstream.load,
        millstream.MapDataset.source,
        lambda source: millstream.DataLoader(data_source=source, sampler=millstream.IndexSampler(3)),
    ],
)
def test_a_generator_where_records_are_needed_is_sent_to_a_stream(construct: Any) -> None:
    """`load(f)` and `load(f())` name `IterDataset.source(f)`, and `DataLoader` and `MapDataset.source` as well."""
    with pytest.raises(TypeError, match=r"IterDataset\.source\(numbers\)"):
        construct(numbers)
    with pytest.raises(TypeError, match=r"IterDataset\.source\(function\)"):
        construct(numbers())


@pytest.mark.parametrize("kind", ["iterable", "hugging face", "loader"])
def test_a_loader_of_a_stream_says_how_to_read_it(kind: str) -> None:
    """`load` needs random access: the error names `IterDataset.source`; that of a chain says to iterate over it."""
    with pytest.raises(TypeError, match=r"which is read in order\. Write millstream\.IterDataset\.source\(stream\)"):
        millstream.load(KINDS[kind](3), batch_size=2)
    with pytest.raises(TypeError, match=r"a stream has no random access\. Add \.batch\(n\) to it"):
        millstream.load(IterDataset.source([1]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"It is read in order\. Write millstream\.IterDataset\.source\(dataset\)"):
        millstream.HuggingFaceDataSource(hugging_face(3))
