"""Reading in a process that was forked without `exec`."""

import os
import warnings
from collections.abc import Callable

from millstream.errors import DataSourceError


def text_after_fork(read: Callable[[], object]) -> str:
    """Returns the text of what a function returns in a forked process, or of its DataSourceError."""
    answer, asked = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of Python 3.12, JAX and other libraries with threads, about forks.
        child = os.fork()
    if child == 0:
        try:
            os.write(asked, str(read()).encode())
        except DataSourceError as error:
            os.write(asked, str(error).encode())
        finally:
            os._exit(0)
    os.close(asked)
    with os.fdopen(answer, "rb") as end:
        text = end.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return text
