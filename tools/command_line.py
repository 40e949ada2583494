"""The command line: `millstream inspect`, `convert`, `index`, `lineage` and `top`; also `python -m millstream`.

The exit status is 0 on success, 1 on failure, 2 on wrong usage, 130 after Ctrl-C, and 141 after a broken pipe. An
expected error is one sentence on stderr. A traceback is a bug.
"""

import argparse
import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millstream import __version__
from millstream.errors import WorkerDiedError, WorkerError, WorkerStalledError
from millstream.sources.file_formats import format_names
from millstream.tools.cli_paths import find_files

_EXPECTED_ERRORS = (OSError, ValueError, ImportError, WorkerDiedError, WorkerError, WorkerStalledError)

_INTERRUPTED, _BROKEN_PIPE = 130, 141
"""Exit statuses as in shells: 128 plus the number of SIGINT or SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns its exit status. The arguments are those of this process if there are none."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout again when it exits, which must succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # File names may contain any bytes.
    options = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    with _messages_on_stderr():
        try:
            run(options)
        except BrokenPipeError:
            raise
        except _EXPECTED_ERRORS as error:
            _print_error(error)
            return 1
    return 0


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="millstream",
        description="Inspect, convert and index record files; trace records; monitor running trainers.",
    )
    root.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspect = _command(commands, "inspect", _inspect, "show the format, record sizes and first record of files")
    index = _command(commands, "index", _index, "build the record indices of files in advance")
    for command in (inspect, index):
        _add_paths(command, "paths", "PATH")
    convert = _command(
        commands,
        "convert",
        _convert,
        "write records of any format to ArrayRecord, Bagz or token files, or decompress a file",
    )
    _add_paths(convert, "sources", "SRC")
    convert.add_argument(
        "destination",
        metavar="DST",
        help="a file ending in .array_record, .bag, .bagz or .bin (tokens); any other name decompresses SRC into it",
    )
    convert.add_argument(
        "--shards", type=_positive, default=1, metavar="N", help="write N files, DST-00000-of-0000N etc. (default: 1)"
    )
    convert.add_argument(
        "--part",
        type=_job,
        metavar="K/M",
        dest="job",
        help="write only the files n with n %% M = K - 1, for job K of an array of M jobs (default: all)",
    )
    convert.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="number of processes that read and encode (default: one per core)",
    )
    convert.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="use --jobs=N actors of a Ray cluster instead of processes; ADDRESS as for ray.init, such as auto",
    )
    convert.add_argument(
        "--encode",
        choices=["auto", "raw", "json", "example"],
        default="auto",
        help="record encoding: raw (bytes and text unchanged), json, example (tf.train.Example), or auto (default: "
        "selected by the first record)",
    )
    convert.add_argument(
        "--map",
        metavar="MODULE:FUNCTION",
        dest="function",
        help="write the results of a Python function, called with each record",
    )
    convert.add_argument(
        "--feature", metavar="NAME", help="for tokens: the entry that holds them (default: the only entry)"
    )
    convert.add_argument(
        "--dtype", help="for tokens: their dtype in the file, such as uint16 (default: that of the arrays)"
    )
    convert.add_argument(
        "--compression", metavar="none|zstd[:LEVEL]", help="compression of each record (default: the fastest to read)"
    )
    convert.add_argument(
        "--max-ratio",
        type=_positive,
        default=200,
        metavar="N",
        help="decompress a file to more than 1 GiB only if it grows at most N-fold (default: 200)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace existing files")
    lineage = _command(commands, "lineage", _lineage, "show the steps of records, and the records of steps")
    lineage.add_argument(
        "loader", metavar="MODULE:FUNCTION", help="a Python function without arguments that returns a DataLoader"
    )
    lineage.add_argument("--state", metavar="FILE", help="a saved state of its iterator; its step becomes the stop")
    lineage.add_argument(
        "--key",
        type=_count,
        action="append",
        default=[],
        metavar="K",
        dest="keys",
        help="a record key, whose steps are found; may be repeated",
    )
    lineage.add_argument(
        "--step",
        type=_count,
        action="append",
        default=[],
        metavar="N",
        dest="steps",
        help="a step, whose records are listed; may be repeated",
    )
    lineage.add_argument(
        "--stop", type=_count, metavar="N", help="consider steps before N only (default: the end of the order)"
    )
    top = _command(commands, "top", _top, "monitor the pipelines of a running trainer")
    top.add_argument(
        "pid",
        type=_positive,
        nargs="?",
        metavar="PID",
        help="process ID of the trainer; optional if only one can be monitored",
    )
    top.add_argument("--list", action="store_true", help="list the trainers that can be monitored")
    top.add_argument(
        "--once", action="store_true", help="print one snapshot and exit (default if stdout is not a terminal)"
    )
    top.add_argument("--stacks", action="store_true", help="also show the stacks of threads and workers")
    top.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="refresh interval in seconds; rates are averages over it (default: 1)",
    )
    return root


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.05 <= (number := float(text)) <= 3600:
            return number
    raise argparse.ArgumentTypeError(f"must be between 0.05 and 3600 seconds, got {text}")


def _job(text: str) -> tuple[int, int]:
    if (match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)) and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise argparse.ArgumentTypeError(f"must be a job and the number of jobs, such as 3/16, got {text!r}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a non-negative integer, got {text!r}")
    return int(text)


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], summary: str
) -> argparse.ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description)
    command.set_defaults(run=run)
    return command


def _add_paths(command: argparse.ArgumentParser, name: str, metavar: str) -> None:
    command.add_argument(
        name, nargs="+", metavar=metavar, help="a file, a quoted glob, or a file with a record range, 'a.txt[0:100]'"
    )
    command.add_argument(
        "--format",
        choices=format_names(),
        help="format of all files (default: detected from their names or first bytes)",
    )


def _inspect(options: argparse.Namespace) -> None:
    from millstream.tools.inspection import inspect_files  # noqa: PLC0415  (lazy: each command imports only its own code)

    errors: list[Exception] = []
    has_output = False
    for kind, paths in find_files(options.paths, options.format, errors.append).values():
        try:
            lines = list(inspect_files(kind, paths))
        except _EXPECTED_ERRORS as error:
            errors.append(error)
            continue
        print("\n" * has_output + "\n".join(lines))
        has_output = True
    for earlier in errors[:-1]:
        _print_error(earlier)
    if errors:
        raise errors[-1]


def _index(options: argparse.Namespace) -> None:
    from millstream.tools.inspection import build_index  # noqa: PLC0415

    for kind, paths in find_files(options.paths, options.format).values():
        print(build_index(kind, paths))


def _convert(options: argparse.Namespace) -> None:
    from millstream.tools.convert_command import run_convert  # noqa: PLC0415

    keywords = {name: value for name, value in vars(options).items() if name not in {"run", "sources", "destination"}}
    print(run_convert(options.sources, options.destination, **keywords))


def _lineage(options: argparse.Namespace) -> None:
    from millstream.tools.lineage_command import lineage_lines  # noqa: PLC0415

    for line in lineage_lines(options.loader, options.state, options.keys, options.steps, options.stop):
        print(line)


def _top(options: argparse.Namespace) -> None:
    from millstream.tools.top_command import monitor, trainer_lines  # noqa: PLC0415

    if options.list:
        for line in trainer_lines():
            print(line)
        return
    monitor(options.pid, once=options.once, stacks=options.stacks, interval=options.interval)


@contextlib.contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """Prints warnings and the log messages of the library to stderr."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"millstream: {message}", file=sys.stderr)

    logger, handler = logging.getLogger("millstream"), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _print_error(error: BaseException) -> None:
    print(f"millstream: {_error_text(error)}", file=sys.stderr)


def _error_text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        name = f": {os.fsdecode(error.filename)!r}" if error.filename else ""
        return f"{error.strerror}{name}"
    return str(error) or type(error).__name__
