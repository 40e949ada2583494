"""The dashboard for Grafana, docs/grafana.json: each panel has a value on the page of a loader that trains."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from support.prometheus_queries import evaluate, samples

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs/grafana.json").read_text())
TARGETS = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
SECONDS = 10.0


@pytest.fixture(scope="module")
def scrapes() -> tuple[Any, Any]:
    """Two scrapes of a loader over a mixture of packed corpora, with ten batches between them."""
    lengths = [3, 5, 4, 2] * 20
    corpora = {name: [{"tokens": np.zeros(length, np.int32)} for length in lengths] for name in ("web", "books")}
    rows = {name: millstream.PackingSampler(lengths, row_length=8, shuffle=True, seed=0) for name in corpora}
    loader = millstream.DataLoader(
        data_source=millstream.ConcatenatedDataSource(corpora),
        sampler=millstream.MixtureSampler(rows, {"web": 0.5, "books": 0.5}),
        operations=[millstream.Pack({"tokens": 8}), millstream.Batch(4)],
    )
    pages = []
    with iter(loader) as batches:
        for _ in range(2):
            for _ in range(10):
                next(batches)
            pages.append(samples(millstream.prometheus_text({"train": loader}), instance="host:9400"))
    return pages[0], pages[1]


@pytest.mark.parametrize("query", TARGETS.values(), ids=TARGETS)
def test_each_query_has_a_value(query: str, scrapes: tuple[Any, Any]) -> None:
    """Each query of a panel names metrics and labels that the page has, and its values are finite and not negative."""
    value = evaluate(query.replace("$__rate_interval", "1m"), *scrapes, SECONDS)
    values = value.values() if isinstance(value, dict) else [value]
    assert values
    assert np.isfinite([*values]).all()
    assert min(values) >= 0


def test_values_are_those_of_the_loader(scrapes: tuple[Any, Any]) -> None:
    """Ten batches in ten seconds are one per second, and the corpora have equal shares."""
    assert [*evaluate(TARGETS["Batches per second, A"], *scrapes, SECONDS).values()] == [1.0]  # type: ignore[union-attr]
    shares = evaluate(TARGETS["Records of each corpus, A"], *scrapes, SECONDS)
    assert shares == {frozenset({("component", name)}): 40 for name in ("web", "books")}


def test_every_metric_of_the_page_is_on_a_panel(scrapes: tuple[Any, Any]) -> None:
    """Nothing that is measured is left out, but for the epoch, which the step says; and each legend names labels."""
    shown = set(re.findall(r"millstream_\w+", json.dumps(DASHBOARD["panels"])))
    assert scrapes[1].keys() - shown <= {"millstream_epoch"}
    known = {label for vector in scrapes[1].values() for labels in vector for label, _ in labels} | {"component"}
    assert set(re.findall(r"{{(\w+)}}", json.dumps(DASHBOARD["panels"]))) <= known


def test_totals_never_fall_between_epochs() -> None:
    """Over the epochs of a run, and within each, counters and the counts of components only grow."""
    parts = {"web": range(20), "books": range(20)}
    loader = millstream.load(parts, weights={"web": 1, "books": 1}, num_epochs=1, batch_size=4)
    before: dict[Any, float] = {}
    for _, batches in loader.epochs(3):
        for _ in batches:
            page = samples(millstream.prometheus_text(loader), instance="")
            totals = {name: page[name] for name in page if name.endswith("_total") or "component" in name}
            now = {(name, labels): value for name, vector in totals.items() for labels, value in vector.items()}
            assert [key for key, value in before.items() if now[key] < value] == []
            before = now
    assert len(before) > 10
