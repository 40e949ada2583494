"""An oracle of resuming: for every kind of pipeline and every kind of change, what must happen."""

import ast
import dataclasses
import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import millstream
from millstream import Batch, CheckpointError, IterDataset, MapDataset, experimental
from millstream.samplers import BalancedSampler, HierarchicalSampler, MixtureSampler
from millstream.transforms import ConcatThenSplit, Filter, Map
from support.streams import comparable


class Tokenizer:
    """An object of another library, which changes when it is called."""

    def __init__(self, calls: int) -> None:
        self.calls = calls


@dataclasses.dataclass(frozen=True)
class Spec:
    """All that may change.

    Attributes:
        calls: how often the operation's tokenizer was called.
        code: which code the operation runs, of two that compute the same.
        extra: how many further operations there are.
        kind: the name of the operation's class.
        nested: a number in a list in a dict.
        row: a number in a small array.
        large: a number in an array of half a megabyte.
        held: a variable around a function.
        default: the default of a parameter of a function.
        swapped: whether the two operations change places, which commute.
    """

    size: int = 2
    seed: int = 0
    calls: int = 0
    code: int = 0
    extra: int = 0
    threads: int = 0
    epochs: int = 2
    kind: str = "Scale"
    private: int = 0
    constant: int = 0
    nested: int = 0
    row: float = 0.0
    large: int = 0
    held: int = 0
    default: int = 0
    swapped: bool = False
    records: int = 30

    @property
    def reading(self) -> millstream.ReadOptions:
        return millstream.ReadOptions(self.threads, 8)

    @property
    def operations(self) -> list[Any]:
        body = ["return element * self.size", "return self.size * element"][self.code]
        space: dict[str, Any] = {"__name__": "users_module", "Map": Map}
        text = f"class {self.kind}(Map):\n    LIMIT = {self.constant}\n    def map(self, element):\n        {body}"
        exec(f"{text}\ndef positive(number, unused={self.default}):\n    return abs(number)", space)
        scale, held = space[self.kind](), self.held
        scale.size, scale.tokenizer = self.size, Tokenizer(self.calls)
        scale._private, scale.nested = self.private, {"limits": [1, self.nested]}
        scale.row, scale.table = np.array([0.5, self.row]), np.full(1 << 16, self.large)
        operations = [scale, Map(lambda number: number + 0 * held), Map(space["positive"])]
        return [*(operations[::-1] if self.swapped else operations), *[Map(abs)] * self.extra]

    @property
    def sampler(self) -> millstream.IndexSampler:
        return millstream.IndexSampler(self.records, shuffle=True, seed=self.seed, num_epochs=self.epochs)

    def loader(self, *after: Any, **options: Any) -> Any:
        source = range(self.records)
        arguments = {"data_source": source, "sampler": self.sampler, "read_options": self.reading, **options}
        return iter(millstream.DataLoader(operations=[*self.operations, *after], **arguments))

    def mapped(self) -> MapDataset[Any]:
        dataset: MapDataset[Any] = MapDataset.range(self.records).shuffle(seed=self.seed)
        for operation in self.operations:
            dataset = dataset.map(operation)
        return dataset

    def stream(self) -> IterDataset[Any]:
        return self.mapped().to_iter_dataset(self.reading)


