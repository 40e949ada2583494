"""Operations that show the settings of their process. Workers import this module by its name."""

import csv
import decimal
import locale
import logging
import os
import socket
import sys
import warnings
import zlib
from typing import Any

import numpy as np

import millstream

VARIABLE = {"set": "by the module"}
"""A variable that a program may set at run time."""


SHOWN: list[str] = []
"""The names of the settings that the program has made. Libraries are imported only if they are among them."""


class ModuleWarning(UserWarning):
    """A category that a worker learns of by importing its module."""


def seen(seed: int) -> str:
    """Returns what this thread and process see of each setting, and what JAX draws by a seed."""
    told: list[Any] = [
        sys.getrecursionlimit(),
        sys.get_int_max_str_digits(),
        csv.field_size_limit(),
        socket.getdefaulttimeout(),
        decimal.Decimal(1) / 3,
        sorted(np.geterr().items()),
        np.get_printoptions()["precision"],
        locale.localeconv()["decimal_point"],
        locale.setlocale(locale.LC_TIME),
        os.environ.get("OF_THE_TRAINER"),
        VARIABLE["set"],
        [
            logging.getLogger(name).isEnabledFor(level)
            for name in ("", "a", "a.b", "c")
            for level in (logging.INFO, logging.WARNING)
        ],
        [_outcome_of(category) for category in (UserWarning, DeprecationWarning, ModuleWarning)],
    ]
    if "jax" in " ".join(SHOWN):
        import jax

        names = ("jax_debug_nans", "jax_numpy_rank_promotion", "jax_default_matmul_precision")
        told += [str(jax.numpy.asarray(1.0).dtype), str(jax.random.key(0).dtype)]
        told.append(float(jax.random.uniform(jax.random.key(seed))))
        told += [jax.config.values[name] for name in names]
    if "absl" in " ".join(SHOWN):
        from absl import flags

        from support.processes import settings_flags

        told.append([settings_flags.SIZE.value, flags.FLAGS.of_the_script])
    if "pillow" in " ".join(SHOWN):
        from PIL import Image, ImageFile

        told += [Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES]
    return repr(told)


def _outcome_of(category: type[Warning]) -> str:
    with warnings.catch_warnings():
        # Nothing is printed.
        warnings.showwarning = lambda *_: None
        try:
            warnings.warn("seen", category, stacklevel=1)
        except category:
            return "error"
    return "no error"


class Seen(millstream.RandomMap):
    """Adds a number to a number or batch that depends on all settings that it sees, and on its random numbers."""

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        number = zlib.crc32(seen(int(rng.integers(1 << 31))).encode())
        if isinstance(element, millstream.PaddedBatch):
            return element._replace(batch=element.batch + number)
        return element + number
