"""Measures what grows with hosts, records, components and workers, on one machine.

    python benchmarks/at_scale.py       half a minute; writes results/scale.json and prints the tables of scale.md

Hosts are simulated: what 1,024 of them compute is computed here, one after the other. What they would read is not: a
source says that it has 10^12 records, and makes those that are asked for.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from array_record.python.array_record_module import ArrayRecordWriter

import millstream
from millstream.transforms import Filter
from suite.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "scale.json"

BLOCK, BATCH = 8_192, 8
"""Positions that are asked for at once: many, and a single small batch."""


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Returns how much processor time some work takes, the least of a few times: whatever else the machine does."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def index_sampler(num_records: int) -> millstream.IndexSampler:
    return millstream.IndexSampler(num_records, shuffle=True, seed=1)


def mixture(num_records: int, components: int) -> millstream.MixtureSampler:
    samplers = [index_sampler(num_records // components) for _ in range(components)]
    return millstream.MixtureSampler(samplers, [1_000 + number for number in range(components)])


def order(sampler: Any, length: int) -> dict[str, float]:
    """Returns what an order costs: nanoseconds a position near its middle, and bytes to send it to a worker."""
    import cloudpickle  # noqa: PLC0415  (only measured here)

    start = length // 2
    return {
        "us_per_batch": seconds(lambda: sampler.record_keys(start, start + BATCH)) * 1e6,
        "ns_per_position": seconds(lambda: sampler.record_keys(start, start + BLOCK)) / BLOCK * 1e9,
        "bytes": len(cloudpickle.dumps(sampler)),
    }


def packing(documents: int) -> dict[str, float]:
    """Returns what it costs to plan rows of documents whose lengths are known."""
    lengths = np.random.default_rng(0).integers(1, 2_049, documents)
    before = psutil.Process().memory_info().rss
    start = time.process_time()
    sampler = millstream.PackingSampler(lengths, 2_048, seed=1, shuffle=True, num_epochs=1)
    sampler.record_keys(0, 1)
    built = time.process_time() - start
    held = psutil.Process().memory_info().rss - before + lengths.nbytes
    return {"documents": documents, "seconds": built, "bytes_per_document": held / documents}


class Most(Filter):
    """Drops one record of eight, so that hosts advance at their own pace."""

    def filter(self, element: Any) -> bool:
        """Says whether the record's number is not a multiple of eight."""
        return bool(element % 8)


def loader(  # noqa: PLR0917  (numbers that say where)
    num_records: int, hosts: int, host: int, batch: int, sampler: Any, logical_shards: int | None = None
) -> millstream.DataLoader:
    return millstream.DataLoader(
        data_source=millstream.RangeDataSource(0, num_records),
        sampler=sampler,
        operations=[*[Most()] * (logical_shards is not None), millstream.Batch(batch, drop_remainder=True)],
        shard_options=millstream.ShardOptions(host, hosts, logical_shards=logical_shards),
        read_options=millstream.ReadOptions(0),
    )


