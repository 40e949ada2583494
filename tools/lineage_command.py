"""The command `millstream lineage`: the records of steps, the steps of records, and the composition so far."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from millstream.loader import DataLoader
from millstream.loader.reporting.snapshot import count_text
from millstream.tools.cli_paths import load_callable


def lineage_lines(
    loader: str, state: str | None, keys: Sequence[int], steps: Sequence[int], stop: int | None
) -> Iterator[str]:
    """Yields the lines of the answers about records and steps of a loader, "module:function".

    Steps are counted and found before `stop`; None for the step of the saved state, or the end of the order.
    """
    argument = "LOADER must be MODULE:FUNCTION, a function without arguments that returns a DataLoader"
    function = load_callable(loader, argument)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{argument}, got {loader!r}: {error}.") from error
    built = function()
    try:
        with _checked(built, argument):
            if state is not None:
                step = _step_of(built, Path(state).read_bytes())
                yield f"the state is at step {step:,}"
                stop = step if stop is None else stop
            yield from _lines(built, keys, steps, stop)
    except (IndexError, TypeError) as error:
        raise ValueError(str(error)) from error


def _checked(built: Any, argument: str) -> DataLoader:
    if not isinstance(built, DataLoader):
        raise TypeError(f"{argument}, but it returned a {type(built).__name__}.")
    return built


def _step_of(loader: DataLoader, state: bytes) -> int:
    with iter(loader) as batches:
        batches.set_state(state)
        return batches.step


def _lines(loader: DataLoader, keys: Sequence[int], steps: Sequence[int], stop: int | None) -> Iterator[str]:
    yield str(loader.composition(stop=stop))
    origins = loader.locate(keys)
    for key, origin, row in zip(keys, origins, loader.steps_of(keys, stop=stop).tolist(), strict=True):
        found = [f"{step:,}" for step in row if step >= 0]
        yield ""
        yield f"record {key}{_origin_text(origin)}"
        yield f"  in {len(found):,} of these steps{': ' if found else ''}{' '.join(found)}"
    for step in steps:
        found_keys = loader.record_keys(step).tolist()
        yield ""
        yield f"step {step:,} has {count_text(len(found_keys), 'record')}"
        for key, origin in zip(found_keys, loader.locate(found_keys), strict=True):
            yield f"  record {key}{_origin_text(origin)}"


def _origin_text(origin: Any) -> str:
    component = "" if origin.component is None else f" of {origin.component}"
    location = f"number {origin.record}" + ("" if origin.file is None else f" in {origin.file!r}")
    return f"{component}: {location}"
