"""One measurement, in a process that does nothing else: `__main__.py` starts it and reads what it prints.

The argument is JSON: the case, the contender, the scale, the task and the number of the copy. Lines for the starter
begin with PREFIX: "ready" when all is warm, whereupon a line on standard input lets the measurement begin; at the end
the outcome, as JSON.
"""

import dataclasses
import json
import sys
from typing import Any

from suite.breakdown import break_down
from suite.case import Case, Contender, Run, UnsupportedError
from suite.cases import CASES
from suite.content import content_of, expected_content
from suite.peers import PEERS
from suite.runner import PREFIX, Outcome
from suite.scale import SCALES, TINY, Scale
from suite.throughput import measure_rate


def measure(case: Case, contender: Contender, scale: Scale, copy: int) -> Outcome:
    """Returns what the case measures."""
    run = Run(case, contender, scale, copy, _wait_for_all_copies)
    found = (case.measure or measure_rate)(run)
    return Outcome(value=found.value, details=dict(found.details))


def check(case: Case, contender: Contender, scale: Scale, copy: int) -> Outcome:
    """Returns whether an epoch holds the records that it should, of a small version of the case's data."""
    del scale, copy
    _wait_for_all_copies()
    work = dataclasses.replace(case.make_work(TINY), one_epoch=True)
    stream = PEERS[contender.peer].adapter().open(work, contender)
    found = content_of(stream.batches, case.view, batched=work.batch_size is not None)
    stream.close()
    expected = expected_content(work, case.view)
    if found.count != expected.count:
        return Outcome(error=f"{found.count} records came instead of {expected.count}")
    return Outcome(value=1.0) if found == expected else Outcome(error="other records came than expected")


def explain(case: Case, contender: Contender, scale: Scale, copy: int) -> Outcome:
    """Returns where the time goes."""
    run = Run(case, contender, scale, copy, _wait_for_all_copies)
    return Outcome(value=0.0, details=break_down(run))


TASKS = {"measure": measure, "check": check, "explain": explain}


def _wait_for_all_copies() -> None:
    _tell("ready")
    sys.stdin.readline()


def _tell(text: str) -> None:
    print(f"\n{PREFIX}{text}", flush=True)


def outcome_of(order: dict[str, Any]) -> Outcome:
    """Returns the outcome of what was ordered; a peer that is missing, unable or broken is an outcome, too."""
    contender = Contender(**order["contender"])
    try:
        PEERS[contender.peer].adapter()
    except ImportError as error:
        return Outcome(absent=f"not installed here ({error})")
    try:
        return TASKS[order["task"]](CASES[order["case"]], contender, SCALES[order["scale"]], order["copy"])
    except UnsupportedError as error:
        return Outcome(unsupported=str(error))
    except Exception as error:  # noqa: BLE001  (whatever a peer raises belongs into the report)
        return Outcome(error=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    _tell(json.dumps(dataclasses.asdict(outcome_of(json.loads(sys.argv[1])))))
