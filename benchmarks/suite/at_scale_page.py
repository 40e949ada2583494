"""The page about what grows: words with the numbers that `at_scale.py` measured, and no others."""

from typing import Any

_RUN_BYTES, _RUN_RECORDS, _RUN_HOSTS, _RUN_DAYS, _RUN_BATCH = 10**16, 10**12, 4_096, 30, 8
"""The run that is worked out on paper; its batch is that of each host."""

_FILE_BYTES = (1 << 30, 16 << 30)


_HOST_BYTES = 16e9
"""What a host may spend on the plan of packed rows, for example."""


def page(measured: dict[str, Any]) -> str:
    """Returns the page in Markdown."""
    machine = measured["machine"]
    return "\n".join(
        [
            "# At scale",
            "",
            (
                f"What grows with hosts, records, components and workers, and what does not: {measured['hosts']:,} "
                f"hosts and {measured['records']:,} records, simulated on one machine ({machine['processor']}, "
                f"{machine['cores']} cores, Python {machine['python']}, NumPy {machine['numpy']}). `python "
                "benchmarks/at_scale.py` measures all of it and writes this page. Times are processor time."
            ),
            "",
            (
                "Simulated means: each host's loader is built, moved, saved and resumed here, one after the other, "
                "and its record keys are compared with the order. Nothing is read from a disk or a network, and no "
                "two hosts run at the same time: what that costs, this page does not say."
            ),
            "",
            *_growth(measured),
            *_order(measured),
            *_packing(measured),
            *_states(measured),
            *_files(measured),
            *_processes(measured),
            *_on_paper(measured),
        ]
    )


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return [*lines, ""]


def _growth(measured: dict[str, Any]) -> list[str]:
    files, plan = measured["files"], measured["packing"][-1]
    index = max(measured["index_bytes"].values())
    rows = [
        [
            "hosts",
            "the number of states that are saved at a step",
            "memory, the size of a state, the cost of a position",
        ],
        [
            "records",
            f"an index of places, {index:.0f} bytes a record, of formats that need one",
            "order, states, memory",
        ],
        ["components", "the time to build a mixture and to find its keys; its text", "states"],
        ["workers", "memory, processes, descriptors", "batches, states"],
        ["files", f"{files['us_per_file']:.0f} µs and {files['bytes_per_file']:.0f} bytes each", "reading, states"],
        ["documents packed ahead", f"{plan['bytes_per_document']:.0f} bytes each, on every host", "states"],
    ]
    return ["## What grows", "", *_table(["with the number of", "grows", "does not grow"], rows)]


def _order(measured: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"shuffle of {int(count):,} records",
            f"{cost['ns_per_position']:,.0f} ns",
            f"{cost['us_per_batch']:,.0f} µs",
            f"{cost['bytes']:,}",
        ]
        for count, cost in measured["order"].items()
    ]
    rows += [
        [
            f"mixture of {int(count):,} components, {measured['records']:,} records",
            f"{cost['ns_per_position']:,.0f} ns",
            f"{cost['us_per_batch']:,.0f} µs",
            f"{cost['bytes']:,}",
        ]
        for count, cost in measured["mixture"].items()
    ]
    return [
        "## The order",
        "",
        "The keys of 8,192 positions in the middle of the order, asked for at once. No list of keys exists anywhere.",
        "",
        *_table(["order", "a position of 8,192", "8 positions", "bytes sent to a worker"], rows),
        (
            f"Building the mixture of {measured['components']:,} components, up to its first key, takes "
            f"{measured['mixture_seconds'] * 1e3:,.0f} ms. Components that are `IndexSampler`s "
            "are asked together."
        ),
        "",
    ]


def _packing(measured: dict[str, Any]) -> list[str]:
    rows = [
        [f"{plan['documents']:,}", f"{plan['seconds']:.2f} s", f"{plan['bytes_per_document']:.0f}"]
        for plan in measured["packing"]
    ]
    held = measured["packing"][-1]["bytes_per_document"]
    whole = held * measured["records"] / 1e12
    return [
        "## Packing ahead",
        "",
        *_table(["documents", "to plan", "bytes a document, lengths included"], rows),
        (
            f"This does not scale without end: {measured['records']:,} documents would need {whole:,.0f} TB on "
            f"every host. {_HOST_BYTES / 1e9:.0f} GB can hold {_HOST_BYTES / held:,.0f} documents. For more, "
            "pack as they come (`FirstFitPack`, `BestFitPack`, `ConcatThenSplit`), which holds open rows only."
        ),
        "",
    ]


