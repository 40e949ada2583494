"""tf.data: everything autotuned and in its graph, record by record or, as its guide advises, on whole batches.

It has no worker processes but those of its service, and reads files in order only: there it shuffles through a buffer.
"""

import dataclasses
from pathlib import Path
from typing import Any, final

import tensorflow as tf

from suite.case import Contender, UnsupportedError
from suite.data import bring_into_memory
from suite.formats import CSV_COLUMNS
from suite.peers.base import Stream, columns_of
from suite.peers.clusters import SERVICE, data_service
from suite.work import SEED, Files, Filter, Mixture, Step, Work

SHUFFLE_BUFFER = 10_000
"""Records from files are shuffled within this many of them."""


@final
class TensorflowAdapter:
    """Opens a `Dataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        tf.random.set_seed(SEED)
        batches_first = contender.mode.endswith("batches first")
        if batches_first and work.batch_size is None:
            raise UnsupportedError("nothing is batched in this case")
        functions = [_graph(step, of_many=batches_first) for step in work.steps]
        dataset = _records(work, work.batch_size if batches_first else None)
        for step, function in zip(work.steps, functions, strict=True):
            if not isinstance(step, Filter):
                dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE)
            elif batches_first:
                dataset = dataset.map(_masked(function), num_parallel_calls=tf.data.AUTOTUNE)
            else:
                dataset = dataset.filter(function)
        if batches_first and work.filters:
            dataset = dataset.rebatch(work.batch_size)
        elif work.batch_size and not batches_first:
            dataset = dataset.batch(work.batch_size, num_parallel_calls=tf.data.AUTOTUNE)
        if contender.mode.startswith(SERVICE):
            # Each of them goes through all the data, in an order of its own: the quickest that there is for an endless
            # stream.
            servers = data_service(1 if work.one_epoch else contender.workers)
            sharding = tf.data.experimental.service.ShardingPolicy.OFF
            dataset = dataset.apply(tf.data.experimental.service.distribute(sharding, servers))
        # Records are shuffled anyway: they may come in the order in which they are ready.
        options = tf.data.Options()
        options.deterministic = False
        dataset = dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
        return Stream(iter(dataset.as_numpy_iterator()))


ADAPTER = TensorflowAdapter()


def _graph(step: Step, *, of_many: bool) -> Any:
    function = step.graph_of_many if of_many else step.graph
    if function is None:
        raise UnsupportedError(f"TensorFlow has no operations for a step{' on whole batches' if of_many else ''}")
    return function


def _masked(function: Any) -> Any:
    return lambda batch: tf.boolean_mask(batch, function(batch))


def _records(work: Work, batch_size: int | None) -> Any:
    if isinstance(work.source, Mixture):
        parts = [_records(dataclasses.replace(work, source=part), None) for part in work.source.parts]
        dataset = tf.data.Dataset.sample_from_datasets(parts, seed=SEED)
        return dataset.batch(batch_size) if batch_size else dataset
    if isinstance(work.source, Files):
        dataset = _files(work.source, work)
        return dataset.batch(batch_size) if batch_size else dataset
    columns, count = _columns(work)
    keys = _shuffled(tf.data.Dataset.range(count), count, work)
    keys = keys.batch(batch_size) if batch_size else keys
    return keys.map(lambda some: _gathered(columns, some), num_parallel_calls=tf.data.AUTOTUNE)


def _shuffled(dataset: Any, count: int, work: Work) -> Any:
    index, shards = work.shard
    dataset = dataset.shard(shards, index).shuffle(count, seed=SEED)
    return dataset if work.one_epoch else dataset.repeat()


def _gathered(columns: Any, keys: Any) -> Any:
    return tf.nest.map_structure(lambda column: tf.gather(column, keys), columns)


def _columns(work: Work) -> tuple[Any, int]:
    """Returns the records in memory as tensors of many rows."""
    columns = columns_of(work)
    return tf.nest.map_structure(tf.constant, columns), len(tf.nest.flatten(columns)[0])


def _files(files: Files, work: Work) -> Any:
    index, shards = work.shard
    dataset = _in_order(files).shard(shards, index).shuffle(SHUFFLE_BUFFER, seed=SEED)
    return dataset if work.one_epoch else dataset.repeat()


def _in_order(files: Files) -> Any:
    paths = list(files.paths)
    match files.format:
        case "array_record":
            paths = [_as_tfrecord(Path(path)) for path in paths]
            return tf.data.TFRecordDataset(paths, num_parallel_reads=len(paths))
        case "tfrecord":
            return tf.data.TFRecordDataset(paths, num_parallel_reads=len(paths))
        case "text":
            return tf.data.TextLineDataset(paths, num_parallel_reads=len(paths))
        case "csv":
            rows = tf.data.experimental.CsvDataset(paths, [tf.string] * len(CSV_COLUMNS), header=True)
            return rows.map(lambda *fields: dict(zip(CSV_COLUMNS, fields, strict=True)))
        case form:
            raise UnsupportedError(f"it does not read {form} files")


def _as_tfrecord(path: Path) -> str:
    """Returns a TFRecord file of the same records, written when first asked for: tf.data reads no ArrayRecord."""
    from array_record.python.array_record_module import ArrayRecordReader  # noqa: PLC0415  (starts threads)

    # A name that no file of the case of TFRecord files has: those come with a list of their records' places.
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
