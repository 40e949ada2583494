"""Metrics have stable names and the values that were measured; Prometheus's own parser reads the page."""

import dataclasses
import gc
import time
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from prometheus_client.parser import text_string_to_metric_families

import millstream
from millstream.loader.reporting.summary import exposition, metrics_of
from support.clocks.owned_clock import CLOCK, Spend
from support.draw.loader_snapshots import snapshot_of_run, with_stage

NAMES = """
batches wait_seconds first_wait_seconds trainer_seconds worker_deaths worker_stalls errors workers batch_bytes step
records epoch seconds/keys seconds/read seconds/operation_0 seconds/operation_1 seconds/hand_over records_per_second
wait_share wait_share_total batches_per_second wait_seconds_p50 wait_seconds_p99
"""


def samples(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Returns the samples of a page by name and labels, as Prometheus's own parser reads them."""
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(values) == len(found)
    return values


def test_names_are_stable_and_values_are_floats() -> None:
    """The names are these, before anything was measured and after, whoever works; the values are plain floats."""
    for workers in (0, 2):
        loader = millstream.load(range(8), transformations=[abs], batch_size=4, num_epochs=1, worker_count=workers)
        before = loader.metrics()
        assert len(list(loader)) == 2
        after = loader.metrics()
        loader.close()
        assert list(before) == list(after) == [f"loader/{name}" for name in NAMES.split()]
        assert {type(value) for value in [*before.values(), *after.values()]} == {float}
        assert (before["loader/batches"], after["loader/batches"], after["loader/batch_bytes"]) == (0.0, 2.0, 32.0)
        assert after["loader/workers"] == workers


def test_batches_without_arrays_have_a_size() -> None:
    """The size of texts and other objects is estimated, and not that of their arrays alone, which is none."""
    loader = millstream.load([{"text": ["word"] * 100}] * 4)
    for _ in zip(range(1), loader, strict=False):
        pass
    assert loader.metrics()["loader/batch_bytes"] >= 400


def test_exactly_the_delivered_records_are_counted() -> None:
    """A short last batch counts as its records, in each pass, on devices and in each shard, and padding does not."""
    loader = millstream.load(range(10), num_epochs=1, batch_size=4)
    for passes in (1, 2):
        assert sum(map(len, loader)) == 10
        assert loader.metrics()["loader/records"] == 10 * passes
    with millstream.device_put(iter(loader)) as batches:
        for count in (4, 8, 10):
            next(batches)
            assert loader.metrics()["loader/records"] == 20 + count
    for index, count in enumerate((6, 5)):
        shard = millstream.ShardOptions(shard_index=index, shard_count=2)
        halves = millstream.load(range(11), num_epochs=1, batch_size=2, shard_options=shard)
        assert sum(map(len, halves)) == halves.metrics()["loader/records"] == count
    padded = millstream.load(range(10), num_epochs=1, transformations=[millstream.Batch(4, pad_remainder=True)])
    assert sum(1 for _ in padded) == 3
    assert padded.metrics()["loader/records"] == 10


def test_exactly_the_delivered_batches_are_counted() -> None:
    """Batches read in advance do not count, during a pass and after it, nor those that a seek passes over.

    Those of an iterator that is dropped count, though it was neither closed nor read to its end.
    """
    loader = millstream.load(range(1000), num_epochs=1)
    with iter(loader) as elements:
        for _ in range(600):
            next(elements)
        assert elements.metrics()["loader/batches"] == loader.metrics()["loader/batches"] == 600
        elements.seek(3)
        next(elements)
    assert loader.metrics()["loader/batches"] == 601
    assert len(list(loader)) == 1000
    dropped = iter(loader)
    assert (next(dropped), next(dropped)) == (0, 1)
    del dropped
    assert loader.metrics()["loader/batches"] == 1603


@pytest.mark.parametrize("on_device", [False, True], ids=["loader", "device_put"])
def test_the_position_stays_when_its_iterator_is_gone(on_device: bool) -> None:
    """After a loop that ended or broke off, step, epoch and components are those that it has reached."""
    loader = millstream.load({"web": range(30), "books": range(10)}, weights=[3, 1], batch_size=4, seed=0)
    for stop in (3, 5):
        iterator: Any = millstream.device_put(iter(loader)) if on_device else iter(loader)
        for _ in iterator:
            if iterator.step == stop:
                break
        before = loader.metrics()
        del iterator
        gc.collect()
        after = loader.metrics()
        names = ["loader/step", "loader/epoch", "loader/component_records/web", "loader/component_records/books"]
        assert [before.get(name) for name in names] == [after.get(name) for name in names]
        assert after["loader/step"] == stop
        assert after["loader/component_records/web"] == 3 * stop


def test_components_of_all_epochs_are_counted() -> None:
    """At every batch of every epoch, the records of a component are those of the batches so far, which never fall."""
    parts = {"web": list(range(40)), "books": list(range(100, 140))}
    orders = {name: millstream.IndexSampler(40, num_epochs=1) for name in parts}
    sampler = millstream.MixtureSampler(orders, {"web": 1, "books": 1}, changes=[(60, {"web": 3, "books": 1})])
    source = millstream.ConcatenatedDataSource(parts)
    loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[millstream.Batch(4)])
    seen = {"web": 0, "books": 0}
    for epoch, batches in loader.epochs(3):
        for batch in batches:
            seen["web"] += int((batch < 100).sum())
            seen["books"] += int((batch >= 100).sum())
            metrics = loader.metrics()
            counted = {name: metrics[f"loader/component_records/{name}"] for name in seen}
            assert counted == seen
            if epoch == 1 and batches.step == 7:
                break
        assert {name: loader.metrics()[f"loader/component_records/{name}"] for name in seen} == seen


