"""Runs that change: skipped batches, other global batches and weights at run time, in states and lineage, anywhere."""

import functools
import itertools
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import Batch, CheckpointError, IndexSampler, MixtureSampler, ShardOptions
from millstream.loader.pipeline.calls import Outputs
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.processes.channel import Channel, Task
from support.faults.interrupted import interrupt_at
from support.faults.user_faults import WAIT_SECONDS
from support.laws import INLINE, inline_loader
from support.processes.worker_pools import pids_of

SOURCES = {"a": list(range(30)), "b": list(range(100, 150))}


def mixture(*changes: Any) -> MixtureSampler:
    orders = {name: IndexSampler(len(source), shuffle=True, seed=ord(name)) for name, source in SOURCES.items()}
    return MixtureSampler(orders, {"a": 1, "b": 1}, changes=changes)


def loader(size: int = 4, index: int = 0, count: int = 1, sampler: Any = None, **options: Any) -> Any:
    return inline_loader(
        millstream.ConcatenatedDataSource(SOURCES),
        mixture() if sampler is None else sampler,
        Batch(size // count),
        shard_options=ShardOptions(index, count),
        **options,
    )


def place(batches: Any) -> Any:
    return millstream.device_put(batches)


def leave(batches: Any) -> Any:
    return batches


def values(batches: Any, count: int) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in itertools.islice(batches, count)]


def keys_of(batch: Any) -> list[int]:
    """Returns the record keys of the numbers in a batch."""
    return [number - 70 if number >= 100 else number for number in np.asarray(batch).tolist()]


@settings(max_examples=25)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(["read", "read", "skip", "double", "halve", "save", "weigh"]), st.integers(0, 3)),
        max_size=12,
    )
)
def test_lineage_knows_what_a_run_has_read(acts: list[tuple[str, int]]) -> None:
    """After any skips, changes of the batch, changed weights and resumes, steps lead to their records, and back."""
    size, seen, weights = 4, list[list[int]](), 0
    batches = iter(loader(size))
    for act, number in acts:
        if act == "read":
            seen += [keys_of(batch) for batch in itertools.islice(batches, number)]
        elif act == "skip":
            batches.skip(number)
        elif act == "weigh":
            weights += 1
            batches.reweight({"a": 1 + weights % 3, "b": 1 + number})
        else:
            new = size * 2 if act == "double" else size // 2 if act == "halve" else size
            state, before = batches.get_state(), batches
            position = int(state.split(b'"position":"[[')[1].split(b",")[0])
            if not 1 <= new <= 16 or position % new:
                continue
            size, batches = new, iter(loader(new))
            batches.set_state(state, allow={"global_batch"})
            before.close()
        assert batches.step == len(seen)
    counts = dict.fromkeys(SOURCES, 0)
    for step, keys in enumerate(seen):
        assert batches.record_keys(step).tolist() == keys
        for key in keys:
            counts["a" if key < 30 else "b"] += 1
    found = batches.steps_of(range(80), stop=len(seen))
    expected = [sorted({step for step, keys in enumerate(seen) if key in keys}) for key in range(80)]
    assert [[step for step in row if step >= 0] for row in found.tolist()] == expected
    composition = batches.composition(stop=len(seen))
    assert (composition.start, composition.stop) == (0, len(seen))
    assert {name: count.documents for name, count in composition.components.items()} == counts
    assert [batches.metrics()[f"loader/component_records/{name}"] for name in SOURCES] == list(counts.values())
    following = batches.get_state()
    again = iter(loader(size))
    again.set_state(following)
    assert (again.get_state(), again.step) == (following, len(seen))
    assert values(again, 3) == values(batches, 3)
    batches.close()
    again.close()


@pytest.mark.parametrize("wrap", [leave, place])
@pytest.mark.parametrize("read_options", [INLINE, None])
def test_skipped_batches_are_no_steps(wrap: Callable[[Any], Any], read_options: Any) -> None:
    """The next step takes a later batch, also on a device, where batches are drawn in advance; states have it."""
    whole = values(iter(loader()), 40)
    with wrap(iter(loader(read_options=read_options))) as batches, wrap(iter(loader())) as resumed:
        assert values(batches, 3) == whole[:3]
        batches.skip(5)
        assert batches.step == 3
        assert values(batches, 2) == whole[8:10]
        batches.skip(0)
        batches.skip(4)
        resumed.set_state(batches.get_state())
        assert values(batches, 3) == values(resumed, 3) == whole[14:17]
        assert batches.step == resumed.step == 8
        assert batches.record_keys(3).tolist() == keys_of(whole[8])
        # A seek goes to the batch that the step has taken, and what comes after that batch in the stream follows.
        for step, taken in ((6, 15), (5, 14), (4, 9), (3, 8), (2, 2), (3, 3)):
            batches.seek(step)
            assert (batches.step, values(batches, 2)) == (step, whole[taken : taken + 2])


