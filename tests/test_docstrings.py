"""The examples in docstrings: each public name has one, and each gives what is shown beneath it."""

import doctest
import functools
import importlib
import inspect
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import millstream
from support.files.record_files import (
    write_array_record,
    write_bagz,
    write_mds,
    write_megatron,
    write_tar,
    write_tfds,
    write_tfrecord,
    write_zarr,
)

MODULES = ["", ".checkpoint", ".dataset", ".experimental", ".keras", ".loader", ".samplers", ".sources", ".tools"]
MODULES += [".transforms"]
GIVEN = {"millstream": millstream, "np": np}
"""The names that the examples use without an import."""
SKIPPED = {"FileCache": "reads a bucket"}
"""The names with an example of which a line is compiled and not run, and the reason."""


def public_names() -> Iterator[tuple[str, Any]]:
    """Yields each public class and function once, by the shortest of its names."""
    seen: set[int] = set()
    for part in MODULES:
        module = importlib.import_module(f"millstream{part}")
        for name in module.__all__:
            value = getattr(module, name)
            is_documented = callable(value) and not isinstance(value, types.ModuleType | types.GenericAlias)
            if is_documented and id(value) not in seen:
                seen.add(id(value))
                yield f"millstream{part}.{name}", value


NAMES = dict(public_names())


def examples_of(name: str) -> list[doctest.DocTest]:
    """Returns the examples of a public name: those of its own docstring first, then those of its methods."""
    value = NAMES[name]
    found = doctest.DocTestFinder(exclude_empty=False).find(value, name, module=False, globs=dict(GIVEN))
    return sorted(found, key=lambda some: some.name != name)


WORDS = [b"one", b"two", b"three"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples read, small ones, written once."""
    folder = tmp_path_factory.mktemp("files")
    write_array_record(folder / "train-0.array_record", WORDS)
    (folder / "people.csv").write_text("name,age\nAda,36\nAlan,41\n")
    (folder / "poem.txt").write_text("first line\nsecond line\n")
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "damaged.jsonl").write_text('{"text": "one"}\n{"text": "tw\n')
    write_bagz(folder / "train.bagz", WORDS)
    write_tfrecord(folder / "train.tfrecord", [millstream.encode_example({"label": label}) for label in range(8)])
    write_tar(folder / "train-0.tar", [("000/17.txt", b"a cat"), ("000/17.cls", b"0"), ("000/18.txt", b"a dog")])
    samples = [{"label": bytes([n, *bytes(7)]), "text": text} for n, text in enumerate((b"one", b"two", b"three"))]
    write_mds(folder / "mds", {"label": "int", "text": "str"}, samples, 2)
    write_megatron(folder / "corpus_text_document", [np.arange(length, dtype=np.uint16) for length in (3, 4)])
    with h5py.File(folder / "demos.hdf5", "w") as file:
        for name in ("demo_0", "demo_1"):
            file[f"data/{name}/image"] = np.zeros((3, 8, 8, 3), np.uint8)
            file[f"data/{name}/grip"] = np.arange(3, 6, dtype=np.float32)
    people = {"name": ["Ada", "Grace", "Alan"], "age": [36, 39, 41]}
    lance.write_dataset(pa.table(people), folder / "people.lance")
    write_zarr(folder / "digits.zarr" / "image", np.zeros((10, 8, 8), np.uint8), 4)
    write_zarr(folder / "digits.zarr" / "label", np.arange(10, dtype=np.int32), 4)
    rows = {"tokens": [[number] * 8 for number in range(1000)], "label": [number % 10 for number in range(1000)]}
    pq.write_table(pa.table(rows), folder / "train-0.parquet", row_group_size=100)
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    label = {"pythonClassName": "tensorflow_datasets.ClassLabel", "classLabel": {"numClasses": "10"}}
    features = {"featuresDict": {"features": {"label": label}}}
    records = [{"label": number} for number in range(10)]
    write_tfds(folder / "tensorflow_datasets" / "digits" / "1.0.0", features, {"train": [records]}, "tfrecord")
    return folder


@pytest.mark.third_party
@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_is_true(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The docstring has an example; in a folder with some files, it gives what is shown."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    found = examples_of(name)
    shown: list[str] = []
    for some in found:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(some, out=shown.append)

    assert found[0].name == name
    assert found[0].examples
    assert shown == []


@pytest.mark.third_party
def test_every_public_method_is_documented() -> None:
    """A public class of millstream documents its public methods and properties, itself or in a base class."""
    undocumented = [
        f"{name}.{member}"
        for name, value in NAMES.items()
        if inspect.isclass(value)
        for base in value.__mro__
        if base.__module__.startswith("millstream")
        for member, found in vars(base).items()
        if not member.startswith("_")
        and (inspect.isroutine(found) or isinstance(found, property | functools.cached_property))
        and not inspect.getdoc(getattr(value, member))
    ]
    assert undocumented == []


def test_what_is_not_run_is_listed() -> None:
    """No example is skipped without a reason, and what is skipped is Python all the same."""
    skipped = [
        (name.rsplit(".", 1)[1], one.source)
        for name in NAMES
        for some in examples_of(name)
        for one in some.examples
        if one.options.get(doctest.SKIP)
    ]
    for name, source in skipped:
        compile(source, name, "single")

    assert {name for name, _ in skipped} == set(SKIPPED)
