"""Pickles of one thread are independent of those that another thread writes at the same time."""

import importlib.util
import io
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from millstream.loader.transport.pickling import ValuePickler


class Calls:
    """A value that calls a function while it is pickled."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __reduce__(self) -> Any:
        self.function()
        return int, ()


def dumped(*values: Any) -> bytes:
    file = io.BytesIO()
    ValuePickler(file).dump(values)
    return file.getvalue()


@pytest.mark.parametrize("is_registered", [False, True])
def test_two_threads_pickle_definitions_of_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_registered: bool
) -> None:
    """A module that no worker can import crosses by value, if another thread ends pickling it in between, too."""
    file = tmp_path / "augment.py"
    file.write_text("def first(x): return x + 1\ndef second(x): return x + 2\n")
    spec = importlib.util.spec_from_file_location("augment", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "augment", module)
    spec.loader.exec_module(module)
    if is_registered:
        cloudpickle.register_pickle_by_value(module)
    has_begun, may_end, pickles = threading.Event(), threading.Event(), []

    def pause() -> None:
        has_begun.set()
        assert may_end.wait(10)

    other = threading.Thread(target=lambda: pickles.append(dumped(module.first, Calls(pause), module.second)))

    def start_other() -> None:
        other.start()
        assert has_begun.wait(10)

    pickles.append(dumped(module.first, Calls(start_other), module.second))
    may_end.set()
    other.join(10)
    assert ("augment" in cloudpickle.list_registry_pickle_by_value()) == is_registered
    if is_registered:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, "augment")
    assert [[function(0) for function in pickle.loads(data)[::2]] for data in pickles] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    "content",
    [
        b"abc",
        b"",
        bytearray(b"abc"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.arange(6.0)[::2],
        np.array(3),
        np.zeros((0, 3)),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
    ],
)
def test_a_memoryview_stays_one(content: Any) -> None:
    """With its format, shape and mutability, as for elements that cross no process."""
    view = memoryview(content)
    (found,) = pickle.loads(dumped(view))
    assert type(found) is memoryview
    assert (found.format, found.shape, found.readonly) == (view.format, view.shape, view.readonly)
    assert found.tobytes() == view.tobytes()
