"""Previews of batches: images as images, tokens as text, packed rows coloured by document."""

import base64
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.html_fragments import document, escaped, figure
from millstream.loader.reporting.png import pixels_of, png_of
from millstream.loader.reporting.quantities import count_text

Decode: TypeAlias = Callable[[list[int]], str]
"""Turns token ids into text."""

IMAGE_PIXELS = 256
"""Largest width and height of an image; larger ones are reduced."""

TEXT_LENGTH = 1_000
"""Longest text; longer ones are cut."""

TOKENS_SHOWN = 512
"""Number of tokens displayed of a row."""

COMPANIONS = ("_segment_ids", "_positions")
"""Suffixes of the leaves that describe the packing of another leaf: `tokens_segment_ids` describes `tokens`."""

STYLE = """
.millstream table{border-collapse:collapse;margin:.3em 0 1em;max-width:100%}
.millstream th,.millstream td{border:1px solid var(--ms-line);padding:.25em .6em;text-align:left;vertical-align:top;
background:var(--ms-page);color:var(--ms-text);overflow-wrap:anywhere}
.millstream th{background:var(--ms-box);font-weight:600}
.millstream img{min-width:4.5em;max-width:16em;image-rendering:pixelated;display:block}
.millstream .ms-segment{border-radius:3px;padding:0 .2em;margin-right:.15em;white-space:pre-wrap}
"""


@final
class Preview:
    """A rendering of a few batches for notebooks; `save` writes it as a page for a browser.

    Attributes:
        batches: the batches themselves.
    """

    def __init__(self, batches: Sequence[Any], *, is_batched: bool, rows: int, decode: Decode | None) -> None:
        self.batches = batches
        self._is_batched = is_batched
        self._rows = rows
        self._decode = decode

    def __repr__(self) -> str:
        batches = count_text(len(self.batches), "batch")
        return f"<Preview of {batches}: displayed by notebooks; elsewhere, use .save('preview.html')>"

    def _repr_html_(self) -> str:
        return figure(*self._tables(), style=STYLE)

    def save(self, path: str | Path) -> Path:
        """Writes a self-contained page, and returns its path.

        Args:
            path: the file to write; an existing one is replaced.
        """
        path = Path(path)
        path.write_text(document("millstream: preview", self._repr_html_()), encoding="utf-8")
        return path

    def _tables(self) -> Iterator[str]:
        for number, batch in enumerate(self.batches):
            leaves = dict(tree.leaves(batch))
            rows = rows_of(leaves, self._rows) if self._is_batched else [leaves]
            yield f"<div>batch {number}{_rest(leaves, len(rows)) if self._is_batched else ''}</div>"
            yield table(rows, self._decode)


def rows_of(leaves: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Returns the first elements of a batch, each as leaves by path."""
    lengths = [len(leaf) for leaf in leaves.values() if isinstance(leaf, np.ndarray | list) and np.ndim(leaf)]
    return [
        {path: leaf[row] if np.ndim(leaf) and row < len(leaf) else leaf for path, leaf in leaves.items()}
        for row in range(min(limit, min(lengths, default=0)))
    ]


def table(rows: Sequence[Mapping[str, Any]], decode: Decode | None) -> str:
    """Returns a table of elements with a column per leaf, except the leaves that describe the packing of others."""
    if not rows:
        return "<div>no elements</div>"
    paths = [path for path in rows[0] if not _is_companion(path, rows[0])]
    head = "".join(f"<th>{escaped(path or 'element')}</th>" for path in paths)
    lines = ("".join(f"<td>{_cell(row, path, decode)}</td>" for path in paths) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _rest(leaves: Mapping[str, Any], shown: int) -> str:
    sizes = {len(leaf) for leaf in leaves.values() if isinstance(leaf, np.ndarray) and leaf.ndim}
    return f", {shown} of {count_text(min(sizes), 'element')}" if sizes else ""


def _is_companion(path: str, leaves: Iterable[str]) -> bool:
    return any(other != path and _companion(other, ending) == path for other in leaves for ending in COMPANIONS)


def _companion(path: str, ending: str) -> str:
    """Returns the path of a companion: `['tokens_segment_ids']` for `['tokens']`."""
    return f"{path[:-2]}{ending}{path[-2:]}" if path.endswith(("']", '"]')) else path + ending


def _cell(row: Mapping[str, Any], path: str, decode: Decode | None) -> str:
    value = row[path]
    if not isinstance(value, np.ndarray) or not value.ndim:
        return escaped(_shortened(value if isinstance(value, str) else repr(_plain(value))))
    if value.dtype.kind in "iu" and value.ndim == 1:
        segments = row.get(_companion(path, COMPANIONS[0]))
        return _tokens(value, segments if isinstance(segments, np.ndarray) else None, decode)
    pixels = pixels_of(value, IMAGE_PIXELS)
    if pixels is not None:
        data = base64.b64encode(png_of(pixels)).decode()
        return f'<img alt="{value.dtype} {value.shape}" src="data:image/png;base64,{data}">'
    return escaped(_shortened(f"{value.dtype} {value.shape}: {np.array2string(value, threshold=8, precision=3)}"))


def _tokens(tokens: NDArray[Any], segments: NDArray[Any] | None, decode: Decode | None) -> str:
    """Returns a row of tokens, coloured by segment. Tokens of segment 0 are padding."""
    if segments is None or segments.shape != tokens.shape:
        return escaped(_text(tokens, decode))
    bounds = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    parts = []
    for start, stop in itertools.pairwise(bounds):
        segment = int(segments[start]) if stop > start else 0
        if not segment:
            parts.append(f'<span class="ms-soft">{stop - start} padding tokens</span>' if stop > start else "")
            continue
        colour = f"hsl({segment * 137.5 % 360:.0f} 60% var(--ms-light))"
        parts.append(
            f'<span class="ms-segment" title="segment {segment}, {stop - start} tokens" style="background:{colour}">'
            f"{escaped(_text(tokens[start:stop], decode))}</span>"
        )
    return "".join(parts)


def _text(tokens: NDArray[Any], decode: Decode | None) -> str:
    shown: list[int] = tokens[:TOKENS_SHOWN].tolist()
    text = " ".join(map(str, shown)) if decode is None else str(decode(shown))
    return _shortened(text) + ("…" if len(tokens) > TOKENS_SHOWN and not text.endswith("…") else "")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}…"
