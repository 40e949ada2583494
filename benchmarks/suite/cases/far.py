"""Many streams of a store far away: a read takes 10 ms, and what joins the streams decides how many are in flight."""

import importlib
from collections.abc import Callable
from typing import Any

from absl import flags

from suite.case import Case, Contender, Goal, Measurement, Pick, Run
from suite.data import SlowSource, integers
from suite.scale import Scale
from suite.steps import identity
from suite.throughput import take_for, taker
from suite.work import Map, Records, Work

READ_SECONDS = 0.01
NUM_STREAMS = 16
NUM_RECORDS = 1 << 20


def is_kept(_: Any) -> bool:
    """Keeps every element: the stream cannot be read at random for all that a loader knows."""
    return True


def _streams(peer: Any) -> list[Any]:
    sources = [SlowSource(NUM_RECORDS, READ_SECONDS) for _ in range(NUM_STREAMS)]
    return [peer.MapDataset.source(source).to_iter_dataset() for source in sources]


def _interleaved(peer: Any) -> Any:
    # What Grain needs for reading all at once, millstream does by itself.
    return peer.experimental.InterleaveIterDataset(
        _streams(peer), cycle_length=NUM_STREAMS, num_make_iter_threads=NUM_STREAMS, iter_buffer_size=NUM_STREAMS
    )


def _mixed(peer: Any) -> Any:
    return peer.IterDataset.mix([stream.filter(is_kept) for stream in _streams(peer)])


def _measured(join: Callable[[Any], Any]) -> Callable[[Run], Measurement]:
    """Returns what measures the records per second of joined streams, a map after them."""

    def measure(run: Run) -> Measurement:
        # Grain's worker processes look at flags, which a program that uses absl would have parsed.
        flags.FLAGS.mark_as_parsed()
        peer = importlib.import_module(run.contender.peer)
        dataset = join(peer).map(identity)
        if run.contender.workers:
            dataset = dataset.mp_prefetch(peer.MultiprocessingOptions(num_workers=run.contender.workers))
        iterator = iter(dataset)
        take = taker(iterator, None, run.case)
        take_for(take, run.scale.warm_seconds, at_least=1)
        run.gate()
        records, seconds = take_for(take, run.scale.seconds, at_least=1)
        if (close := getattr(iterator, "close", None)) is not None:
            close()
        return Measurement(records / seconds)

    return measure


def _work(_: Scale) -> Work:
    return Work(Records(integers(1)), (Map(identity),), 1)


def _case(name: str, title: str, join: Callable[[Any], Any], at_least: float) -> Case:
    return Case(
        name=name,
        title=f"{NUM_STREAMS} {title}, {READ_SECONDS * 1e3:.0f} ms a record",
        make_work=_work,
        contenders=tuple(
            Contender(peer, workers, None, mode)
            for peer, mode in (("millstream", ""), ("grain", "Dataset"))
            for workers in (0, 2)
        ),
        goals=tuple(
            Goal(
                f"{at_least:g} times Grain without workers, {how}",
                at_least,
                Pick("grain", 0),
                Pick("millstream", workers),
            )
            for workers, how in ((0, "without workers"), (2, "with workers"))
        ),
        measure=_measured(join),
    )


CASES = (
    _case("interleave_far", "streams interleaved", _interleaved, 1),
    _case("mix_far", "filtered streams mixed", _mixed, 2),
)
