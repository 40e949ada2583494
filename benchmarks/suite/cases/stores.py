"""Arrays, datasets and token files, each beside the library of its format and the loop that people write with it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from suite import array_files, data
from suite.case import Case, Contender, Goal, Pick
from suite.contenders import fork_server, modes
from suite.peers import PEERS
from suite.scale import Scale
from suite.steps import identity
from suite.work import Work

BATCH_SIZE = 256


def tokens_of_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch of tokens as int64, of which nanoGPT and PyTorch make them."""
    return {"tokens": np.asarray(batch["tokens"]).astype(np.int64)}


def _case(
    name: str,
    title: str,
    peer: str,
    times: float,
    *,
    shape: tuple[int, ...] = (array_files.TOKENS,),
    view: Callable[[Any], Any] = tokens_of_batch,
    pytorch: tuple[Contender, ...] = fork_server("pytorch"),
    is_flat: bool = False,
) -> Case:
    def work(scale: Scale) -> Work:
        return Work(data.array_files(scale.pick(tiny=512, quick=8192, full=32_768), name, shape), (), BATCH_SIZE)

    bounds = (Contender("bare", mode="pread"),) if is_flat else ()
    ours = modes("millstream", "default", threads=None)
    peers = fork_server(peer) if peer == "mosaicml" else (Contender(peer, mode="loop"),)
    return Case(
        name=name,
        title=f"{title}, batch {BATCH_SIZE}",
        make_work=work,
        contenders=(*ours, *peers, *pytorch, *bounds),
        goals=(
            Goal(f"{times:g} times {PEERS[peer].title}", times, Pick(peer)),
            *[Goal("0.8 of bare pread", 0.8, Pick("bare"), Pick("millstream", 0)) for _ in bounds],
        ),
        view=view,
    )


CASES = (
    _case(
        "hdf5", "rows of 12 KB of an HDF5 dataset", "h5py", 5, shape=array_files.ROW_SHAPE, view=identity, is_flat=True
    ),
    _case(
        "hdf5_gzip",
        "the same, in gzip chunks of 16 rows, in windows of chunks",
        "h5py",
        5,
        shape=array_files.ROW_SHAPE,
        view=identity,
    ),
    _case(
        "zarr",
        "the same of a Zarr 3 array, uncompressed",
        "tensorstore",
        5,
        shape=array_files.ROW_SHAPE,
        view=identity,
    ),
    _case("lance", "rows of 1,024 tokens of a Lance dataset", "pylance", 1),
    _case("mds", "samples of 1,024 tokens of MDS shards that Zstandard compressed", "mosaicml", 4, pytorch=()),
    _case("token_windows", "windows of 1,024 tokens of a flat file", "nanogpt", 5, pytorch=(), is_flat=True),
)
