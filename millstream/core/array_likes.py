"""Objects that NumPy makes arrays of, although these do not hold all that the objects do."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_COMPLETE = frozenset({np.ndarray, list, tuple, bool, int, float, str, bytes})
"""Types whose arrays hold everything. Only other values are looked at one by one."""


def find_loss(values: Sequence[Any]) -> tuple[int, str] | None:
    """Returns the index of the first value whose array would lose something, with what and the remedy.

    None if no array does. Masks, palettes of images, and units of measurement are found.
    """
    if set(map(type, values)) <= _COMPLETE:
        return None
    for row, value in enumerate(values):
        if isinstance(value, np.ma.MaskedArray):
            return row, "its mask would be lost. Keep its data and its mask as two arrays"
        if getattr(value, "mode", None) in ("P", "PA") and hasattr(value, "getpalette"):
            return row, "its palette would be lost, and its pixels be numbers of colors. Call convert('RGB') on it"
        for name in ("unit", "units"):
            unit = getattr(value, name, None) if isinstance(value, np.ndarray) or hasattr(type(value), name) else None
            # Those of times are part of the dtype, and pandas calls them by their names.
            if unit is not None and not isinstance(unit, str):
                return row, "its unit would be lost. Convert it to a unit of your choice, and pass the plain array"
    return None
