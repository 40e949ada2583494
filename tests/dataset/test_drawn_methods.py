"""Random trees draw the whole API of chains. What they do not draw is listed here, with the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream import DatasetIterator, IterDataset, MapDataset

SUPPORT = Path(__file__).parents[1] / "support"
DRAWN_IN: dict[type, tuple[str, ...]] = {
    MapDataset: ("draw/chains.py", "draw/streams.py"),
    IterDataset: ("draw/streams.py",),
    DatasetIterator: ("everywhere.py",),
}
DATASETS = {
    *("IterDataset", "MapDataset", "chain", "dataset", "datasets", "documents", "endless", "first", "iterator"),
    *("mixture", "parent", "stream"),
}
"""The names of datasets and iterators in these modules."""

DESCRIBES = "it describes, and has no element"
FOR_LOADERS = "loaders ask for it, which read chains in `draw/shares.py`"
REPORTS = "it reports what was read"
NOT_DRAWN: dict[type, dict[str, str]] = {
    MapDataset: {
        "calls_in_reads": DESCRIBES,
        "content_marks": "each state has them",
        "fingerprint": "each state has it",
        "is_in_memory": FOR_LOADERS,
        "of": "a node without a dataset",
        "parents": DESCRIBES,
        "reads_one_by_one": FOR_LOADERS,
        "takes_key_arrays": FOR_LOADERS,
        "unit_numbers": FOR_LOADERS,
        "unit_sizes": FOR_LOADERS,
        "window_units": FOR_LOADERS,
    },
    IterDataset: {"iterates_itself": DESCRIBES, "parents": DESCRIBES},
    DatasetIterator: {
        "close": "each block that ends closes its iterator",
        "epoch": DESCRIBES,
        "insight": REPORTS,
        "load": "a file of `set_state`",
        "load_state_dict": "another name of `set_state`",
        "metrics": REPORTS,
        "prepare_to_move": "`set_state` asks for it",
        "preview": REPORTS,
        "profile": REPORTS,
        "report": REPORTS,
        "save": "a file of `get_state`",
        "skip": "it seeks",
        "state_dict": "another name of `get_state`",
        "states_are_bytes": DESCRIBES,
        "summary": REPORTS,
        "trace": REPORTS,
    },
}


def drawn_from(expression: ast.expr) -> Iterator[str]:
    """Yields the names of attributes of a dataset, and of what they return."""
    found = []
    while not isinstance(expression, ast.Name):
        if isinstance(expression, ast.Attribute):
            found.append(expression.attr)
            expression = expression.value
        elif isinstance(expression, ast.Call):
            expression = expression.func
        elif isinstance(expression, ast.Subscript):
            expression = expression.value
        else:
            return
    yield from found if expression.id in DATASETS else []


@pytest.mark.parametrize("kind", DRAWN_IN)
def test_random_trees_draw_each_method(kind: type) -> None:
    """A public name of a dataset or iterator is drawn, or there is a reason. One that is drawn, or gone, has none."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    drawn = {
        name
        for path in DRAWN_IN[kind]
        for node in ast.walk(ast.parse((SUPPORT / path).read_text()))
        if isinstance(node, ast.Attribute)
        for name in drawn_from(node)
    }
    assert names - drawn == set(NOT_DRAWN[kind])
