"""The first outputs of a pipeline: the structure of elements between its operations, and renderings of batches.

They are computed by a separate pass in the calling thread. Iterators of the loader are not affected. Images are
rendered as images, tokens as text, packed rows coloured by document.
"""

import base64
import contextlib
import dataclasses
import functools
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.html_fragments import document, escaped, figure, table
from millstream.loader.engine.engine import Engine
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.reporting.snapshot import LoaderSnapshot, count_text
from millstream.loader.reporting.summary import render_loader

MAX_LEAVES = 16


def first_outputs(
    pipeline: Pipeline, observe: Callable[[str, Elements], None] = lambda _label, _result: None
) -> Iterator[Any]:
    """Computes the outputs of a pipeline in this thread, from the beginning of its stream.

    `observe` gets the label and the result of each call of a stage, before the next one.
    """

    def instrument(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if isinstance(result, Elements):
                observe(label, result)
            return result

        return call

    plan = Plan(dataclasses.replace(pipeline, num_local=0), instrument)
    with contextlib.closing(Engine(plan, plan.beginning)) as engine:
        while (outputs := engine.next_outputs()) is not None:
            yield from outputs.values[outputs.first :]
            if outputs.error is not None:
                raise outputs.error


def traced(pipeline: Pipeline) -> Mapping[str, tuple[str, ...]]:
    """Returns descriptions of the leaves of each stage's results for the first output, by the stage's label."""
    seen: dict[str, tuple[str, ...]] = {}

    def observe(label: str, result: Elements) -> None:
        if len(result.values):
            # The last call counts: a grouping operation measures elements before, under the same label.
            # Elements of a chain may be missing.
            seen[label] = leaf_texts(next((value for value in result.values if value is not None), None))

    next(first_outputs(pipeline, observe), None)
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


Decode: TypeAlias = Callable[[list[int]], str]
IMAGE_PIXELS = 256
TEXT_LENGTH = 1_000
TOKENS_SHOWN = 512

COMPANIONS = ("_segment_ids", "_positions")
"""Suffixes of the leaves that describe the packing of another leaf: `tokens_segment_ids` describes `tokens`."""

_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG's numbers for grey, grey with alpha, RGB and RGB with alpha, by number of channels."""

STYLE = """
.millstream .ms-grid{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:.6em;margin:.3em 0 1em}
.millstream .ms-grid figure{margin:0;overflow-wrap:anywhere}
.millstream .ms-grid img{width:100%}
.millstream img{min-width:4.5em;max-width:16em;image-rendering:pixelated;display:block}
.millstream .ms-segment{border-radius:3px;padding:0 .2em;margin-right:.15em;white-space:pre-wrap}
"""


@final
class Preview:
    """A rendering of a few batches for notebooks; `save` writes it as a page for a browser.

    Attributes:
        batches: the batches themselves.
    """

    def __init__(
        self, batches: Sequence[Any], *, is_batched: bool, rows: int, decode: Decode | None, classes: Sequence[str]
    ) -> None:
        self.batches = batches
        self._is_batched = is_batched
        self._rows = rows
        self._decode = decode
        self._classes = classes

    def __repr__(self) -> str:
        batches = count_text(len(self.batches), "batch")
        return f"<Preview of {batches}: displayed by notebooks; elsewhere, use .save('preview.html')>"

    def _repr_html_(self) -> str:
        return figure(*self._sections(), style=STYLE)

    def save(self, path: str | Path) -> Path:
        """Writes a self-contained page, and returns its path.

        Args:
            path: the file to write; an existing one is replaced.
        """
        path = Path(path)
        path.write_text(document("millstream: preview", self._repr_html_()), encoding="utf-8")
        return path

    def _sections(self) -> Iterator[str]:
        for number, batch in enumerate(self.batches):
            leaves = dict(tree.leaves(batch))
            rows, rest = [leaves], ""
            if self._is_batched:
                rows, count = rows_of(batch, leaves, self._rows)
                rest = f", {len(rows)} of {count_text(count, 'element')}" if count else ""
            yield f"<div>batch {number}{rest}</div>"
            yield self._elements(rows) if rows else "<div>no elements</div>"

    def _elements(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Returns a grid of images if each element is an image with numbers and texts; otherwise a table."""
        paths = [path for path in rows[0] if not _is_companion(path, rows[0])]
        label = _label(rows[0]) if self._classes else None
        cells = [{path: self._cell(row, path, is_class=path == label) for path in paths} for row in rows]
        large = [path for path in paths if isinstance(rows[0][path], np.ndarray) and rows[0][path].ndim]
        if len(large) != 1 or not cells[0][large[0]].startswith("<img"):
            return table([escaped(_title(path)) for path in paths], *(list(row.values()) for row in cells))
        names = {path: "" if path == label else f"{escaped(_title(path))} " for path in paths if path not in large}
        images = (
            "".join([row[large[0]], *(f"<div>{name}{row[path]}</div>" for path, name in names.items())])
            for row in cells
        )
        return f'<div class="ms-grid">{"".join(f"<figure>{image}</figure>" for image in images)}</div>'

    def _cell(self, row: Mapping[str, Any], path: str, *, is_class: bool) -> str:
        value = row[path]
        if is_class and isinstance(value, int | np.integer) and 0 <= int(value) < len(self._classes):
            return escaped(self._classes[int(value)])
        if not isinstance(value, np.ndarray) or not value.ndim:
            plain = value.item() if isinstance(value, np.generic) else value
            return escaped(_shortened(plain if isinstance(plain, str) else repr(plain)))
        if value.dtype.kind in "iu" and value.ndim == 1:
            segments = row.get(_companion(path, COMPANIONS[0]))
            return _tokens(value, segments if isinstance(segments, np.ndarray) else None, self._decode)
        pixels = pixels_of(value, IMAGE_PIXELS)
        if pixels is not None:
            data = base64.b64encode(png_of(pixels)).decode()
            return f'<img alt="{value.dtype} {value.shape}" src="data:image/png;base64,{data}">'
        return escaped(_shortened(f"{value.dtype} {value.shape}: {np.array2string(value, threshold=8, precision=3)}"))


def rows_of(batch: Any, leaves: Mapping[str, Any], limit: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the leaves of up to `limit` elements of a batch, and the number of all."""
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, np.ndarray | list) and np.ndim(leaf)]
    count = min(map(len, arrays), default=0)
    is_stacked = len(arrays) == len(leaves) and len(set(map(len, arrays))) == 1
    if type(batch) is list or (type(batch) is tuple and not is_stacked):
        elements = [dict(tree.leaves(element)) for element in batch]
        if all(_kinds(element) == _kinds(elements[0]) for element in elements):
            # A `batch_fn` has listed the elements.
            return elements[:limit], len(elements)
    rows = [
        {path: leaf[row] if np.ndim(leaf) and row < len(leaf) else leaf for path, leaf in leaves.items()}
        for row in range(min(limit, count))
    ]
    return rows, count


