"""Keras trains on loaders and chains: each epoch of `fit` gets the batches of one pass, in their order."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import millstream
from millstream.keras import Dataset
from support.processes.worker_pools import python

pytestmark = pytest.mark.third_party

ROWS = millstream.InMemoryDataSource((np.arange(10, dtype=np.float32)[:, None], np.arange(10, dtype=np.float32)))
"""Ten records, each a pair of its number as a row and as a target."""


class Jitter(millstream.RandomMap):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element[0], element[1] + np.float32(rng.random())


def loader(*, num_epochs: int | None = 1, **options: Any) -> millstream.DataLoader:
    """Returns a shuffled loader of batches of four: two of four records and one of two."""
    options = {"batch_size": 4, "transformations": [Jitter()], "seed": 0, **options}
    return millstream.load(ROWS, shuffle=True, num_epochs=num_epochs, **options)


def chain() -> millstream.MapDataset[Any]:
    return millstream.MapDataset.source(ROWS).seed(0).shuffle().random_map(Jitter()).batch(4)


def mixture(*, num_epochs: int | None = 1, **options: Any) -> millstream.DataLoader:
    """Returns a mixture of two halves of the records."""
    halves = {"a": millstream.MapDataset.source(ROWS)[:5], "b": millstream.MapDataset.source(ROWS)[5:]}
    options = {"weights": {"a": 1, "b": 1}, "batch_size": 4, "transformations": [Jitter()], "seed": 0, **options}
    return millstream.load(halves, shuffle=True, num_epochs=num_epochs, **options)


def balanced() -> millstream.DataLoader:
    """Returns a loader whose batches are dealt to two parts of equal cost."""
    order = millstream.IndexSampler(10, shuffle=True, seed=0, num_epochs=1)
    sampler = millstream.BalancedSampler(order, costs=np.arange(1, 11), global_batch_size=4, parts=2)
    return millstream.DataLoader(data_source=ROWS, sampler=sampler, operations=[Jitter(), millstream.Batch(4)])


class Recorder:
    """A model whose loss records the targets of each step that it is trained or evaluated on."""

    def __init__(self, *, is_built: bool = False) -> None:
        self.seen: list[list[float]] = []
        self.model = keras.Sequential([*([keras.Input((1,))] if is_built else []), keras.layers.Dense(1)])
        self.model.compile("sgd", self._loss)

    def _loss(self, targets: Any, predictions: Any) -> Any:
        jax.debug.callback(lambda values: self.seen.append(np.ravel(values).tolist()), targets, ordered=True)
        return keras.losses.mean_squared_error(targets, predictions)

    def fit(self, dataset: Any, **options: Any) -> list[list[float]]:
        """Trains, and returns the targets of each step since the last call."""
        self.model.fit(dataset, verbose=0, **options)
        jax.effects_barrier()
        seen, self.seen = self.seen, []
        return seen


def targets(batches: Any) -> Iterator[list[float]]:
    return (batch[1].tolist() for batch in batches)


def epochs_of(data: Any, num_epochs: int, start: int = 0) -> list[list[float]]:
    """Returns the targets of each batch of the epochs of a loader or a chain."""
    if isinstance(data, millstream.DataLoader):
        return [step for _, batches in data.epochs(num_epochs, start=start) for step in targets(batches)]
    return list(targets(data[step] for step in range(start * len(data), num_epochs * len(data))))


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    "make",
    [loader, lambda: loader(worker_count=1), chain, mixture, balanced],
    ids=["loader", "workers", "chain", "mixture", "balanced"],
)
def test_each_epoch_of_fit_is_the_next_epoch_of_the_data(make: Callable[[], Any], is_built: bool) -> None:
    """Keras' shuffle of batches, on by default, and the batch that it builds a model with change nothing."""
    dataset, recorder = Dataset(make()), Recorder(is_built=is_built)

    assert len(dataset) == 3
    first, second = epochs_of(make(), 1), epochs_of(make(), 2, start=1)
    assert {target for batch in first for target in batch} != {target for batch in second for target in batch}
    assert recorder.fit(dataset, epochs=2) == [*first, *second]
    assert recorder.fit(dataset, epochs=1) == epochs_of(make(), 3, start=2)
    dataset.close()


@pytest.mark.parametrize("make", [loader, chain])
def test_a_run_resumes_at_an_epoch(make: Callable[[], Any]) -> None:
    """`initial_epoch` of the dataset and of `fit` together go on where an earlier run was left."""
    dataset = Dataset(make(), initial_epoch=1)

    assert Recorder().fit(dataset, initial_epoch=1, epochs=3) == epochs_of(make(), 3, start=1)


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(num_epochs=None),
        lambda: loader(num_epochs=None, transformations=[millstream.transforms.Filter(lambda row: row[1] % 3 > 0)]),
        lambda: chain().repeat().to_iter_dataset(),
    ],
    ids=["1:1", "filtered", "chain"],
)
def test_epochs_of_a_number_of_steps_are_parts_of_one_stream(make: Callable[[], Any], is_built: bool) -> None:
    """With `steps_per_epoch`, no batch of the stream is lost between epochs, and none comes twice."""
    dataset, recorder = Dataset(make(), steps_per_epoch=2), Recorder(is_built=is_built)
    expected = targets(make())

    assert len(dataset) == 2
    assert recorder.fit(dataset, epochs=3) == [next(expected) for _ in range(6)]
    assert recorder.fit(dataset, epochs=1) == [next(expected) for _ in range(2)]
    dataset.close()