def test_lineage_after_a_skip_speaks_of_the_steps_of_training() -> None:
    """The last step is that of training, records are located, and a range of no steps stays where it is."""
    with iter(millstream.load(range(40), batch_size=4, num_epochs=1)) as batches:
        next(batches)
        batches.skip(3)
        assert [found.record for found in batches.locate(batches.record_keys(1))] == [16, 17, 18, 19]
        for step in (-1, 7):
            with pytest.raises(IndexError, match=f"step must be between 0 and 6, the last batch, got {step}"):
                batches.record_keys(step)
        empty = batches.composition(2, 2)
        assert (empty.start, empty.stop, empty.components["range"].documents) == (2, 2, 0)


def test_skips_of_elements_that_are_filtered_are_counted_by_computing_them() -> None:
    """A pipeline that is not 1:1 computes what it skips, comes back on errors, and has the skips in its states."""
    kept = millstream.Filter(lambda number: number % 3 > 0)

    def iterator_of() -> Any:
        order = IndexSampler(60, shuffle=True, seed=1, num_epochs=1)
        return iter(inline_loader(range(60), order, kept, Batch(4)))

    whole = values(iterator_of(), 99)
    batches, resumed = iterator_of(), iterator_of()
    assert values(batches, 2) == whole[:2]
    batches.skip(3)
    assert values(batches, 1) == whole[5:6]
    with pytest.raises(IndexError, match="count must be at most 4, the number of batches left, got 9"):
        batches.skip(9)
    with pytest.raises(IndexError, match="step must be at most 7, the number of batches, got 12"):
        batches.seek(12)
    assert batches.step == 3
    resumed.set_state(batches.get_state())
    assert (resumed.step, values(resumed, 9)) == (3, whole[6:])
    batches.seek(1)
    assert values(batches, 2) == whole[1:3]
    resumed.seek(2)
    assert values(resumed, 2) == whole[5:7]


def test_another_global_batch_begins_a_segment_on_any_number_of_hosts() -> None:
    """Steps go on, each record comes once, and hosts of another number resume from all states."""
    with iter(loader(4)) as one:
        seen = [keys_of(batch) for batch in itertools.islice(one, 6)]
        state = one.get_state()
    hosts = [iter(loader(8, index, 2)) for index in range(2)]
    for host in hosts:
        host.set_state(state, allow={"global_batch"})
        assert host.step == 6
    seen += [[key for host in hosts for key in keys_of(next(host))] for _ in range(2)]
    with iter(loader(8)) as last:
        last.set_states([host.get_state() for host in hosts])
        assert last.step == 8
        assert [last.record_keys(step).tolist() for step in range(8)] == seen
        with pytest.raises(ValueError, match="Step 3 had a global batch of 4, and this loader has one of 8"):
            last.seek(3)
        last.seek(6)
        assert keys_of(next(last)) == seen[6]
    assert [host.record_keys(6).tolist() for host in hosts] == [seen[6][:4], seen[6][4:]]
    assert hosts[0].record_keys(2).tolist() == seen[2][:2]
    flat = [key for keys in seen for key in keys]
    assert len(set(flat)) == len(flat) == 40
    hosts[0].skip(1)
    states, last = [host.get_state() for host in hosts], iter(loader(8))
    with pytest.raises(CheckpointError, match="runs that skipped other batches"):
        last.set_states(states)


@pytest.mark.parametrize("wrap", [leave, place])
def test_weights_set_at_run_time_hold_from_the_next_batch_on(wrap: Callable[[Any], Any]) -> None:
    """The batches are those of a program that had the change in its code, and a program without it resumes them."""
    planned = values(iter(loader(sampler=mixture((12, {"a": 3, "b": 1}), (20, {"a": 0, "b": 1})))), 10)
    with wrap(iter(loader(read_options=None))) as batches, wrap(iter(loader())) as resumed:
        first = values(batches, 3)
        batches.reweight({"a": 3, "b": 1})
        first += values(batches, 2)
        batches.reweight([0, 5])
        state = batches.get_state()
        resumed.set_state(state)
        for changed in (batches, resumed):
            weights = "mixture a 50 %, b 50 %; from position 12: a 75 %, b 25 %; from position 20: a 0 %, b 100 %"
            assert weights in str(changed.summary())
        assert first + values(batches, 5) == planned
        assert values(resumed, 5) == planned[5:]
        # What the program knows already is the same stream, and a later state has its own weights.
        batches.set_state(state)
        assert values(batches, 5) == planned[5:]
        batches.seek(1)
        assert values(batches, 5) == planned[1:6]
    with iter(loader(sampler=mixture((12, {"a": 3, "b": 1}), (20, {"a": 0, "b": 1})))) as coded:
        coded.set_state(state)
        assert values(coded, 5) == planned[5:]
    with iter(inline_loader(range(80), IndexSampler(80), Batch(4))) as plain:
        with pytest.raises(TypeError, match="reweight needs a loader with a MixtureSampler, got IndexSampler"):
            plain.reweight([1, 2])
        with pytest.raises(CheckpointError, match="weights of a mixture that were set at run time"):
            plain.set_state(state)