class OwnStream(IterDataset[Any]):
    """A stream of a user's, without states; a parameter of it is content, as of a source."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.start = spec.calls * 0
        self.tokenizer = Tokenizer(spec.calls)

    def __iter__(self) -> Any:
        return iter(range(self.start, 100))


def jittered(number: int, rng: np.random.Generator) -> float:
    return float(number + rng.random())


def thirds(number: int) -> bool:
    return number % 3 > 0


def document(number: int) -> dict[str, Any]:
    return {"t": np.full(1 + int(number) % 5, number)}


def is_odd(row: Any) -> bool:
    return bool(row["t"][0] % 4)


PIPELINES: dict[str, Callable[[Spec], Any]] = {
    "batches": lambda spec: spec.loader(Batch(4)),
    "records": lambda spec: spec.loader(),
    "filter": lambda spec: spec.loader(Filter(thirds), Batch(4)),
    "packer": lambda spec: spec.loader(document, ConcatThenSplit({"t": 4}), Filter(is_odd), Batch(2)),
    "chain as a source": lambda spec: iter(
        millstream.load(spec.mapped(), num_epochs=spec.epochs, batch_size=4, read_options=spec.reading)
    ),
    "read": lambda spec: iter(spec.stream().batch(3)),
    "sparse": lambda spec: iter(spec.stream().filter(thirds).batch(3)),
    "mix": lambda spec: iter(IterDataset.mix([spec.stream(), spec.stream()], [2, 1]).batch(3)),
    "mix by name": lambda spec: iter(IterDataset.mix({"a": spec.stream(), "b": spec.stream()}, {"a": 2, "b": 1})),
    "zip": lambda spec: iter(experimental.ZipIterDataset([spec.stream(), spec.stream()])),
    "limit": lambda spec: iter(experimental.LimitIterDataset(spec.stream(), 20).map(abs)),
    "repeat": lambda spec: iter(experimental.RepeatIterDataset(spec.stream(), spec.epochs)),
    "cache": lambda spec: iter(experimental.CacheIterDataset(spec.stream())),
    "draws": lambda spec: iter(spec.stream().random_map(jittered, seed=spec.seed).batch(3)),
    "draws of a loader": lambda spec: spec.loader(millstream.RandomMap(jittered), Batch(4)),
    "indices": lambda spec: spec.loader(millstream.MapWithIndex(lambda index, number: number + index)),
    "split": lambda spec: spec.loader(millstream.FlatMap(lambda number: [number, number], max_fan_out=2), Batch(4)),
    "rebatch": lambda spec: spec.loader(Batch(4), millstream.Rebatch(3)),
    "first fit": lambda spec: spec.loader(document, millstream.FirstFitPack({"t": 8}, num_packing_bins=2)),
    "window shuffle": lambda spec: spec.loader(millstream.WindowShuffle(5, seed=spec.seed), Batch(4)),
    "batched map": lambda spec: spec.loader(Map(lambda numbers: [0, *numbers][1:], batched=True), Batch(4)),
    "skipped errors": lambda spec: spec.loader(Batch(4), on_error="skip"),
    "windows of units": lambda spec: spec.loader(
        Batch(4), sampler=HierarchicalSampler([10] * 3, window_units=2, seed=spec.seed, num_epochs=spec.epochs)
    ),
    "balanced": lambda spec: spec.loader(
        Batch(4), sampler=BalancedSampler(spec.sampler, costs=range(1, 31), global_batch_size=4, parts=2)
    ),
    "mixture of sources": lambda spec: spec.loader(
        Batch(4),
        sampler=MixtureSampler({"a": spec.sampler, "b": spec.sampler}, {"a": 2, "b": 1}),
        data_source=millstream.ConcatenatedDataSource({"a": range(30), "b": range(30)}),
    ),
    "logical shards": lambda spec: spec.loader(
        Filter(thirds), Batch(4), shard_options=millstream.ShardOptions(0, 1, logical_shards=2)
    ),
    "after a stream": lambda spec: iter(OwnStream(Spec()).apply(spec.operations).batch(2)),
    "after an iterable": lambda spec: iter(IterDataset.source(range(60)).apply(spec.operations)),
    "after a filtered mixture": lambda spec: iter(
        IterDataset.mix([spec.stream(), spec.stream().filter(thirds)]).map(abs).batch(2)
    ),
    "mixture of mixtures": lambda spec: iter(
        IterDataset.mix([IterDataset.mix([spec.stream(), spec.stream()]).map(abs), spec.stream().filter(thirds)])
    ),
    "here after processes": lambda spec: iter(spec.stream().mp_prefetch(0).map(abs).batch(2)),
    "elastic": lambda spec: experimental.ElasticIterator(
        spec.mapped(), 4, millstream.ShardOptions(0, 1), read_options=spec.reading
    ),
    "loader on the device": lambda spec: millstream.device_put(spec.loader(Batch(4))),
    "chain on the device": lambda spec: iter(experimental.device_put(spec.stream().batch(3), None)),
    "interleave": lambda spec: iter(experimental.InterleaveIterDataset([spec.stream()] * 3, cycle_length=2)),
}
IDENTITY: list[dict[str, Any]] = [
    *({"size": 3}, {"seed": 1}, {"extra": 1}, {"kind": "Enlarge"}, {"private": 1}, {"constant": 1}),
    *({"nested": 1}, {"row": 1.0}, {"swapped": True}),
]
CONTENT: list[tuple[dict[str, Any], str]] = [
    *(({"calls": 1}, "tokenizer"), ({"code": 1}, "map()"), ({"large": 1}, "table"), ({"held": 1}, "held")),
    ({"default": 1}, "unused"),
]
NONE: list[dict[str, Any]] = [{}, {"threads": 2}, {"epochs": 3}]


@pytest.mark.parametrize("name", PIPELINES)
def test_each_change_is_refused_or_reported_or_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Identity is an error that leaves the iterator as it was; content a warning by name; all else is silent.

    With strict=True, content is an error, too. The differences that an error advises to allow are accepted.
    """
    caplog.set_level(logging.WARNING, "millstream")
    build, spec = PIPELINES[name], Spec()
    with build(spec) as saved:
        taken(saved, 3)
        state, saved_step = saved.get_state(), saved.step
        rest = taken(saved, 2)
    state = state if isinstance(state, bytes) else json.loads(json.dumps(state))
    for change in IDENTITY:
        if "seed" in change and name in ("after a stream", "after an iterable"):  # Nothing shuffles these.
            continue
        with build(dataclasses.replace(spec, **change)) as changed:
            taken(changed, 1)
            before = changed.get_state()
            with pytest.raises(CheckpointError) as refused:
                changed.set_state(state)
            assert changed.get_state() == before
            if name not in ("repeat", "cache"):  # These compute the elements before the position again.
                changed.set_state(state, allow=advised(refused.value))
                assert changed.step == saved_step
    caplog.clear()
    for content, word in [*CONTENT, *[(change, "") for change in NONE]]:
        with build(dataclasses.replace(spec, **content)) as resumed:
            before = taken(resumed, 1) and resumed.get_state()
            if word:
                with pytest.raises(CheckpointError) as refused:
                    resumed.set_state(state, strict=True)
                assert resumed.get_state() == before
                assert not caplog.records
                resumed.set_state(state, strict=True, allow=advised(refused.value))
                assert taken(resumed, 2) == rest
                assert not caplog.records
            resumed.set_state(state)
            assert taken(resumed, 2) == rest
            resumed.set_state(resumed.get_state(), strict=True)
        messages = [record.getMessage() for record in caplog.records if "differs from" in record.getMessage()]
        # Of datasets below others, states have a hash of the content.
        assert all(word in message for message in messages if "below others" not in message)
        assert bool(messages) == bool(word), (content, messages)
        caplog.clear()


