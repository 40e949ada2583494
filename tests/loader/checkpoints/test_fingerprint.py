"""A fingerprint holds everything that decides the stream, under paths that a person understands."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millstream.loader.checkpoints.fingerprint import OWN_TEXT_LIMIT, SAMPLE_SIZE, fingerprint_of
from millstream.record import RecordMetadata
from millstream.samplers import BalancedSampler, IndexSampler, MixtureSampler, SequentialSampler
from millstream.transforms import Batch, Filter, FlatMap, Map, OnlyFor
from millstream.transforms.given import as_transformation

SAMPLER = IndexSampler(7)


def words(source: Any = range(7), sampler: Any = SAMPLER, operations: Any = ()) -> dict[str, str]:
    checked = [as_transformation(operation) for operation in operations]
    return dict(fingerprint_of(source, sampler, checked).identity)


def source_words(source: Any) -> dict[str, str]:
    return {path: text for path, text in words(source).items() if path.startswith("source")}


def sampler_words(sampler: Any) -> dict[str, str]:
    return {path: text for path, text in words(sampler=sampler).items() if path.startswith("sampler")}


@dataclasses.dataclass
class Folder:
    """A source whose records are slow to read, so that reading one here is an error."""

    path: str
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> Any:
        raise AssertionError(key)


class Signed(Folder):
    def fingerprint(self) -> Any:
        return self.path


def test_a_source_is_its_class_and_length_and_its_attributes_are_content() -> None:
    """A custom source is described without reading a record; a folder that has moved is not another stream."""
    found = fingerprint_of(Folder("train", 7), SAMPLER, [])
    assert {path: text for path, text in found.identity.items() if path.startswith("source")} == {
        "source": "7 records of Folder"
    }
    assert {path: text for path, text in found.content.items() if not path.endswith("()")} == {
        "source.path": "'train'",
        "source.size": "7",
    }


@dataclasses.dataclass(frozen=True)
class Recipe(Map):
    """An operation that says what it is."""

    name: str
    noise: int = 0

    def fingerprint(self) -> str:
        return f"recipe name={self.name}"

    def map(self, element: Any) -> Any:
        return element


def test_an_operation_may_say_what_it_is() -> None:
    """Its `fingerprint()` counts instead of its attributes, and each `name=` has its own path."""
    described = words(operations=[Recipe("a", 1)])
    assert described == words(operations=[Recipe("a", 2)]) != words(operations=[Recipe("b", 1)])
    assert described["operations[0].name"] == "a"


def test_sources_and_samplers_may_say_what_they_are() -> None:
    """`fingerprint()` is what counts, made printable and never too long; it must be a string."""
    assert source_words(Signed("corpus v1", 7)) == {"source": "corpus v1"}
    assert source_words(Signed("é\n", 7)) == {"source": "\\xe9\\n"}
    assert sampler_words(Signed("mixture 3", 7)) == {"sampler": "mixture 3"}
    long, other = (source_words(Signed("a" * size, 7))["source"] for size in (2000, 2001))
    assert long != other
    assert len(long) < OWN_TEXT_LIMIT + 20
    for broken in ({"source": Signed(b"corpus", 7)}, {"sampler": Signed(b"corpus", 7)}):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"Signed\.fingerprint\(\) must return a str, got bytes"):
            words(**broken)


def test_a_plain_sequence_is_its_length_and_some_records() -> None:
    """A list, tuple or array is its length, its type and some evenly spread records; a range may be vast."""
    every = []
    for build in (list, tuple, np.array, lambda keys: [{"image": np.full(9, key)} for key in keys]):
        texts = [source_words(build(keys))["source"] for keys in (range(1000), range(999), range(1, 1001), range(5))]
        assert texts == [
            source_words(build(keys))["source"] for keys in (range(1000), range(999), range(1, 1001), range(5))
        ]
        assert texts[0].startswith("1000 records of ")
        every += texts
    assert len({*every}) == len(every)
    assert source_words(range(10**12))["source"] == "1000000000000 records of range(0, 1000000000000)"
    assert source_words(range(10**12)) != source_words(range(1, 10**12 + 1))
    records = list(range(100))
    looked_at = [
        key for key in records if source_words([*records[:key], -1, *records[key + 1 :]]) != source_words(records)
    ]
    assert len(looked_at) == SAMPLE_SIZE
    assert {0, 99} <= {*looked_at}


class Backwards(IndexSampler):
    def record_keys_at(self, positions: Any) -> Any:
        return self.num_records - 1 - super().record_keys_at(positions)


@dataclasses.dataclass
class Weighted:
    """A custom sampler with parameters."""

    weights: list[float]

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, 0)


def test_an_index_sampler_is_its_order_whatever_its_epochs_and_shards() -> None:
    """Records, shuffle, seed and keys count; epochs and shards do not; a subclass is a class of its own."""
    shuffled = IndexSampler(7, shuffle=True, seed=3)
    assert sampler_words(shuffled) == {
        "sampler": "IndexSampler",
        "sampler.num_records": "7",
        "sampler.seed": "3",
        "sampler.shuffle": "True",
    }
    assert sampler_words(IndexSampler(7, num_epochs=1)) == sampler_words(SequentialSampler(7))
    assert sampler_words(IndexSampler(7, num_epochs=1)) == sampler_words(IndexSampler(7))
    keyed = [sampler_words(IndexSampler(2, keys=keys)) for keys in ([0, 1], [1, 0], np.array([0, 1]))]
    assert keyed[0] == keyed[2] != keyed[1]
    assert sampler_words(Backwards(7))["sampler"] == "Backwards"
    assert sampler_words(Backwards(7, num_epochs=1)) == sampler_words(Backwards(7, num_epochs=2))
    assert sampler_words(Backwards(7)) != sampler_words(Backwards(8))
    assert sampler_words(Weighted([0.3, 0.7])) == {"sampler": "Weighted", "sampler.weights": "[0.3, 0.7]"}


COMBINATIONS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda part: MixtureSampler({"a": part}, [1], source_lengths=[7]), "sampler['a']"),
    (lambda part: BalancedSampler(part, costs=np.ones(7), global_batch_size=4, parts=2), "sampler.order"),
    (lambda part: COMBINATIONS[0][0](COMBINATIONS[0][0](part)), "sampler['a']['a']"),
    (lambda part: COMBINATIONS[1][0](COMBINATIONS[0][0](part)), "sampler.order['a']"),
]


@pytest.mark.parametrize(("combine", "path"), COMBINATIONS, ids=[path for _, path in COMBINATIONS])
def test_a_custom_sampler_in_a_combination_counts(combine: Callable[[Any], Any], path: str) -> None:
    """By its attributes under its path, or by its `fingerprint()` in that of the combination."""
    one, other = (sampler_words(combine(Weighted([weight]))) for weight in (0.5, 0.7))
    assert {path: text for path, text in one.items() if other[path] != text} == {f"{path}.weights": "[0.5]"}
    assert one[path] == "Weighted"
    assert sampler_words(combine(SAMPLER)) != sampler_words(combine(IndexSampler(7, seed=1)))
    assert not any(name.startswith(path) for name in sampler_words(combine(SAMPLER)))
    code = fingerprint_of(range(7), combine(Backwards(7)), []).content
    assert f"{path}.record_keys_at()" in code


def test_functions_in_c_are_named() -> None:
    """A Map of another one is another stream, as one of a function in Python is; a method counts with its object."""
    texts = [
        words(operations=[function])["operations[0].map"] for function in (len, abs, str.upper, math.sqrt, np.sqrt)
    ]
    assert texts == ["builtins.len", "builtins.abs", "str.upper", "math.sqrt", "numpy.sqrt"]
    prefixes = [fingerprint_of([], SAMPLER, [Map(prefix.join)]) for prefix in "ab"]
    assert prefixes[0].identity == prefixes[1].identity
    assert prefixes[0].content["operations[0].map()"] != prefixes[1].content["operations[0].map()"]


def test_operations_for_one_component_are_described_one_by_one() -> None:
    """Their parameters are identity under paths of their own, also next to a function."""
    one, other = (words(operations=[OnlyFor("a", [same, Repeated(times)])]) for times in (2, 3))
    assert {path: text for path, text in one.items() if other[path] != text} == {
        "operations[0].operations[1].max_fan_out": "2"
    }
    assert one["operations[0].operations[0].map"] == "same"
    assert one["operations[0].component"] == "'a'"


class Even(Filter):
    def filter(self, element: int) -> bool:
        return element % 2 == 0


def same(element: Any) -> Any:
    return element


class Repeated(FlatMap):
    def __init__(self, times: int) -> None:
        self.max_fan_out = times

    def flat_map(self, element: Any) -> Any:
        return [element] * self.max_fan_out


def test_operations_are_their_kinds_and_parameters() -> None:
    """Kinds and classes are named; the size of the first Batch is not listed."""
    operations = [same, Even(), FlatMap(same, max_fan_out=2), Batch(4), Batch(2, True, batch_fn=same)]
    assert {path: text for path, text in words(operations=operations).items() if path.startswith("operations")} == {
        "operations[0]": "Map",
        "operations[0].map": "same",
        "operations[1]": "Filter Even",
        "operations[2]": "FlatMap",
        "operations[2].flat_map": "same",
        "operations[2].max_fan_out": "2",
        "operations[3]": "Batch",
        "operations[3].drop_remainder": "False",
        "operations[3].pad_remainder": "False",
        "operations[4]": "Batch",
        "operations[4].batch_fn": "same",
        "operations[4].batch_size": "2",
        "operations[4].drop_remainder": "True",
        "operations[4].pad_remainder": "False",
    }


def test_code_is_marked_by_part_and_function_but_not_millstreams_own() -> None:
    """Marks have the path of the function; an update of millstream changes none."""
    fingerprint = fingerprint_of(range(7), Backwards(7), [Map(same), Even(), Batch(4)])
    assert list(fingerprint.content) == ["sampler.record_keys_at()", "operations[0].map()", "operations[1].filter()"]
    assert all(mark.startswith("code #") for mark in fingerprint.content.values())
    assert fingerprint.python == f"{sys.version_info.major}.{sys.version_info.minor}"


class Held:
    """A sampler of the user's that holds a value."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, 0)


