"""The laws of every loader, checked for any pipeline and any executor."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

import millstream
from support.draw.random_pipelines import Pipeline
from support.oracle.stream import oracle
from support.streams import comparable, drain, end_to_end, equal_streams

INLINE = millstream.ReadOptions(num_threads=0)


def inline_loader(source: Any, sampler: Any, *operations: Any, **options: Any) -> millstream.DataLoader:
    """Returns a loader that the consumer's thread computes, unless options say something else."""
    options = {"read_options": INLINE, **options}
    return millstream.DataLoader(data_source=source, sampler=sampler, operations=operations, **options)


def counted_constant() -> tuple[list[Any], Any]:
    """Returns a list that grows whenever a constant is described, and a function that has the constant."""
    asked = []

    class Constant:
        def __reduce__(self) -> Any:
            asked.append(self)
            return Constant, ()

    def same(element: Any, constant: Constant = Constant()) -> Any:  # noqa: B008
        return element if constant else None

    return asked, same


def loader_of(pipeline: Pipeline, **options: Any) -> millstream.DataLoader:
    """Returns a loader of a random pipeline, which the consumer's thread computes by default."""
    return inline_loader(
        pipeline.source, pipeline.sampler, *pipeline.operations, shard_options=pipeline.shard, **options
    )


def expected_of(pipeline: Pipeline) -> tuple[list[object], type[BaseException] | None]:
    """Returns the elements of the oracle, in comparable form, and the type of the error that ends them."""
    source, sampler = pipeline.plain or (pipeline.source, pipeline.sampler)
    return drain(oracle(source, sampler, pipeline.operations, pipeline.shard))


def with_epochs(pipeline: Pipeline, num_epochs: int) -> Pipeline:
    """Returns the pipeline with another number of epochs."""
    return dataclasses.replace(pipeline, sampler=dataclasses.replace(pipeline.sampler, num_epochs=num_epochs))


def assert_is_the_oracle_and_resumes(pipeline: Pipeline, data: st.DataObject, **options: Any) -> None:
    """Checks laws 1 and 2 for one pipeline and one executor.

    The stream is the oracle's up to and including the first error. States of any step resume exactly in iterators that
    are new, used or exhausted, from this executor to the consumer's thread and back. So does `seek`.
    """
    expected, error = expected_of(pipeline)
    with loader_of(pipeline, **options) as loader, iter(loader_of(pipeline)) as inline:
        used = iter(loader)
        assert drain(used) == (expected, error)
        states = [inline.get_state()]
        for element in expected:
            assert comparable(next(inline)) == element
            states.append(inline.get_state())

        step = data.draw(st.integers(0, len(expected)))
        used.set_state(states[step])
        assert (used.step, used.get_state()) == (step, states[step])
        num_more = data.draw(st.integers(0, len(expected) - step))
        assert [comparable(next(used)) for _ in range(num_more)] == expected[step : step + num_more]
        inline.set_state(used.get_state())
        assert drain(inline) == (expected[step + num_more :], error)

        inline.seek(step)
        state = inline.get_state()
        assert drain(inline) == (expected[step:], error)
        used.seek(num_more)
        assert drain(used) == (expected[num_more:], error)
        with iter(loader) as new:
            new.set_state(state)
            assert drain(new) == (expected[step:], error)


def assert_resumes_everywhere(loader: Any) -> tuple[list[Any], type[BaseException] | None]:
    """Returns the elements and the error of a loader or chain, having resumed from all states in between."""
    elements, error = drain(iter(loader))
    with contextlib.closing(iter(loader)) as saved:
        states = [saved.get_state()]
        for _ in elements:
            next(saved)
            states.append(saved.get_state())
    for step, state in enumerate(states):
        with contextlib.closing(iter(loader)) as resumed:
            resumed.set_state(state)
            assert drain(resumed) == (elements[step:], error)
    return elements, error


def assert_shards_agree(
    make: Callable[[int, int], millstream.DataLoader],
    counts: Sequence[int],
    step: int = 0,
    num_steps: int | None = None,
) -> None:
    """Checks that the batches of all shards, laid end to end, are those of a single one, whoever saved the state.

    Args:
        make: returns the loader of a shard, given its index and the number of shards.
        counts: the numbers of shards that are compared with a single one.
        step: where the comparison begins. Each shard resumes there from the state of the shard before it.
        num_steps: how many batches are compared; None for all that follow.
    """
    with iter(make(0, 1)) as whole:
        whole.seek(step)
        state = whole.get_state()
        expected = list(itertools.islice(whole, num_steps))
    for count in counts:
        streams = []
        for index in range(count):
            with iter(make(index, count)) as part:
                part.set_state(state)
                assert part.step == step
                streams.append(list(itertools.islice(part, num_steps)))
                part.seek(max(0, step - 1))
                if step:
                    next(part)
                state = part.get_state()
        together = [
            end_to_end([one for one in batches if one is not None]) for batches in itertools.zip_longest(*streams)
        ]
        assert equal_streams(expected, together), count
