"""The peers: one adapter each, each optional, all with the same function `open_stream`."""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stream:
    """A running loader.

    Attributes:
        batches: the loader's own iterator, with nothing of the suite around it where possible.
        close: ends it.
        get_state: returns the position, in the loader's own form; None where the peer has no such thing.
        set_state: changes the position.
    """

    batches: Iterator[Any]
    close: Callable[[], None] = lambda: None
    get_state: Callable[[], Any] | None = None
    set_state: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Peer:
    """A loader: its title, the module of its adapter, and the packages whose versions are reported."""

    title: str
    module: str
    distributions: tuple[str, ...]

    def adapter(self) -> Any:
        return importlib.import_module(self.module)

    def version(self) -> str:
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""


PEERS = {
    "millstream": Peer("millstream", "suite.peers.millstream_adapter", ("millstream",)),
    "grain": Peer("Grain", "suite.peers.grain_adapter", ("grain",)),
    "pytorch": Peer("PyTorch", "suite.peers.pytorch_adapter", ("torch",)),
    "torchdata": Peer("PyTorch's StatefulDataLoader", "suite.peers.pytorch_adapter", ("torchdata",)),
    "tensorflow": Peer("tf.data", "suite.peers.tensorflow_adapter", ("tensorflow-cpu", "tensorflow")),
    "huggingface": Peer("HF datasets", "suite.peers.huggingface_adapter", ("datasets",)),
    "spdl": Peer("SPDL", "suite.peers.spdl_adapter", ("spdl",)),
    "litdata": Peer("LitData", "suite.peers.litdata_adapter", ("litdata",)),
    "mosaicml": Peer("MosaicML Streaming", "suite.peers.mosaicml_adapter", ("mosaicml-streaming",)),
}
"""By key."""
