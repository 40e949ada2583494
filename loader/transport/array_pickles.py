"""Pickling of arrays by their memory, whatever their layout and dtype.

NumPy passes the memory of an array out of band (pickle protocol 5) if the array is contiguous and Python's buffers know
its dtype. It copies other arrays into the pickle, and may swap their bytes. This module copies an array that is not
contiguous once, into its final memory, and passes other dtypes, such as bfloat16 and dates, as bytes. PyTorch tensors
are treated in the same way.
"""

import sys
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate

Reduced: TypeAlias = str | tuple[Any, ...]
"""The reduction of a value: instructions to pickle it, as `__reduce_ex__` returns them."""


def reduce_array(array: NDArray[Any], allocate: Allocate) -> Reduced:
    """Returns the reduction of an array.

    Args:
        array: an array without Python objects.
        allocate: allocates the copy of an array that is not contiguous.
    """
    if not array.flags.forc:
        copy = allocate(array.shape, array.dtype)
        copy[...] = array
        array = copy
    # An array whose elements have no bytes (a structure without fields) has no memory to pass.
    if array.dtype.itemsize == 0 or (array.dtype.isbuiltin == 1 and array.dtype.kind not in "mM"):
        return array.__reduce_ex__(5)
    order = "C" if array.flags.c_contiguous else "F"
    return rebuild_array, (array.reshape(-1, order="A").view(np.uint8), array.dtype, array.shape, order)


def rebuild_array(memory: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    """Returns a view of the bytes as an array."""
    return memory.view(dtype).reshape(shape, order=order)


def reduce_tensor(tensor: Any) -> Reduced | None:
    """Returns the reduction of a PyTorch tensor as an array, or None if only PyTorch can pickle it.

    Args:
        tensor: an instance of `torch.Tensor` itself, not of a subclass.
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
    """Returns a view of the bytes as a tensor. Bytes that are not writable are copied first."""
    # Unpickling the dtype has imported PyTorch.
    torch = sys.modules["torch"]
    writable = memory if memory.flags.writeable else memory.copy()
    return torch.from_numpy(writable).view(dtype).reshape(shape)


def as_memmap(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array as a `numpy.memmap` without a file: a memory map that crosses as bytes becomes this."""
    return array.view(np.memmap)