def taken(iterator: Iterator[Any], count: int) -> list[Any]:
    elements = itertools.islice(iterator, count)
    return [comparable(np.asarray(element) if isinstance(element, jax.Array) else element) for element in elements]


def advised(error: CheckpointError) -> Any:
    """Returns the value of `allow` in the text of an error."""
    found = re.search(r"allow=(\{\"[^}]*\})", str(error))
    assert found is not None, error
    return ast.literal_eval(found[1])


def checked(number: int) -> int:
    if number == 13:
        raise ValueError(number)
    return int(number)


def skipping(dataset: IterDataset[Any]) -> IterDataset[Any]:
    return experimental.WithOptionsIterDataset(dataset, experimental.DatasetOptions(on_error="skip"))


def loaded(operations: list[Any], **options: Any) -> Any:
    return millstream.load(range(30), transformations=operations, **options)


def corpora(weight: int) -> Any:
    return millstream.load({"a": range(9), "b": range(9)}, weights={"a": 1, "b": weight}, batch_size=3)


def checked_stream() -> IterDataset[Any]:
    return MapDataset.range(30).map(checked).to_iter_dataset()


FILTERED = [checked, Filter(thirds)]
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "on_error": (
        lambda: loaded([checked]),
        lambda: loaded([checked], on_error="skip"),
    ),
    "on_error, filtered": (
        lambda: loaded(FILTERED),
        lambda: loaded(FILTERED, on_error="skip"),
    ),
    "on_error, dense chain": (checked_stream, lambda: skipping(checked_stream())),
    "on_error, sparse chain": (
        lambda: checked_stream().filter(thirds),
        lambda: skipping(checked_stream().filter(thirds)),
    ),
    "on_error, mixture": (
        lambda: IterDataset.mix([checked_stream(), checked_stream()]),
        lambda: skipping(IterDataset.mix([checked_stream(), checked_stream()])),
    ),
    "another kind of operation": (lambda: loaded([]), lambda: loaded([abs])),
    "batch size": (lambda: millstream.load(range(60), batch_size=4), lambda: millstream.load(range(60), batch_size=2)),
    "source": (lambda: loaded([]), lambda: millstream.load(range(31))),
    "weights": (lambda: corpora(1), lambda: corpora(2)),
    "class of the sampler": (
        lambda: loaded([]),
        lambda: millstream.DataLoader(
            data_source=range(30), sampler=HierarchicalSampler([10] * 3, window_units=2, seed=0)
        ),
    ),
    "filter": (lambda: loaded([]), lambda: loaded([Filter(thirds)])),
    "stream": (lambda: OwnStream(Spec()), lambda: IterDataset.source(range(30, 60))),
    "operations after a stream": (
        lambda: IterDataset.source(range(60)).map(abs),
        lambda: IterDataset.source(range(60)).map(abs).filter(thirds),
    ),
}


