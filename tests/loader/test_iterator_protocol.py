"""One protocol of iterators: those of loaders, of chains and of device_put have the same methods, which agree."""

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.loader.monitoring.client import query
from support.faults.user_faults import WAIT_SECONDS

NUM_BATCHES = 5
BATCHES = [list(range(start, start + 4)) for start in range(0, 20, 4)]


def chain() -> millstream.IterDataset[Any]:
    return millstream.MapDataset.range(20).map(abs).to_iter_dataset().batch(4)


def loader(**options: Any) -> millstream.DataLoader:
    return millstream.load(range(20), num_epochs=1, transformations=[abs], batch_size=4, **options)


ITERATORS: dict[str, Callable[[], Any]] = {
    "loader": lambda: iter(loader()),
    "loader without threads": lambda: iter(loader(read_options=millstream.ReadOptions(0))),
    "chain": lambda: iter(chain()),
    "device_put of a loader": lambda: millstream.device_put(iter(loader())),
    "device_put of a chain": lambda: millstream.device_put(iter(chain())),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS.keys())
def test_every_iterator_has_positions_states_and_views(make: Callable[[], Any], tmp_path: Path) -> None:
    """Steps and lengths count what was delivered; each way to save and move leads to the same batches; views agree."""
    with make() as batches:
        batches.start_prefetch()
        assert (batches.step, batches.epoch, len(batches), bool(batches)) == (0, 0, NUM_BATCHES, True)
        first = [next(batches).tolist() for _ in range(2)]
        state, saved = batches.get_state(), batches.state_dict()
        rest = [batch.tolist() for batch in batches]
        assert (batches.step, len(batches), bool(batches)) == (NUM_BATCHES, 0, True)
        assert [*first, *rest] == BATCHES
        metrics = batches.metrics()
        assert (metrics["loader/batches"], metrics["loader/step"]) == (NUM_BATCHES, NUM_BATCHES)
        assert metrics["loader/seconds/operation_0"] == batches.profile()["operations[0], Map(abs)"]
        assert "Map(abs)" in str(batches.summary())
        assert "Map(abs)" in str(batches.trace())
        assert len(batches.preview(2).batches) == 2
        assert "Map(abs)" in batches.report(tmp_path / "report.html").read_text()
        for wrong in ({}, {"state": None, "more": 1}, saved["state"]):
            with pytest.raises(millstream.CheckpointError):
                batches.load_state_dict(wrong)
        for move, argument in ((batches.set_state, state), (batches.load_state_dict, saved), (batches.seek, 2)):
            move(argument)
            assert batches.step == 2
            assert [batch.tolist() for batch in batches] == rest


STREAMS: dict[str, Callable[[], Any]] = {
    "mixture": lambda: millstream.IterDataset.mix([chain(), chain()], weights=[1, 2]),
    "limit": lambda: millstream.experimental.LimitIterDataset(chain(), 4),
    "limit of a mixture": lambda: millstream.experimental.LimitIterDataset(STREAMS["mixture"](), 7),
}


@pytest.mark.parametrize("name", STREAMS)
def test_joins_are_stateful(name: str) -> None:
    """`state_dict` of a mixture or limit, loaded into another iterator at any step, leads to the same rest."""
    expected = [batch.tolist() for batch in STREAMS[name]()]
    with iter(STREAMS[name]()) as saved, iter(STREAMS[name]()) as loaded:
        for step in range(len(expected) + 1):
            loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
            assert [batch.tolist() for batch in loaded] == expected[step:]
            next(saved, None)


@pytest.mark.parametrize("name", ITERATORS)
def test_a_closed_iterator_says_so(name: str) -> None:
    """A `with` block closes at its end, even if it raises; then all that needs work is an error, and the state remains.

    Closing again does nothing.
    """
    with contextlib.suppress(KeyError), ITERATORS[name]() as batches:
        assert iter(batches) is batches
        first = next(batches).tolist()
        state = batches.get_state()
        raise KeyError
    batches.close()
    way = r"millstream\.device_put\(iter\(loader\)\)" if "device_put" in name else "iter"
    go_back: list[Callable[[], Any]] = [lambda: batches.seek(0), lambda: batches.set_state(state)]
    for move in (lambda: next(batches), batches.start_prefetch, *go_back):
        with pytest.raises(ValueError, match=f"(?i)closed.* call {way}"):
            move()
    assert batches.get_state() == state
    assert "device_put" in name or "closed" in repr(batches)
    with ITERATORS[name]() as fresh:
        fresh.set_state(state)
        assert [first, *(batch.tolist() for batch in fresh)] == BATCHES


def test_top_sees_the_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`top` reports the wait inside `next` of device_put, and the trainer's step."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    go_on = threading.Event()

    def hold(value: int) -> int:
        assert value < 8 or go_on.wait(WAIT_SECONDS)
        return value

    with (
        millstream.load(range(40), num_epochs=1, transformations=[hold], batch_size=4) as held,
        millstream.device_put(iter(held), buffer_size=1) as batches,
    ):
        held.serve_top()

        def iterator_status() -> dict[str, Any]:
            ((status,),) = (pipeline["iterators"] for pipeline in query(os.getpid(), "snapshot")["pipelines"])
            return dict(status)

        assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        between = iterator_status()
        third = threading.Thread(target=next, args=(batches,))
        third.start()
        while (status := iterator_status())["waits_for"] is None:
            assert third.is_alive()
        go_on.set()
        third.join()

    assert (between["waits_for"], between["step"]) == (None, 2)
    assert status["step"] == 2
