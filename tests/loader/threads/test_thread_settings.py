"""Settings of the consumer's thread alone reach no operation, wherever it runs: the bytes are the same."""

import contextlib
import contextvars
import decimal
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.threads.thread_settings import ThreadSettings, in_fresh_thread
from millstream.transforms import Batch, Filter
from support.processes.context_variables import VARIABLE

pytestmark = pytest.mark.third_party

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_RECORDS = 48


def settings_here(number: Any) -> Any:
    """Returns what an operation sees of every kind of setting, and the sum of its element."""
    import jax.numpy as jnp

    from support.processes.context_variables import VARIABLE

    seen = [
        int(jnp.asarray(np.float64(0)).dtype == np.float64),
        int(jax.config.jax_debug_nans),  # type: ignore[attr-defined, unused-ignore]
        decimal.getcontext().prec,
        int(np.geterr()["divide"] == "raise"),
        VARIABLE.get(),
    ]
    return np.array([*seen, np.sum(number)])


DEFAULTS = [0, 0, 28, 0, 0]


class Source:
    """Records that show the settings in which they were read."""

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitems__(self, keys: list[int]) -> list[Any]:
        seen = settings_here(0)
        return [np.array([*seen[:-1], key]) for key in keys]

    def __getitem__(self, key: int) -> Any:
        return self.__getitems__([key])[0]


class Sampler:
    """The source's order, with keys that show the settings in which they were asked for."""

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, position: int) -> millstream.RecordMetadata:
        seen = settings_here(0)[:-1].tolist()
        return millstream.RecordMetadata(position, position if seen == DEFAULTS else 0, None)


@contextlib.contextmanager
def assigned(variable: contextvars.ContextVar[int]) -> Iterator[None]:
    """Sets a variable."""
    token = variable.set(1)
    yield
    variable.reset(token)


OVERRIDES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "decimal": lambda: decimal.localcontext(decimal.Context(prec=5)),
    "errstate": lambda: np.errstate(divide="raise"),
    "variable": lambda: assigned(VARIABLE),
}


