"""The measured cases: one module per group."""

from suite.case import Case
from suite.cases import (
    arrays,
    cluster,
    device,
    far,
    far_requests,
    files,
    formats,
    mixtures,
    packing,
    position,
    stores,
    tiny,
    workers,
)

GROUPS = (
    tiny,
    arrays,
    files,
    formats,
    stores,
    mixtures,
    packing,
    workers,
    far,
    far_requests,
    cluster,
    device,
    position,
)

CASES: dict[str, Case] = {case.name: case for group in GROUPS for case in group.CASES}
"""All cases by name, in the order of the report."""
