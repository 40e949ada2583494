"""The first outputs of a pipeline, and the structure of the elements between its operations.

They are computed by a separate pass in the calling thread. Iterators of the loader are not affected.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

import numpy as np

from millstream.core import tree
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.stages import Instrument
from millstream.loader.reporting.snapshot import LoaderSnapshot
from millstream.loader.reporting.summary import render_loader
from millstream.loader.threads.executors import InlineExecutor

MAX_LEAVES = 16


def first_outputs(pipeline: Pipeline, instrument: Instrument = lambda _, function: function) -> Iterator[Any]:
    """Computes the outputs of a pipeline in this thread, from the beginning of its stream."""
    plan = Plan(dataclasses.replace(pipeline, num_local=0), instrument)
    with contextlib.closing(InlineExecutor(plan, plan.beginning)) as executor:
        while (outputs := executor.next_outputs()) is not None:
            yield from outputs.values[outputs.first :]
            if outputs.error is not None:
                raise outputs.error


def traced(pipeline: Pipeline) -> Mapping[str, tuple[str, ...]]:
    """Returns descriptions of the leaves of each stage's results for the first output, by the stage's label."""
    seen: dict[str, tuple[str, ...]] = {}

    def instrument(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if isinstance(result, Elements) and len(result.values):
                # The last call counts: a grouping operation measures elements before, under the same label.
                # Elements of a chain may be missing.
                shown = next((value for value in result.values if value is not None), None)
                seen[label] = leaf_texts(shown)
            return result

        return call

    for _ in first_outputs(pipeline, instrument):
        break
    return MappingProxyType(seen)


def leaf_texts(element: Any) -> tuple[str, ...]:
    texts = [f"{path or 'element'}: {_leaf_text(leaf)}" for path, leaf in tree.leaves(element)]
    more = len(texts) - MAX_LEAVES
    return (*texts[:MAX_LEAVES], *([f"… {more} more"] if more > 0 else []))


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}"
    if isinstance(leaf, str | bytes):
        return f"{type(leaf).__name__} of {len(leaf):,} {'characters' if isinstance(leaf, str) else 'bytes'}"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return f"{type(leaf).__name__}{f' {shape}' if shape else ''}{f' {dtype}' if shape and dtype else ''}"


@final
class Trace:
    """The structure of the elements between the operations of a loader. Printed, it is a line per leaf.

    Attributes:
        leaves: path, type and shape of each leaf of a stage's results, by the stage's label.
    """

    def __init__(self, leaves: Mapping[str, tuple[str, ...]], snapshot: LoaderSnapshot) -> None:
        self.leaves = leaves
        self._snapshot = snapshot

    def __repr__(self) -> str:
        return "\n".join(
            line for label, leaves in self.leaves.items() for line in (label, *(f"    {leaf}" for leaf in leaves))
        )

    def _repr_html_(self) -> str:
        return render_loader(self._snapshot)


def element_text(first: Callable[[], Any]) -> str:
    """Returns the structure of an element, with dtype and shape of each leaf: `{'tokens': 'int64[128]'}`.

    An error of user code in `first` must not keep training from starting: it becomes the text.
    """
    try:
        element = first()
        return "no element" if element is None else repr(tree.map_leaves(_grain_leaf_text, element))
    except StopIteration:
        return "no element"
    except Exception as error:  # noqa: BLE001  (user code raises anything)
        return f"unknown: {type(error).__name__}: {error}"


def _grain_leaf_text(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype}[{','.join(map(str, shape))}]"
