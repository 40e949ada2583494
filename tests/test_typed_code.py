"""Code as users write it, fully typed: `make check` runs mypy --strict over this file, and the test runs it."""

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

import millstream
from millstream.transforms import Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation


class Example(TypedDict):
    """What a decoder makes of a record."""

    image: NDArray[np.float32]
    label: int


class Decode(millstream.MapTransform[bytes, Example]):
    """With types of what it gets and returns."""

    def map(self, element: bytes) -> Example:
        """Returns the image and its label."""
        return {"image": np.frombuffer(element, np.uint8).astype(np.float32), "label": element[0]}


@dataclasses.dataclass(frozen=True)
class Jitter(millstream.RandomMapTransform[Example, Example]):
    """A dataclass with parameters."""

    scale: float = 0.1

    def random_map(self, element: Example, rng: np.random.Generator) -> Example:
        """Returns the image with noise."""
        noise = rng.normal(0, self.scale, element["image"].shape).astype(np.float32)
        return {**element, "image": element["image"] + noise}


class IsEven(millstream.FilterTransform[Example]):
    """A filter."""

    def filter(self, element: Example) -> bool:
        """Keeps even labels."""
        return element["label"] % 2 == 0


class Halves(millstream.FlatMapTransform[Example, Example]):
    """A splitting operation whose limit is an attribute of the class."""

    max_fan_out = 2

    def flat_map(self, element: Example) -> Sequence[Example]:
        """Returns the two halves of an image."""
        first, second = np.split(element["image"], 2)
        return [{**element, "image": first}, {**element, "image": second}]


class Untyped(millstream.MapTransform):
    """Without types, as code for Grain has it: the annotations of the method are enough."""

    def map(self, element: Example) -> Example:
        """Returns the element."""
        return element


class Resize(millstream.MapTransform[Example, Example]):
    """With a constructor of its own."""

    def __init__(self, size: int, *, method: str = "nearest") -> None:
        self.size = size
        self.method = method

    def map(self, element: Example) -> Example:
        """Returns the image at another size."""
        return {**element, "image": np.resize(element["image"], self.size)}


def collate(elements: list[Example]) -> NDArray[np.int64]:
    """Returns the labels of a batch."""
    return np.array([element["label"] for element in elements])


RECORDS = [bytes([label] * 8) for label in range(10)]


def test_typed_code_runs() -> None:
    """Operations of every kind, in lists of every kind, make one stream."""
    operations: list[Transformation] = [Decode(), Untyped(), Jitter(scale=0.2), IsEven(), Halves(), Resize(4)]
    inferred = [Decode(), millstream.Batch(2)]
    with_functions = millstream.load(
        RECORDS,
        seed=0,
        num_epochs=1,
        transformations=[
            Decode(),
            lambda element: element,
            Map(Untyped().map),
            RandomMap(lambda element, _rng: element),
            MapWithIndex(lambda _index, element: element),
            Filter(lambda element: element["label"] > 1),
            FlatMap(lambda element: [element], max_fan_out=1),
        ],
        batch_size=2,
        batch_fn=collate,
    )
    long = millstream.DataLoader(
        data_source=RECORDS,
        sampler=millstream.IndexSampler(len(RECORDS), num_epochs=1, seed=0),
        operations=[*operations, millstream.Batch(2, drop_remainder=True)],
    )
    labels: NDArray[np.int64] = next(iter(with_functions))

    assert labels.tolist() == [2, 3]
    assert next(iter(long))["image"].shape == (2, 4)
    assert len(millstream.load(RECORDS, num_epochs=1, transformations=inferred)) == 5


def test_types_of_operations_are_known() -> None:
    """What an operation made from a function gets and returns is the function's; what it is given is checked."""
    length: Map[bytes, int] = Map(len)
    words: FlatMap[str, str] = FlatMap(str.split, max_fan_out=8)

    assert length.map(b"abc") == 3
    assert list(words.flat_map("a b")) == ["a", "b"]
    assert Decode().map(b"abc")["label"] == 97
    assert list(millstream.load(["a b"], num_epochs=1, transformations=[words])) == ["a", "b"]


def wrong() -> None:
    """Is not run: each line is a type error, which mypy must find, or it complains of the comment."""
    millstream.load(RECORDS, batchsize=2)  # type: ignore[call-arg]
    millstream.Batch(2, batch_fn=3)  # type: ignore[arg-type]
    Decode().map("text")  # type: ignore[arg-type]
    Map(3)  # type: ignore[call-overload]
    FlatMap(str.split)  # type: ignore[call-overload]
    FlatMap(str.split, max_fanout=8)  # type: ignore[call-overload]
    millstream.MapTransfrom(len)  # type: ignore[attr-defined]
    millstream.checkpoint.CheckpointSav(None)  # type: ignore[attr-defined]
