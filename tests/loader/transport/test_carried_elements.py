"""Requests that carry elements to a worker arrive as they were, in a pickle of few arrays."""

import pickletools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.requests import Fed, Group
from millstream.loader.transport.carried_elements import dump_request, load_request
from millstream.loader.transport.class_table import ClassTable
from millstream.transforms.packing.rows import Rows
from support.draw.elements_of_all_kinds import elements
from support.streams import comparable

CLASSES = ClassTable()


def origins_of(count: int) -> Origins:
    return Origins(np.arange(7 * count).reshape(7, count))


@given(st.lists(elements, max_size=5), st.booleans())
@settings(deadline=None)
def test_requests_arrive_as_they_were(values: list[Any], is_group: bool) -> None:
    """Kind, stage, elements and origins are the same on the other side."""
    carried = Elements(values, origins_of(len(values)))
    request = Group(3, carried) if is_group else Fed(carried)
    arrived = load_request(dump_request(request, CLASSES), CLASSES)
    assert type(arrived) is type(request)
    assert arrived[:-1] == request[:-1]
    assert list(map(comparable, arrived.elements.values)) == list(map(comparable, values))
    assert np.array_equal(arrived.elements.origins.table, carried.origins.table)


def test_documents_and_rows_are_few_arrays() -> None:
    """Hundreds of documents are one array in the pickle, and rows that were laid out together their columns."""
    documents = [(np.arange(length, dtype=np.int32),) for length in range(1, 300)]
    columns = {name: np.arange(64, dtype=np.int32).reshape(8, 8) for name in ("tokens", "tokens_positions")}
    rows = Rows(columns, {})[2:6]
    for values, num_arrays in ((documents, 1), (rows, 2)):
        data = dump_request(Group(1, Elements(values, origins_of(len(values)))), CLASSES)
        num_buffers = sum(opcode.name.startswith("BYTEARRAY") for opcode, _, _ in pickletools.genops(data))
        assert num_buffers <= num_arrays + 1  # The table of origins is one, too.
        arrived = load_request(data, CLASSES).elements.values
        assert list(map(comparable, arrived)) == list(map(comparable, values))
    assert isinstance(arrived, Rows)
