"""Requests that carry elements to a worker: a group's elements, or elements drawn from a stream.

A request crosses as one pickle. Small arrays that are alike are merged into one (see `element_columns`), and rows that
were built together cross as their columns, because pickling each array takes longer than most operations.
"""

from typing import Any

import numpy as np

from millstream.loader.operations.elements import Elements
from millstream.loader.pipeline.calls import Fed, Group
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.element_columns import to_columns, to_elements
from millstream.transforms.packing.rows import Rows


def dump_request(request: Group | Fed, classes: ClassTable) -> bytes:
    """Returns the pickle of a request.

    Raises:
        Exception: an element cannot be pickled.
    """
    values = request.elements.values
    columns: Any = values if isinstance(values, Rows) else to_columns(list(values), np.empty)
    return classes.dumps(_with_values(request, columns))


def load_request(data: bytes, classes: ClassTable) -> Group | Fed:
    """Returns the request that `dump_request` pickled."""
    request: Group | Fed = classes.loads(data)
    columns: Any = request.elements.values
    return _with_values(request, to_elements(columns))


def _with_values(request: Group | Fed, values: Any) -> Group | Fed:
    elements = request.elements
    return request._replace(elements=Elements(values, elements.origins, elements.error))
