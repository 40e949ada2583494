"""tf.train.Example: batches as columns, whatever the encoding; and what is encoded is what other code encodes."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import millstream
from millstream import FixedLengthFeature, VariableLengthFeature, decode_example, decode_examples, encode_example
from millstream.tf_example import wire
from support.files.example_messages import (
    entry_message,
    example_message,
    feature_message,
    field,
    values_message,
    varint,
)
from support.laws import assert_resumes_everywhere
from support.streams import comparable

INTS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), max_size=6)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=6)
TEXTS = st.lists(st.binary(max_size=50), max_size=4)


def some(kind: str, values: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[tuple[str, list[Any]] | None]:
    """Returns a strategy for a feature of a kind that may be absent."""
    return st.none() | st.tuples(st.just(kind), values)


EXAMPLES = st.lists(
    st.tuples(
        st.fixed_dictionaries({"i": some("int64", INTS), "f": some("float32", FLOATS), "b": some("bytes", TEXTS)}),
        st.booleans(),
        st.randoms(use_true_random=False),
    ),
    min_size=1,
    max_size=8,
)


def noise(rng: random.Random) -> list[bytes]:
    """Returns some fields that no reader of Examples knows: all kinds of them."""
    unknown = [
        field(9, b"bytes"),
        varint(7 << 3) + varint(2**60),
        varint(8 << 3 | 1) + b"8 bytes!",
        varint(77 << 3 | 5) + b"four",
    ]
    return rng.sample(unknown, rng.randrange(len(unknown) + 1))


def shuffled(rng: random.Random, fields: list[bytes]) -> bytes:
    """Returns a message of some fields, in any order, with unknown ones between them."""
    everything = [*fields, *noise(rng)]
    rng.shuffle(everything)
    return b"".join(everything)


@settings(max_examples=25)
@given(EXAMPLES)
def test_what_was_encoded_comes_out(examples: list[tuple[dict[str, Any], bool, random.Random]]) -> None:
    """Packed or not, in any order of fields, with fields and features between them that are not asked for."""
    batch = []
    for features, packed, rng in examples:
        entries = [
            shuffled(
                rng,
                [field(1, name.encode()), field(2, shuffled(rng, [feature_message(feature[0], feature[1], packed)]))],
            )
            for name, feature in [*features.items(), ("other", ("int64", [1])), ("x", ("bytes", [b"y"]))]
            if feature is not None
        ]
        inner = shuffled(rng, [field(1, entry) for entry in entries])
        batch.append(shuffled(rng, [field(1, inner)]))
    kinds = {"i": np.int64, "f": np.float32, "b": bytes}

    columns = decode_examples({name: VariableLengthFeature(kind) for name, kind in kinds.items()}).map(batch)

    for name, kind in kinds.items():
        expected = [features[name][1] if features[name] else [] for features, _, _ in examples]
        column = columns[name]
        assert column.values.dtype == (np.object_ if kind is bytes else kind)
        assert column.lengths.tolist() == [len(values) for values in expected]
        assert [row.tolist() for row in column.rows()] == expected


def outcome(decode: Any, element: Any) -> Any:
    """Returns the result of an operation, comparable, or the text of its error."""
    try:
        return comparable(decode(element))
    except ValueError as error:
        return str(error).lower().replace("element 0 of the batch", "the record")


@settings(max_examples=40)
@given(EXAMPLES, st.integers(0, 3), st.data())
def test_a_record_alone_is_decoded_as_in_a_batch_of_one(examples: Any, damage: int, data: st.DataObject) -> None:
    """Values, dtypes and errors are equal, for records of the usual form, of any other, and damaged ones."""
    features: dict[str, Any] = {
        "i": VariableLengthFeature(np.int64),
        "f": FixedLengthFeature(2, np.float32, default=[1, 2]),
        "b": FixedLengthFeature((), bytes, default=b"x"),
    }
    usual = {name: feature[1] for name, feature in examples[0][0].items() if feature}
    for record in (
        encode_example(
            {name: np.array(values, np.float32) if name == "f" else values for name, values in usual.items()}
        ),
        example_message({name: feature for name, feature in examples[0][0].items() if feature}),
    ):
        changed = bytearray(record)
        for _ in range(damage if record else 0):
            changed[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))

        def batch_of_one(element: bytes) -> Any:
            columns = decode_examples(features).map([element])
            return {"i": columns["i"].values, "f": columns["f"][0], "b": columns["b"][0]}

        assert outcome(decode_example(features).map, bytes(changed)) == outcome(batch_of_one, bytes(changed))


def test_a_record_alone_calls_no_decoder_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that `encode_example` or TensorFlow writes takes no walk of NumPy through its fields."""
    monkeypatch.setattr("millstream.tf_example.columns.decode_columns", None)
    record = encode_example({"image": bytes(2000), "label": 3, "tokens": list(range(1000)), "x": [0.5]})
    features: dict[str, Any] = {
        "image": FixedLengthFeature((), bytes),
        "label": FixedLengthFeature((), np.int64),
        "tokens": VariableLengthFeature(np.int64),
        "x": FixedLengthFeature(1, np.float32),
        "missing": FixedLengthFeature((), np.int64, default=-1),
    }
    decoded = decode_example(features).map(record)
    assert (decoded["image"], decoded["label"], decoded["missing"]) == (bytes(2000), 3, -1)
    assert (decoded["tokens"].tolist(), decoded["x"].tolist()) == (list(range(1000)), [0.5])


