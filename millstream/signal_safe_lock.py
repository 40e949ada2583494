"""A lock that a signal handler's exception cannot leave locked.

Guarantee: whatever a handler raises, and wherever Python runs it, the lock is held in the block and not after it.

`with lock:` alone guarantees that up to Python 3.13. Python 3.14 checks for signals between the call that acquires the
lock and the block, where an exception of a handler would leave the lock acquired forever
(https://github.com/python/cpython/issues/148874).
"""

import operator
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import threading


@final
class SignalSafeLock:
    """Holds a lock during a `with` block.

    Args:
        lock: a `threading.Lock` or a `threading.RLock` that no other code acquires.
    """

    __slots__ = ("_lock", "_taken")

    def __init__(self, lock: "threading.Lock | threading.RLock") -> None:
        self._lock = lock
        # Acquires the lock for each element.
        self._taken = iter(lock.acquire, None)

    def __enter__(self) -> None:
        # Python checks for signals after calls and when a function begins. A loop asks for its next element without a
        # call, so no check follows the acquisition, neither here nor when this function ends.
        for _ in self._taken:
            return

    # The lock's own method, without a Python function around it, whose start would be a check before the release.
    __exit__: Any = property(operator.attrgetter("_lock.__exit__"))