@pytest.mark.parametrize("is_reversed", [False, True], ids=["", "back"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_error_advises_to_allow_is_accepted(kind: str, *, is_reversed: bool) -> None:
    """For each kind of difference, in both directions, unless the error says that nothing can accept it."""
    with iter(KINDS[kind][is_reversed]()) as saved, iter(KINDS[kind][not is_reversed]()) as here:
        taken(saved, 4)
        state = saved.get_state()
        with pytest.raises(CheckpointError) as refused:
            here.set_state(state)
        if is_reversed and "cannot accept this" in str(refused.value):
            assert kind in ("filter", "operations after a stream")
            return
        here.set_state(state, allow=advised(refused.value))
        assert here.step == saved.step or kind == "batch size"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("on_error")])
def test_a_run_that_died_at_a_record_resumes_without_it(kind: str) -> None:
    """With on_error="skip", from the state before the error."""
    failing, here = (iter(build()) for build in KINDS[kind])
    with failing, here:
        with pytest.raises(ValueError, match="13"):
            taken(failing, 30)
        here.set_state(failing.get_state(), allow={"on_error"})
        assert ("int", 14) in taken(here, 3)


IN_USE = ["batches", "filter", "logical shards", "sparse", "mix", "mix by name", "zip"]
IN_USE += ["after a filtered mixture", "loader on the device", "chain on the device", "elastic"]


@pytest.mark.parametrize("name", IN_USE)
def test_a_state_of_another_thread_is_of_one_moment(name: str) -> None:
    """Wherever `get_state` is interrupted by calls of `next`, the batch at its step follows, or it refuses as in use.

    A thread may lose the interpreter at any call.
    """
    build, spec = PIPELINES[name], Spec(records=6000)
    with build(spec) as iterator:
        expected = taken(iterator, 1000)
    with build(spec) as iterator, build(spec) as resumed:
        number, is_over = 0, False
        while not is_over:
            num_calls, is_over = 0, True

            def switch(_frame: Any, event: str, _arg: Any, number: int = number) -> None:
                nonlocal num_calls, is_over
                num_calls += event in ("call", "c_return")
                if num_calls > number:
                    sys.setprofile(None)
                    taken(iterator, 5)
                    is_over = False

            taken(iterator, 1)
            state = None
            sys.setprofile(switch)
            try:
                state = iterator.get_state()
            except ValueError as error:
                assert "is in use" in str(error)  # noqa: PT017  (most calls raise nothing)
            finally:
                sys.setprofile(None)
            if state is not None:
                resumed.set_state(state)
                step = resumed.step
                assert taken(resumed, 1) == expected[step : step + 1]
            number += 1 + number // 3