def test_weights_set_at_run_time_are_those_of_the_components_that_there_were() -> None:
    """A state resumes in a program that has added a component of weight 0, and not in one with other components."""

    def loader_of(**sources: Any) -> Any:
        weights = {name: int(name != "new") for name in sources}
        return millstream.load(sources, weights=weights, shuffle=True, seed=0, batch_size=4, read_options=INLINE)

    with iter(loader_of(**SOURCES)) as batches, iter(loader_of(**SOURCES, new=[1, 2])) as grown:
        values(batches, 1)
        batches.reweight({"a": 3, "b": 1})
        values(batches, 1)
        state = batches.get_state()
        grown.set_state(state)
        assert values(grown, 3) == values(batches, 3)
        grown.set_state(grown.get_state())
        assert values(grown, 3) == values(batches, 3)
    with (
        iter(loader_of(a=SOURCES["a"], other=SOURCES["b"])) as other,
        pytest.raises(CheckpointError, match="not of the one here: weights must name exactly the components"),
    ):
        other.set_state(state)


def saved_with_other_weights() -> bytes:
    """Returns a state of `loader()` after three batches with the weights of the program."""
    with iter(loader()) as batches:
        values(batches, 3)
        batches.reweight({"a": 5, "b": 1})
        state: bytes = batches.get_state()
        return state


def change_weights(batches: Any, *, state: bytes | None) -> None:
    """Gives a mixture other weights, or moves to a state that has some."""
    if state is None:
        batches.reweight({"a": 1, "b": 9})
    else:
        batches.set_state(state)


@pytest.mark.parametrize("wrap", [leave, place])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_change_of_weights_that_is_interrupted_has_happened_or_not(resumes: bool, wrap: Callable[[Any], Any]) -> None:
    """An exception after any call of `reweight`, or of `set_state`: the state has the batches that come."""
    state, made = saved_with_other_weights() if resumes else None, loader(stall_timeout=WAIT_SECONDS)
    for module in ("run_changes", "iterator", "device_iterator"):
        for moment in itertools.count():
            with wrap(iter(made)) as batches, iter(made) as resumed:
                values(batches, 4)
                change = functools.partial(change_weights, batches, state=state)
                was_interrupted = interrupt_at(moment, change, f"millstream.loader.{module}")
                resumed.set_state(batches.get_state())
                assert values(resumed, 2) == values(batches, 2), (module, moment)
            if not was_interrupted:
                break