@given(
    st.lists(st.tuples(st.lists(st.integers(-5, 10**9), min_size=6, max_size=6), st.booleans()), min_size=1, max_size=9)
)
def test_fixed_lengths_are_arrays_of_their_shape(rows: list[tuple[list[int], bool]]) -> None:
    """Elements without the feature get the default, all of it."""
    batch = [example_message({"x": ("int64", values)} if there else {}) for values, there in rows]
    operation = decode_examples({"x": FixedLengthFeature((2, 3), np.int64, default=[[7, 7, 7], [8, 8, 8]])})

    table = operation.map(np.array(batch, np.object_))["x"]

    assert (table.shape, table.dtype) == ((len(rows), 2, 3), np.int64)
    assert table.reshape(-1, 6).tolist() == [values if there else [7, 7, 7, 8, 8, 8] for values, there in rows]


def test_scalars_and_defaults_of_each_kind() -> None:
    """Bytes keep zeros at their end, in values and in defaults."""
    batch = [example_message({"i": ("int64", [3]), "f": ("float32", [0.5]), "b": ("bytes", [b"a\0"])}), b""]
    features: dict[str, Any] = {
        "i": FixedLengthFeature((), np.int64, default=-1),
        "f": FixedLengthFeature((), "float32", default=2),
        "b": FixedLengthFeature((), bytes, default=b"\0\0"),
        "pair": FixedLengthFeature(2, bytes, default=[b"x\0", b""]),
    }

    columns = decode_examples(features).map(batch)

    assert columns["i"].tolist() == [3, -1]
    assert (columns["f"].tolist(), columns["f"].dtype) == ([0.5, 2.0], np.float32)
    assert columns["b"].tolist() == [b"a\0", b"\0\0"]
    assert columns["pair"].tolist() == [[b"x\0", b""]] * 2


def test_several_fields_mean_what_they_do_in_any_protocol_buffer() -> None:
    """Of equal fields, entries or members of a oneof, the last counts; parts of a list are one list."""
    old = entry_message("x", feature_message("int64", [1, 2]))
    both = feature_message("bytes", [b"old"]) + feature_message("int64", [3])
    new = field(1, b"wrong name") + field(2, feature_message("int64", [9])) + field(1, b"x") + field(2, both)
    batch = [field(1, field(1, old)) + field(1, field(1, new))]

    assert decode_examples({"x": VariableLengthFeature(np.int64)}).map(batch)["x"].values.tolist() == [3]
    parts = values_message("int64", [1, 300], packed=True) + values_message("int64", [-1], packed=False)
    batch = [field(1, field(1, entry_message("x", field(3, parts + values_message("int64", [5], packed=True)))))]
    assert decode_examples({"x": VariableLengthFeature(np.int64)}).map(batch)["x"].values.tolist() == [1, 300, -1, 5]
    empty, none = entry_message("", feature_message("int64", [])), entry_message("", b"")
    operation = decode_examples({"": FixedLengthFeature((), np.int64, default=5)})
    assert operation.map([field(1, field(1, none))])[""].tolist() == [5]
    with pytest.raises(ValueError, match="Feature '' has 0 values in element 0 of the batch, but its shape "):
        operation.map([field(1, field(1, empty))])


