"""The peers: one adapter each, each optional, all with the interface of `suite.peers.base`."""

import dataclasses
import importlib
import importlib.metadata
from typing import cast

from suite.peers.base import Adapter


@dataclasses.dataclass(frozen=True)
class Peer:
    """A loader, or the bare loop."""

    title: str
    module: str
    distributions: tuple[str, ...] = ()

    def adapter(self) -> Adapter:
        """Returns the peer's adapter."""
        return cast("Adapter", importlib.import_module(self.module).ADAPTER)

    def version(self) -> str:
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return ""


PEERS = {
    "millstream": Peer("millstream", "suite.peers.millstream_adapter", ("millstream",)),
    "millstream_one_source": Peer("millstream over one source", "suite.peers.millstream_adapter"),
    "millstream_unpacked": Peer("millstream without packing", "suite.peers.millstream_adapter"),
    "grain": Peer("Grain", "suite.peers.grain_adapter", ("grain",)),
    "grain_our_source": Peer("Grain reading by millstream's source", "suite.peers.grain_adapter"),
    "pytorch": Peer("PyTorch", "suite.peers.pytorch_adapter", ("torch",)),
    "pytorch_our_source": Peer("PyTorch reading by millstream's source", "suite.peers.pytorch_adapter"),
    "tensorflow": Peer("tf.data", "suite.peers.tensorflow_adapter", ("tensorflow-cpu", "tensorflow")),
    "huggingface": Peer("HF datasets", "suite.peers.huggingface_adapter", ("datasets",)),
    "webdataset": Peer("WebDataset", "suite.peers.webdataset_adapter", ("webdataset",)),
    "wids": Peer("wids", "suite.peers.wids_adapter", ("wids",)),
    "spdl": Peer("SPDL", "suite.peers.spdl_adapter", ("spdl",)),
    "olmo_core": Peer("OLMo-core", "suite.peers.olmo_packer", ("ai2-olmo-core",)),
    "trl": Peer("TRL", "suite.peers.trl_packer", ("trl",)),
    "mosaicml": Peer("MosaicML Streaming", "suite.peers.mosaicml_adapter", ("mosaicml-streaming",)),
    "ray_data": Peer("Ray Data", "suite.peers.ray_data_adapter", ("ray",)),
    "h5py": Peer("h5py, row by row", "suite.peers.bare_loop", ("h5py",)),
    "tensorstore": Peer("TensorStore, row by row", "suite.peers.bare_loop", ("tensorstore",)),
    "pylance": Peer("Lance, `take` of each batch", "suite.peers.bare_loop", ("pylance",)),
    "nanogpt": Peer("nanoGPT's `get_batch`", "suite.peers.bare_loop"),
    "bare": Peer("the bound", "suite.peers.bare_loop"),
}
"""By key. The bare loop is not a loader: it shows what the machine gives to a program without one."""
