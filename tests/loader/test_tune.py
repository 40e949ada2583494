"""Tuning measures what a loader could do, advises what is worth its price, and changes no batch."""

import inspect
import sys
import time
from typing import Any

import cloudpickle
import numpy as np
import pytest

import millstream
from millstream.loader import tuning as tuning_module
from millstream.loader.reporting.tuned import Measurement, Settings, Tuning
from millstream.loader.timed_passes import TimedPasses
from millstream.loader.tuning import memory_bytes

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAIN = millstream.ReadOptions()
WAITED_SECONDS = 0.02


def waited_for(batch: Any) -> Any:
    """Returns the batch after a while, as from a service far away."""
    time.sleep(WAITED_SECONDS)
    return batch


def is_kept(value: int) -> bool:
    """Returns whether a number is not a multiple of three."""
    return value % 3 != 0


def large(value: int) -> np.ndarray[Any, Any]:
    """Returns a megabyte."""
    return np.full(1 << 17, value, dtype=np.int64)


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no more than one worker tried: the machine has others to serve."""
    monkeypatch.setattr(tuning_module, "available_cores", lambda: 1)


def batches_of(loader: millstream.DataLoader, count: int) -> list[list[int]]:
    """Returns the first batches as lists."""
    with loader:
        return [np.asarray(batch).tolist() for batch, _ in zip(loader, range(count), strict=False)]


def test_rates_are_of_what_was_made_while_they_were_measured() -> None:
    """However much settings had ready, and whatever the machine does meanwhile: a rate is what they can do, or less.

    The loader is left alone, and its batches are the same with what is advised.
    """
    what: dict[str, Any] = {
        "data_source": range(100_000),
        "sampler": millstream.IndexSampler(100_000, shuffle=True, seed=3),
        "operations": [millstream.Batch(250), waited_for],
    }
    loader = millstream.DataLoader(**what)

    tuning = millstream.tune(loader, seconds=4, memory="1GB")

    assert tuning.current == Settings(0, PLAIN.num_threads, 1, PLAIN.prefetch_buffer_size)
    assert tuning.chosen in {one.settings for one in tuning.measurements}
    for one in tuning.measurements:
        at_once = one.settings.worker_count or min(one.settings.num_threads, one.settings.prefetch_buffer_size // 250)
        assert 0 < one.batches_per_second <= at_once / WAITED_SECONDS
        assert one.records_per_second == pytest.approx(250 * one.batches_per_second)
        assert one.memory_bytes < 10**9
    assert loader.metrics()["loader/batches"] == 0
    assert batches_of(millstream.DataLoader(**what, **tuning.arguments), 5) == batches_of(loader, 5)


def test_load_takes_every_setting_that_can_be_advised() -> None:
    """`load` has each argument of DataLoader but what it makes itself, with the same default; tuning names no other."""
    taken = inspect.signature(millstream.load).parameters
    wanted = dict(inspect.signature(millstream.DataLoader).parameters)
    for made in ("data_source", "sampler", "operations"):
        del wanted[made]
    assert {name: taken[name].default for name in wanted} == {name: one.default for name, one in wanted.items()}

    found = Tuning(Settings(2, 8, 3, 100), Settings(0, 16, 1, 500), (), memory_limit=1)
    assert found.arguments.keys() <= wanted.keys()
    loader = millstream.load(range(8), batch_size=2, **found.arguments)
    assert loader.multiprocessing_options == millstream.MultiprocessingOptions(2, 3)
    assert loader.read_options == millstream.ReadOptions(8, 100)


def test_a_short_stream_is_begun_anew() -> None:
    """A stream of three batches is measured as any other."""
    loader = millstream.load(range(300), num_epochs=1, batch_size=100, transformations=[is_kept])

    tuning = millstream.tune(loader, seconds=2)

    assert all(one.records_per_second == pytest.approx(100 * one.batches_per_second) for one in tuning.measurements)
    assert repr(tuning).startswith("DataLoader(..., worker_count=")


def test_streams_that_decide_while_reading_can_be_tuned() -> None:
    """Where a Filter comes before Batch, the loader's equals go on where the last one stopped, too.

    Of 15 records, 10 are kept, for a batch. A run of a few batches may have begun or ended a block of records.
    """
    loader = millstream.DataLoader(
        data_source=range(3000),
        sampler=millstream.IndexSampler(3000, num_epochs=1),
        operations=[Kept(), millstream.Batch(10)],
    )

    tuning = millstream.tune(loader, seconds=1)

    assert tuning.measurements
    assert all(5 < one.records_per_second / one.batches_per_second < 30 for one in tuning.measurements)
    with loader:
        passes = TimedPasses(loader, None)
        for batches in range(1, 501):
            passes.draw_one()
            assert -15 < passes.records - 15 * batches < 15
    assert passes.batches == 500


def test_a_batch_that_takes_longer_than_there_is_time_is_measured() -> None:
    """Something is, however little time there is."""
    loader = millstream.load(range(100), num_epochs=1, batch_size=50, transformations=[waited_for])

    tuning = millstream.tune(loader, seconds=0.01)

    assert [one.settings for one in tuning.measurements] == [tuning.current] == [tuning.chosen]
    assert tuning.untried


class Kept(millstream.FilterTransform):
    """Keeps two thirds of the numbers."""

    def filter(self, element: int) -> bool:
        """Whether a number is kept."""
        return is_kept(element)


def test_memory_is_a_limit() -> None:
    """Settings that would take more than the memory are not tried, and are named."""
    loader = millstream.load(
        range(1000),
        transformations=[large],
        batch_size=2,
        read_options=millstream.ReadOptions(num_threads=2, prefetch_buffer_size=4),
    )

    tuning = millstream.tune(loader, seconds=1, memory="6 MB")

    assert [one.settings for one in tuning.measurements] == [tuning.current] == [tuning.chosen]
    assert [one.memory_bytes for one in tuning.measurements] == [2 * 2 * (1 << 20)]
    assert Settings(0, PLAIN.num_threads, 1, PLAIN.prefetch_buffer_size) in tuning.too_large
    assert "At most 6 MB of memory was allowed" in repr(tuning)
    with pytest.raises(ValueError, match=r"None of the settings takes less than memory=3,000,000 bytes"):
        millstream.tune(loader, seconds=1, memory=3_000_000)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"loader": range(3)}, TypeError, "loader"),
        ({"seconds": 0}, ValueError, "seconds must be a number of seconds above 0"),
        ({"seconds": float("inf")}, ValueError, "finite"),
        ({"seconds": "1"}, TypeError, "seconds must be a number of seconds"),
        ({"memory": 0}, ValueError, "memory must be at least 1"),
        ({"memory": 1.5}, TypeError, "memory must be an integer"),
        ({"memory": "lots"}, ValueError, 'memory must be a number of bytes, or a text such as "4GB"'),
    ],
    ids=["no loader", "no time", "endless", "text for seconds", "no memory", "a float for memory", "words for memory"],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    """Each argument that is wrong is an error that names it, before anything is measured."""
    given = {"loader": millstream.load(range(8), batch_size=4)} | arguments
    with pytest.raises(error, match=match):
        millstream.tune(**given)


def test_loaders_that_cannot_be_tuned() -> None:
    """No batch, debug mode and actors of a cluster are errors that say what to do."""
    with pytest.raises(ValueError, match="yields no batch"):
        millstream.tune(millstream.load(range(3), num_epochs=1, batch_size=4, drop_remainder=True))
    with pytest.raises(ValueError, match="without debug=True"):
        millstream.tune(millstream.load(range(8), batch_size=4, debug=True))


@pytest.mark.parametrize(
    ("text", "number"),
    [("4GB", 4 * 10**9), ("500 MiB", 500 << 20), ("1.5kB", 1500), ("7", 7), ("7b", 7), (12, 12), ("2TiB", 2 << 40)],
)
def test_amounts_of_memory(text: str | int, number: int) -> None:
    """Decimal units are powers of 1000, those with an i of 1024, and a number alone is bytes."""
    assert memory_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 PB", "nan", "1e400", "4G"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    """Anything else is an error that shows how to write it."""
    with pytest.raises(ValueError, match="memory must be"):
        memory_bytes(text)


def tuning_of(*rates: tuple[Settings, float], chosen: int, **options: Any) -> Tuning:
    """Returns what was found where these rates were measured."""
    measurements = tuple(Measurement(settings, rate / 4, rate, 10**6, 3) for settings, rate in rates)
    return Tuning(rates[chosen][0], rates[0][0], measurements, 4 * 10**9, num_cores=8, **options)


def test_the_text_says_what_to_write_and_why() -> None:
    """The page begins with what to write; bars are in proportion, and notes say what was left out."""
    plain, workers, more = Settings(0, 16, 1, 500), Settings(4, 16, 2, 500), Settings(8, 16, 1, 500)
    tuning = tuning_of((plain, 1000.0), (workers, 4000.0), chosen=1, too_large=(more,))

    lines = repr(tuning).splitlines()

    assert lines[0] == (
        "DataLoader(..., worker_count=4, worker_buffer_size=2, "
        "read_options=ReadOptions(num_threads=16, prefetch_buffer_size=500, max_buffer_bytes=None))"
    )
    assert lines[2] == "4,000 records/s for a trainer that only waits, on 8 cores: 4.0 times as fast."
    assert lines[4].split() == ["records/s", "memory"]
    assert [line.count("█") for line in lines[5:7]] == [2, 10]
    assert lines[5].startswith("yours no workers, 16 threads, 500 records ahead  ")
    assert lines[6].startswith("use   4 workers, 16 threads each, 2 batches ahead ")
    assert lines[6].endswith("4,000    1 MB")
    assert max(map(len, lines[1:])) <= 80
    assert "8 workers, 16 threads each, 1 batch ahead." in " ".join(repr(tuning).split())
    assert tuning.arguments == {
        "worker_count": 4,
        "worker_buffer_size": 2,
        "read_options": millstream.ReadOptions(num_threads=16, prefetch_buffer_size=500),
    }


def test_the_picture_has_a_bar_for_each_measurement() -> None:
    """In a notebook, the same is a drawing; what was measured is in it, escaped, and the advice marked."""
    plain, workers = Settings(0, 16, 1, 500), Settings(4, 16, 2, 500)
    html = tuning_of((workers, 4000.0), (plain, 3900.0), chosen=1, untried=(Settings(8, 16, 1, 500),))._repr_html_()

    assert html.count("<rect") == 2
    assert html.count('class="ms-use"') == 1
    assert "about as fast as now, for less" in html
    assert "There was no time for: 8 workers" in html
    assert "← use" in html