@pytest.mark.parametrize("at_once", [1, 2, 7, 1000])
@pytest.mark.parametrize("bits", [6, 7, 14, 29, 63, 64])
def test_long_lists_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch, at_once: int, bits: int) -> None:
    """Numbers of any length, wherever the parts end."""
    monkeypatch.setattr(wire, "_VARINTS_PER_STEP", at_once)
    rng = random.Random(bits)
    lists = [[rng.getrandbits(rng.randint(1, bits)) for _ in range(100)] for _ in range(2)]
    signed = [[value - (1 << 64) if value >> 63 else value for value in values] for values in lists]

    column = decode_examples({"x": VariableLengthFeature(np.int64)}).map(
        [example_message({"x": ("int64", values)}) for values in lists]
    )["x"]

    assert [row.tolist() for row in column.rows()] == signed


WHOLE = example_message({"ints": ("int64", [1, 300, -1]), "floats": ("float32", [1.0]), "b": ("bytes", [b"x" * 200])})
ALL = {
    "ints": VariableLengthFeature(np.int64),
    "floats": VariableLengthFeature(np.float32),
    "b": VariableLengthFeature(bytes),
}


@pytest.mark.parametrize("length", range(1, len(WHOLE)))
def test_every_truncation_is_an_error_with_its_element(length: int) -> None:
    """Every truncation is an error with its element: the outermost field says how long it is."""
    with pytest.raises(ValueError, match=r"Element 1 of the batch is not a tf\.train\.Example, or is damaged"):
        decode_examples(ALL).map([WHOLE, WHOLE[:length], WHOLE])


def decoded_or_reason(batch: list[bytes]) -> tuple[dict[str, Any] | None, str]:
    """Returns the columns of a batch, or why there are none."""
    try:
        return decode_examples(ALL).map(batch), ""
    except ValueError as error:
        return None, str(error)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_damage_is_other_values_or_an_error(place: int, change: int) -> None:
    """A changed byte gives other values or an error, never a crash, and never affects neighbouring elements."""
    damaged = bytearray(WHOLE)
    damaged[place] ^= change
    columns, reason = decoded_or_reason([WHOLE, bytes(damaged), WHOLE])
    if columns is None:
        assert "lement 1 of the batch" in reason
    else:
        assert [columns["ints"].rows()[k].tolist() for k in (0, 2)] == [[1, 300, -1]] * 2


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_noise_is_decoded_or_refused(batch: list[bytes]) -> None:
    """Bytes of any kind end in columns or in a ValueError."""
    columns, reason = decoded_or_reason(batch)
    if columns is None:
        assert "of the batch" in reason
    else:
        assert [len(column.lengths) for column in columns.values()] == [len(batch)] * 3


