"""Settings of JAX and PyTorch that only one thread has, and that would reach the pipeline.

`with jax.enable_x64(True)` or `with torch.no_grad()` applies to one thread only. User code that runs sometimes in the
consumer's thread, and sometimes in one of the library's, would produce different bytes. It therefore never runs under
such a setting. The settings of the consumer's thread are compared with those of a fresh thread. If they differ, the
library's threads run every call. (Context variables, such as the precision of `decimal` and NumPy's `errstate`, need
no thread: see `plan`.)

Neither library is imported here. A program that has not imported it has no settings of it.
"""

import _thread
import contextlib
import functools
import queue
import sys
from collections.abc import Callable
from typing import Any, TypeVar, final

ResultT = TypeVar("ResultT")


@final
class ThreadSettings:
    """Compares the settings of the calling thread with those of a fresh thread, which are the global ones.

    A comparison costs 100 ns if neither library is imported, and some 5 µs with JAX. A fresh thread is started only
    after a change.
    """

    def __init__(self) -> None:
        self._neutral: tuple[Any, ...] | None = ()
        self._deviating: tuple[Any, ...] | None = None

    def are_neutral(self) -> bool:
        """Returns True if user code in this thread would see the same settings as in any other."""
        here = _settings()
        if here == self._neutral:
            return True
        if here != self._deviating:
            # Set for this thread only, or globally by `jax.config.update`: a fresh thread shows which.
            self._neutral = in_fresh_thread(_settings)
            self._deviating = None if here == self._neutral else here
        return self._deviating is None


def in_fresh_thread(function: Callable[[], ResultT]) -> ResultT:
    """Calls a function in a new thread, and returns its result or raises its exception.

    If the system has no thread left, the calling thread runs the function. The thread is started by `_thread`, because
    the lock of `threading` may be held by this very thread, if it was interrupted by a signal handler that calls this.
    """
    outcomes: queue.SimpleQueue[tuple[ResultT, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((function(), None))
        except BaseException as error:  # noqa: BLE001  (raised in the waiting thread)
            outcomes.put((None, error))

    try:
        _thread.start_new_thread(run, ())
    except (RuntimeError, MemoryError):
        return function()
    result, error = outcomes.get()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # mypy: None only together with an error


def _settings() -> tuple[Any, ...]:
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is None and torch is None:
        return ()
    return (None if jax is None else _jax_settings(jax), None if torch is None else _torch_settings(torch))


def _jax_settings(jax: Any) -> Any:
    """Returns this thread's settings of JAX, or None while JAX is being imported.

    JAX itself collects the settings that affect compiled functions at each call, in 0.3 µs, but by a private function.
    The others are read one by one. Reading all settings by their public name takes 25 µs.
    """
    try:
        config = sys.modules["jax._src.config"]
        settings = _states_beside_key(config, len(config.config_states))
        return config.trace_context(), [state.value for state in settings]
    except (AttributeError, KeyError):
        return getattr(getattr(jax, "config", None), "values", None)


@functools.lru_cache(maxsize=1)
def _states_beside_key(config: Any, _num_states: int) -> list[Any]:
    """Returns the settings that a thread may have of its own, and that are not part of JAX's key. Some come late."""
    in_key: frozenset[str] = frozenset()
    # Older versions do not tell.
    with contextlib.suppress(AttributeError, NotImplementedError):
        in_key = frozenset(config.trace_context_names())
    return [state for name, state in config.config_states.items() if name not in in_key]


def _torch_settings(torch: Any) -> Any:
    """Returns this thread's settings of PyTorch, or None while PyTorch is being imported."""
    try:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()
    except AttributeError:
        return None
