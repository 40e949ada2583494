"""The command line: `millstream inspect`, `convert`, `index` and `top`, also as `python -m millstream`.

Exit statuses: 0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C, 141 where nobody reads the output
any more. What goes wrong is a sentence on the standard error; what is not expected to is a traceback.
"""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millstream import __version__
from millstream.errors import WorkerDiedError, WorkerError, WorkerStalledError
from millstream.sources.formats import FORMATS
from millstream.tools.cli_paths import given_files

_EXPECTED = (OSError, ValueError, ImportError, WorkerDiedError, WorkerError, WorkerStalledError)
"""What says in a sentence what is wrong: with a file, with its content, or with what is asked for."""

_INTERRUPTED, _NOBODY_READS = 130, 141
"""128 and the number of the signal, SIGINT and SIGPIPE, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the exit status.

    Args:
        arguments: what follows the name of the program; None for that of this process.

    Raises:
        SystemExit: wrong usage, or `--help`.
    """
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NOBODY_READS


def _run(arguments: Sequence[str] | None) -> int:
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # Names of files may be any bytes.
    given = parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = given.run
    with _messages_on_standard_error():
        try:
            run(given)
        except BrokenPipeError:
            raise
        except _EXPECTED as error:
            _complain(error)
            return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns what understands the arguments of all commands."""
    whole = argparse.ArgumentParser(
        prog="millstream",
        description="Looks at files of records, converts and indexes them; looks at running pipelines.",
    )
    whole.add_argument("--version", action="version", version=f"millstream {__version__}")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    inspect = _command(commands, "inspect", _inspect, "show what files hold: records, sizes, the first record")
    index = _command(commands, "index", _index, "find where each record begins, ahead of time, and keep that")
    for command in (inspect, index):
        _add_paths(command, "paths", "PATH")
    convert = _command(
        commands, "convert", _convert, "write records of any format to ArrayRecord or Bagz files, or unpack a file"
    )
    _add_paths(convert, "sources", "SRC")
    convert.add_argument(
        "destination",
        metavar="DST",
        help="a file that ends in .array_record, .bag or .bagz; any other name unpacks a SRC that is compressed",
    )
    convert.add_argument(
        "--shards", type=_positive, default=1, metavar="N", help="write N files, DST-00000-of-0000N and so on"
    )
    convert.add_argument(
        "--jobs", type=_positive, metavar="N", help="how many processes write files at the same time (one per core)"
    )
    convert.add_argument(
        "--encode",
        choices=["auto", "raw", "json", "example"],
        default="auto",
        help="what records become: bytes and text as they are, JSON, tf.train.Example; auto chooses by the first one",
    )
    convert.add_argument(
        "--compression", metavar="none|zstd[:LEVEL]", help="how each record is compressed (none, the fastest to read)"
    )
    convert.add_argument(
        "--runner", metavar="NAME", help="write with Apache Beam instead: DirectRunner, FlinkRunner, SparkRunner, ..."
    )
    convert.add_argument(
        "--runner-option",
        action="append",
        default=[],
        dest="runner_options",
        metavar="NAME=VALUE",
        help="an option of Beam, such as flink_master=localhost:8081; may be repeated",
    )
    convert.add_argument(
        "--max-ratio",
        type=_positive,
        default=200,
        metavar="N",
        help="unpack a file of more than 1 GiB only if it becomes at most N times as large (200)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace existing files")
    top = _command(commands, "top", _top, "show what the pipelines of a running trainer do, live")
    top.add_argument(
        "pid",
        type=_positive,
        nargs="?",
        metavar="PID",
        help="the trainer's process; not needed where there is only one",
    )
    top.add_argument("--list", action="store_true", help="list the processes that can be looked at")
    top.add_argument("--once", action="store_true", help="print one look as text, which is also what goes into a pipe")
    top.add_argument("--stacks", action="store_true", help="show the stacks of its threads and workers, too")
    top.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between two looks, over which rates are taken (1)",
    )
    return whole


def _seconds(text: str) -> float:
    number = float(text)
    if not 0.05 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"must be from 0.05 to 3600 seconds, got {text}")
    return number


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    return command


def _add_paths(command: argparse.ArgumentParser, name: str, shown: str) -> None:
    command.add_argument(
        name, nargs="+", metavar=shown, help="a file, a pattern in quotes, or a file with a range, 'a.tfrecord[0:100]'"
    )
    names = [kind.name for kind in FORMATS]
    command.add_argument(
        "--format", choices=names, help="the format of all files, where their names and first bytes do not say it"
    )


def _inspect(given: argparse.Namespace) -> None:
    from millstream.tools.inspection import inspected  # noqa: PLC0415  (each command loads what it needs)

    refused: list[Exception] = []
    has_shown = False
    for kind, paths in given_files(given.paths, given.format, refused.append).values():
        try:
            lines = list(inspected(kind, paths))
        except _EXPECTED as error:
            refused.append(error)
            continue
        print("\n" * has_shown + "\n".join(lines))
        has_shown = True
    for one in refused[:-1]:
        _complain(one)
    if refused:
        raise refused[-1]


def _index(given: argparse.Namespace) -> None:
    from millstream.tools.indexing import indexed  # noqa: PLC0415

    for kind, paths in given_files(given.paths, given.format).values():
        for line in indexed(kind, paths):
            print(line)


def _convert(given: argparse.Namespace) -> None:
    from millstream.tools.convert_command import converted  # noqa: PLC0415

    options = {name: value for name, value in vars(given).items() if name not in {"run", "sources", "destination"}}
    print(converted(given.sources, given.destination, **options))


def _top(given: argparse.Namespace) -> None:
    from millstream.tools.top_command import listed, shown  # noqa: PLC0415

    if given.list:
        for line in listed():
            print(line)
        return
    shown(given.pid, once=given.once, stacks=given.stacks, interval=given.interval)


@contextlib.contextmanager
def _messages_on_standard_error() -> Iterator[None]:
    """Shows warnings, and what the library logs, as lines on the standard error."""

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


def _complain(error: BaseException) -> None:
    print(f"millstream: {_sentence(error)}", file=sys.stderr)


def _sentence(error: BaseException) -> str:
    """Returns what an error says, in one sentence."""
    if isinstance(error, OSError) and error.strerror:
        name = f": {os.fsdecode(error.filename)!r}" if error.filename else ""
        return f"{error.strerror}{name}"
    return str(error) or type(error).__name__