STREAMS: list[tuple[str, Callable[[], IterDataset[Any]], Callable[[], IterDataset[Any]]]] = [
    (
        "other weights",
        lambda: IterDataset.mix([Spec().stream(), Spec().stream()], [1, 1]),
        lambda: IterDataset.mix([Spec().stream(), Spec().stream()], [9, 1]),
    ),
    (
        r"50 elements, and here \.take\(3",
        lambda: experimental.LimitIterDataset(MapDataset.range(99), 60),
        lambda: experimental.LimitIterDataset(MapDataset.range(99), 3),
    ),
    (
        "epoch 1 of a repeated dataset, and here there are 1",
        lambda: experimental.RepeatIterDataset(MapDataset.range(40), 3),
        lambda: experimental.RepeatIterDataset(MapDataset.range(40), 1),
    ),
    (
        "at dataset 3, and here there are 2",
        lambda: experimental.InterleaveIterDataset([MapDataset.range(15)] * 4, cycle_length=2),
        lambda: experimental.InterleaveIterDataset([MapDataset.range(15)] * 2, cycle_length=2),
    ),
    (
        "elements are counted, got one of zipped datasets",
        lambda: experimental.ZipIterDataset([MapDataset.range(99)]),
        lambda: OwnStream(Spec()),
    ),
]


@pytest.mark.parametrize(("text", "saved", "here"), STREAMS, ids=[text for text, _, _ in STREAMS])
def test_another_combination_of_streams_is_refused(
    text: str, saved: Callable[[], IterDataset[Any]], here: Callable[[], IterDataset[Any]]
) -> None:
    """By what differs, wherever the state was saved before that shows."""
    with iter(saved()) as one, iter(here()) as other:
        taken(one, 50)
        with pytest.raises(CheckpointError, match=text.replace("60, and", "50 elements, and")):
            other.set_state(one.get_state())


def test_a_stream_of_a_users_is_its_class_and_its_attributes_are_content(caplog: pytest.LogCaptureFixture) -> None:
    """As for a source: another class is an error, another attribute a warning that names it."""
    with iter(OwnStream(Spec())) as one, iter(OwnStream(Spec(calls=1))) as other:
        taken(one, 3)
        other.set_state(one.get_state())
        assert taken(other, 1) == [("int", 3)]
    assert "stream.tokenizer" in caplog.text


def test_files_of_equal_names_and_sizes_with_other_ends_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that was replaced is named; one that has moved is not, in a combination of sources neither."""

    def lines(folder: str, text: str) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "lines.txt").write_text(text)
        return millstream.TextLineDataSource(tmp_path / folder / "lines.txt")

    def resumed(saved: Any, here: Any, **options: Any) -> None:
        with iter(millstream.load(saved)) as one, iter(millstream.load(here)) as other:
            next(one)
            other.set_state(one.get_state(), **options)

    joined = millstream.ConcatenatedDataSource
    old, moved = lines("a", "one\ntwo\nend\n"), lines("b", "one\ntwo\nend\n")
    resumed(old, moved, strict=True)
    resumed(joined([old, old]), joined([moved, moved]), strict=True)
    assert not caplog.records
    replaced = lines("c", "one\ntwo\nEND\n")
    resumed(old, replaced)
    resumed(joined([old, old]), joined([moved, replaced]))
    assert len(caplog.records) == 2
    assert "source.first_and_last_bytes: saved #" in caplog.text
    assert "source[1].first_and_last_bytes: saved #" in caplog.text
    with pytest.raises(CheckpointError, match="first_and_last_bytes"):
        resumed(old, replaced, strict=True)
    resumed(old, replaced, strict=True, allow={"source.first_and_last_bytes"})
    for source in (old, moved, replaced):
        source.close()
