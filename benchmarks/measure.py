"""One measurement, in a process that does nothing else: the runner starts it and reads what it prints.

The argument is an order in JSON. Lines for the runner begin with PREFIX: "ready" when all is warm, whereupon a line on
standard input lets the measurement begin; at the end the outcome, in JSON.
"""

import dataclasses
import json
import sys

from suite.orders import carry_out
from suite.runner import PREFIX, Order


def tell(text: str) -> None:
    """Prints a line for the runner, whatever a peer may have printed before it."""
    print(f"\n{PREFIX}{text}", flush=True)


def wait_for_all_copies() -> None:
    """Says that all is warm here, and waits until it is so everywhere."""
    tell("ready")
    sys.stdin.readline()


if __name__ == "__main__":
    outcome = carry_out(Order.from_json(sys.argv[1]), wait_for_all_copies)
    tell(json.dumps(dataclasses.asdict(outcome)))
