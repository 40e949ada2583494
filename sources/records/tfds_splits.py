"""The splits of a TensorFlow Datasets dataset, and the files and records that a slice of them selects.

For each split, `dataset_info.json` contains the number of records per file and a template of the file names. The
notation `train[:80%]+test` is described at tensorflow.org/datasets/splits.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from millstream.sources.storage.paths import FileRange, member_path

_ONE = re.compile(r"(?P<name>[\w-]+)(?:\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\])?")
_BOUND = re.compile(r"(-?[\d_.]+)(%?)")

_WORD = re.compile(r"\{(\w+)\}")

_DEFAULT_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


@final
@dataclasses.dataclass(frozen=True)
class Split:
    """A split as it is stored: its files, and the number of records of each."""

    name: str
    files: Sequence[str]
    lengths: Sequence[int]

    @property
    def num_records(self) -> int:
        return sum(self.lengths)

    def ranges(self, start: int, stop: int) -> Iterator[FileRange]:
        """Yields the ranges of the files that hold the records [start, stop) of the split."""
        ends = list(itertools.accumulate(self.lengths))
        for file, length, end in zip(self.files, self.lengths, ends, strict=True):
            first, last = max(start, end - length), min(stop, end)
            if first < last:
                yield FileRange(file, first - (end - length), last - (end - length))


def splits_of(info: Mapping[str, Any], folder: str, file_format: str) -> dict[str, Split]:
    """Returns the splits of a dataset by name, given its `dataset_info.json` and its folder."""
    splits = {}
    for entry in info.get("splits", []):
        lengths = [int(length) for length in entry.get("shardLengths", [])]
        template = entry.get("filepathTemplate") or _DEFAULT_TEMPLATE
        count, digits = len(lengths), max(5, len(str(len(lengths))))
        files = []
        for number in range(count):
            fields = {
                "DATASET": info.get("name", ""),
                "SPLIT": entry["name"],
                "FILEFORMAT": file_format,
                "SHARD_INDEX": f"{number:0{digits}}",
                "NUM_SHARDS": f"{count:0{digits}}",
                "SHARD_X_OF_Y": f"{number:0{digits}}-of-{count:0{digits}}",
            }
            name = _WORD.sub(lambda match, fields=fields: fields.get(match[1], match[0]), template)
            files.append(member_path(folder, name))
        splits[entry["name"]] = Split(entry["name"], files, lengths)
    return splits


def ranges_of(text: str, splits: Mapping[str, Split]) -> list[FileRange]:
    """Returns the ranges of files for a split such as `train`, `train[:80%]` or `train[100:200]+test`."""
    found: list[FileRange] = []
    for slice_text in text.split("+"):
        one = _ONE.fullmatch(slice_text.strip())
        if one is None:
            raise ValueError(
                "split must be a name with an optional slice of records or percents, or several of these "
                f"joined by '+', such as 'train', 'train[:80%]' or 'train[100:200]+test', got {text!r}."
            )
        if one["name"] == "all" and one["start"] is None and "all" not in splits:
            chosen = list(splits.values())
        elif one["name"] not in splits:
            raise ValueError(f"split must be one of {', '.join(map(repr, splits))}, or 'all', got {text!r}.")
        else:
            chosen = [splits[one["name"]]]
        for split in chosen:
            start = _bound(one["start"], 0, split, text)
            stop = _bound(one["stop"], split.num_records, split, text)
            found += split.ranges(start, stop)
    if not found:
        raise ValueError(f"A source must hold at least one record, got none in the split {text!r}.")
    return found


def _bound(text: str | None, default: int, split: Split, whole: str) -> int:
    if not text:
        return default
    match, count = _BOUND.fullmatch(text.strip()), split.num_records
    try:
        if match is None:
            raise ValueError  # noqa: TRY301  (as for text that is not a number)
        # TFDS rounds percents in the same way: to the closest, halves to the even one.
        position = round(float(match[1]) * count / 100) if match[2] else int(match[1])
    except ValueError:
        raise ValueError(
            f"A slice of a split must have record numbers or percents, such as [10:20] or [:80%], got {whole!r}."
        ) from None
    if abs(position) > count:
        raise ValueError(f"Split {split.name!r} has {count} records, too few for {text} in {whole!r}.")
    return position + count if position < 0 else position
