"""The first outputs of a pipeline, made here and now, and what flowed between its operations meanwhile.

Whatever else the loader is doing continues: this is a pass of its own, without threads and workers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

import numpy as np

from millstream import tree
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.stages import Watch
from millstream.loader.reporting.html_rendering import render_loader
from millstream.loader.reporting.snapshot import LoaderSnapshot
from millstream.loader.threads.inline_executor import InlineExecutor
from millstream.transforms import Batch, BucketBatch, Rebatch, TokenBudgetBatch

LEAVES_SHOWN = 16
"""Of an element with more leaves, the first ones are shown."""


def first_outputs(pipeline: Pipeline, watch: Watch = lambda _, function: function) -> Iterator[Any]:
    """Yields the outputs of a pipeline from the beginning of its stream on, made in this thread.

    Args:
        pipeline: whose outputs.
        watch: wraps each function that does a part of the work, as for `Plan`.

    Raises:
        Exception: what the pipeline raises, with notes of where.
    """
    plan = Plan(pipeline, watch)
    with contextlib.closing(InlineExecutor(plan, plan.beginning)) as executor:
        while (outputs := executor.next_outputs()) is not None:
            yield from outputs.values[outputs.first :]
            if outputs.error is not None:
                raise outputs.error


def traced(pipeline: Pipeline) -> Mapping[str, tuple[str, ...]]:
    """Returns the leaves of what each stage gave for the first output of a pipeline, by the label of the stage."""
    seen: dict[str, tuple[str, ...]] = {}

    def watch(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if isinstance(result, Elements) and len(result.values):
                # The last word counts: what groups elements has measured them before, under the same label.
                # Of a chain's elements, some may be absent.
                shown = next((value for value in result.values if value is not None), None)
                seen[label] = leaf_texts(shown)
            return result

        return call

    for _ in first_outputs(pipeline, watch):
        break
    return MappingProxyType(seen)


def makes_batches(pipeline: Pipeline) -> bool:
    """Whether what a pipeline gives are batches: elements of several records, stacked."""
    return any(
        isinstance(operation, Batch | Rebatch | TokenBudgetBatch | BucketBatch) for operation in pipeline.operations
    )


def leaf_texts(element: Any) -> tuple[str, ...]:
    """Returns a line for each leaf of an element: its path, and its type and shape."""
    texts = [f"{path or 'element'}: {_leaf_text(leaf)}" for path, leaf in tree.leaves(element)]
    rest = len(texts) - LEAVES_SHOWN
    return (*texts[:LEAVES_SHOWN], *([f"… {rest} more"] if rest > 0 else []))


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}"
    if isinstance(leaf, str | bytes):
        return f"{type(leaf).__name__} of {len(leaf):,} {'characters' if isinstance(leaf, str) else 'bytes'}"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return f"{type(leaf).__name__}{f' {shape}' if shape else ''}{f' {dtype}' if shape and dtype else ''}"


@final
class Trace:
    """What flows between the operations of a loader: printed, a line for each leaf; in a notebook, in its picture.

    Attributes:
        leaves: a line for each leaf of what a stage gives, by the label of the stage.
    """

    def __init__(self, leaves: Mapping[str, tuple[str, ...]], snapshot: LoaderSnapshot) -> None:
        self.leaves = leaves
        self._snapshot = snapshot

    def __repr__(self) -> str:
        return "\n".join(
            line for label, leaves in self.leaves.items() for line in (label, *(f"    {leaf}" for leaf in leaves))
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return render_loader(self._snapshot)
