"""Requests that carry elements to a worker: those of a group, and those that were drawn from a stream.

What travels is one pickle, in which small arrays that are alike are one array (see `element_columns`), and rows that
were laid out together are their columns: to pickle each array by itself takes longer than most operations.
"""

from typing import Any

import numpy as np

from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.requests import Fed, Group
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.element_columns import to_columns, to_elements
from millstream.transforms.rows import Rows


def dump_request(request: Group | Fed, classes: ClassTable) -> bytes:
    """Returns the pickle of a request.

    Raises:
        Exception: an element cannot be pickled.
    """
    values = request.elements.values
    columns: Any = values if isinstance(values, Rows) else to_columns(list(values), np.empty)
    return classes.dumps(_with_values(request, columns))


def load_request(data: bytes, classes: ClassTable) -> Group | Fed:
    """Returns the request of a pickle from `dump_request`."""
    request: Group | Fed = classes.loads(data)
    columns: Any = request.elements.values
    return _with_values(request, to_elements(columns))


def _with_values(request: Group | Fed, values: Any) -> Group | Fed:
    elements = request.elements
    return request._replace(elements=Elements(values, elements.origins, elements.error))
