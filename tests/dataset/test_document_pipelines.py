"""Pipelines of files and of documents as large trainers build them, in Grain's words, against plain Python."""

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream.experimental as grain_experimental
import millstream.python as grain
from support.files.record_files import write_tfrecord

ROW, BATCH, IGNORED = 8, 2, -100

pytestmark = pytest.mark.third_party


# ---- Files, some rows of which each host reads, cut into chunks and laid end to end ----------------------------------


class IndexShardIterator(grain.DatasetIterator[Any]):
    """Yields every n-th element; its state holds that of its parent."""

    def __init__(self, parent: Any, host_index: int, host_count: int) -> None:
        super().__init__(parent)
        self._host_index = host_index
        self._host_count = host_count
        self._next_index = 0

    def __next__(self) -> Any:
        while True:
            value = next(self._parent)
            self._next_index += 1
            if (self._next_index - 1) % self._host_count == self._host_index:
                return value

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next_index, "parent": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next_index = state["next_index"]
        self._parent.set_state(state["parent"])


class IndexShard(grain.IterDataset[Any]):
    """The elements of one of several hosts."""

    def __init__(self, parent: Any, host_index: int, host_count: int) -> None:
        super().__init__(parent)
        self._hosts = host_index, host_count

    def __iter__(self) -> Any:
        return IndexShardIterator(self._parent.__iter__(), *self._hosts)


@dataclasses.dataclass
class TokenizeAndChunk(grain_experimental.FlatMapTransform):
    """Splits a text into chunks of tokens, none of an empty one."""

    length: int
    max_fan_out: int = 2048

    def flat_map(self, element: dict[str, Any]) -> list[dict[str, Any]]:
        tokens = np.array([ord(letter) for letter in element["text"]], np.int32)
        return [{"text": tokens[start : start + self.length]} for start in range(0, len(tokens), self.length)]


class Rekey(grain.MapTransform):
    """Gives features another name, in place: one may become several."""

    def __init__(self, mapping_dict: dict[str, str]) -> None:
        self.mapping_dict = mapping_dict

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        """Returns the same element."""
        for new, old in self.mapping_dict.items():
            element[new] = element[old]
        for old in set(self.mapping_dict.values()):
            del element[old]
        return element


def text_of_bytes(element: Any) -> dict[str, Any]:
    return {"text": element.decode()} if isinstance(element, bytes) else element


def texts_of(file: int) -> list[str]:
    return [chr(97 + file) * (number * 13 % 21) for number in range(7 + file)]


def write_files(folder: Path, kind: str) -> list[str]:
    """Writes three files; returns their paths."""
    paths = [str(folder / f"{file}.{kind}") for file in range(3)]
    for file, path in enumerate(paths):
        if kind == "parquet":
            pq.write_table(pa.table({"text": texts_of(file)}), path, row_group_size=3)
        else:
            write_tfrecord(Path(path), [text.encode() for text in texts_of(file)])
    return paths


def batches_of_files(paths: Sequence[str], host: int, workers: int) -> Any:
    """Returns the batches of one host of two."""
    files = grain.MapDataset.source(paths).shuffle(seed=5).repeat(2)[slice(None)]
    opened: Any = grain_experimental.ParquetIterDataset if paths[0].endswith("parquet") else None
    dataset: Any = grain_experimental.InterleaveIterDataset(
        files.map(opened or grain_experimental.TFRecordIterDataset), cycle_length=2
    )
    dataset = IndexShard(dataset, host_index=host, host_count=2)
    dataset = grain_experimental.WindowShuffleIterDataset(dataset, window_size=5, seed=5)
    dataset = dataset.map(text_of_bytes).apply(TokenizeAndChunk(2 * ROW))
    dataset = dataset.map(Rekey({"inputs": "text", "targets": "text"}))
    dataset = grain_experimental.ConcatThenSplitIterDataset(
        dataset,
        length_struct={"inputs": ROW, "targets": ROW},
        bos_handling=grain_experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
        bos_features=["inputs"],
        bos_token_id=1,
    )
    dataset = dataset.map(Rekey({"segments": "targets_segment_ids", "places": "targets_positions"}))
    filled = functools.partial(grain_experimental.batch_and_pad, batch_size=BATCH, pad_value=0)
    return dataset.batch(BATCH, batch_fn=filled).mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in batch.items()}


