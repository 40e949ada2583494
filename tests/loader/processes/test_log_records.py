"""Log records of operations reach the handlers of the trainer, wherever the operations run."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import expect_stalls, python, sooner_than


class Collected(logging.Handler):
    """A handler that formats as a user's would, and keeps the texts and the records."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(threadName)s %(message)s"))
        self.texts: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))
        self.records.append(record)


@pytest.fixture
def handler() -> Iterator[Collected]:
    """Yields a handler of the loggers below "decoder", which records of INFO and above pass."""
    logger, collected = logging.getLogger("decoder"), Collected()
    logger.addHandler(collected)
    logger.setLevel(logging.INFO)
    yield collected
    logger.removeHandler(collected)
    logger.setLevel(logging.NOTSET)


def talk(number: int) -> int:
    """Logs on several levels and in several ways: with arguments, objects, exceptions and attributes."""
    log = logging.getLogger("decoder.jpeg")
    log.debug("not seen %d", number)
    log.info("record %d of %s", number, {"a", "b"} if number < 0 else "a file", extra={"step": number, "object": log})
    log.log(33, "an own level")
    logging.getLogger("decoder.quiet").warning("not seen, as the program says")
    try:
        int("bad")
    except ValueError:
        log.exception("failed: %s", Path("x"))
    return number


PLACES: list[dict[str, Any]] = [
    {"read_options": millstream.ReadOptions(0)},
    {"read_options": millstream.ReadOptions(2)},
    {"worker_count": 1},
]


def test_the_trainer_handles_all_records(handler: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels, texts, exceptions and attributes are those of one process; each comes before its element."""
    monkeypatch.setattr(logging.getLogger("decoder.quiet"), "disabled", True)
    monkeypatch.setitem(logging._levelToName, 33, "OWN")
    told: list[list[tuple[str, ...]]] = []
    for place in PLACES:
        handler.texts.clear()
        handler.records.clear()
        for number in millstream.load([3, 4], transformations=[talk], num_epochs=1, **place):
            assert any(f"record {number} of a file" in text for text in handler.texts)
        # Lines of tracebacks are those of the places, and threads have names.
        firsts = [" ".join(text.splitlines()[0].split(" ", 3)[::3]) for text in handler.texts]
        lasts = [text.splitlines()[-1] for text in handler.texts if "Traceback" in text]
        told.append([*firsts, *lasts, *(str(vars(record).get("step")) for record in handler.records)])  # type: ignore[list-item]
    assert told[0] == told[1] == told[2]
    assert {"OWN an own level", "ERROR failed: x", "ValueError: invalid literal for int() with base 10: 'bad'"} <= set(
        told[2]
    )
    assert {record.processName for record in handler.records} == {"millstream-w0"}
    assert {record.process for record in handler.records}.isdisjoint({os.getpid()})


def test_records_of_a_worker_that_dies_arrive(handler: Collected, tmp_path: Path) -> None:
    """The last words of a worker are heard, each once, also those of threads that log at the same time."""

    def die_once(number: int) -> int:
        log = logging.getLogger("decoder")
        if number == 5 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()

            def say(who: int) -> None:
                for line in range(300):
                    log.info("%d: line %d", who, line)

            threads = [threading.Thread(target=say, args=(who,)) for who in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert list(millstream.load(range(8), transformations=[die_once], num_epochs=1, worker_count=1)) == list(range(8))
    said = [record.getMessage() for record in handler.records]
    assert sorted(said) == sorted(f"{who}: line {line}" for who in range(3) for line in range(300))
    assert [text for text in said if text.startswith("1")] == [f"1: line {line}" for line in range(300)]


def test_logging_for_ever_is_a_stall(handler: Collected) -> None:
    """An operation that never ends and keeps logging is given up, and closing a loader never waits for its records."""

    def log_forever(number: int) -> int:
        while number == 3:
            logging.getLogger("decoder").info("again")
        return number

    loader = millstream.load(
        range(8), transformations=[log_forever], num_epochs=1, worker_count=1, stall_timeout=WAIT_SECONDS
    )
    with iter(loader) as iterator:
        assert next(iterator) == 0
        expect_stalls(iterator, 0.5)
        with sooner_than(WAIT_SECONDS), pytest.raises(millstream.WorkerStalledError):
            list(iterator)
    assert {record.getMessage() for record in handler.records} == {"again"}
    with iter(loader) as iterator, sooner_than(WAIT_SECONDS):
        assert next(iterator) == 0


def test_handlers_of_worker_init_fn_are_called(handler: Collected, tmp_path: Path) -> None:
    """A handler that worker_init_fn adds gets the records, with its level, beside the trainer's."""

    def init(index: int, _: int) -> None:
        logging.basicConfig(filename=tmp_path / f"{index}.log", level=logging.DEBUG, format="%(message)s")
        logging.getLogger("decoder").setLevel(logging.DEBUG)

    list(millstream.load([3], transformations=[talk], num_epochs=1, worker_count=1, worker_init_fn=init))
    assert (tmp_path / "0.log").read_text().startswith("not seen 3\nrecord 3 of a file\n")
    assert [record.levelno for record in handler.records] == [logging.INFO, 33, logging.WARNING, logging.ERROR]


def test_captured_warnings_and_raising_handlers(handler: Collected) -> None:
    """`logging.captureWarnings` holds in workers, and a filter of the trainer that raises breaks no batch."""

    def warns(number: int) -> int:
        warnings.warn(f"number {number}", UserWarning, stacklevel=1)
        logging.getLogger("decoder").info("a record")
        return number

    def refuse(_: logging.LogRecord) -> bool:
        raise RuntimeError

    logging.getLogger("py.warnings").addHandler(handler)
    logging.captureWarnings(True)
    logging.getLogger("decoder").addFilter(refuse)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert list(millstream.load([3], transformations=[warns], num_epochs=1, worker_count=1)) == [3]
    finally:
        logging.getLogger("decoder").removeFilter(refuse)
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").removeHandler(handler)
    assert [("UserWarning: number 3" in record.getMessage()) for record in handler.records] == [True]


EXIT = """
import logging, millstream, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(processName)s %(message)s")
def talk(number):
    for _ in range(3000):
        logging.info("%d %s", number, "x" * 1000)
    return number
iterator = iter(millstream.load(range(100), transformations=[talk], worker_count=1))
print(next(iterator), flush=True)
"""


def test_a_program_ends_while_its_workers_log() -> None:
    """Records that wait for a trainer that ends keep neither it nor a worker; the first element's are all there."""
    with sooner_than(4 * WAIT_SECONDS):
        done = python("-c", EXIT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("millstream-w0 0 x") == 3000
