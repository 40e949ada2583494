"""tf.data: everything autotuned and in its graph, record by record or, as its guide advises, on whole batches.

It reads files in order only, through a buffer in which it shuffles, and no ArrayRecord: the same records are written as
TFRecord files for it. It delivers in any order, which is faster.
"""

import dataclasses
from pathlib import Path
from typing import Any

import tensorflow as tf

from suite.data import bring_into_memory
from suite.peers import Stream
from suite.work import (
    SEED,
    Columns,
    Contender,
    Files,
    Filter,
    Mixture,
    Records,
    Step,
    UnsupportedError,
    Work,
)

_SHUFFLE_BUFFER = 10_000
"""Records from files are shuffled within this many of them."""


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of a `Dataset`; "batches first" applies the steps to whole batches."""
    if work.row_length is not None:
        raise UnsupportedError("it packs nothing as documents come")
    tf.random.set_seed(SEED)
    batches_first = contender.mode == "batches first"
    functions = [_graph(step, of_many=batches_first) for step in work.steps]
    dataset = _records(work, work.batch_size if batches_first else None)
    for function in functions:
        dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE)
    if not batches_first:
        dataset = dataset.batch(work.batch_size, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = False
    return Stream(iter(dataset.prefetch(tf.data.AUTOTUNE).with_options(options).as_numpy_iterator()))


def _graph(step: Step, *, of_many: bool) -> Any:
    if isinstance(step, Filter):
        raise UnsupportedError("the filter is Python, which its graph has not")
    function = step.graph_of_many if of_many else step.graph
    if function is None:
        raise UnsupportedError(f"TensorFlow has no operations for a step{' on whole batches' if of_many else ''}")
    return function


def _records(work: Work, batch_size: int | None) -> Any:
    match work.source:
        case Mixture(parts):
            datasets = [_records(dataclasses.replace(work, source=part), None) for part in parts]
            dataset = tf.data.Dataset.sample_from_datasets(datasets, seed=SEED)
        case Files(paths=paths, format="array_record"):
            records = [_as_tfrecord(Path(path)) for path in paths]
            dataset = tf.data.TFRecordDataset(records, num_parallel_reads=len(records))
            dataset = _shuffled(dataset, _SHUFFLE_BUFFER, work)
        case Files():
            raise UnsupportedError(f"its graph does not read {work.source.format} files")
        case Records() | Columns():
            return _gathered(work, batch_size)
    return dataset.batch(batch_size) if batch_size else dataset


def _gathered(work: Work, batch_size: int | None) -> Any:
    columns = _columns(work)
    count = len(tf.nest.flatten(columns)[0])
    keys = _shuffled(tf.data.Dataset.range(count), count, work)
    keys = keys.batch(batch_size) if batch_size else keys
    return keys.map(
        lambda some: tf.nest.map_structure(lambda column: tf.gather(column, some), columns),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _shuffled(dataset: Any, count: int, work: Work) -> Any:
    dataset = dataset.shuffle(count, seed=SEED)
    return dataset if work.one_epoch else dataset.repeat()


def _columns(work: Work) -> Any:
    """Returns the records in memory as tensors of many rows."""
    import numpy as np  # noqa: PLC0415

    if isinstance(work.source, Columns):
        return tf.nest.map_structure(tf.constant, work.source.arrays)
    if isinstance(work.source, Records) and isinstance(work.source.values, list):
        return tf.constant(np.array(work.source.values))
    raise UnsupportedError("the source is Python, and not data in memory")


def _as_tfrecord(path: Path) -> str:
    """Returns a TFRecord file of the same records, written when first asked for."""
    from array_record.python.array_record_module import ArrayRecordReader  # noqa: PLC0415  (starts threads)

    target = path.with_name(f"{path.name}.tfrecord")
    if not target.exists():
        reader = ArrayRecordReader(str(path))
        partial = target.with_suffix(".partial")
        with tf.io.TFRecordWriter(str(partial)) as writer:
            for record in reader.read_all():
                writer.write(record)
        reader.close()
        partial.replace(target)
    bring_into_memory(target)
    return str(target)
