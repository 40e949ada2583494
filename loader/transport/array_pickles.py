"""Arrays in pickles: by their memory, whatever their layout and dtype.

NumPy hands out the memory of an array (pickle's protocol 5) if it is contiguous and of a dtype that Python's buffers
know. Other arrays it copies into the pickle, and it may swap their bytes. Here the former are copied once, to where
they are going, and the latter, bfloat16 and dates among them, are handed out as bytes. So are PyTorch's tensors, where
a program uses them.
"""

import sys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate

Reduced: TypeAlias = str | tuple[Any, ...]
"""How to pickle a value, as `__reduce_ex__` says it."""


def reduce_array(array: NDArray[Any], allocate: Allocate) -> Reduced:
    """Returns how to pickle an array, as `__reduce_ex__` does.

    Args:
        array: without Python objects.
        allocate: gives the memory for the copy of an array that is not contiguous.
    """
    if not array.flags.forc:
        copy = allocate(array.shape, array.dtype)
        copy[...] = array
        array = copy
    # An element without bytes, of a structure without fields, leaves nothing to hand out.
    if array.dtype.itemsize == 0 or (array.dtype.isbuiltin == 1 and array.dtype.kind not in "mM"):
        return array.__reduce_ex__(5)
    order = "C" if array.flags.c_contiguous else "F"
    return rebuild_array, (array.reshape(-1, order="A").view(np.uint8), array.dtype, array.shape, order)


def rebuild_array(memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    """Returns the array that some bytes are, without copying them."""
    return memory.view(dtype).reshape(shape, order=order)


def reduce_tensor(tensor: Any) -> Reduced | None:
    """Returns how to pickle a tensor of PyTorch as an array, None where only PyTorch knows how.

    Args:
        tensor: of the very class `torch.Tensor`.
    """
    torch = sys.modules["torch"]
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and not vars(tensor)
        and tensor.numel() > 0
    )
    if not is_plain:
        return None
    # As bytes: NumPy does not know all of PyTorch's dtypes.
    memory = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return rebuild_tensor, (memory, tensor.dtype, tuple(tensor.shape))


def rebuild_tensor(memory: NDArray[np.uint8], dtype: Any, shape: tuple[int, ...]) -> Any:
    """Returns the tensor that some bytes are, without copying them unless they cannot be written to."""
    # The dtype has brought it.
    torch = sys.modules["torch"]
    writable = memory if memory.flags.writeable else memory.copy()
    return torch.from_numpy(writable).view(dtype).reshape(shape)


def as_memmap(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array as a `numpy.memmap` of no file: what one becomes that crosses as bytes."""
    return array.view(np.memmap)


def reduce_memoryview(view: memoryview) -> Reduced:
    """Returns how to pickle a memoryview: one of the same format, shape and bytes comes of it."""
    return rebuild_memoryview, (np.asarray(view),)


def rebuild_memoryview(array: NDArray[Any]) -> memoryview:
    """Returns an array as a memoryview."""
    return array.data
