"""Fast copies of flipped images, as augmentation makes them: views in which each row runs from right to left.

NumPy copies them pixel by pixel, since only the few bytes of a pixel are in order; channel by channel takes a fifth of
the time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

_LEAST_BYTES = 1 << 12
"""Smaller images are copied faster than they are checked."""

_MOST_CHANNELS = 4
"""With more channels, pixel by pixel is as fast."""


def any_flipped(images: Sequence[np.ndarray[Any, Any]]) -> bool:
    """Says whether it may be worthwhile to copy these arrays one by one with `copy_image`."""
    if images[0].ndim < 3 or images[0].nbytes < _LEAST_BYTES:
        return False
    # Checking a sign is cheap; `copy_image` looks closer.
    return any(image.ndim > 1 and image.strides[-2] < 0 for image in images)


def copy_image(image: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> None:
    """Copies an array to one of the same shape and dtype."""
    if _is_flipped(image):
        for channel in range(image.shape[-1]):
            to[..., channel] = image[..., channel]
    else:
        to[...] = image


def _is_flipped(image: np.ndarray[Any, Any]) -> bool:
    """Whether an array of shape (…, width, channels) has the pixels of each row in reverse, and theirs in order."""
    channels = image.shape[-1] if image.ndim > 1 else 0
    return 0 < channels <= _MOST_CHANNELS and image.strides[-2:] == (-image.itemsize * channels, image.itemsize)
