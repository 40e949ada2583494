"""A pipeline of files as large trainers build it, in Grain's words, against plain Python.

Each host reads some rows of files, which are cut into chunks, shuffled in windows, and split into rows of tokens.
"""

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream.experimental as grain_experimental
import millstream.python as grain
from support.files.record_files import write_tfrecord

ROW, BATCH = 8, 2

pytestmark = pytest.mark.third_party


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
