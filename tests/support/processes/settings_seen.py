"""Operations that show the settings of their process. Workers import this module by its name."""

import csv
import decimal
import locale
import logging
import os
import socket
import sys
import warnings
from typing import Any

import millstream

VARIABLE = {"set": "by the module"}
"""A variable that a program may set at run time."""


class ModuleWarning(UserWarning):
    """A category that a worker learns of by importing its module."""


def seen(_: object) -> str:
    """Returns what this process sees of each setting. JAX, absl and Pillow are imported if the trainer has set them."""
    import_flags = os.environ.get("SETTINGS_SEEN", "")
    told: list[Any] = [
        sys.getrecursionlimit(),
        sys.get_int_max_str_digits(),
        csv.field_size_limit(),
        socket.getdefaulttimeout(),
        decimal.Decimal(1) / 3,
        locale.localeconv()["decimal_point"],
        locale.setlocale(locale.LC_TIME),
        os.environ.get("OF_THE_TRAINER"),
        VARIABLE["set"],
        [logging.getLogger(name).isEnabledFor(logging.INFO) for name in ("", "a", "a.b", "c")],
        [_outcome_of(category) for category in (UserWarning, DeprecationWarning, ModuleWarning)],
    ]
    if "jax" in import_flags:
        import jax

        names = ("jax_debug_nans", "jax_numpy_rank_promotion", "jax_default_matmul_precision")
        told += [str(jax.numpy.asarray(1.0).dtype), str(jax.random.key(0).dtype)]
        told += [jax.config.values[name] for name in names]
    if "absl" in import_flags:
        from absl import flags

        from support.processes import settings_flags

        told.append([settings_flags.SIZE.value, flags.FLAGS.of_the_script])
    if "pillow" in import_flags:
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


class Seen(millstream.MapTransform):
    """Shows the settings of its process."""

    def map(self, element: Any) -> str:
        return seen(element)


class SeenOfBatches(millstream.MapTransform):
    """Shows the settings of its process for each batch."""

    def map(self, element: Any) -> list[str]:
        return [seen(element)]
