"""A lock for `with`, in a thread that runs signals' handlers.

Guarantee: whatever a handler raises, wherever Python runs it, the lock is held in the block and not after it.

`with lock:` alone holds to that up to Python 3.13. Python 3.14 looks for signals between the call that takes the lock
and the block: an exception of a handler leaves the lock taken for ever
(https://github.com/python/cpython/issues/148874).
"""

import operator
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import threading


@final
class SignalSafeLock:
    """Holds a lock in the block of `with`.

    Args:
        lock: a `threading.Lock` or a `threading.RLock`. Nobody else takes it.
    """

    __slots__ = ("_lock", "_taken")

    def __init__(self, lock: "threading.Lock | threading.RLock") -> None:
        self._lock = lock
        # Takes the lock for each element.
        self._taken = iter(lock.acquire, None)

    def __enter__(self) -> None:
        # Python looks for signals after it has called something, and as a function begins. A loop asks for its next
        # element without a call: so no look follows the taking, neither here nor as this function ends.
        for _ in self._taken:
            return

    # The lock's own method, found without a function of ours: a look, as that begins, would be before the release.
    __exit__: Any = property(operator.attrgetter("_lock.__exit__"))