@pytest.mark.parametrize(
    ("name", "inner", "words"),
    [
        ("ints", field(3, field(1, b"\x01\x80")), "ends within a number"),
        ("ints", field(3, field(1, b"\x80" * 10 + b"\x01")), "more than 64 bits"),
        ("floats", field(2, field(1, bytes(14))), "not a multiple of 4 bytes"),
    ],
)
def test_damaged_lists_are_errors_with_their_element(name: str, inner: bytes, words: str) -> None:
    """A packed list must hold whole numbers: three and a half floats are not three."""
    damaged = field(1, field(1, entry_message(name, inner)))
    with pytest.raises(ValueError, match=rf"Element 1 of the batch .* {words}"):
        decode_examples(ALL).map([WHOLE, damaged])


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (FixedLengthFeature(3, np.int64), r"'x' has 2 values in element 1 of the batch, but its shape \(3,\) has 3"),
        (FixedLengthFeature(2, np.float32), "'x' must be float32, but it is int64 in element 0"),
        (VariableLengthFeature(bytes), "'x' must be bytes, but it is int64 in element 0"),
        (FixedLengthFeature((), np.int64), r"Element 2 of the batch has no feature 'x', .*default="),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_element(feature: Any, words: str) -> None:
    """A feature of the wrong type or size, or without values, is an error that names it and the expected one."""
    lists = ([1], [4], []) if feature == FixedLengthFeature((), np.int64) else ([1, 2, 3], [4, 5])
    batch = [example_message({"x": ("int64", values)} if values else {}) for values in lists]
    with pytest.raises(ValueError, match=words):
        decode_examples({"x": feature}).map(batch)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: decode_examples([]), TypeError, "must be a dict"),  # type: ignore[arg-type]
        (lambda: decode_examples({}), ValueError, "at least one feature"),
        (lambda: decode_examples({"x": np.int64}), TypeError, "FixedLengthFeature or VariableLength"),  # type: ignore[dict-item]
        (lambda: FixedLengthFeature((), np.int32), ValueError, r"must be np\.int64, np\.float32 or bytes"),
        (lambda: FixedLengthFeature((-1,), np.int64), ValueError, "at least 0, got -1"),
        (lambda: FixedLengthFeature((2,), np.int64, default=[1, 2, 3]), ValueError, r"shape \(2,\) .* got \[1, 2, 3\]"),
        (lambda: FixedLengthFeature((), np.int64, default="x"), ValueError, "dtype int64, got 'x'"),
        (lambda: FixedLengthFeature((), np.int64, default=1.5), ValueError, r"dtype int64, got 1\.5"),
        (lambda: FixedLengthFeature((), np.int64, default=2**63), ValueError, "dtype int64, got 9223372036854775808"),
        (lambda: VariableLengthFeature(3), ValueError, r"must be np\.int64, np\.float32 or bytes, .* got 3"),
        (lambda: decode_examples(ALL).map(WHOLE), TypeError, "Put it directly after Batch"),
    ],
)
def test_mistakes_are_errors_at_once(make: Any, error: type[Exception], words: str) -> None:
    """Invalid features are errors at construction."""
    with pytest.raises(error, match=words):
        make()


def test_ragged_columns_are_padded_and_cut() -> None:
    """`padded` gives the same as Python's own lists, and `rows` one for each element, also of none."""
    column = millstream.RaggedColumn(np.arange(10), np.array([3, 0, 5, 2]))

    assert column.padded(4, padding=-1).tolist() == [[0, 1, 2, -1], [-1] * 4, [3, 4, 5, 6], [8, 9, -1, -1]]
    assert column.padded(0).shape == (4, 0)
    for lengths in ([], [0], [2, 0, 1]):
        column = millstream.RaggedColumn(np.arange(sum(lengths)), np.array(lengths, np.int64))
        assert [len(row) for row in column.rows()] == lengths


def test_it_is_an_operation_of_a_loader() -> None:
    """It runs after Batch, with or without workers, and an equal operation resumes its state."""
    records = [example_message({"n": ("int64", [n]), "text": ("bytes", [b"t" * n])}) for n in range(20)]
    features: dict[str, Any] = {"n": FixedLengthFeature((), np.int64), "text": VariableLengthFeature(bytes)}

    operation = decode_examples(features)
    operations = [millstream.Batch(8), operation]
    expected = [operation.map(records[start : start + 8]) for start in range(0, 20, 8)]
    for worker_count in (0, 2):
        with millstream.load(records, num_epochs=1, transformations=operations, worker_count=worker_count) as loader:
            assert assert_resumes_everywhere(loader) == ([comparable(batch) for batch in expected], None)
    assert repr(pickle.loads(pickle.dumps(operation))) == repr(operation) == "decode_examples(n, text)"


LONG_INTS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), min_size=1, max_size=30)
SOME_FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=6)
SOME_BYTES = st.lists(st.binary(max_size=300), min_size=1, max_size=4)