def _states(measured: dict[str, Any]) -> list[str]:
    mixed = measured["checkpoints_of_mixture"]
    kinds = [(f"{one['hosts']:,} hosts", one) for one in measured["checkpoints"]]
    kinds.append((f"{mixed['hosts']:,} hosts, mixture of {measured['components']:,}", mixed))
    rows = [
        [
            name,
            f"{one['bytes_per_host']:.0f} bytes",
            f"{one['bytes_per_host'] * one['hosts'] / 1e3:,.0f} KB",
            f"{one['get_state_us']:.0f} µs",
            f"{one['set_state_us']:.0f} µs",
        ]
        for name, one in kinds
    ]
    dealt = [
        [
            f"{one['hosts']:,} hosts",
            f"{one['bytes_per_host']:.0f} bytes",
            f"{one['bytes_per_host'] * one['hosts'] / 1e3:,.0f} KB",
            f"{one['set_states_ms']:,.1f} ms",
        ]
        for one in measured["dealt"]
    ]
    return [
        "## Checkpoints",
        "",
        (
            "Of all hosts at step 1,000,000. Each host's part of the step was compared with the order; and half as "
            "many hosts, at the same global batch, resumed from the state of one."
        ),
        "",
        *_table(["", "a host's state", "of all hosts", "to take", "to resume"], rows),
        (
            "With a filter, hosts advance at their own pace. Dealt to as many logical shards as there are hosts, they "
            "resume on half as many from all of their states together:"
        ),
        "",
        *_table(["", "a host's state", "of all hosts", "to resume from all, on each host"], dealt),
    ]


def _files(measured: dict[str, Any]) -> list[str]:
    files = measured["files"]
    rows = [[name, f"{count:.0f}"] for name, count in measured["index_bytes"].items()]
    return [
        "## Files and indices",
        "",
        (
            f"ArrayRecord files have their own index. Each file of a source costs {files['us_per_file']:.0f} µs when "
            f"the source is built, which looks at each, and {files['bytes_per_file']:.0f} bytes of memory; measured "
            f"with {files['files']:,} files on a local disk. Formats of lines have an index of places beside the "
            "data, made once and mapped by all processes of a host:"
        ),
        "",
        *_table(["format", "bytes a record"], rows),
    ]


def _processes(measured: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{one['records']:,}",
            f"{one['components']:,}",
            f"{one['hosts']:,}",
            f"{one['workers']}",
            f"{one['mb']:.0f} MB",
            f"{one['processes']}",
            f"{one['descriptors']}",
        ]
        for one in measured["processes"]
    ]
    head = ["records", "components", "hosts", "workers", "memory", "processes", "open files of the trainer"]
    return [
        "## The memory of a host",
        "",
        (
            "All processes of one host's loader, after 20 batches of 8 numbers; memory that they share is counted "
            "once. Batches come on top: `workers * (1 + worker_buffer_size)` of them."
        ),
        "",
        *_table(head, rows),
    ]


def _on_paper(measured: dict[str, Any]) -> list[str]:
    files, state = measured["files"], measured["checkpoints"][-1]["bytes_per_host"]
    cost = measured["order"][str(measured["records"])]["ns_per_position"]
    rate = _RUN_RECORDS / _RUN_DAYS / 86_400 / _RUN_HOSTS
    index = max(measured["index_bytes"].values())
    rows = [
        ["a host reads", f"{rate:,.0f} records/s, {rate * _RUN_BYTES / _RUN_RECORDS / 1e6:,.2f} MB/s"],
        ["all hosts read", f"{_RUN_BYTES / _RUN_DAYS / 86_400 / 1e9:,.1f} GB/s"],
        ["the order takes, of one core of a host", f"{rate * cost / 1e9:.1e}"],
        ["steps", f"{_RUN_RECORDS / _RUN_HOSTS / _RUN_BATCH:,.0f}"],
        ["the states of all hosts, at a step", f"{state * _RUN_HOSTS / 1e6:.1f} MB"],
        ["an index of places, if the format needs one", f"{index * _RUN_RECORDS / 1e12:.0f} TB"],
    ]
    for size in _FILE_BYTES:
        count = _RUN_BYTES / size
        rows.append(
            [
                f"files of {size >> 30} GiB",
                (
                    f"{count:,.0f}: {count * files['us_per_file'] / 60e6:,.1f} min to build the source on each host, "
                    f"{count * files['bytes_per_file'] / 1e9:.2f} GB of memory in each of its processes that reads"
                ),
            ]
        )
    return [
        "## 10 PB on 4,096 hosts, on paper",
        "",
        (
            f"Not run: {_RUN_BYTES / 1e15:.0f} PB in {_RUN_RECORDS:,} records of {_RUN_BYTES // _RUN_RECORDS:,} "
            f"bytes, one epoch in {_RUN_DAYS} days on {_RUN_HOSTS:,} hosts, with {_RUN_BATCH} records a host and "
            "step. From the constants above:"
        ),
        "",
        *_table(["", "needs"], rows),
        (
            "So the order, the states and the memory are not a problem at this size. The number of files is, so make "
            "them large; and so is an index of places, so take a format that has its own."
        ),
        "",
    ]
