"""Reading in a process that was forked without `exec`."""

import os
import warnings
from collections.abc import Callable
from typing import Any

from millstream.errors import DataSourceError


def source_error_after_fork(read: Callable[[], Any]) -> str:
    """Returns the text of the DataSourceError of a read in a forked process; empty if there was none."""
    answer, asked = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of Python 3.12, JAX and other libraries with threads, about forks.
        child = os.fork()
    if child == 0:
        try:
            read()
        except DataSourceError as error:
            os.write(asked, str(error).encode())
        finally:
            os._exit(0)
    os.close(asked)
    with os.fdopen(answer, "rb") as end:
        text = end.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return text
