"""Diagrams of pipelines, printed or written to a folder whenever a user makes an iterator."""

import contextlib
import contextvars
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from millstream.configuration import config
from millstream.core import tree

Made = TypeVar("Made")

_is_opening = contextvars.ContextVar("millstream_is_opening", default=False)
_numbers = itertools.count()


def visualized(caller: FrameType, make: Callable[[], Made], text: Callable[[], str], html: Callable[[], str]) -> Made:
    """Returns a new iterator, and shows a diagram of its pipeline if the settings ask for one.

    Iterators that the library makes for itself have none, nor have those that an iterator draws from.
    """
    folder = config.py_dataset_visualization_output_dir
    if folder is None or _is_opening.get() or caller.f_globals.get("__name__", "").split(".")[0] == "millstream":
        return make()
    with _opening():
        iterator = make()
        if folder:
            _write(Path(folder), html())
        else:
            print(text())  # noqa: T201  (the setting asks for it)
    return iterator


@contextlib.contextmanager
def _opening() -> Iterator[None]:
    token = _is_opening.set(True)
    try:
        yield
    finally:
        _is_opening.reset(token)


def _write(folder: Path, html: str) -> None:
    """Writes a page into a folder that other processes may share."""
    from millstream.core.html_fragments import document  # noqa: PLC0415  (lazy: off by default)

    folder.mkdir(parents=True, exist_ok=True)
    while True:
        path = folder / f"pipeline-{os.getpid()}-{next(_numbers)}.html"
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as page:
            page.write(document("Pipeline", html))
            return


def element_text(first: Callable[[], Any]) -> str:
    """Returns the structure of an element, with dtype and shape of each leaf: `{'tokens': 'int64[128]'}`.

    An error of user code in `first` must not keep training from starting: it becomes the text.
    """
    try:
        element = first()
        return "no element" if element is None else repr(tree.map_leaves(_leaf_text, element))
    except StopIteration:
        return "no element"
    except Exception as error:  # noqa: BLE001  (user code raises anything)
        return f"unknown: {type(error).__name__}: {error}"


def _leaf_text(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype}[{','.join(map(str, shape))}]"
