"""The data: made here, the same on every machine, files kept in a folder that git ignores."""

import functools
import io
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite import formats, tables
from suite.array_files import ARRAY_FORMATS
from suite.steps import IMAGE_SIDE, TOKEN_BYTES
from suite.work import SEED, Files, Mixture, Records

FOLDER = Path(os.environ.get("MILLSTREAM_BENCHMARK_DATA", Path(__file__).parents[1] / "data"))
"""The folder of the files."""

NUM_FILES = 4
ROW_LENGTH = 2048
"""Tokens in a packed row, and in the longest document."""

BIG_SHAPE = (224, 224, 3)
"""150,528 bytes, as an image for a vision model."""


class SlowSource(Sequence[Any]):
    """The ints 0 … count - 1, each of which takes some seconds to read, like an object in a remote store."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Any) -> Any:
        time.sleep(self._seconds)
        return int(key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._count}, {self._seconds})"


def integers(count: int) -> list[int]:
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


def token_files(count: int, form: str = "array_record", options: str = "") -> Files:
    """Returns files of random records of 1 KB each."""
    name = "-".join(("tokens", *([options] if options else []), str(count)))
    return _files(name, count // NUM_FILES, _random_bytes(count // NUM_FILES), form=form, options=options)


def token_components(count: int, components: int) -> Mixture:
    """Returns as many ArrayRecord files as there are components: random records of 1 KB, `count` in all."""
    files = _files(f"components-{count}", count // components, _random_bytes(count // components), num_files=components)
    return Mixture(tuple(Files((path,), files.records_per_file) for path in files.paths))


def integer_components(count: int, components: int) -> Mixture:
    size = count // components
    return Mixture(tuple(Records(list(range(start, start + size))) for start in range(0, size * components, size)))


def text_files(count: int) -> Files:
    texts = sentences(count)
    return _files(f"sentences-{count}", count // NUM_FILES, lambda part: texts[part::NUM_FILES], form="text")


def many_text_files(count: int) -> Files:
    """Returns files with four of the `sentences` each on lines."""
    texts, num_files = sentences(count), count // 4
    return _files(f"many-{count}", 4, lambda part: texts[4 * part : 4 * part + 4], form="text", num_files=num_files)


def json_files(count: int) -> Files:
    """Returns files of JSON on lines of some 600 characters: a number, and 100 tokens."""

    def records(part: int) -> Iterable[dict[str, Any]]:
        tokens = np.random.default_rng((SEED, part)).integers(0, 50_000, (count // NUM_FILES, 100)).tolist()
        return ({"id": part * count + row, "tokens": tokens[row]} for row in range(len(tokens)))

    return _files(f"json-{count}", count // NUM_FILES, records, form="json_lines")


def csv_files(count: int) -> Files:
    """Returns CSV files with rows of some 60 characters: a number, and eight fractions."""

    def records(part: int) -> Iterable[dict[str, Any]]:
        values = np.random.default_rng((SEED, part)).integers(0, 10_000, (count // NUM_FILES, 8)) / 16
        rows = values.tolist()
        return (
            dict(zip(formats.CSV_COLUMNS, (part * count + row, *rows[row]), strict=True)) for row in range(len(rows))
        )

    return _files(f"csv-{count}", count // NUM_FILES, records, form="csv")


def sample_files(count: int) -> Files:
    """Returns WebDataset archives with samples of two members: 1 KB of random bytes, and a label in digits."""

    def records(part: int) -> Iterable[dict[str, Any]]:
        contents = _random_bytes(count // NUM_FILES)(part)
        return (
            {"__key__": f"{part}-{row:07d}", "bin": content, "cls": str(part * count + row).encode()}
            for row, content in enumerate(contents)
        )

    return _files(f"samples-{count}", count // NUM_FILES, records, form="webdataset")


def table_files(count: int, form: str, *, is_wide: bool = False) -> Files:
    """Returns Parquet files, or Arrow files as HF datasets keeps them: a number, and 512 tokens."""
    size = count // NUM_FILES
    name = f"tables-{'wide-' if is_wide else ''}{count}"
    paths = [FOLDER / f"{name}-{part}-of-{NUM_FILES}.{form}" for part in range(NUM_FILES)]
    for part, path in enumerate(paths):
        rng = np.random.default_rng((SEED, part))
        _keep(path, functools.partial(tables.write, form=form, first=part * size, count=size, rng=rng, is_wide=is_wide))
    return Files(tuple(map(str, paths)), size, form, tables.COLUMNS)


def array_files(count: int, form: str, shape: tuple[int, ...]) -> Files:
    """Returns a file or folder of random rows: of bytes if they have several axes, else of uint16 tokens."""

    def write(partial: Path) -> None:
        dtype = np.uint8 if len(shape) > 1 else np.uint16
        rows = np.random.default_rng(SEED).integers(0, 50_000 if len(shape) == 1 else 256, (count, *shape), dtype)
        ARRAY_FORMATS[form].write(partial, rows)

    path = FOLDER / f"rows-{count}.{form}"
    _keep(path, write)
    return Files((str(path),), count, form)


def documents(count: int) -> list[NDArray[np.uint16]]:
    """Returns documents of 1 to 2,048 tokens, in lengths that are log-normal, as those of web text are."""
    rng = np.random.default_rng(SEED)
    return [rng.integers(0, 50_000, length, dtype=np.uint16) for length in document_lengths(count).tolist()]


def document_lengths(count: int) -> NDArray[np.int64]:
    """Returns how long such documents are: 600 tokens on average, 370 in the middle."""
    lengths = np.random.default_rng(SEED).lognormal(5.9, 1.1, count)
    return np.clip(lengths, 1, ROW_LENGTH).astype(np.int64)


def image_files(count: int) -> Files:
    """Returns ArrayRecord files of JPEG images: in each record 8 bytes of label, then the file."""

    def records(part: int) -> Iterable[bytes]:
        rng = np.random.default_rng((SEED, part))
        labels = range(part * count, part * count + count // NUM_FILES)
        return (label.to_bytes(8, "little") + _jpeg(rng) for label in labels)

    return _files(f"images-{count}", count // NUM_FILES, records)


def bring_into_memory(path: Path) -> None:
    """Reads a file, or those of a folder: they are in the page cache then, and no contender waits for the disk."""
    for part in path.rglob("*") if path.is_dir() else [path]:
        if part.is_file():
            with part.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def _keep(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file or folder unless it is there, which it is only if it is complete; brings it into memory."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        write(partial)
        partial.rename(path)
    bring_into_memory(path)


def _jpeg(rng: np.random.Generator) -> bytes:
    """Returns a JPEG file of soft shapes and some grain: about as many bytes as a photograph of that size."""
    from PIL import Image  # noqa: PLC0415  (only the images need it)

    shapes = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += rng.integers(-12, 13, pixels.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _random_bytes(count: int) -> Callable[[int], Iterable[bytes]]:
    def records(part: int) -> Iterable[bytes]:
        rng = np.random.default_rng((SEED, part))
        return (rng.bytes(TOKEN_BYTES) for _ in range(count))

    return records


def _files(
    name: str,
    records_per_file: int,
    records: Callable[[int], Iterable[Any]],
    *,
    form: str = "array_record",
    options: str = "",
    num_files: int = NUM_FILES,
) -> Files:
    suffix = form if form == "array_record" else formats.FORMATS[form].suffix
    paths = [FOLDER / f"{name}-{part}-of-{num_files}.{suffix}" for part in range(num_files)]
    for part, path in enumerate(paths):
        write: Callable[[Path], object] = functools.partial(_write_array_record, records, part, options)
        if form != "array_record":
            write = functools.partial(formats.write, formats.FORMATS[form], records, part, formats.pieces_path_of(path))
        _keep(path, write)
    return Files(tuple(map(str, paths)), records_per_file, form)


def _write_array_record(records: Callable[[int], Iterable[bytes]], part: int, options: str, path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415  (starts threads)

    writer = ArrayRecordWriter(str(path), ",".join(["group_size:1", *([options] if options else [])]))
    for record in records(part):
        writer.write(record)
    writer.close()
