"""What a measuring process is ordered to do, and how it does it."""

import dataclasses
from collections.abc import Callable

from suite.case import Run, UnsupportedError
from suite.cases import CASES
from suite.content import content_of, expected_content
from suite.peers import PEERS
from suite.runner import Order, Outcome
from suite.scale import SCALES, TINY
from suite.throughput import break_down, measure_rate


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
