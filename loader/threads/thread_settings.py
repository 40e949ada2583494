"""Whether a thread has settings of its own that would reach the pipeline: those of JAX and PyTorch.

`with jax.enable_x64(True)` or `with torch.no_grad()` holds in one thread only. User code that runs now in the
consumer's thread, now in one of the library's, would give other bytes each time. So it never runs under such a
setting: what the consumer's thread sees is compared with what a fresh thread sees, and where the two differ, the
library's threads make every call. (Context variables, such as the precision of `decimal` and NumPy's `errstate`, need
no thread: see `plan`.)

Neither library is imported here: who has not imported it has set nothing in it.
"""

import _thread
import operator
import queue
import sys
from collections.abc import Callable
from typing import Any, TypeVar, final

Result = TypeVar("Result")

_JAX_SETTINGS = operator.attrgetter(
    "jax_debug_nans",
    "jax_default_prng_impl",
    "jax_transfer_guard_host_to_device",
)
"""Those that decide what JAX computes, or whether it raises, and that its key for compiled functions leaves out."""


@final
class ThreadSettings:
    """Compares the settings of the thread that asks with those of a fresh thread, which are the global ones.

    It costs some 100 ns where neither library is imported, and about 1 µs where JAX is. A fresh thread is asked only
    where something has changed.
    """

    def __init__(self) -> None:
        self._neutral: tuple[Any, ...] | None = ()
        self._deviating: tuple[Any, ...] | None = None

    def are_neutral(self) -> bool:
        """Whether user code that runs in this thread now would see what it sees in any other."""
        here = _settings()
        if here == self._neutral:
            return True
        if here != self._deviating:
            # Set for this thread alone, or for all of them by `jax.config.update`: a fresh thread knows.
            self._neutral = in_fresh_thread(_settings)
            self._deviating = None if here == self._neutral else here
        return self._deviating is None


def in_fresh_thread(function: Callable[[], Result]) -> Result:
    """Returns what a function returns in a thread made for it, or raises what it raises there.

    In a process that can have no more threads, this one takes its place: there is nobody else to make the calls then.
    The thread comes from `_thread`: the lock that `threading` starts threads under may be held by this very thread,
    interrupted by a signal whose handler has called us.
    """
    outcomes: queue.SimpleQueue[tuple[Result, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((function(), None))
        except BaseException as error:  # noqa: BLE001  (the thread that waits raises it)
            outcomes.put((None, error))

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return function()
    result, error = outcomes.get()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # mypy: it is None only beside an error


def _settings() -> tuple[Any, ...]:
    """Returns what this thread sees of all settings that a thread can have of its own."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is None and torch is None:
        return ()
    return (None if jax is None else _jax_settings(jax), None if torch is None else _torch_settings(torch))


def _jax_settings(jax: Any) -> Any:
    """Returns what this thread sees of JAX's settings; None from a JAX that is still being imported.

    What decides about compiled functions JAX itself collects at each call, in 0.3 µs, but its name is private. All
    settings there are, by their public name, take 15 µs.
    """
    try:
        return sys.modules["jax._src.config"].trace_context(), _JAX_SETTINGS(jax.config)
    except (AttributeError, KeyError):
        return getattr(getattr(jax, "config", None), "values", None)


def _torch_settings(torch: Any) -> Any:
    """Returns what this thread sees of PyTorch's settings; None from a PyTorch that is still being imported."""
    try:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled()
    except AttributeError:
        return None