def seen_by(num_threads: int, operations: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """Returns the distinct settings that a pass sees, and the numbers of its elements, in order."""
    options |= {"operations": operations, "read_options": millstream.ReadOptions(num_threads)}
    loader = millstream.DataLoader(data_source=Source(), sampler=Sampler(), **options)
    keys = [int(key) for step in range(4) for key in loader.record_keys(step)] if operations[:1] != [KEEP] else []
    assert keys == list(range(len(keys)))
    with iter(loader) as iterator:
        rows = np.concatenate([np.atleast_2d(element) for element in iterator])
    return np.unique(rows[:, :-1], axis=0).tolist(), rows[:, -1].tolist()


def passed_on(element: Any) -> Any:
    """Returns the element with the current settings, or with those that it came with if they are not the defaults."""
    seen = settings_here(0)[:-1]
    return element if element[:-1].tolist() != DEFAULTS else np.array([*seen, element[-1]])


KEEP = Filter(lambda _: settings_here(0)[:-1].tolist() == DEFAULTS)


@given(
    overrides=st.sets(st.sampled_from(sorted(OVERRIDES))),
    operations=st.sampled_from([[passed_on], [passed_on, Batch(4)], [KEEP, passed_on, Batch(4)]]),
    num_threads=st.sampled_from([0, 1, 4]),
)
@settings(max_examples=25)
def test_an_operation_sees_the_defaults(overrides: set[str], operations: list[Any], num_threads: int) -> None:
    """Sources, samplers and operations see no setting of the consumer's, nor what another call has set."""
    with contextlib.ExitStack() as stack:
        for name in sorted(overrides):
            stack.enter_context(OVERRIDES[name]())
        assert seen_by(num_threads, operations) == ([DEFAULTS], list(range(NUM_RECORDS)))


def test_workers_and_device_put_see_the_same() -> None:
    """Operations see the defaults in worker processes and in the thread of `device_put`, too."""
    with contextlib.ExitStack() as stack:
        for override in OVERRIDES.values():
            stack.enter_context(override())
        assert seen_by(2, [passed_on, Batch(4)], worker_count=1) == ([DEFAULTS], list(range(NUM_RECORDS)))
        loader = millstream.load(Source(), transformations=[passed_on], batch_size=4, num_epochs=1)
        with millstream.device_put(iter(loader)) as iterator:
            rows = np.concatenate([np.asarray(batch) for batch in iterator])
        assert np.unique(rows[:, :-1], axis=0).tolist() == [DEFAULTS]


@pytest.mark.parametrize("options", [{}, {"read_options": millstream.ReadOptions(0)}], ids=str)
def test_what_a_call_sets_is_gone_at_the_next(options: dict[str, Any]) -> None:
    """An operation that sets its context for good sees the defaults again in the next call, in the same thread too."""

    def look_and_set(batch: Any) -> Any:
        seen = settings_here(batch)
        decimal.getcontext().prec = 7
        np.seterr(divide="raise")
        importlib.import_module("support.processes.context_variables").VARIABLE.set(5)
        return seen

    with iter(
        millstream.load(list(range(40)), transformations=[Batch(4), look_and_set], num_epochs=1, **options)
    ) as iterator:
        assert [row[:-1].tolist() for row in iterator] == [DEFAULTS] * 10
    assert (decimal.getcontext().prec, VARIABLE.get()) == (28, 0)


def test_settings_may_come_and_go_between_batches() -> None:
    """Operations see the defaults where every other `next` has settings of its own, with threads and without."""
    for num_threads in (0, 4):
        options: dict[str, Any] = {"num_epochs": 1, "read_options": millstream.ReadOptions(num_threads)}
        loader = millstream.load(list(range(NUM_RECORDS)), transformations=[settings_here], batch_size=4, **options)
        with iter(loader) as iterator:
            for step in range(NUM_RECORDS // 4):
                with jax.enable_x64(True) if step % 2 else contextlib.nullcontext():
                    assert next(iterator)[:, :-1].tolist() == [DEFAULTS] * 4


def test_a_global_setting_is_not_taken_for_a_local_one() -> None:
    """Settings by `jax.config.update` for all threads reach operations, and keep no thread from working."""
    thread = ThreadSettings()
    assert thread.are_neutral()
    jax.config.update("jax_enable_x64", True)
    try:
        assert thread.are_neutral()
        with jax.enable_x64(False):
            assert not thread.are_neutral()
            assert not thread.are_neutral()
        assert thread.are_neutral()
        makers: set[int] = set()

        def look(number: int) -> Any:
            makers.add(threading.get_ident())
            return settings_here(number)

        options: dict[str, Any] = {"num_epochs": 1, "read_options": millstream.ReadOptions(0)}
        assert {element[0] for element in millstream.load(list(range(8)), transformations=[look], **options)} == {1}
        assert makers == {threading.get_ident()}
    finally:
        jax.config.update("jax_enable_x64", False)


def test_every_setting_of_jax_counts() -> None:
    """A thread with any setting of its own is told from the others; so is one within another guard of transfers."""
    thread, states = ThreadSettings(), importlib.import_module("jax._src.config").config_states
    assert thread.are_neutral()
    flags: list[Any] = [state for state in states.values() if isinstance(state.value, bool)]
    guards: list[Any] = [jax.transfer_guard, jax.transfer_guard_device_to_host, jax.transfer_guard_device_to_device]
    for override in [*((lambda state=state: state(not state.value)) for state in flags), *guards]:
        with override("disallow") if override in guards else override():
            assert not thread.are_neutral(), override
    assert thread.are_neutral()
    assert len(flags) > 50


@pytest.mark.parametrize("num_threads", [0, 4])
def test_errors_that_a_thread_asks_for_stay_there(num_threads: int) -> None:
    """`with jax.debug_infs(True)` around `next` makes no operation fail, whether its calls are quick or not."""

    def infinite(_: int) -> Any:
        import jax.numpy as jnp

        return np.asarray(jnp.ones(1) / jnp.zeros(1))

    options = millstream.ReadOptions(num_threads)
    with jax.debug_infs(True):
        batches = list(millstream.load(range(200), transformations=[infinite], num_epochs=1, read_options=options))
    assert len(batches) == 200


def test_other_versions_of_jax_are_asked_by_its_public_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the private function, all settings are compared."""
    monkeypatch.delattr("jax._src.config.trace_context")
    thread = ThreadSettings()
    assert thread.are_neutral()
    with jax.enable_x64(True):
        assert not thread.are_neutral()


def test_a_fresh_thread_returns_and_raises() -> None:
    """The function's result or error arrives, and it ran in another thread."""
    assert in_fresh_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_fresh_thread(lambda: 1 // 0)
    previous = threading.stack_size(1 << 46)
    try:
        assert in_fresh_thread(threading.get_ident) == threading.get_ident()
    finally:
        threading.stack_size(previous)
