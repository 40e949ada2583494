"""Spans of local files that are read into memory, together if they are near each other."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.sources.storage.byte_files import LocalFile

SIZE = 3 << 20
LENGTH = 24
RNG = np.random.default_rng(0)
STARTS = {
    "adjacent": np.arange(64) * LENGTH + 5,
    "one": np.array([77]),
    "backwards": np.arange(64)[::-1] * LENGTH,
    "overlapping": np.arange(64) * (LENGTH - 1),
    "repeated": np.full(64, 9),
    "a window": RNG.permutation(512)[:64] * LENGTH,
    "two adjacent ones in the wrong order": np.array([LENGTH, 0]),
    "more bytes than are read together": np.arange(64) * 16_000,
    "far": RNG.permutation(SIZE - LENGTH)[:64],
    "at the end": np.array([SIZE - 2 * LENGTH, SIZE - LENGTH]),
}
TOGETHER = {"adjacent", "one", "backwards", "overlapping", "repeated", "a window", "at the end"}
TOGETHER |= {"two adjacent ones in the wrong order"}


@pytest.mark.parametrize("name", STARTS)
def test_near_spans_are_read_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The bytes are those of the file, in the order of the spans; far ones take a call each."""
    content = RNG.integers(0, 256, SIZE, dtype=np.uint8)
    content.tofile(tmp_path / "a")
    starts = STARTS[name].tolist()
    rows = np.zeros((len(starts), LENGTH), np.uint8)
    preadv = os.preadv
    calls: list[int] = []

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    with contextlib.closing(LocalFile(str(tmp_path / "a"))) as file:
        assert file.read_into(starts, rows) == [LENGTH] * len(starts)
    assert rows.tolist() == [content[start : start + LENGTH].tolist() for start in starts]
    assert len(calls) == (1 if name in TOGETHER else len(starts))


@pytest.mark.parametrize("step", [LENGTH, LENGTH + 7])
def test_spans_beyond_the_end_are_short(tmp_path: Path, step: int) -> None:
    """Of spans that are near each other, those that the file has are whole."""
    content = np.arange(200, dtype=np.uint8)
    content.tofile(tmp_path / "a")
    starts = [number * step for number in range(20)]
    rows = np.zeros((20, LENGTH), np.uint8)
    with contextlib.closing(LocalFile(str(tmp_path / "a"))) as file:
        lengths = file.read_into(starts, rows)
    assert lengths == [min(LENGTH, max(0, 200 - start)) for start in starts]
    for start, length, row in zip(starts, lengths, rows, strict=True):
        assert row[:length].tolist() == content[start : start + length].tolist()