class Named(Held):
    def fingerprint(self) -> str:
        return f"Named stride_from_1000={self.held}"  # type: ignore[attr-defined]


class NamedIndex(IndexSampler):
    def __init__(self, held: int) -> None:
        super().__init__(7)
        object.__setattr__(self, "stride_from_1000", held)


@pytest.mark.parametrize("combine", [lambda part: part, *(combine for combine, _ in COMBINATIONS[::3])])
@pytest.mark.parametrize(
    "build",
    [
        lambda last: Held(held=np.append(np.zeros(10**4), last)),
        lambda last: Held(held=[0.5] * 12_000 + [last]),
        lambda last: Held(held=["a"] * 12_000 + [last]),
        lambda last: Held(held=dict.fromkeys(range(12_000), 0) | {"a": last}),
        lambda last: Held(held={*map(str, range(12_000)), f"number {last}"}),
        lambda last: Held(held=bytes(2 * 10**6) + bytes([last])),
        lambda last: Held(held=[np.zeros(10**5), {"a": np.append(np.zeros(10**4), last)}]),
        lambda last: Held(held=Held(held=np.append(np.zeros(10**4), last))),
        lambda last: Held(held=np.array(["a"] * 12_000 + [last], object)),
        lambda last: Held(stride_from_1000=last),
        lambda last: Held(first_turns=[last]),
        lambda last: Named(held=last),
        NamedIndex,
    ],
)
def test_all_that_a_sampler_holds_is_identity(build: Callable[[int], Any], combine: Callable[[Any], Any]) -> None:
    """Of any size and under any name, in a combination too, because it decides the order from the beginning."""
    first, other, same = (fingerprint_of([], combine(build(last)), []) for last in (1, 2, 1))
    assert first == same
    assert first.before(0).identity != other.before(0).identity
    assert len(str(first.identity)) < 2000
