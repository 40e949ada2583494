"""The orders to a measuring process, and their execution.

The records that contenders deliver are compared as multisets: orders differ by design.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.case import Contender, Run, UnsupportedError
from suite.cases import CASES
from suite.peers import PEERS
from suite.peers.bare_loop import ADAPTER as BARE_LOOP
from suite.runner import Order, Outcome
from suite.scale import SCALES, TINY
from suite.throughput import break_down, measure_rate
from suite.work import Work


def carry_out(order: Order, gate: Callable[[], None]) -> Outcome:
    """Returns the outcome of an order; a peer that is missing, unable or broken is an outcome, too."""
    try:
        PEERS[order.contender.peer].adapter()
    except ImportError as error:
        return Outcome(reason=f"not installed here ({error})", is_absent=True)
    run = Run(CASES[order.case], order.contender, SCALES[order.scale], order.copy, gate)
    try:
        return _TASKS[order.task](run)
    except UnsupportedError as error:
        return Outcome(reason=str(error))
    except ImportError as error:
        return Outcome(reason=f"a library for this case is not installed here ({error})")
    except Exception as error:  # noqa: BLE001  (whatever a peer raises belongs into the report)
        return Outcome(reason=f"{type(error).__name__}: {error}"[:500])


def _measure(run: Run) -> Outcome:
    found = (run.case.measure or measure_rate)(run)
    return Outcome(value=found.value, details=dict(found.details))


def _check(run: Run) -> Outcome:
    """Returns whether an epoch holds the records that it should, of a small version of the case's data."""
    run.gate()
    work = dataclasses.replace(run.case.make_work(TINY), one_epoch=True)
    stream = PEERS[run.contender.peer].adapter().open(work, run.contender)
    found = content_of(stream.batches, run.case.view, batched=work.batch_size is not None)
    stream.close()
    expected = expected_content(work, run.case.view)
    if found.count != expected.count:
        return Outcome(reason=f"{found.count} records came instead of {expected.count}")
    return Outcome(value=1.0) if found == expected else Outcome(reason="other records came than expected")


def _explain(run: Run) -> Outcome:
    return Outcome(value=0.0, details=break_down(run))


_TASKS: dict[str, Callable[[Run], Outcome]] = {"measure": _measure, "check": _check, "explain": _explain}

_MODULUS = 1 << 64


@dataclasses.dataclass(frozen=True)
class Content:
    """The content that a stream delivered."""

    count: int
    digest: int


def expected_content(work: Work, view: Callable[[Any], Any]) -> Content:
    stream = BARE_LOOP.open(dataclasses.replace(work, one_epoch=True), Contender("bare", mode="loop"))
    return content_of(stream.batches, view, batched=work.batch_size is not None)


def content_of(batches: Iterable[Any], view: Callable[[Any], Any], *, batched: bool) -> Content:
    count = digest = 0
    for batch in batches:
        leaves = list(_leaves(view(batch), ""))
        columns = [(path, _array(leaf) if batched else _array([leaf])) for path, leaf in leaves]
        for row in range(len(columns[0][1])):
            count += 1
            digest += _hash((path, column[row]) for path, column in columns)
    return Content(count, digest % _MODULUS)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _leaves(value[name], f"{path}/{name}")
    else:
        yield path, value


def _array(leaf: Any) -> NDArray[Any]:
    """Returns an array of the leaf; text is made one kind of text, as bytes are what TensorFlow has for it."""
    array = np.asarray(leaf)
    if array.dtype == object or array.dtype.kind in "SU":
        texts = [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]
        return np.array(texts, dtype=object).reshape(array.shape)
    return array


def _hash(named: Iterable[tuple[str, Any]]) -> int:
    whole = hashlib.blake2b(digest_size=8)
    for path, value in named:
        is_text = isinstance(value, str)
        content = value.encode() if is_text else value.tobytes()
        whole.update(repr((path, None if is_text else (value.dtype.str, value.shape), len(content))).encode() + content)
    return int.from_bytes(whole.digest(), "little")
