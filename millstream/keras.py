"""A loader or a chain as training data of Keras: `model.fit(millstream.keras.Dataset(loader), epochs=3)`."""

import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any, final

from millstream.core.checks import as_integer
from millstream.dataset import IterDataset, MapDataset
from millstream.loader import DataLoader
from millstream.samplers import BalancedSampler, MixtureSampler

try:
    import keras
except ImportError as error:
    raise ImportError(
        "Cannot import millstream.keras without Keras 3 and the library of its backend: pip install "
        "'millstream[keras]', and set KERAS_BACKEND=jax in the environment, because Keras' default is TensorFlow."
    ) from error

__all__ = ["Dataset"]


@final
class Dataset(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types.
    """The batches of a loader or a chain, for `fit`, `evaluate` and `predict` of Keras.

    A batch is a tuple `(inputs, targets)` or `(inputs, targets, sample_weights)`, or the inputs alone. The batches come
    in the order of the loader or chain: Keras' own shuffle of batches, `fit(shuffle=True)`, has no effect. Threads and
    workers of millstream prefetch them; Keras' workers are not used.

    Without `steps_per_epoch`, an epoch of Keras is one pass, and its length is known:

    - of a `DataLoader` with `num_epochs=1`, an epoch of `loader.epochs`, with its own order and random draws, also of
      a mixture. With a sampler that has no epochs, each pass is the same.
    - of a batched `MapDataset`, an epoch of the dataset, with its own order and random draws.
    - of an `IterDataset` with a known length, the same pass again.

    With `steps_per_epoch`, the epochs are consecutive parts of one stream. A pass that Keras does not finish, such as
    the batch that it builds a model with, is started again.

    Use a dataset for one `fit`, `evaluate` or `predict` at a time.

    Args:
        batches: a `DataLoader`, a `MapDataset` of batches or an `IterDataset` of batches.
        steps_per_epoch: the number of batches per epoch of Keras, at least 1; None for one pass.
        initial_epoch: the number of the first epoch, from 0: that of `fit(initial_epoch=…)`, to resume a run.

    Raises:
        TypeError: batches is of another kind.
        ValueError: a number is out of range; the length of a pass is not known, and steps_per_epoch is None; or there
            are no batches.
        ImportError: Keras is not installed. Raised when `millstream.keras` is imported.

    Examples:
        >>> rows = millstream.InMemoryDataSource((np.arange(6.0).reshape(6, 1), np.arange(6)))
        >>> loader = millstream.load(rows, shuffle=True, seed=0, num_epochs=1, batch_size=4)
        >>> dataset = millstream.keras.Dataset(loader)
        >>> len(dataset), [targets.tolist() for inputs, targets in dataset]
        (2, [[2, 4, 5, 3], [0, 1]])
        >>> [targets.tolist() for inputs, targets in dataset]
        [[1, 5, 2, 0], [3, 4]]
    """

    def __init__(
        self,
        batches: "DataLoader | MapDataset[Any] | IterDataset[Any]",
        *,
        steps_per_epoch: int | None = None,
        initial_epoch: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(batches, (DataLoader, MapDataset, IterDataset)):
            raise TypeError(
                "batches must be a DataLoader, a MapDataset or an IterDataset, got "
                f"{type(batches).__name__}. Pass the loader itself, not its iterator."
            )
        self._first_epoch = as_integer(initial_epoch, "initial_epoch", 0)
        self._is_one_stream = steps_per_epoch is not None
        self._num_batches = (
            _batches_per_pass(batches) if steps_per_epoch is None else as_integer(steps_per_epoch, "steps_per_epoch", 1)
        )
        self._passes = self._each_pass(batches)
        self._iterator: Any = None
        self._start_state: Any = None
        # The number of batches that the current pass has delivered.
        self._count = 0
        # Keras reads `num_batches` whenever it begins to enumerate a pass, before the first batch of an epoch.
        self._begins_pass = True
        self._is_within_epoch = False

    def __len__(self) -> int:
        """Returns the number of batches per epoch."""
        return self._num_batches

    @property
    def num_batches(self) -> int:
        """The number of batches per epoch."""
        self._begins_pass = self._begins_pass or not self._is_within_epoch
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the next epoch."""
        self.on_epoch_begin()
        yield from super().__iter__()

    def __getitem__(self, index: int) -> Any:
        """Returns the next batch of the pass, whatever the index is: Keras asks once for each, in an order of its own.

        Raises:
            ValueError: the stream has ended before the epoch, or the loader is closed.
        """
        del index
        if self._begins_pass or self._count == self._num_batches:
            self._begin_pass()
        self._begins_pass, self._is_within_epoch = False, True
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"The batches have ended after {self._count} of the {self._num_batches} steps of an epoch. Pass a "
                "smaller steps_per_epoch, or repeat them: DataLoader(sampler=IndexSampler(..., num_epochs=None)), or "
                "dataset.repeat() of a MapDataset."
            ) from None
        self._count += 1
        return batch

    def on_epoch_begin(self) -> None:
        """Prepares for an epoch. Keras calls it."""
        self._is_within_epoch = False

    on_epoch_end = on_epoch_begin

    def close(self) -> None:
        """Ends the threads and workers that prefetch. Idempotent; without it, they end with the dataset."""
        self._passes.close()

    def _begin_pass(self) -> None:
        if self._iterator is None or self._count == self._num_batches:
            self._iterator = next(self._passes)
            # A user's iterator may change its states.
            self._start_state = copy.deepcopy(self._iterator.get_state())
        elif self._count:
            self._iterator.set_state(copy.deepcopy(self._start_state))
        self._count = 0

    def _each_pass(self, batches: Any) -> Any:
        epoch = self._first_epoch
        if not self._is_one_stream and isinstance(batches, DataLoader) and _has_epochs(batches):
            yield from (iterator for _, iterator in batches.epochs(sys.maxsize, start=epoch))
        elif not self._is_one_stream and not isinstance(batches, MapDataset):
            while True:
                with iter(batches) as iterator:
                    yield iterator
        with iter(batches if self._is_one_stream else batches.repeat().to_iter_dataset()) as iterator:
            if epoch:
                iterator.seek(epoch * self._num_batches)
            yield from itertools.repeat(iterator)


def _single_samplers(sampler: Any) -> list[Any]:
    """Returns a sampler, or those of the components of a mixture."""
    if isinstance(sampler, BalancedSampler):
        return _single_samplers(sampler.order)
    if isinstance(sampler, MixtureSampler):
        return [one for component in sampler.parts.values() for one in _single_samplers(component)]
    return [sampler]


def _has_epochs(loader: DataLoader) -> bool:
    return all(callable(getattr(sampler, "of_epoch", None)) for sampler in _single_samplers(loader.sampler))


def _batches_per_pass(batches: Any) -> int:
    """Returns the number of batches of one pass.

    Raises:
        ValueError: it is not known, or 0.
    """
    remedy = "Pass steps_per_epoch, the number of batches after which Keras ends an epoch"
    has_epochs = isinstance(batches, DataLoader) and _has_epochs(batches)
    numbers = [getattr(sampler, "num_epochs", 1) for sampler in _single_samplers(batches.sampler)] if has_epochs else []
    several = [number for number in numbers if number != 1]
    if several:
        raise ValueError(
            f"Cannot take one pass over this DataLoader for an epoch of Keras: it has num_epochs={several[0]}. Build "
            f"it with num_epochs=1 for an epoch with its own order each time. {remedy}, if the epochs are to be parts "
            "of one stream."
        )
    try:
        with contextlib.closing(batches.epochs(1)) if has_epochs else iter(batches) as iterator:
            length = len(next(iterator)[1] if has_epochs else iterator)
    except TypeError as error:
        raise ValueError(f"Cannot count the batches of an epoch: {error} {remedy}.") from error
    if not length:
        raise ValueError(f"batches must have at least one batch, got an empty {type(batches).__name__}.")
    return length