@pytest.mark.parametrize("act", ["skip", "reweight", "set_state"])
def test_a_state_that_another_thread_takes_is_from_before_a_move_or_from_after_it(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is being taken while the iterator moves leads to the batches of its step."""
    other, position_after = saved_with_other_weights(), Outputs.position_after
    with iter(loader()) as batches, iter(loader()) as resumed:
        values(batches, 4)
        moves: dict[str, Callable[[], object]] = {
            "skip": lambda: batches.skip(3),
            "reweight": lambda: change_weights(batches, state=None),
            "set_state": lambda: change_weights(batches, state=other),
        }
        acts = [moves[act]]

        def moves_meanwhile(outputs: Outputs, row: int) -> Any:
            if acts:
                acts.pop()()
            return position_after(outputs, row)

        following = values(iter(loader()), 6)[4:]
        monkeypatch.setattr(Outputs, "position_after", moves_meanwhile)
        state = batches.get_state()
        assert not acts
        resumed.set_state(state)
        assert (resumed.step, values(resumed, 2)) == (4, following)


def test_workers_stay_when_weights_change() -> None:
    """The processes are those from before, and the batches those without workers."""
    with loader() as here, loader(worker_count=1, read_options=None) as there:
        expected, batches = iter(here), iter(there)
        assert values(batches, 3) == values(expected, 3)
        before = pids_of(batches)
        for weights in ({"a": 1, "b": 4}, {"a": 2, "b": 1}):
            batches.reweight(weights)
            expected.reweight(weights)
            assert values(batches, 4) == values(expected, 4)
        assert pids_of(batches) == before
        assert len(before) == 1


def test_calls_do_not_carry_the_history_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message to a worker is as short after many changes of weights as before; a replaced worker has them, too."""
    sizes, send = list[int](), Channel.send

    def recorded(channel: Channel, message: Any, descriptors: Sequence[int] = ()) -> None:
        if isinstance(message, Task):
            sizes.append(len(pickle.dumps(tuple(message))))
        send(channel, message, descriptors)

    monkeypatch.setattr(Channel, "send", recorded)
    found = []
    for workers in (0, 1):
        with iter(loader(worker_count=workers, read_options=INLINE)) as batches:
            taken = []
            for number in range(6):
                taken += values(batches, 1)
                if workers and number == 3:
                    os.kill(pids_of(batches)[0], signal.SIGKILL)
                batches.reweight({"a": 1 + number, "b": 1})
            found.append(taken + values(batches, 3))
    assert found[0] == found[1]
    assert max(sizes) <= min(sizes) + 8


def test_what_cannot_change_at_run_time_is_refused() -> None:
    """Epochs, filters, wrong weights and counts are errors, and leave the iterator where it was."""
    with iter(loader()) as batches:
        whole = values(batches, 2)
        for wrong in ({"a": 1}, [1, -1], [0, 0]):
            with pytest.raises(ValueError, match="weight"):
                batches.reweight(wrong)
        with pytest.raises(ValueError, match="count must be at least 0"):
            batches.skip(-1)
        batches.seek(0)
        assert values(batches, 2) == whole
    filtered = inline_loader(millstream.ConcatenatedDataSource(SOURCES), mixture(), millstream.Filter(bool), Batch(4))
    with iter(filtered) as batches, pytest.raises(ValueError, match="needs a 1:1 pipeline"):
        batches.reweight([1, 2])
    finite = mixture().of_epoch(0)
    for _, batches in loader(sampler=finite).epochs(1):
        with pytest.raises(ValueError, match="one iterator over all epochs"):
            batches.reweight([1, 2])
        left = len(batches)
        with pytest.raises(IndexError, match=f"count must be at most {left}"):
            batches.skip(left + 1)
        batches.skip(left)
        assert (list(batches), len(batches), batches.step) == ([], 0, 0)
    chain = millstream.MapDataset.range(8).to_iter_dataset().batch(2)
    with (
        millstream.device_put(iter(chain), jax.devices()[0]) as batches,
        pytest.raises(TypeError, match="has no reweight"),
    ):
        batches.reweight([1, 2])


CHANGES = st.lists(
    st.tuples(st.sampled_from([4, 8, 12, 40]), st.integers(1, 3)), max_size=4, unique_by=lambda one: one[0]
)


@settings(max_examples=30)
@given(sets=st.lists(CHANGES, min_size=2, max_size=6))
def test_weights_set_one_after_another_are_those_set_together(sets: list[list[tuple[int, int]]]) -> None:
    """A pipeline that had other weights before, more, fewer or the same ones, gets what a new pipeline gets."""
    orders = {name: millstream.IndexSampler(50, shuffle=True, seed=seed) for seed, name in enumerate("ab")}
    mixture = millstream.MixtureSampler(orders, {"a": 1, "b": 1}).reweighted(20, {"a": 5, "b": 1})
    source = millstream.ConcatenatedDataSource({name: range(50) for name in "ab"})
    used = Pipeline.of(source, mixture, [], None)
    for changes in sets:
        text = json.dumps([[position, {"a": weight, "b": 1}] for position, weight in sorted(changes)])
        found, expected = used.with_changes(text), Pipeline.of(source, mixture, [], None).with_changes(text)
        assert found.order.record_keys(0, 60).tolist() == expected.order.record_keys(0, 60).tolist()
        assert found.order.fingerprint() == expected.order.fingerprint()  # type: ignore[union-attr]  # of a mixture


def test_the_hundredth_call_of_reweight_applies_one_change() -> None:
    """A run may set weights at each of its steps: the ones that it has set before are not applied again."""
    applied = MixtureSampler.reweighted.__code__
    with iter(millstream.load({"a": [1], "b": [2]}, weights={"a": 1, "b": 1}, batch_size=2)) as batches:
        for number in range(99):
            next(batches)
            batches.reweight({"a": 1 + number % 2, "b": 2})
        next(batches)
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(event) if frame.f_code is applied else None)
        try:
            batches.reweight({"a": 7, "b": 2})
        finally:
            sys.setprofile(None)
        assert calls.count("call") <= 2
