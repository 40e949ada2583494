"""Pipelines as large trainers build them, in Grain's words: what they feed a model with, against plain Python."""

import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import millstream as grain

LENGTH, BATCH, PAD = 8, 4, 0
WEIGHTS = {"web": 0.7, "books": 0.3}

pytestmark = pytest.mark.third_party


@dataclasses.dataclass
class TokenizeAndTrim(grain.MapTransform):
    """Makes token ids of a text, in place; holds a lock, as tokenizers do."""

    def __init__(self, names: tuple[str, ...], length: int) -> None:
        self.names = names
        self.length = length
        self._lock = threading.Lock()

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        """Adds a feature of tokens for each name."""
        with self._lock:
            text = element.pop("text")
        for name in self.names:
            element[name] = np.array([ord(letter) for letter in text][: self.length], np.int32)
        return element

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


@dataclasses.dataclass
class Rekey(grain.MapTransform):
    """Renames features, in place."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        for new, old in self.names.items():
            element[new] = element.pop(old)
        return element


def parse(record: bytes) -> dict[str, Any]:
    return {"text": record.decode()}


def texts(name: str, count: int) -> list[str]:
    return [name[0] * (1 + number * 3 % LENGTH) for number in range(count)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Returns a file for each component."""
    for name, count in (("web", 40), ("books", 25)):
        writer = ArrayRecordWriter(str(tmp_path / f"{name}.array_record"), "group_size:1")
        for text in texts(name, count):
            writer.write(text.encode())
        writer.close()
    return {name: str(tmp_path / f"{name}.array_record") for name in WEIGHTS}


def mixture(files: dict[str, str], host: int = 0, hosts: int = 1) -> grain.IterDataset[Any]:
    """Returns the mixed records of a host."""
    parts = {}
    for name, path in files.items():
        dataset = grain.MapDataset.source(grain.ArrayRecordDataSource(path)).shuffle(seed=7).repeat(2)
        reading = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
        parts[name] = dataset[host::hosts].to_iter_dataset(read_options=reading)
    return grain.IterDataset.mix(parts, WEIGHTS)


def pipeline(files: dict[str, str], workers: int, *, packs: bool) -> grain.IterDataset[Any]:
    """Returns the batches of a host of two."""
    dataset = mixture(files, 1, 2).map(parse).map(TokenizeAndTrim(("inputs", "targets"), LENGTH))
    if packs:
        dataset = grain.experimental.FirstFitPackIterDataset(
            dataset, length_struct={"inputs": LENGTH, "targets": LENGTH}, num_packing_bins=BATCH
        )
        names = {"inputs_segmentation": "inputs_segment_ids", "targets_segmentation": "targets_segment_ids"}
        dataset = dataset.map(Rekey({**names, "inputs_position": "inputs_positions"}))
    else:
        dataset = dataset.map(pad_to_length)
    batch = functools.partial(grain.experimental.batch_and_pad, batch_size=BATCH, pad_value=PAD)
    dataset = dataset.batch(BATCH, batch_fn=batch)
    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1))


def pad_to_length(element: dict[str, Any]) -> dict[str, Any]:
    return {name: np.pad(value, (0, LENGTH - len(value)), constant_values=PAD) for name, value in element.items()}


def expected_texts() -> Iterator[str]:
    """Yields the texts of the second of two hosts: the samplers' orders, cut by hand, in the turns of a mixture."""
    orders = {}
    for name, count in (("web", 40), ("books", 25)):
        sampler = grain.IndexSampler(count, shuffle=True, seed=7, num_epochs=2)
        orders[name] = iter([texts(name, count)[sampler[position].record_key] for position in range(1, 2 * count, 2)])
    for name in mixed_names():
        text = next(orders[name], None)
        if text is None:
            return
        yield text


def mixed_names() -> Iterator[str]:
    endless = {name: grain.MapDataset.source([name]).repeat().to_iter_dataset() for name in WEIGHTS}
    return iter(grain.IterDataset.mix(endless, WEIGHTS))


@pytest.mark.parametrize("workers", [0, 2])
def test_padded_batches_are_those_of_plain_python(files: dict[str, str], workers: int) -> None:
    """Mixed, tokenized, padded and batched, with the last batch filled up; and a resume in the middle."""
    rows = [[ord(letter) for letter in text] + [PAD] * (LENGTH - len(text)) for text in expected_texts()]
    rows += [[PAD] * LENGTH] * (-len(rows) % BATCH)
    expected = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]

    with iter(pipeline(files, workers, packs=False)) as iterator:
        begun = [next(iterator) for _ in range(3)]
        state = json.dumps(iterator.get_state())
        ends = list(iterator)
    with iter(pipeline(files, 2 - workers, packs=False)) as iterator:
        iterator.set_state(json.loads(state))
        resumed = list(iterator)

    assert [batch["inputs"].tolist() for batch in begun + ends] == expected
    assert [batch["targets"].tolist() for batch in resumed] == expected[3:]


def test_packed_batches_lose_nothing(files: dict[str, str]) -> None:
    """Every text is one segment, whatever the workers; each state restores under another number of them."""
    with iter(pipeline(files, 0, packs=True)) as iterator:
        batches, states = [], [json.dumps(iterator.get_state())]
        for batch in iterator:
            batches.append(batch)
            states.append(json.dumps(iterator.get_state()))
    segments = []
    for row, ids in zip(
        itertools.chain.from_iterable(batch["inputs"] for batch in batches),
        itertools.chain.from_iterable(batch["inputs_segmentation"] for batch in batches),
        strict=True,
    ):
        segments += ["".join(map(chr, row[ids == segment])) for segment in range(1, ids.max() + 1)]

    assert sorted(segments) == sorted(expected_texts())
    assert {batch["inputs_position"].shape for batch in batches} == {(BATCH, LENGTH)}
    with iter(pipeline(files, 2, packs=True)) as iterator:
        for step in (0, 2, len(batches) - 1, len(batches)):
            iterator.set_state(json.loads(states[step]))
            for batch, other in zip(batches[step:], iterator, strict=True):
                assert {name: value.tolist() for name, value in batch.items()} == {
                    name: value.tolist() for name, value in other.items()
                }
