"""Did every contender deliver the same records? Compares what came as multisets: orders differ by design."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.case import Contender
from suite.peers.bare_loop import ADAPTER as BARE_LOOP
from suite.work import Work

_MODULUS = 1 << 64


@dataclasses.dataclass(frozen=True)
class Content:
    """What a stream delivered."""

    count: int
    digest: int


def expected_content(work: Work, view: Callable[[Any], Any]) -> Content:
    stream = BARE_LOOP.open(dataclasses.replace(work, one_epoch=True), Contender("bare", mode="loop"))
    return content_of(stream.batches, view, batched=work.batch_size is not None)


def content_of(batches: Iterable[Any], view: Callable[[Any], Any], *, batched: bool) -> Content:
    count = digest = 0
    for batch in batches:
        leaves = list(_leaves(view(batch), ""))
        columns = [(path, _array(leaf) if batched else _array([leaf])) for path, leaf in leaves]
        for row in range(len(columns[0][1])):
            count += 1
            digest += _hash((path, column[row]) for path, column in columns)
    return Content(count, digest % _MODULUS)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _leaves(value[name], f"{path}/{name}")
    else:
        yield path, value


def _array(leaf: Any) -> NDArray[Any]:
    """Returns an array of the leaf; text is made one kind of text, as bytes are what TensorFlow has for it."""
    array = np.asarray(leaf)
    if array.dtype == object or array.dtype.kind in "SU":
        texts = [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]
        return np.array(texts, dtype=object).reshape(array.shape)
    return array


def _hash(named: Iterable[tuple[str, Any]]) -> int:
    whole = hashlib.blake2b(digest_size=8)
    for path, value in named:
        is_text = isinstance(value, str)
        content = value.encode() if is_text else value.tobytes()
        whole.update(repr((path, None if is_text else (value.dtype.str, value.shape), len(content))).encode() + content)
    return int.from_bytes(whole.digest(), "little")