@pytest.mark.parametrize("kind", ["tfrecord", "parquet"])
def test_every_token_of_files_comes_once_an_epoch(kind: str, tmp_path: Path) -> None:
    """On one of the hosts, for any number of workers; each state, also the first, resumes under another number."""
    paths = write_files(tmp_path, kind)
    counted: collections.Counter[int] = collections.Counter()
    for host in range(2):
        with iter(batches_of_files(paths, host, 0)) as iterator:
            states, batches = [json.dumps(iterator.get_state())], []
            for batch in iterator:
                batches.append(plain(batch))
                states.append(json.dumps(iterator.get_state()))
        for batch in batches:
            for inputs, targets, places in zip(batch["inputs"], batch["targets"], batch["places"], strict=True):
                counted.update(token for token in targets if token)
                begun = [1 if place == 0 and target else target for target, place in zip(targets, places, strict=True)]
                assert inputs == begun
        workers = 2 * host
        with iter(batches_of_files(paths, host, workers)) as iterator:
            assert [plain(batch) for batch in iterator] == batches
            for step in (1,) if workers else (0, len(batches) // 2, len(batches)):
                iterator.set_state(json.loads(states[step]))
                assert iterator.get_state() == json.loads(states[step])
                assert [plain(batch) for batch in iterator] == batches[step:]

    assert counted == collections.Counter(2 * list(map(ord, "".join(itertools.chain(*map(texts_of, range(3)))))))


# ---- Documents of several sources, shifted, packed and worked on ahead -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    """A document, and which of its tokens are to be learnt."""

    token_ids: np.ndarray[Any, Any]
    loss_mask: np.ndarray[Any, Any]


class Rows:
    """A source that says only `len` and `[]`: rows of one corpus."""

    def __init__(self, corpus: int, count: int) -> None:
        self._rows = [{"first": 1000 * (corpus + 1) + 20 * row, "length": row * 7 % 9} for row in range(count)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, int]:
        return self._rows[index]


def sample_of(row: dict[str, int]) -> Sample:
    """Returns the document of a row, whose first two tokens are a prompt."""
    tokens = np.arange(row["first"], row["first"] + row["length"])
    return Sample(tokens, np.arange(len(tokens)) >= 2)


def shifted(sample: Sample) -> dict[str, Any] | None:
    """Returns inputs and labels; None for a document that is too short for any."""
    if len(sample.token_ids) < 2:
        return None
    labels = np.where(sample.loss_mask[1:], sample.token_ids[1:], IGNORED)
    return {"input_ids": sample.token_ids[:-1], "labels": labels}


def for_training(features: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns what a training step takes: padding is not learnt."""
    labels = np.where(features["input_ids_segment_ids"] == 0, IGNORED, features["labels"])
    return {"input": features["input_ids"], "positions": features["input_ids_positions"]}, labels


def trainer(rank: int, packing: str, epochs: int | None = 2) -> Any:
    """Returns the iterator of one rank of two."""
    children: list[Any] = [grain.MapDataset.source(Rows(0, 23)), grain.MapDataset.source(Rows(1, 11))]
    children = [child.map(sample_of).filter(lambda sample: len(sample.token_ids) != 5) for child in children]
    dataset: Any = grain.MapDataset.mix(children, weights=[2 / 3, 1 / 3])
    dataset = dataset.shuffle(seed=42)[rank::2].repeat(epochs)
    dataset = dataset.map(shifted).filter(lambda features: features is not None)
    dataset = dataset.to_iter_dataset(read_options=grain.ReadOptions(num_threads=4, prefetch_buffer_size=64))
    lengths = {"input_ids": ROW, "labels": ROW}
    if packing == "split":
        dataset = grain_experimental.ConcatThenSplitIterDataset(dataset, length_struct=lengths, meta_features=())
    else:
        dataset = grain_experimental.FirstFitPackIterDataset(
            dataset,
            length_struct=lengths,
            num_packing_bins=BATCH,
            meta_features=("labels",),
            padding_struct={"labels": IGNORED},
            seed=42,
            shuffle_bins=False,
        )
    dataset = dataset.batch(batch_size=BATCH, drop_remainder=True).map(for_training)
    return iter(grain_experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=8))


def documents(rank: int, epochs: int) -> Iterator[dict[str, Any]]:
    """Yields the documents of a rank: positions of each epoch's own shuffle of the mixture, cut by hand."""
    mixed = grain.MapDataset.mix(
        [grain.MapDataset.source(Rows(0, 23)), grain.MapDataset.source(Rows(1, 11))], weights=[2 / 3, 1 / 3]
    )
    sampler = grain.IndexSampler(len(mixed), shuffle=True, seed=42, num_epochs=epochs)
    for epoch, offset in itertools.product(range(epochs), range(rank, len(mixed), 2)):
        # Epoch e of the mixture goes on where the one before has ended.
        key = sampler[epoch * len(mixed) + offset].record_key
        sample = sample_of(mixed[epoch * len(mixed) + key])
        features = None if len(sample.token_ids) == 5 else shifted(sample)
        if features is not None:
            yield features


@pytest.mark.parametrize("rank", [0, 1])
def test_documents_laid_end_to_end_are_those_of_plain_python(rank: int) -> None:
    """Token by token, with positions that begin anew in each piece; no label crosses documents; every state resumes."""
    cells: list[tuple[int, int, int]] = []
    for features in documents(rank, 2):
        for place, (token, label) in enumerate(zip(features["input_ids"], features["labels"], strict=True)):
            begins = place == 0 or len(cells) % ROW == 0
            cells.append((token, label, 0 if begins else cells[-1][2] + 1))
    # The last row is padded, and a last batch of fewer rows is dropped.
    num_rows = -(-len(cells) // ROW) // BATCH * BATCH
    cells = (cells + [(0, IGNORED, 0)] * ROW)[: num_rows * ROW]

    with trainer(rank, "split") as iterator:
        states, batches = [], []
        while True:
            states.append(json.dumps(iterator.get_state()))
            batch = next(iterator, None)
            if batch is None:
                break
            batches.append(batch)
    found = [
        cell
        for inputs, labels in batches
        for cell in zip(inputs["input"].flat, labels.flat, inputs["positions"].flat, strict=True)
    ]

    assert found == cells
    with trainer(rank, "split") as iterator:
        for step in (0, 2, len(batches)):
            iterator.set_state(json.loads(states[step]))
            assert [labels.tolist() for _, labels in iterator] == [labels.tolist() for _, labels in batches[step:]]


def test_packed_documents_of_both_ranks_are_an_epoch() -> None:
    """Each document is one segment of one rank, with its labels beside it; the ranks share none."""
    seen: list[list[list[tuple[int, int]]]] = []
    for rank in range(2):
        expected = [list(zip(*map(np.ndarray.tolist, one.values()), strict=True)) for one in documents(rank, 1)]
        found: list[list[tuple[int, int]]] = []
        with trainer(rank, "fit", None) as iterator:
            while len(found) < 2 * len(expected):
                inputs, labels = next(iterator)
                for row in range(BATCH):
                    starts = np.flatnonzero((inputs["positions"][row] == 0) & (inputs["input"][row] > 0))
                    ends = [*starts[1:], int((inputs["input"][row] > 0).sum())]
                    for start, end in zip(starts, ends, strict=True):
                        part = slice(int(start), int(end))
                        found.append(
                            list(zip(inputs["input"][row, part].tolist(), labels[row, part].tolist(), strict=True))
                        )
        assert [one for one in expected if one not in found] == []
        seen.append(found)
    assert not {str(one) for one in seen[0][:8]} & {str(one) for one in seen[1][:8]}
