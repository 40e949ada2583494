"""Files of other formats, shuffled globally: what reading and parsing a record at random costs in each."""

from collections.abc import Callable
from typing import Any

import numpy as np

from suite import data
from suite.case import Case, Contender, Goal, Pick
from suite.contenders import fork_server, modes
from suite.scale import Scale
from suite.steps import (
    fields_of_json,
    fields_of_row,
    fields_of_row_in_graph,
    fields_of_sample,
    identity,
    tokens_in_graph,
    tokens_of,
)
from suite.work import Files, Map, Work

BATCH_SIZE = 256

OURS = (
    Contender("millstream"),
    Contender("millstream", threads=None),
    Contender("millstream", workers=2),
    Contender("millstream", workers=2, threads=None),
)

BY_OUR_SOURCE = (
    Contender("grain_our_source", threads=None, mode="DataLoader"),
    *modes("grain_our_source", "Dataset", threads=None),
    *fork_server("pytorch_our_source"),
)
"""Loaders that have no source for most formats, but take ours: it reads a batch at a time for PyTorch only."""

LOOP = Contender("bare", mode="loop")

SPANS_QUICKER = Goal("1.5 times ArrayRecord, uncompressed", 1.5, Pick("millstream", case="array_record"))
"""Reading pieces of files is worth code of our own where that is clearly quicker than ArrayRecord's library."""

GRAIN = modes("grain", "Dataset", threads=None)
TENSORFLOW = (Contender("tensorflow"), Contender("tensorflow", mode="batches first"))
HUGGINGFACE = (Contender("huggingface", mode="table"), Contender("huggingface", mode="streamed"))
WEBDATASET = (*fork_server("webdataset"), *fork_server("wids"), *fork_server("mosaicml"))


def label_and_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns what the step makes of a sample: WebDataset puts its key beside that."""
    return {name: np.asarray(batch[name]) for name in ("label", "tokens")}


def in_one_dtype(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch of integers as int64: the NumPy format of HF datasets makes that of them all."""
    return {name: np.asarray(values).astype(np.int64) for name, values in batch.items()}


def _case(
    name: str,
    title: str,
    files: Callable[[int], Files],
    step: Map | None,
    *,
    peers: tuple[Contender, ...],
    bounds: tuple[Contender, ...] = (Contender("bare", mode="pread"), LOOP),
    goals: tuple[Goal, ...] = (),
    view: Callable[[Any], Any] = identity,
) -> Case:
    """Returns a case of files. Tables have no step, and their columns no bare loop over records."""

    def work(scale: Scale) -> Work:
        count = scale.pick(tiny=1024, quick=65_536, full=262_144)
        return Work(files(count), () if step is None else (step,), BATCH_SIZE)

    half = Goal("0.5 of the bare loop, without workers", 0.5, Pick("bare", mode="loop"), Pick("millstream", 0))
    return Case(
        name=name,
        title=f"{title}, batch {BATCH_SIZE}",
        make_work=work,
        contenders=(*OURS, *peers, *bounds),
        goals=(*goals, half) if LOOP in bounds else goals,
        view=view,
    )


def _tokens(form: str, options: str = "") -> Callable[[int], Files]:
    return lambda count: data.token_files(count, form, options)


_TOKENS = Map(tokens_of, tokens_in_graph, tokens_in_graph)


def _parquet_case(name: str, title: str, *, is_wide: bool) -> Case:
    return _case(
        name,
        title,
        lambda count: data.table_files(count, "parquet", is_wide=is_wide),
        None,
        peers=GRAIN,
        bounds=(Contender("bare", mode="row groups"), Contender("bare", mode="index")),
        goals=(
            Goal("3 times Grain", 3, Pick("grain")),
            Goal("0.6 of reading the row groups in order", 0.6, Pick("bare", mode="row groups")),
        ),
    )


