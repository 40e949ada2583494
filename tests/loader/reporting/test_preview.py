"""A preview shows the first batches as they are: images as images, tokens as text, packed rows by their documents."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from PIL import Image

import millstream
from millstream.loader.reporting.preview import pixels_of, png_of
from support.documents.html_pages import Page


def images_in(page: str) -> list[NDArray[Any]]:
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]


@hypothesis.given(
    arrays.arrays(
        np.uint8,
        strategies.tuples(strategies.integers(1, 9), strategies.integers(1, 9), strategies.integers(1, 4)),
    )
)
def test_a_png_has_the_pixels(pixels: NDArray[np.uint8]) -> None:
    """Another library reads what was written."""
    image = np.asarray(Image.open(io.BytesIO(png_of(pixels))))
    assert np.array_equal(image.reshape(pixels.shape), pixels)


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (np.zeros((8, 9), np.uint8), (8, 9, 1)),
        (np.zeros((8, 9, 3), np.float32), (8, 9, 3)),
        (np.zeros((3, 8, 9), np.float64), (8, 9, 3)),
        (np.zeros((8, 9), np.bool_), (8, 9, 1)),
        (np.zeros((1000, 500, 3), np.uint8), (250, 125, 3)),
        (np.zeros((8, 9), np.int64), None),
        (np.zeros((8, 9, 5), np.uint8), None),
        (np.zeros(8, np.uint8), None),
    ],
    ids=["grey", "float", "channels first", "flags", "large", "integers", "five channels", "row"],
)
def test_what_looks_like_an_image_is_one(array: NDArray[Any], shape: tuple[int, ...] | None) -> None:
    """Bytes, flags and floats with a plausible number of channels; large ones are made smaller."""
    pixels = pixels_of(array, 256)
    assert (None if pixels is None else pixels.shape) == shape


@hypothesis.given(arrays.arrays(np.float32, (4, 5), elements=strategies.floats(width=32)))
def test_any_float_has_a_pixel(array: NDArray[np.float32]) -> None:
    """Infinities and nan too; from 0 to 1 the scale is that of the values, else from the least to the largest."""
    pixels = pixels_of(array, 256)
    assert pixels is not None
    finite = array[np.isfinite(array)].astype(np.float64)
    if finite.size == array.size and finite.min() >= 0 and finite.max() <= 1:
        assert np.array_equal(pixels[:, :, 0], np.round(array.astype(np.float64) * 255))
    elif finite.size == array.size and finite.min() < finite.max():
        assert (int(pixels.min()), int(pixels.max())) == (0, 255)


def test_images_and_labels_are_shown_row_by_row() -> None:
    """The images of the page are those of the first batch; the labels stand beside them, as many as asked for."""
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 9, 3), np.uint8)
    source = millstream.InMemoryDataSource({"image": images, "label": np.arange(6) * 111})
    preview = millstream.load(source, batch_size=4).preview(rows=3)
    page = preview._repr_html_()
    assert np.array_equal(np.stack(images_in(page)), images[:3])
    text = Page(page).text
    assert [word in text for word in ("111", "222", "333")] == [True, True, False]
    assert "3 of 4 elements" in text
    assert np.array_equal(preview.batches[0]["image"], images[:4])


def test_images_with_labels_are_a_grid_with_the_names_of_the_classes(tmp_path: Path) -> None:
    """The names are those of the source, or the given ones; a number without a name is shown as it is."""
    for name in ("cat", "dog <b>"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (5, 4)).save(tmp_path / name / "a.png")

    def decode(record: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.asarray(Image.open(io.BytesIO(record["image"]))), "label": np.int32(record["label"])}

    source = millstream.ImageFolderDataSource(tmp_path)
    loader = millstream.load(source, num_epochs=1, transformations=[decode], batch_size=2)
    for preview, names in ((loader.preview(), ["cat", "dog <b>"]), (loader.preview(classes=["one"]), ["one", "1"])):
        page = preview._repr_html_()
        assert [Page(image).text for image in re.findall(r"<figure>.*?</figure>", page)] == names
        assert "<table>" not in page
    chain = millstream.MapDataset.source(source).map(decode).batch(2).to_iter_dataset()
    with iter(chain) as batches:
        assert "dog <b>" in Page(batches.preview()._repr_html_()).text
        assert "two" in Page(batches.preview(classes=["one", "two"])._repr_html_()).text


def test_the_class_is_the_only_integer_or_the_label() -> None:
    """Of several integers it is the label; other leaves have their names; an array beside an image makes a table."""
    images = np.zeros((2, 4, 4, 3), np.uint8)
    for leaves, shown in (
        ({"y": [1, 0]}, ["b", "a"]),
        ({"label": [1, 0], "id": [0, 1]}, ["bid 0", "aid 1"]),
        ({"x": [1, 0], "id": [0, 1]}, ["x 1id 0", "x 0id 1"]),
    ):
        source = millstream.InMemoryDataSource({"image": images} | {name: np.array(v) for name, v in leaves.items()})
        page = millstream.load(source, batch_size=2).preview(classes=["a", "b"])._repr_html_()
        assert [Page(image).text for image in re.findall(r"<figure>.*?</figure>", page)] == shown
    source = millstream.InMemoryDataSource(
        {"image": images, "tokens": np.zeros((2, 5), np.int64), "label": np.arange(2)}
    )
    page = millstream.load(source, batch_size=2).preview(classes=["a", "b"])._repr_html_()
    assert "<figure>" not in page
    assert page.count("<td>b</td>") == 1


def test_several_batches_are_those_of_the_stream() -> None:
    """As many as asked for, as far as there are any; nothing of the loader has moved."""
    loader = millstream.load(range(10), shuffle=True, seed=0, num_epochs=1, batch_size=4)
    expected = [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in loader.preview(2).batches] == expected[:2]
    assert [batch.tolist() for batch in loader.preview(9).batches] == expected


def test_packed_rows_are_coloured_by_document() -> None:
    """Each document has its text and colour, padding is counted, and companions have no columns."""
    documents = [{"tokens": np.array([ord(letter) for letter in word])} for word in ("one", "<two>", "3")]
    loader = millstream.DataLoader(
        data_source=documents,
        sampler=millstream.IndexSampler(3, num_epochs=1),
        operations=[millstream.FirstFitPack({"tokens": 12}, num_packing_bins=1), millstream.Batch(1)],
    )
    page = loader.preview(decode=lambda tokens: "".join(map(chr, tokens)))._repr_html_()
    segments = re.findall(
        r'<span class="ms-segment" title="segment (\d), (\d) tokens" style="([^"]*)">([^<]*)</span>', page
    )
    assert [(number, count, text) for number, count, _, text in segments] == [
        ("1", "3", "one"),
        ("2", "5", "&lt;two&gt;"),
        ("3", "1", "3"),
    ]
    assert len({colour for _, _, colour, _ in segments}) == 3
    assert "3 padding tokens" in Page(page).text
    assert "segment_ids" not in Page(page).text


LISTED: dict[str, list[Any]] = {
    "images": [np.full((8, 9, 3), number, np.uint8) for number in range(4)],
    "images of several sizes": [np.full((8 + number, 9, 3), number, np.uint8) for number in range(4)],
    "dicts": [{"tokens": np.arange(4) + number, "text": f"{number}"} for number in range(4)],
    "pairs": [(number, -number) for number in range(4)],
    "texts": ["one", "two", "three", "four"],
    "arrays": [np.arange(number, 9.0) for number in range(4)],
}


@pytest.mark.parametrize("records", LISTED.values(), ids=LISTED)
def test_the_elements_of_a_list_are_its_rows(records: list[Any]) -> None:
    """A batch that `batch_fn=list` makes is shown like the same elements without a batch, for loaders and chains."""
    chain = millstream.MapDataset.source(records)
    alone = millstream.load(records).preview(2)._repr_html_()
    for listed in (
        millstream.load(records, transformations=[millstream.Batch(3, batch_fn=list)]).preview(rows=2),
        iter(chain.batch(3, batch_fn=list).to_iter_dataset()).preview(rows=2),
        iter(chain.to_iter_dataset().batch(3, batch_fn=list)).preview(rows=2),
    ):
        page = listed._repr_html_()
        assert "2 of 3 elements" in page
        shown = re.compile(r"<t[hd][^>]*>.*?</t[hd]>|<img[^>]*>", re.DOTALL)
        assert sorted(set(shown.findall(page))) == sorted(set(shown.findall(alone)))


def test_elements_without_a_batch_are_shown_whole() -> None:
    """A record is a row: its first axis is no batch; tokens without a decoder are numbers."""
    loader = millstream.load([{"tokens": np.arange(5), "text": "a <b>", "none": None}])
    text = Page(loader.preview()._repr_html_()).text
    for words in ("0 1 2 3 4", "a <b>", "None"):
        assert words in text


def test_long_things_are_cut() -> None:
    """A page of very long rows stays small."""
    loader = millstream.load([{"tokens": np.arange(100_000), "text": "x" * 100_000, "x": np.zeros((99, 99, 99))}])
    assert len(loader.preview()._repr_html_()) < 20_000


def test_a_preview_is_saved_as_a_page(tmp_path: Path) -> None:
    """The page is whole; without a notebook, `repr` says how to look at it."""
    preview = millstream.load(range(4), batch_size=2).preview()
    assert ".save(" in repr(preview)
    assert "batch 0, 2 of 2 elements" in Page(preview.save(tmp_path / "preview.html").read_text()).text


@pytest.mark.parametrize("classes", [{0: "cat"}, "cat", [0, 1]])
def test_names_of_classes_that_are_no_list_are_refused(classes: Any) -> None:
    """They would be left out without a word."""
    with pytest.raises(TypeError, match="classes must be a list of names"):
        millstream.load([{"label": 1}], batch_size=1).preview(classes=classes)


@pytest.mark.parametrize("wrong", [{"num_batches": 0}, {"rows": 0}], ids=["no batches", "no rows"])
def test_less_than_one_is_refused(wrong: dict[str, int]) -> None:
    """There is no picture of nothing."""
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        millstream.load(range(4), batch_size=2).preview(**wrong)  # type: ignore[arg-type]
