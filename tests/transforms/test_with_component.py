"""The number of the component in each element: through batches, planned rows, packers, and changes of the mixture."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import Batch, CheckpointError, FlatMap, IndexSampler, MixtureSampler, OnlyFor, Pack, PackingSampler
from millstream.transforms import FirstFitPack, Transformation, WithComponent

NAMES = ("web", "books", "code")
SOURCES = {name: [{"tokens": np.full(1 + key % 4, number)} for key in range(40)] for number, name in enumerate(NAMES)}


def loader_of(*operations: Transformation, names: Any = NAMES, **options: Any) -> millstream.DataLoader:
    orders = {name: IndexSampler(40, shuffle=True, seed=ord(name[0])) for name in names}
    return loader_over(MixtureSampler(orders, {name: 1 + (name == "web") for name in names}), *operations, **options)


def loader_over(mixture: MixtureSampler, *operations: Transformation, **options: Any) -> millstream.DataLoader:
    source = millstream.ConcatenatedDataSource({name: SOURCES[name] for name in mixture.names})
    return millstream.DataLoader(data_source=source, sampler=mixture, operations=operations, **options)


def twice(element: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(element), dict(element)]


def first(loader: millstream.DataLoader) -> Any:
    with iter(loader) as batches:
        return next(batches)


@pytest.mark.parametrize("worker_count", [0, 1])
def test_each_element_has_the_number_of_its_component(worker_count: int) -> None:
    """Also after it was split, and in a worker process; per token, every entry has it."""
    added = [WithComponent("corpus"), WithComponent("of_token", like="tokens")]
    loader = loader_of(FlatMap(twice, max_fan_out=2), *added, worker_count=worker_count)
    with loader, iter(loader) as elements:
        for _ in range(30):
            element = next(elements)
            (number,) = set(element["tokens"].tolist())
            assert element["corpus"] == number
            assert element["corpus"].dtype == np.int32
            assert element["of_token"].tolist() == element["tokens"].tolist()


def test_planned_rows_have_it_per_row_and_per_token() -> None:
    """After Pack, a row has one number; before, each token has its own, and padding has 0."""
    lengths = [len(document["tokens"]) for document in SOURCES["web"]]
    rows = {name: PackingSampler(lengths, 8, shuffle=True, seed=ord(name[0])) for name in NAMES}
    pack = Pack({"tokens": 8, "of_token": 8}, meta_features=["of_token"])
    mixture = MixtureSampler(rows, [1, 1, 1])
    loader = loader_over(mixture, WithComponent("of_token", like="tokens"), pack, WithComponent("corpus"), Batch(6))
    batch = first(loader)
    assert batch.keys() == {"tokens", "tokens_segment_ids", "tokens_positions", "of_token", "corpus"}
    assert sorted(set(batch["corpus"].tolist())) == [0, 1, 2]
    is_token = batch["tokens_segment_ids"] > 0
    assert (batch["of_token"] == batch["tokens"]).all()
    assert (batch["of_token"] == np.where(is_token, batch["corpus"][:, np.newaxis], 0)).all()


def test_packers_have_it_per_document_and_per_token() -> None:
    """A row of documents of several components has a list of numbers, or one for each token."""
    added = [WithComponent("corpus"), WithComponent("of_token", like="tokens")]
    pack = FirstFitPack({"tokens": 9, "of_token": 9}, num_packing_bins=3, meta_features=["corpus", "of_token"])
    row = first(loader_of(*added, pack))
    assert row["of_token"].tolist() == row["tokens"].tolist()
    firsts = [int(np.argmax(row["tokens_segment_ids"] == 1 + number)) for number in range(len(row["corpus"]))]
    assert [int(number) for number in row["corpus"]] == row["tokens"][firsts].tolist()
    assert len(set(firsts)) > 1


def test_numbers_are_part_of_the_stream() -> None:
    """A component that joins after the others keeps their numbers; before them, a state is refused with both."""
    state = iter(loader_of(WithComponent("corpus"), Batch(4), names=NAMES[:2]))
    state.seek(2)
    old = loader_of(names=NAMES[:2]).sampler
    assert isinstance(old, MixtureSampler)
    order, weights = IndexSampler(40), {"web": 2, "books": 1, "code": 0}
    for samplers in ({"code": order}, {"code": order, **old.parts}):
        mixture = old.reweighted(8, weights, samplers=samplers)
        plain, numbered = (loader_over(mixture, *own, Batch(4)) for own in ([], [WithComponent("corpus")]))
        with iter(plain) as batches:
            whole = iter(loader_of(Batch(4), names=NAMES[:2]))
            batches.set_state(whole.get_state(), strict=True)
        with iter(numbered) as batches:
            if mixture.names[0] == "web":
                batches.set_state(state.get_state(), strict=True)
                assert (next(batches)["corpus"] == next(state)["corpus"]).all()
            else:
                with pytest.raises(CheckpointError, match=r"names.index\('web'\): saved 0, here 1"):
                    batches.set_state(state.get_state())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: WithComponent(3), TypeError, "name must be the name of a feature, got 3"),  # type: ignore[arg-type]
        (lambda: first(loader_of(Batch(2), WithComponent("corpus"))), ValueError, "Put it before that"),
        (
            lambda: millstream.load([{}], transformations=[WithComponent("corpus")]),
            ValueError,
            "the sampler is not a MixtureSampler. Use one",
        ),
        (lambda: first(loader_of(WithComponent("tokens"))), ValueError, "name that elements do not have"),
        (lambda: first(loader_of(WithComponent("a", like="b"))), ValueError, "names no feature: elements have tokens"),
        (
            lambda: first(loader_of(OnlyFor("web", len), WithComponent("a"))),
            TypeError,
            "needs elements that are dicts, got int",
        ),
        (
            lambda: millstream.MapDataset.range(3).to_iter_dataset().apply(WithComponent("a")),
            TypeError,
            "belongs to a DataLoader with a MixtureSampler",
        ),
    ],
)
def test_what_has_no_component_is_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    """Other orders, batches and elements without names are errors that say so."""
    with pytest.raises(error, match=message):
        make()
