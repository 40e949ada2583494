"""Log records of a worker on their way to the handlers of the trainer.

Guarantees:
    * The records of a call arrive before its outputs, in the order logged. Those of a worker that dies arrive, too.
    * Logging never fails. It waits when the trainer has not received for long, and ends with the channel.
    * Any thread may log, at any time, also while another one sends. A process that user code has forked, and a worker
      that ends, print their warnings.
"""

import logging
import os
import threading
import traceback
from collections import deque
from typing import Any, final

from millstream.core.signals import is_from_signal_handler
from millstream.loader.processes.channel import Channel, Logged, Message

MAX_RECORDS = 1000
"""The number of records that wait while another thread sends. Later ones are dropped, and counted."""

_PLAIN = (type(None), bool, int, float, str)


@final
class WorkerLog(logging.Handler):
    """The handler of all loggers of a worker, and the sender of all its messages."""

    def __init__(self, channel: Channel, process_name: str) -> None:
        super().__init__()
        self._channel = channel
        self._process_name = process_name
        self._owner = os.getpid()
        self._waiting: deque[Message] = deque()
        self._num_dropped = 0
        self._sending = threading.Lock()
        self._of_modules: list[logging.Handler] = []

    def install(self) -> None:
        """Takes the records of all loggers. Handlers that exist are not called, because the trainer has them as well.

        Those added later are called, such as those of `worker_init_fn`.
        """
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        self._of_modules = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
        log = self

        def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
            log.handle(record)
            log._call_own(logger, record)

        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign, assignment]  # positional

    def keep_root(self) -> None:
        """Makes `logging.info` find a handler, unless the worker has one of its own: it would add one that prints."""
        if not logging.root.handlers:
            logging.root.addHandler(self)
            self._of_modules.append(self)

    def send(self, message: Message) -> None:
        with self._sending:
            self._channel.send(message)
        # Those of a thread that did not wait for this.
        self._send_waiting()

    def post(self, message: Message) -> None:
        """Sends a message now, or when the thread that sends has done so, which may be this one."""
        self._waiting.append(message)
        self._send_waiting()

    def handle(self, record: logging.LogRecord) -> bool:
        """Sends a record, without the lock of handlers: a thread that sends must not keep others from logging."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._owner or not self._channel.is_open:
            if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
                logging.lastResort.handle(record)
            return
        try:
            if len(self._waiting) < MAX_RECORDS:
                logged = Logged(self._fields(record), self._num_dropped)
                self._num_dropped = 0
                self.post(logged)
            else:
                self._num_dropped += 1
        except Exception:  # noqa: BLE001  (as in every handler)
            self.handleError(record)

    def _send_waiting(self) -> None:
        # Whoever holds the lock looks again after its release. A record logged while this thread sends does not wait.
        while self._waiting and self._sending.acquire(blocking=False):
            try:
                while self._waiting:
                    self._channel.send(self._waiting.popleft())
            finally:
                self._sending.release()

    def _call_own(self, logger: logging.Logger | None, record: logging.LogRecord) -> None:
        while logger is not None:
            for handler in logger.handlers:
                if handler not in self._of_modules and record.levelno >= handler.level:
                    handler.handle(record)
            logger = logger.parent if logger.propagate else None

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = {name: value if _is_plain(value) else repr(value) for name, value in vars(record).items()}
        if not (isinstance(record.msg, str) and _is_plain(record.args)):
            fields |= {"msg": record.getMessage(), "args": None}
        if record.exc_info:
            fields["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
        return fields | {"exc_info": None, "processName": self._process_name}


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) in _PLAIN and type(item) in _PLAIN for key, item in value.items())
    return type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value))


def log_here(message: Logged) -> None:
    """Gives a record of a worker to the trainer's handlers, if its logger is enabled here."""
    try:
        record = logging.makeLogRecord(message.fields)
        # The trainer's name, which a program may have chosen.
        record.levelname = logging.getLevelName(record.levelno)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
        if message.num_dropped:
            logger.warning("millstream: %d log records of %s were dropped", message.num_dropped, record.processName)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        # A filter or handler of the user's raises.
        traceback.print_exc()