def _kinds(leaves: Mapping[str, Any]) -> dict[str, tuple[type, Any]]:
    return {path: (type(leaf), getattr(leaf, "dtype", None)) for path, leaf in leaves.items()}


def _is_companion(path: str, leaves: Iterable[str]) -> bool:
    return any(other != path and _companion(other, ending) == path for other in leaves for ending in COMPANIONS)


def _companion(path: str, ending: str) -> str:
    """Returns the path of a companion: `['tokens_segment_ids']` for `['tokens']`."""
    return f"{path[:-2]}{ending}{path[-2:]}" if path.endswith(("']", '"]')) else path + ending


def _title(path: str) -> str:
    """Returns the name of a leaf: `image` for `['image']`."""
    return path.replace("']['", ".").strip("[']") or "element"


def _label(row: Mapping[str, Any]) -> str | None:
    """Returns the leaf with the number of a class: the only integer, or the only one called `label`; else None."""
    numbers = [
        path for path, value in row.items() if isinstance(value, int | np.integer) and not isinstance(value, bool)
    ]
    found = numbers if len(numbers) == 1 else [path for path in numbers if _title(path) == "label"]
    return found[0] if found else None


def _tokens(tokens: NDArray[Any], segments: NDArray[Any] | None, decode: Decode | None) -> str:
    """Returns a row of tokens, coloured by segment. Tokens of segment 0 are padding."""
    if segments is None or segments.shape != tokens.shape:
        return escaped(_text(tokens, decode))
    bounds = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    spans = []
    for start, stop in itertools.pairwise(bounds):
        segment = int(segments[start]) if stop > start else 0
        if not segment:
            spans.append(f'<span class="ms-soft">{stop - start} padding tokens</span>' if stop > start else "")
            continue
        colour = f"hsl({segment * 137.5 % 360:.0f} 60% var(--ms-light))"
        spans.append(
            f'<span class="ms-segment" title="segment {segment}, {stop - start} tokens" style="background:{colour}">'
            f"{escaped(_text(tokens[start:stop], decode))}</span>"
        )
    return "".join(spans)


def _text(tokens: NDArray[Any], decode: Decode | None) -> str:
    shown: list[int] = tokens[:TOKENS_SHOWN].tolist()
    text = " ".join(map(str, shown)) if decode is None else str(decode(shown))
    return _shortened(text) + ("…" if len(tokens) > TOKENS_SHOWN and not text.endswith("…") else "")


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}…"


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Returns a PNG file, https://www.w3.org/TR/png-3/, of pixels of shape (height, width, 1 to 4 channels)."""
    height, width, channels = pixels.shape
    # Each line begins with the number of its filter: 0 is none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def pixels_of(array: NDArray[Any], max_size: int) -> NDArray[np.uint8] | None:
    """Returns an array as pixels of shape (height, width, channels), or None if it is not an image.

    An image is a two-dimensional array of bytes, booleans or floats, or one with 1, 3 or 4 channels last or first.
    If floats leave the range 0 … 1, the smallest becomes black and the largest white. Images larger than `max_size`
    lose rows and columns at regular intervals.
    """
    if array.dtype != np.uint8 and array.dtype.kind not in "bf":
        return None
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or min(array.shape[:2]) < 2:
        return None
    step = -(-max(array.shape[:2]) // max_size)
    array = array[::step, ::step]
    if array.dtype == np.uint8:
        return array
    values = array.astype(np.float64)
    known = values[np.isfinite(values)]
    smallest, largest = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if smallest < 0 or largest > 1:
        values = (values - smallest) / ((largest - smallest) or 1.0)
    return (np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255).round().astype(np.uint8)
