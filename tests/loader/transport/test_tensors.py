"""PyTorch's tensors cross by their memory, as arrays do; what only PyTorch knows how to send, it sends."""

from typing import Any

import pytest

from millstream.loader.transport.class_table import ClassTable
from support.processes.pickles import sent

torch = pytest.importorskip("torch", reason="PyTorch is no dependency; `make bench` installs it")


def tensors() -> dict[str, Any]:
    """Returns tensors of all kinds, those that cross by their memory first."""
    return {
        "rows": torch.arange(6.0).reshape(2, 3),
        "bfloat16": torch.arange(6).to(torch.bfloat16),
        "float8": torch.tensor([1, 2], dtype=torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        "one number": torch.tensor(True),
        "transposed": torch.arange(12).reshape(3, 4).T,
        "a part": torch.arange(100)[10:20],
        "nothing": torch.zeros(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "with a gradient": torch.ones(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.ones(4).to_sparse(),
    }


@pytest.mark.third_party
@pytest.mark.parametrize("name", tensors())
def test_tensors_arrive_as_they_are(name: str) -> None:
    """Class, dtype, shape, layout, gradient and values are kept."""
    tensor = tensors()[name]
    pickled, buffers = sent(tensor)
    arrived = ClassTable().loads(pickled, buffers)[0]

    assert type(arrived) is type(tensor)
    assert (arrived.dtype, arrived.shape, arrived.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert (arrived.requires_grad, arrived.is_conj()) == (tensor.requires_grad, tensor.is_conj())
    assert str(arrived) == str(tensor)


@pytest.mark.third_party
def test_the_memory_of_tensors_is_shared() -> None:
    """A pickle holds none of their bytes, and what arrives is a view of the memory that was sent."""
    pickled, (buffer,) = sent(torch.ones(1000, 1000))
    memory = bytearray(buffer.raw())
    arrived = ClassTable().loads(pickled, [memory])[0]
    memory[:4] = bytes(4)

    assert len(pickled) < 1000
    assert (arrived[0, 0], arrived[0, 1]) == (0, 1)