CASES = (
    _case(
        "array_record",
        "1 KB records from uncompressed ArrayRecord files, as uint16",
        _tokens("array_record", "uncompressed"),
        _TOKENS,
        peers=(*GRAIN, *fork_server("pytorch")),
        bounds=(Contender("bare", mode="read"), Contender("bare", mode="read singly"), LOOP),
    ),
    _case(
        "tfrecord",
        "1 KB records from TFRecord files, as uint16",
        _tokens("tfrecord"),
        _TOKENS,
        peers=(*GRAIN, *TENSORFLOW, *BY_OUR_SOURCE),
        goals=(
            SPANS_QUICKER,
            Goal("5 times Grain, which shuffles a window only", 5, Pick("grain")),
            Goal("1.3 times tf.data, which shuffles a buffer only", 1.3, Pick("tensorflow")),
        ),
    ),
    _case(
        "bagz",
        "1 KB records from Bagz files, uncompressed, as uint16",
        _tokens("bagz"),
        _TOKENS,
        peers=(*GRAIN, *fork_server("pytorch"), *BY_OUR_SOURCE),
        goals=(SPANS_QUICKER,),
    ),
    _case(
        "text",
        "lines of 20 to 60 characters from text files",
        data.text_files,
        Map(identity, identity, identity),
        peers=(*TENSORFLOW, *HUGGINGFACE, *BY_OUR_SOURCE),
    ),
    Case(
        name="many_files",
        title=f"lines of 20 to 60 characters from text files of four lines, batch {BATCH_SIZE}",
        make_work=lambda scale: Work(
            data.many_text_files(scale.pick(tiny=1024, quick=16_384, full=65_536)),
            (Map(identity, identity, identity),),
            BATCH_SIZE,
        ),
        contenders=(*OURS, *BY_OUR_SOURCE, Contender("bare", mode="open and pread")),
        goals=(
            Goal("0.2 of opening, reading and closing a file for each record", 0.2, Pick("bare")),
            Goal("5 times Grain over our source", 5, Pick("grain_our_source")),
        ),
    ),
    _case(
        "json_lines",
        "JSON of 600 characters on lines: a number and 100 tokens",
        data.json_files,
        Map(fields_of_json),
        peers=(*HUGGINGFACE, *BY_OUR_SOURCE),
    ),
    _case(
        "csv",
        "rows of 60 characters from CSV files: a number and 8 fractions",
        data.csv_files,
        Map(fields_of_row, fields_of_row_in_graph, fields_of_row_in_graph),
        peers=(*TENSORFLOW, *HUGGINGFACE, *BY_OUR_SOURCE),
    ),
    _case(
        "webdataset",
        "samples of 1 KB and a label from WebDataset archives",
        data.sample_files,
        Map(fields_of_sample),
        peers=(*WEBDATASET, *BY_OUR_SOURCE),
        goals=(
            Goal("10 times webdataset, which shuffles a buffer only", 10, Pick("webdataset")),
            Goal("1.5 times wids", 1.5, Pick("wids")),
        ),
        view=label_and_tokens,
    ),
    _parquet_case("parquet", "rows of Parquet files: a number and 512 tokens, 16 row groups shuffled", is_wide=False),
    _case(
        "parquet_default",
        "the same, four times as large as the memory for row groups, as load(shuffle=True) has it by itself",
        lambda count: data.table_files(count, "parquet", is_wide=False),
        None,
        peers=(Contender("millstream", threads=None, mode="default"), *GRAIN),
        bounds=(Contender("bare", mode="row groups"),),
        goals=(
            Goal(
                "0.5 of a HierarchicalSampler",
                0.5,
                Pick("millstream", 0, mode=""),
                Pick("millstream", 0, mode="default"),
            ),
        ),
    ),
    _parquet_case("parquet_columns", "the same, two of four columns of 2 KB a row", is_wide=True),
    _case(
        "huggingface",
        "rows of a Hugging Face dataset: a number and 512 tokens",
        lambda count: data.table_files(count, "arrow"),
        None,
        peers=(
            Contender("huggingface", mode="Python"),
            Contender("huggingface", mode="NumPy"),
            Contender("huggingface", mode="Arrow"),
            *fork_server("pytorch"),
        ),
        bounds=(Contender("bare", mode="index"),),
        goals=(
            Goal("twice PyTorch over the same dataset", 2, Pick("pytorch")),
            Goal("3 times `dataset[keys]`", 3, Pick("huggingface")),
        ),
        view=in_one_dtype,
    ),
)