def test_the_epochs_of_keras_may_be_shorter_than_those_of_the_data() -> None:
    """`fit(steps_per_epoch=…)` goes on within a pass, and begins the next one after its last batch."""
    recorder = Recorder()

    assert recorder.fit(Dataset(loader()), steps_per_epoch=1, epochs=6) == epochs_of(loader(), 2)


def test_an_iter_dataset_is_read_again_in_each_epoch() -> None:
    """A stream of a known length is the same pass each time."""
    expected = list(targets(chain().to_iter_dataset()))

    assert Recorder().fit(Dataset(chain().to_iter_dataset()), epochs=2) == expected * 2


def test_evaluate_and_predict_get_every_record_once() -> None:
    """Predictions come in the order of the records, losses are those over arrays, and validation follows each epoch."""
    recorder = Recorder(is_built=True)
    inputs, labels = np.arange(10, dtype=np.float32)[:, None], np.arange(10, dtype=np.float32)
    ordered = millstream.load(ROWS, num_epochs=1, batch_size=4)
    dataset = Dataset(ordered)

    assert recorder.model.evaluate(dataset, verbose=0) == pytest.approx(
        recorder.model.evaluate(inputs, labels, batch_size=4, verbose=0)
    )
    np.testing.assert_allclose(
        recorder.model.predict(dataset, verbose=0), recorder.model.predict(inputs, verbose=0), rtol=1e-6
    )
    recorder.seen = []
    seen = recorder.fit(Dataset(loader()), epochs=2, validation_data=dataset)
    train, validation = epochs_of(loader(), 2), list(targets(ordered))
    assert seen == [*train[:3], *validation, *train[3:], *validation]


def test_batches_are_iterated_over_epoch_by_epoch() -> None:
    """Without Keras, each loop is an epoch; one that was left early is begun again."""
    dataset = Dataset(loader())
    first = next(iter(dataset))[1].tolist()

    assert first == epochs_of(loader(), 1)[0]
    assert list(targets(dataset)) == epochs_of(loader(), 1)
    assert list(targets(dataset)) == epochs_of(loader(), 2, start=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loader(num_epochs=None), "it has num_epochs=None. Build it with num_epochs=1 .* Pass steps_per_epoch"),
        (lambda: loader(num_epochs=3), "it has num_epochs=3"),
        (lambda: mixture(num_epochs=3, stop="drop_exhausted"), "it has num_epochs=3"),
        (lambda: chain().repeat(), "Cannot count the batches of an epoch: .* Pass steps_per_epoch"),
        (lambda: chain().to_iter_dataset().filter(bool), "Cannot count the batches of .* Pass steps_per_epoch"),
        (lambda: chain()[:0], "batches must have at least one batch, got an empty MapDataset"),
    ],
    ids=["endless", "three epochs", "three epochs of a mixture", "endless chain", "filtered", "empty"],
)
def test_data_without_a_known_epoch_is_refused(make: Callable[[], Any], message: str) -> None:
    """The error says that the length is not known, and to pass `steps_per_epoch`."""
    with pytest.raises(ValueError, match=message):
        Dataset(make())


def test_wrong_arguments_are_refused() -> None:
    """An iterator is not a dataset, and numbers are checked."""
    with pytest.raises(TypeError, match=r"got DataLoaderIterator\. Pass the loader itself, not its iterator"):
        Dataset(iter(loader()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 1, got 0"):
        Dataset(loader(), steps_per_epoch=0)
    with pytest.raises(ValueError, match="initial_epoch must be at least 0, got -1"):
        Dataset(loader(), initial_epoch=-1)


def test_a_stream_that_ends_within_an_epoch_is_an_error() -> None:
    """A finite stream with too many steps says how many there were, and how to repeat it."""
    message = re.escape("ended after 1 of the 2 steps of an epoch. Pass a smaller steps_per_epoch, or repeat them")
    with pytest.raises(ValueError, match=message):
        Recorder().fit(Dataset(loader(), steps_per_epoch=2), epochs=2)


FIT_AS_GRAIN = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import millstream
millstream.install_as_grain()
import grain
import keras
import numpy as np

rows = list(zip(np.arange(8, dtype=np.float32)[:, None], np.arange(8, dtype=np.float32)))
chain = grain.MapDataset.source(rows).batch(4)
loader = grain.load(rows, num_epochs=1, batch_size=4, worker_count=0)
losses = set()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
weights = model.get_weights()
for data in (chain, chain.to_iter_dataset(), loader):
    model.set_weights(weights)
    model.fit(data, epochs=1, verbose=0, shuffle=False)
    losses.add(model.evaluate(data, verbose=0))
    assert model.predict(data, verbose=0).shape == (8, 1)
print(len(losses))
"""


def test_keras_takes_what_is_installed_as_grain(tmp_path: Path) -> None:
    """`fit`, `evaluate` and `predict` get chains and loaders themselves, as they get Grain's."""
    ended = python("-W", "ignore", "-c", FIT_AS_GRAIN, cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


def test_without_keras_the_error_says_what_to_install(tmp_path: Path) -> None:
    """Everything else works without Keras."""
    code = "import sys; sys.modules['keras'] = None; import millstream; millstream.load([1]); millstream.keras"
    ended = python("-c", code, cwd=tmp_path)

    assert "pip install 'millstream[keras]', and set KERAS_BACKEND=jax" in ended.stderr
