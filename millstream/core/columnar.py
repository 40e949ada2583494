"""Records stored as columns, which can be batched without being split into records, and objects that become arrays."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""A function that allocates an uninitialised, C-contiguous array: `numpy.empty`, or one for shared memory."""


UNEVEN_BYTES = 1 << 20
"""Size of the array up to which texts of any lengths are stacked as an array of text."""

UNEVEN_FACTOR = 8
"""Factor by which padding may lengthen the texts of a larger array. Beyond it, they become an array of objects."""


_IMAGE_BYTES = 1 << 12
"""Smallest image that is looked at. Smaller ones are copied faster."""

_MAX_CHANNELS = 16
"""Longest last axis that is copied index by index if it is not contiguous with the axis before."""


_BAND_BYTES = 3 << 15
"""Size of the lines of a flipped image that are copied together, which stay in the processor's cache."""


class ColumnarRecords(Sequence[Any]):
    """A sequence of records that also exists as one batch.

    A source's `__getitems__` may return one. Operations get the records, which are built during iteration; a Batch that
    comes first takes the columns unchanged.
    """

    @abc.abstractmethod
    def stack(self, allocate: Allocate) -> Any:
        """Returns the stacked records, in arrays allocated by `allocate`; None if they must be stacked one by one."""


def stack_texts(texts: list[str], allocate: Allocate) -> NDArray[Any]:
    """Returns texts as an array: of dtype `<U` as long as the longest, or of objects.

    They become objects if any has a NUL character, because NumPy strips these at the ends, or if their lengths differ
    so much that the array would take more than UNEVEN_BYTES and more than UNEVEN_FACTOR times the bytes of their
    characters. Only the texts of the batch decide.
    """
    characters = "".join(texts)
    longest = max(1, max(map(len, texts), default=0))
    padded = longest * len(texts)
    if "\0" in characters or (4 * padded > UNEVEN_BYTES and padded > UNEVEN_FACTOR * len(characters)):
        return stack_objects(texts)
    batch = allocate((len(texts),), np.dtype(f"<U{longest}"))
    batch[:] = texts
    return batch


def stack_objects(values: list[Any]) -> NDArray[Any]:
    """Returns values, such as bytes, as an array of objects in its own memory."""
    batch = np.empty(len(values), np.object_)
    batch[:] = values
    return batch


def any_flipped(images: Sequence[NDArray[Any]]) -> bool:
    """Returns True if `copy_images` may be faster than NumPy, because an augmentation returned a flipped view."""
    if images[0].ndim < 3 or images[0].nbytes < _IMAGE_BYTES:
        return False
    # Only a sign, which is cheap to look at.
    return any(image.ndim > 1 and image.strides[-2] < 0 for image in images)


def copy_images(images: NDArray[Any], out: NDArray[Any]) -> None:
    """Copies an array to another one of the same shape and dtype.

    Images that are flipped or transposed views are copied channel by channel, in a fifth of the time: NumPy's innermost
    loop would be over the few channels of a pixel.
    """
    channels = images.shape[-1] if images.ndim > 2 else 0
    if not 0 < channels <= _MAX_CHANNELS or images.strides[-2] == channels * images.strides[-1]:
        out[...] = images
        return
    is_flipped = images.ndim == 3 and images.nbytes > 0 and images.strides[-2] < 0
    lines = max(1, _BAND_BYTES // images[0].nbytes) if is_flipped else max(1, len(images))
    for start in range(0, len(images), lines):
        band = images[start : start + lines]
        # Read once from memory, as it lies there, and for each channel from the cache.
        band = band[:, ::-1].copy()[:, ::-1] if is_flipped else band
        for channel in range(channels):
            out[start : start + lines, ..., channel] = band[..., channel]


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