def test_lookups_take_no_time_of_the_pipeline() -> None:
    """Finding the records of steps is no work of training: no stage gets its time, and no advice speaks of it."""
    loader = millstream.load(range(10_000), shuffle=True, seed=0, batch_size=16)
    with iter(loader) as batches:
        next(batches)
    before = loader.profile()["keys"]
    for step in range(0, 10_000, 100):
        loader.record_keys(step)
    assert loader.profile()["keys"] == before


def test_components_of_a_mixture_are_counted() -> None:
    """Metrics, page, summary and text have the records of each component before the step, as `composition` counts."""
    loader = millstream.load(
        {"web": range(300), "books": range(1000, 1100)}, weights={"web": 3, "books": 1}, batch_size=8, seed=1
    )
    with iter(loader) as batches:
        drawn = np.concatenate([next(batches) for _ in range(5)])
        metrics, page = loader.metrics(), samples(millstream.prometheus_text(loader))
        summary = str(loader.summary())
    books = int((drawn >= 1000).sum())
    for component, count in (("web", 40 - books), ("books", books)):
        assert metrics[f"loader/component_records/{component}"] == count
        assert page["millstream_component_records", frozenset({("component", component)})] == count
        assert loader.composition(0, 5).components[component].documents == count
    assert f"so far web {40 - books} records, books {books} records" in summary
    assert [name for name in loader.metrics() if "component" in name] == [
        "loader/component_records/web",
        "loader/component_records/books",
    ]


def test_tokens_of_a_mixture_of_rows_are_counted() -> None:
    """At any step, forwards and backwards: rows and tokens of each component are those that `composition` counts."""
    lengths = np.random.default_rng(0).integers(1, 32, 90)
    documents = [{"tokens": np.full(length, 1)} for length in lengths.tolist()]
    orders = {
        "web": millstream.PackingSampler(lengths[:60], 32, shuffle=True, seed=1, num_epochs=None),
        "books": millstream.PackingSampler(
            lengths[60:], 32, strategy="concat_then_split", shuffle=True, seed=2, num_epochs=1
        ),
    }
    mixture = millstream.MixtureSampler(orders, [1, 2], stop="all_exhausted").reweighted(24, [3, 1])
    for sampler in (mixture, millstream.BalancedSampler(mixture, costs=lengths, global_batch_size=6, parts=3)):
        loader = millstream.DataLoader(
            data_source=millstream.ConcatenatedDataSource({"web": documents[:60], "books": documents[60:]}),
            sampler=sampler,
            operations=[millstream.Pack({"tokens": 32}), millstream.Batch(6)],
        )
        with iter(loader) as batches:
            for step in (1, 2, 30, 300, 7):
                batches.seek(step)
                metrics, page = loader.metrics(), samples(millstream.prometheus_text(loader))
                for name, count in loader.composition(0, step).components.items():
                    assert metrics[f"loader/component_tokens/{name}"] == count.tokens
                    assert page["millstream_component_tokens", frozenset({("component", name)})] == count.tokens
            rows = mixture.drawn_before(42)
            assert f"so far web {rows[0]} rows of {loader.composition(0, 7).components['web'].tokens} tokens" in repr(
                loader
            )