def checkpoints(num_records: int, hosts: int, sampler: Any) -> dict[str, Any]:
    """Returns what the states of all hosts cost, having seen that the hosts' parts are those of the order."""
    step, batch = 10**6, 8
    saved, took, restored, parts = [], [], [], []
    for host in range(hosts):
        with iter(loader(num_records, hosts, host, batch, sampler)) as iterator:
            iterator.seek(step)
            took.append(seconds(iterator.get_state, 1))
            saved.append(iterator.get_state())
        with (one := loader(num_records, hosts, host, batch, sampler)), iter(one) as iterator:
            restored.append(seconds(lambda: iterator.set_state(saved[-1]), 1))
            assert iterator.step == step
            parts.append(one.record_keys(step))
    start = step * hosts * batch
    whole = np.concatenate(parts)
    # The rows of a mixture are permuted within their global batch.
    assert np.array_equal(np.sort(whole), np.sort(sampler.record_keys(start, start + hosts * batch)))
    # Half as many hosts with twice the batch, from the state of any one: the same global batch.
    with (half := loader(num_records, hosts // 2, 1, 2 * batch, sampler)), iter(half) as iterator:
        iterator.set_state(saved[0])
        assert np.array_equal(half.record_keys(step), whole[2 * batch : 4 * batch])
    return {
        "hosts": hosts,
        "bytes_per_host": float(np.mean(list(map(len, saved)))),
        "get_state_us": float(np.median(took)) * 1e6,
        "set_state_us": float(np.median(restored)) * 1e6,
    }


def dealt_checkpoints(num_records: int, hosts: int) -> dict[str, Any]:
    """Returns what the states cost of hosts that filter, each at its own pace, and resume on half as many."""
    sampler, states, firsts = index_sampler(num_records), [], []
    for host in range(hosts):
        with (one := loader(num_records, hosts, host, 8, sampler, hosts)), iter(one) as iterator:
            next(iterator)
            states.append(iterator.get_state())
            firsts.append(next(iterator))
    with (half := loader(num_records, hosts // 2, 0, 16, sampler, hosts)), iter(half) as iterator:
        took = seconds(lambda: iterator.set_states(states), 1)
        assert np.array_equal(next(iterator), np.concatenate(firsts[:2]))
    return {"hosts": hosts, "bytes_per_host": float(np.mean(list(map(len, states)))), "set_states_ms": took * 1e3}


def files(count: int) -> dict[str, float]:
    """Returns what each of many ArrayRecord files costs a process that has them as one source."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        writer = ArrayRecordWriter(str(first), "group_size:1")
        writer.write(bytes(8))
        writer.close()
        for number in range(count):
            (Path(folder) / f"{number:06}.array_record").write_bytes(first.read_bytes())
        before = psutil.Process().memory_info().rss
        start = time.process_time()
        source = millstream.ArrayRecordDataSource(f"{folder}/*.array_record")
        taken = time.process_time() - start
        assert len(source) == count
        grown = psutil.Process().memory_info().rss - before
    return {"files": count, "us_per_file": taken / count * 1e6, "bytes_per_file": grown / count}


def process(records: int, components: int, hosts: int, workers: int) -> dict[str, float]:
    """Returns what one host's processes hold after some batches: measured in a process of its own."""
    given = [str(number) for number in (records, components, hosts, workers)]
    done = subprocess.run(
        [sys.executable, __file__, "--process", *given], stdout=subprocess.PIPE, text=True, check=True
    )
    return {"records": records, "components": components, "hosts": hosts, "workers": workers, **json.loads(done.stdout)}


def print_process(records: int, components: int, hosts: int, workers: int) -> None:
    sampler = mixture(records, components) if components > 1 else index_sampler(records)
    made = millstream.DataLoader(
        data_source=millstream.RangeDataSource(0, records),
        sampler=sampler,
        operations=[millstream.Batch(8)],
        shard_options=millstream.ShardOptions(hosts - 1, hosts),
        worker_count=workers,
    )
    itself = psutil.Process()
    with iter(made) as iterator:
        for _ in range(20):
            next(iterator)
        family = [itself, *itself.children(recursive=True)]
        memory = sum(one.memory_full_info().pss for one in family)
        print(json.dumps({"mb": memory / 1e6, "processes": len(family), "descriptors": itself.num_fds()}))


def measure(  # noqa: PLR0917  (numbers that say how much)
    hosts: int, records: int, components: int, documents: int, num_files: int, workers: Sequence[int]
) -> dict[str, Any]:
    machine = describe_machine()
    of_index = {str(count): order(index_sampler(count), count) for count in (10**6, 10**9, records)}
    counts = sorted({2, 10, 100, components})
    of_mixture = {str(count): order(mixture(records, count), records) for count in counts}
    return {
        "machine": {name: machine[name] for name in ("processor", "cores", "python", "numpy")},
        "hosts": hosts,
        "records": records,
        "components": components,
        "order": of_index,
        "mixture": of_mixture,
        "mixture_seconds": seconds(lambda: mixture(records, components).record_keys(0, 1), 3),
        "packing": [packing(documents // 10), packing(documents)],
        "checkpoints": [
            checkpoints(records, max(4, hosts // 16), index_sampler(records)),
            checkpoints(records, hosts, index_sampler(records)),
        ],
        "checkpoints_of_mixture": checkpoints(records, max(4, hosts // 16), mixture(records, components)),
        "dealt": [dealt_checkpoints(records, max(4, hosts // 16)), dealt_checkpoints(records, hosts)],
        "files": files(num_files),
        "processes": [
            process(10**6, 1, 1, 0),
            process(records, 1, 1, 0),
            process(records, 1, hosts, 0),
            *(process(records, components, hosts, count) for count in workers),
        ],
    }


def tables(measured: dict[str, Any]) -> Iterator[str]:
    orders = {f"shuffle of {int(count):,} records": cost for count, cost in measured["order"].items()}
    orders |= {
        f"mixture of {int(count):,} components, {measured['records']:,} records": cost
        for count, cost in measured["mixture"].items()
    }
    yield _table(
        {
            "order": name,
            "a position of 8,192": f"{cost['ns_per_position']:,.0f} ns",
            "8 positions": f"{cost['us_per_batch']:,.0f} µs",
            "bytes sent to a worker": f"{cost['bytes']:,}",
        }
        for name, cost in orders.items()
    )
    yield _table(
        {
            "documents": f"{plan['documents']:,}",
            "to plan": f"{plan['seconds']:.2f} s",
            "bytes a document, lengths included": f"{plan['bytes_per_document']:.0f}",
        }
        for plan in measured["packing"]
    )
    mixed = measured["checkpoints_of_mixture"]
    states = [("", one) for one in measured["checkpoints"]] + [(f", mixture of {measured['components']:,}", mixed)]
    yield _table(
        {
            **_states(one, order),
            "to take": f"{one['get_state_us']:.0f} µs",
            "to resume": f"{one['set_state_us']:.0f} µs",
        }
        for order, one in states
    )
    yield _table(
        {**_states(one), "to resume from all, on each host": f"{one['set_states_ms']:,.1f} ms"}
        for one in measured["dealt"]
    )
    yield _table(
        {
            "records": f"{one['records']:,}",
            "components": f"{one['components']:,}",
            "hosts": f"{one['hosts']:,}",
            "workers": f"{one['workers']}",
            "memory": f"{one['mb']:.0f} MB",
            "processes": f"{one['processes']}",
            "open files of the trainer": f"{one['descriptors']}",
        }
        for one in measured["processes"]
    )


def _states(measured: dict[str, Any], order: str = "") -> dict[str, str]:
    size = measured["bytes_per_host"]
    return {
        "": f"{measured['hosts']:,} hosts{order}",
        "a host's state": f"{size:.0f} bytes",
        "of all hosts": f"{size * measured['hosts'] / 1e3:,.0f} KB",
    }


def _table(rows: Iterator[dict[str, str]]) -> str:
    first, *others = rows
    lines = [list(first), ["---"] * len(first), *(list(row.values()) for row in (first, *others))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what grows, and prints the tables of benchmarks/scale.md.")
    parser.add_argument("--output", type=Path, help="only measure a little, to see that it runs, and write it there")
    parser.add_argument("--process", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        print_process(*given.process)
    elif given.output:
        given.output.write_text(json.dumps(measure(4, 10**9, 10, 10_000, 10, [1])))
    else:
        measured = measure(1_024, 10**12, 1_000, 10**7, 2_000, [0, 1, 2, 4])
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n")
        print("\n".join(tables(measured)))


if __name__ == "__main__":
    main()
