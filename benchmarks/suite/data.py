"""The data: made here, the same on every machine, files kept in a folder that git ignores."""

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.steps import IMAGE_SIDE, TOKEN_BYTES
from suite.work import SEED, Files

FOLDER = Path(os.environ.get("MILLSTREAM_BENCHMARK_DATA", Path(__file__).parents[1] / "data"))
"""Where files are kept."""

NUM_FILES = 4
BIG_SHAPE = (224, 224, 3)
"""150,528 bytes, as an image for a vision model."""


def integers(count: int) -> list[int]:
    """Returns the ints 0 … count - 1."""
    return list(range(count))


def vectors(count: int) -> list[NDArray[np.float32]]:
    """Returns float32 arrays of shape (64,)."""
    return list(np.random.default_rng(SEED).random((count, 64), dtype=np.float32))


def big_arrays(count: int) -> list[NDArray[np.uint8]]:
    """Returns uint8 arrays of BIG_SHAPE, each with its own memory."""
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, 256, BIG_SHAPE, dtype=np.uint8) for _ in range(count)]


def feature_columns(count: int) -> dict[str, NDArray[np.float32]]:
    """Returns one float32 column of 64 features a row."""
    return {"features": np.random.default_rng(SEED).random((count, 64), dtype=np.float32)}


def nested_dicts(count: int) -> list[dict[str, Any]]:
    """Returns nested dicts with 20 small leaves: ten int scalars, ten float32 arrays of shape (4,)."""
    arrays = np.random.default_rng(SEED).random((count, 10, 4), dtype=np.float32)
    return [
        {
            "scalars": {f"s{leaf}": 10 * record + leaf for leaf in range(10)},
            "vectors": {f"v{leaf}": arrays[record, leaf] for leaf in range(10)},
        }
        for record in range(count)
    ]


def sentences(count: int) -> list[str]:
    """Returns texts of 20 to 60 characters."""
    lengths = np.random.default_rng(SEED).integers(0, 40, count).tolist()
    return [f"text number {record:08d}{'x' * length}" for record, length in enumerate(lengths)]


def token_files(count: int) -> Files:
    """Returns ArrayRecord files of random records of 1 KB each."""

    def records(part: int) -> Iterable[bytes]:
        rng = np.random.default_rng((SEED, part))
        return (rng.bytes(TOKEN_BYTES) for _ in range(count // NUM_FILES))

    return _files(f"tokens-{count}", count // NUM_FILES, records)


def image_files(count: int) -> Files:
    """Returns ArrayRecord files of JPEG images: in each record 8 bytes of label, then the file."""

    def records(part: int) -> Iterable[bytes]:
        rng = np.random.default_rng((SEED, part))
        labels = range(part * count, part * count + count // NUM_FILES)
        return (label.to_bytes(8, "little") + _jpeg(rng) for label in labels)

    return _files(f"images-{count}", count // NUM_FILES, records)


def bring_into_memory(path: Path) -> None:
    """Reads a file to its end: it is in the system's page cache then, and no contender waits for the disk."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def _jpeg(rng: np.random.Generator) -> bytes:
    """Returns a JPEG file of soft shapes and some grain: about as many bytes as a photograph of that size."""
    from PIL import Image  # noqa: PLC0415  (only the images need it)

    shapes = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += rng.integers(-12, 13, pixels.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _files(name: str, records_per_file: int, records: Callable[[int], Iterable[bytes]]) -> Files:
    paths = [FOLDER / f"{name}-{part}-of-{NUM_FILES}.array_record" for part in range(NUM_FILES)]
    for part, path in enumerate(paths):
        if not path.exists():
            _write(path, records(part))
        bring_into_memory(path)
    return Files(tuple(map(str, paths)), records_per_file)


def _write(path: Path, records: Iterable[bytes]) -> None:
    """Writes a file that is either complete or not there."""
    from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415  (starts threads)

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    writer = ArrayRecordWriter(str(partial), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    partial.replace(path)