LISTS: dict[str, st.SearchStrategy[list[Any]]] = {"int64": LONG_INTS, "float32": SOME_FLOATS, "bytes": SOME_BYTES}


@given(
    st.dictionaries(
        st.text(max_size=5), st.one_of([st.tuples(st.just(kind), some) for kind, some in LISTS.items()]), max_size=4
    )
)
def test_lists_are_encoded_as_other_code_does(features: dict[str, tuple[str, list[Any]]]) -> None:
    """Byte for byte, with the values of a list packed."""
    values = {name: values for name, (_, values) in features.items()}
    assert encode_example(values) == example_message(features)
    one = {name: (kind, values[:1]) for name, (kind, values) in features.items()}
    assert encode_example({name: values[0] for name, (_, values) in one.items()}) == example_message(one)


@given(
    arrays.arrays(
        st.sampled_from([np.int8, np.uint16, np.int64, np.bool_, np.float32, np.float16]),
        arrays.array_shapes(max_dims=3, max_side=4),
    )
)
def test_arrays_come_out_with_their_values(array: Any) -> None:
    """Arrays of any shape and any dtype of an Example, contiguous or not, are encoded with their values."""
    dtype = np.float32 if array.dtype.kind == "f" else np.int64
    for given_array in (array, array.T, array[::-1]):
        decode = decode_examples({"x": FixedLengthFeature(given_array.shape, dtype)})
        np.testing.assert_array_equal(decode.map([encode_example({"x": given_array})])["x"][0], given_array)


def test_texts_empty_lists_and_absent_values() -> None:
    """Text is UTF-8; an empty list has no values, and an empty array those of its dtype; None is left out."""
    cases: dict[str, tuple[Any, Any, Any]] = {
        "text": ("ä", FixedLengthFeature((), bytes), ["ä".encode()]),
        "buffer": (bytearray(b"abc"), FixedLengthFeature((), bytes), [b"abc"]),
        "texts": (np.array(["a", "bc"]), VariableLengthFeature(bytes), [b"a", b"bc"]),
        "none": (None, FixedLengthFeature((), np.int64, default=-7), [-7]),
        "empty": ([], VariableLengthFeature(np.int64), []),
        "also empty": ([], VariableLengthFeature(np.float32), []),
        "nothing": ([], FixedLengthFeature((2, 0), bytes), [[[], []]]),
        "no texts": (np.array([], object), VariableLengthFeature(bytes), []),
    }
    decode = decode_examples({name: feature for name, (_, feature, _) in cases.items()})
    columns = decode.map([encode_example({name: value for name, (value, _, _) in cases.items()})])
    for name, (_, _, expected) in cases.items():
        assert getattr(columns[name], "values", columns[name]).tolist() == expected, name
    assert columns["also empty"].values.dtype == np.float32
    assert encode_example({}) == example_message({})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ({"a": 1}, TypeError, "'x' must be bytes, str, a number, .* got dict"),
        ([[1], [2, 3]], TypeError, "got list"),
        ([b"a", 1], TypeError, "got list"),
        (1j, TypeError, "got complex"),
        (object(), TypeError, "got object"),
        (np.datetime64("2026-01-01"), TypeError, "got datetime64"),
        (np.ma.masked_array([1], [True]), TypeError, "got MaskedArray"),
        (2**63, ValueError, "below 2"),
        (2**64, ValueError, "more than 64 bits"),
        ([-1, 2**63], ValueError, "more than 64 bits, signed"),
        ([[np.int64(-1)], [np.uint64(1)]], ValueError, "more than 64 bits, signed"),
        (np.array([2**63], np.uint64), ValueError, r"below 2\*\*63, .* got 9223372036854775808"),
    ],
)
def test_what_an_example_cannot_hold_is_an_error(value: Any, error: type[Exception], words: str) -> None:
    """A value that an Example cannot contain is an error that names the feature."""
    with pytest.raises(error, match=words):
        encode_example({"x": value})
    with pytest.raises(TypeError, match="name of a feature must be a str, got 1"):
        encode_example({1: value})  # type: ignore[dict-item]
