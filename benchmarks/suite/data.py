"""The data of the cases: in memory, or in files that are written once and then lie in the page cache."""

import functools
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.steps import TOKEN_BYTES
from suite.work import SEED, Files, Mixture

FOLDER = Path(os.environ.get("MILLSTREAM_BENCHMARK_DATA", Path(__file__).parents[1] / "data"))
"""The folder of the files."""

NUM_FILES = 4
IMAGE_SHAPE = (375, 500, 3)
"""Of ImageNet's photographs, about."""

ROW_LENGTH = 2048
"""Tokens in a packed row, and in the longest document."""

BIG_SHAPE = (224, 224, 3)
"""150,528 bytes."""

ROWS_IN_GROUP = 1000
"""Texts in a row group of Parquet."""


class SlowSource(Sequence[Any]):
    """The ints 0 … count - 1, each of which takes some seconds to read, like an object in a remote store."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Any) -> Any:
        if not 0 <= key < self._count:
            raise IndexError(f"{key} is not in 0 … {self._count - 1}")
        time.sleep(self._seconds)
        return int(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._count}, {self._seconds})"


def big_arrays(count: int) -> list[NDArray[np.uint8]]:
    """Returns uint8 arrays of BIG_SHAPE, each with its own memory."""
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, 256, BIG_SHAPE, dtype=np.uint8) for _ in range(count)]


def feature_columns(count: int) -> dict[str, NDArray[np.float32]]:
    """Returns one float32 column of 64 features a row."""
    return {"features": np.random.default_rng(SEED).random((count, 64), dtype=np.float32)}


def documents(count: int) -> list[NDArray[np.uint16]]:
    """Returns documents of 1 to 2,048 tokens, in lengths that are log-normal, as those of web text are."""
    rng = np.random.default_rng(SEED)
    lengths = np.clip(rng.lognormal(5.9, 1.1, count), 1, ROW_LENGTH).astype(np.int64)
    return [rng.integers(0, 50_000, length, dtype=np.uint16) for length in lengths.tolist()]


def token_files(count: int) -> Files:
    """Returns ArrayRecord files of random records of 1 KB each."""
    return _array_records(f"tokens-{count}", count // NUM_FILES, NUM_FILES, _random_bytes(count // NUM_FILES))


def token_components(count: int, components: int) -> Mixture:
    """Returns as many ArrayRecord files as there are components: random records of 1 KB, `count` in all."""
    files = _array_records(f"components-{count}", count // components, components, _random_bytes(count // components))
    return Mixture(tuple(Files((path,), files.records_per_file) for path in files.paths))


def image_files(count: int) -> Files:
    """Returns ArrayRecord files of JPEG images: in each record 8 bytes of label, then the file."""

    def records(part: int) -> Iterator[bytes]:
        rng = np.random.default_rng((SEED, part))
        return ((part * count + row).to_bytes(8, "little") + _jpeg(rng) for row in range(count // NUM_FILES))

    return _array_records(f"images-{count}", count // NUM_FILES, NUM_FILES, records)


def json_files(count: int) -> Files:
    """Returns files of JSON on lines of some 600 characters: a number, and 100 tokens."""

    def write(part: int, path: Path) -> None:
        tokens = np.random.default_rng((SEED, part)).integers(0, 50_000, (count // NUM_FILES, 100)).tolist()
        lines = (json.dumps({"id": part * count + row, "tokens": tokens[row]}) for row in range(len(tokens)))
        path.write_text("".join(f"{line}\n" for line in lines))

    return _files(f"lines-{count}", "json_lines", count // NUM_FILES, NUM_FILES, write)


def text_files(count: int) -> Files:
    """Returns Parquet files with a column of texts of some 600 characters."""
    import pyarrow as pa  # noqa: PLC0415  (only the texts need it)
    import pyarrow.parquet as pq  # noqa: PLC0415

    def write(part: int, path: Path) -> None:
        texts = list(_texts(np.random.default_rng((SEED, part)), count // NUM_FILES))
        pq.write_table(pa.table({"text": texts}), path, row_group_size=ROWS_IN_GROUP, compression="zstd")

    return _files(f"texts-{count}", "parquet", count // NUM_FILES, NUM_FILES, write)


def tokenizer_file() -> Path:
    """Returns a byte-pair encoding of 8,192 tokens that was trained on such texts."""
    import tokenizers  # noqa: PLC0415  (only the texts need it)

    def write(path: Path) -> None:
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(_texts(np.random.default_rng(SEED), 2000), vocab_size=8192, show_progress=False)
        tokenizer.save(str(path))

    path = FOLDER / "tokenizer.json"
    _keep(path, write)
    return path


def bring_into_memory(path: Path) -> None:
    """Reads a file: it is in the page cache then, and no contender waits for the disk."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def _texts(rng: np.random.Generator, count: int) -> Iterator[str]:
    """Yields texts of made-up words whose frequencies fall off as those of a language do."""
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    makers = np.random.default_rng(SEED)
    words = ["".join(letters[makers.zipf(1.3, makers.integers(1, 10)) % 26]) for _ in range(20_000)]
    for _ in range(count):
        yield " ".join(words[index % 20_000] for index in rng.zipf(1.2, rng.integers(40, 180)).tolist())


def _jpeg(rng: np.random.Generator) -> bytes:
    """Returns a JPEG file of soft shapes and some grain: about as many bytes as a photograph of that size."""
    from PIL import Image  # noqa: PLC0415  (only the images need it)

    height, width, _ = IMAGE_SHAPE
    shapes = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += rng.integers(-12, 13, pixels.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _random_bytes(count: int) -> Callable[[int], Iterable[bytes]]:
    def records(part: int) -> Iterable[bytes]:
        rng = np.random.default_rng((SEED, part))
        return (rng.bytes(TOKEN_BYTES) for _ in range(count))

    return records


def _array_records(name: str, size: int, num_files: int, records: Callable[[int], Iterable[bytes]]) -> Files:
    def write(part: int, path: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415  (starts threads)

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for record in records(part):
            writer.write(record)
        writer.close()

    return _files(name, "array_record", size, num_files, write)


def _files(name: str, form: str, size: int, num_files: int, write: Callable[[int, Path], None]) -> Files:
    paths = [FOLDER / f"{name}-{part}-of-{num_files}.{form}" for part in range(num_files)]
    for part, path in enumerate(paths):
        _keep(path, functools.partial(write, part))
    return Files(tuple(map(str, paths)), size, form)


def _keep(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file unless it is there, which it is only if it is complete; brings it into memory."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        write(partial)
        partial.rename(path)
    bring_into_memory(path)