def test_metrics_are_what_the_profile_says() -> None:
    """The seconds are those of `profile()`; the waits for first batches are counted apart."""
    loader = millstream.load(range(64), transformations=[abs], batch_size=4, num_epochs=2)
    for _ in range(2):
        assert len(list(loader)) == 32
    metrics, profile = loader.metrics(), loader.profile()
    waits = metrics["loader/wait_seconds"] + metrics["loader/first_wait_seconds"]
    assert waits == pytest.approx(profile["next"])
    assert metrics["loader/trainer_seconds"] == profile["consumer"]
    assert metrics["loader/seconds/operation_0"] == profile["operations[0], Map(abs)"]


def test_rates_are_those_since_the_previous_call() -> None:
    """Waits and batches before the previous call do not count."""
    before = snapshot_of_run(waits=1.0, trains=9.0)
    measured = dataclasses.replace(
        before.measured,
        batches=120,
        timed_batches=110,
        records=960,
        wait_seconds=4.0,
        trainer_seconds=10.0,
        waits=(0.0, 0.0, 0.5, 2.5),
    )
    now = dataclasses.replace(before, measured=measured)
    metrics = metrics_of(now, before.measured)

    assert metrics["loader/wait_share"] == 0.75
    assert metrics["loader/wait_share_total"] == pytest.approx(4 / 14)
    assert metrics["loader/batches_per_second"] == 2.5
    assert metrics["loader/records_per_second"] == 20
    assert (metrics["loader/wait_seconds_p50"], metrics["loader/wait_seconds_p99"]) == (0.5, 2.5)


@pytest.mark.parametrize("workers", [0, 1])
def test_rates_are_those_of_the_training_loop(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches are fetched together: at any step, the rate is that of the trainer, as soon as it is known."""
    monkeypatch.setattr(time, "perf_counter", CLOCK.perf_counter)
    loader = millstream.load(range(800), batch_size=4, num_epochs=1, worker_count=workers)
    spend, rates = Spend(0.125), []
    with loader, iter(loader) as batches:
        for batch in batches:
            spend(batch)
            rates.append(loader.metrics()["loader/batches_per_second"])
    known = rates.index(8.0)
    assert known < len(rates) // 2
    assert set(rates[:known]) <= {0.0}
    assert set(rates[known:]) == {8.0}
    assert loader.metrics()["loader/batches_per_second"] == 8.0


def test_a_page_has_what_the_metrics_have() -> None:
    """Prometheus reads the values that `metrics()` gives, each stage with its short name and its own."""
    snapshot = snapshot_of_run(read=1.5, augment=2.5, waits=1.0, trains=3.0, workers=2, deaths=1, batch_bytes=10)
    metrics, page = metrics_of(snapshot), samples(exposition({None: snapshot}))
    assert page["millstream_batches_total", frozenset()] == metrics["loader/batches"] == 100
    assert page["millstream_worker_deaths_total", frozenset()] == 1
    assert page["millstream_batch_bytes", frozenset()] == 10
    augment = frozenset({("stage", "operation_0"), ("name", "Augment")})
    assert page["millstream_stage_seconds_total", augment] == metrics["loader/seconds/operation_0"] == 2.5
    assert len(page) == len(metrics) - 5  # Prometheus computes rates itself.


def test_several_loaders_are_on_one_page() -> None:
    """Each family is described once, and has a sample of each loader with its name."""
    loaders = {"train": millstream.load(range(8), batch_size=4), "eval": millstream.load(range(8), batch_size=2)}
    page = millstream.prometheus_text(loaders)
    described = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(described) == len(set(described)) == 13
    for name in loaders:
        assert samples(page)["millstream_batches_total", frozenset({("loader", name)})] == 0
    assert samples(millstream.prometheus_text(loaders["train"]))["millstream_batches_total", frozenset()] == 0


@hypothesis.given(strategies.text(), strategies.text(), strategies.floats(0, allow_nan=False))
def test_any_name_and_number_survives(loader: str, operation: str, seconds: float) -> None:
    """Quotes, backslashes and newlines in names, and any number, infinity too, are read as they were written."""
    hypothesis.assume("\r" not in loader + operation)  # The parser takes lines apart as Python does.
    hypothesis.assume(len((loader + operation).replace("\n", "").splitlines()) <= 1)
    snapshot = with_stage(snapshot_of_run(), "operations[0]", name=operation, seconds=seconds)
    key = frozenset({("loader", loader), ("stage", "operation_0"), ("name", operation)})
    assert samples(exposition({loader: snapshot}))["millstream_stage_seconds_total", key] == seconds


def test_what_is_not_a_loader_is_refused() -> None:
    """The error says what to write."""
    wrong: Any = [1]
    with pytest.raises(
        TypeError, match=r"must be loaders or their iterators, got int\. Write prometheus_text\(loader\)"
    ):
        millstream.prometheus_text({"train": wrong[0]})
