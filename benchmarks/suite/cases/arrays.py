"""Arrays, dicts and texts in memory: what stacking and handing over cost."""

from typing import Any

import numpy as np

from suite import data
from suite.case import Case, Contender, Goal, Pick
from suite.contenders import COLUMNS, RECORDS, rates
from suite.scale import Scale
from suite.steps import identity
from suite.work import Columns, Map, Records, Work


def _big(scale: Scale) -> Work:
    arrays = data.big_arrays(scale.pick(tiny=16, quick=512, full=1024))
    return Work(Records(arrays), (Map(identity, identity, identity),), scale.pick(tiny=8, quick=128, full=128))


def _columns(scale: Scale) -> Work:
    return Work(Columns(data.feature_columns(scale.pick(tiny=8192, quick=65_536, full=65_536))), (), 4096)


def _views(scale: Scale) -> Work:
    # The rows are what they were; the memory is that of the transposed array.
    columns = data.feature_columns(scale.pick(tiny=8192, quick=65_536, full=65_536))
    views = {
        name: np.moveaxis(np.ascontiguousarray(np.moveaxis(column, 0, -1)), -1, 0) for name, column in columns.items()
    }
    return Work(Columns(views), (), 4096)


def _nested(scale: Scale) -> Work:
    dicts = data.nested_dicts(scale.pick(tiny=512, quick=16_384, full=16_384))
    return Work(Records(dicts), (Map(identity, identity, identity),), 256)


def _strings(scale: Scale) -> Work:
    texts = data.sentences(scale.pick(tiny=512, quick=65_536, full=65_536))
    return Work(Records(texts), (Map(identity, identity, identity),), 256)


class CopyOut:
    """A consumer that reads every byte of a batch, as a transfer to a device does."""

    def __init__(self) -> None:
        self._target: Any = None

    def __call__(self, batch: Any) -> None:
        """Copies the batch to where the one before was copied to."""
        array = np.asarray(batch)
        if self._target is None:
            self._target = np.empty_like(array)
        np.copyto(self._target[: len(array)], array)


CASES = (
    Case(
        name="big",
        title="150 KB arrays in memory, batch 128 (19 MB)",
        make_work=_big,
        contenders=(*rates("copy"), *COLUMNS, Contender("bare", mode="copy in turns", copies=2)),
        goals=(
            Goal("10 times Grain, both with 2 workers", 10, Pick("grain", 2), Pick("millstream", 2)),
            Goal("10 times PyTorch, both with 2 workers", 10, Pick("pytorch", 2), Pick("millstream", 2)),
            Goal(
                "0.9 of the memory copy, without workers",
                0.9,
                Pick("bare", mode="copy"),
                Pick("millstream", 0),
            ),
        ),
    ),
    Case(
        name="big_read",
        title="the same, the consumer copies every batch out",
        make_work=_big,
        contenders=(*rates("copy"), *COLUMNS),
        consume=CopyOut(),
    ),
    Case(
        name="columns",
        title="float32 rows of 64 from columns in memory, batch 4,096",
        make_work=_columns,
        contenders=rates("index"),
        goals=(
            Goal("within 1.3 times the bare fancy index", 1 / 1.3, Pick("bare", mode="index"), Pick("millstream", 0)),
        ),
    ),
    Case(
        name="views",
        title="the same from columns that are transposed views",
        make_work=_views,
        contenders=rates("index"),
        goals=(
            Goal("within 1.5 times the bare fancy index", 1 / 1.5, Pick("bare", mode="index"), Pick("millstream", 0)),
        ),
    ),
    Case(
        name="nested",
        title="nested dicts with 20 small leaves, batch 256",
        make_work=_nested,
        contenders=(*rates("loop"), *COLUMNS),
        goals=(Goal("6 times Grain, from lists as well", 6, Pick("grain"), RECORDS),),
    ),
    Case(
        name="strings",
        title="texts of 20 to 60 characters, batch 256",
        make_work=_strings,
        contenders=(*rates("loop", "keys"), *COLUMNS),
    ),
)
