"""What is measured: one module per group of cases."""

from suite.case import Case
from suite.cases import arrays, device, files, position, tiny, workers

CASES: dict[str, Case] = {
    case.name: case for group in (tiny, arrays, files, workers, device, position) for case in group.CASES
}
"""All cases by name, in the order of the report."""
