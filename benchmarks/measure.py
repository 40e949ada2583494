"""One contender of one case, in a process that does nothing else: the runner starts it, asks it, and reads its answers.

The argument is an order in JSON. Lines for the runner begin with PREFIX: "ready" when the stream is open and warm; then
an answer in JSON to each line on standard input, until that ends.
"""

import json
import sys

from suite.orders import PREFIX, Order, Session


def tell(value: object) -> None:
    """Prints a line for the runner, whatever a peer may have printed before it."""
    print(f"\n{PREFIX}{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    session = Session(Order.from_json(sys.argv[1]))
    tell(session.open())
    for _ in sys.stdin:
        tell(session.measure())
    session.close()
