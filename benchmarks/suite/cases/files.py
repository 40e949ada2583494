"""Records from ArrayRecord files: tokens and images."""

from typing import Any

import numpy as np

from suite import data
from suite.case import Case, Contender, Goal, Pick
from suite.contenders import chain_goals, fork_server, grain_goals, rates
from suite.scale import Scale
from suite.steps import crop_and_flip, crop_and_flip_in_graph, decode, decode_in_graph, tokens_in_graph, tokens_of
from suite.work import Map, RandomMap, Work


def token_work(scale: Scale) -> Work:
    files = data.token_files(scale.pick(tiny=1024, quick=65_536, full=262_144))
    return Work(files, (Map(tokens_of, tokens_in_graph, tokens_in_graph),), 256)


def image_work(scale: Scale) -> Work:
    files = data.image_files(scale.pick(tiny=128, quick=1024, full=4096))
    return Work(files, (Map(decode, decode_in_graph), RandomMap(crop_and_flip, crop_and_flip_in_graph)), 64)


def labels_and_shapes(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns what does not depend on randomness, nor on whose JPEG decoder it was."""
    image, label = np.asarray(batch["image"]), np.asarray(batch["label"])
    if image.dtype != np.uint8 or int(image.max()) - int(image.min()) < 64:
        raise ValueError(f"These are no images: {image.dtype}, from {image.min()} to {image.max()}.")
    return {"label": label, "shape": np.broadcast_to(image.shape[1:], (len(label), 3))}


SHARDS = (1, 2, 3, 4)

CASES = (
    Case(
        name="tokens",
        title="1 KB records from ArrayRecord files, as uint16, batch 256",
        make_work=token_work,
        contenders=(
            *rates("read", "read singly", from_files=True, as_chain=True),
            Contender("bare", mode="read singly", copies=2),
            *fork_server("pytorch_our_source"),
        ),
        goals=(
            *chain_goals(),
            *grain_goals(50),
            Goal("twice PyTorch", 2, Pick("pytorch")),
            Goal("twice tf.data, which shuffles a buffer only", 2, Pick("tensorflow")),
            Goal("0.6 of one bare C++ reader, without workers", 0.6, Pick("bare", copies=1), Pick("millstream", 0)),
            Goal("0.6 of two bare C++ readers, with 2 workers", 0.6, Pick("bare", copies=2), Pick("millstream", 2)),
        ),
    ),
    Case(
        name="images",
        title="JPEG 256 x 256 from ArrayRecord files: decode, crop, flip, batch 64",
        make_work=image_work,
        contenders=(
            *rates("loop", from_files=True, as_chain=True),
            Contender("spdl", threads=2),
            Contender("spdl", threads=4),
            Contender("bare", mode="loop", copies=2),
        ),
        goals=(
            *chain_goals(),
            Goal("1.1 times tf.data, whose decoder is its own", 1.1, Pick("tensorflow")),
            Goal("as fast as SPDL", 1, Pick("spdl")),
            Goal(
                "0.9 of two bare loops, with 2 workers",
                0.9,
                Pick("bare", mode="loop", copies=2),
                Pick("millstream", 2),
            ),
        ),
        view=labels_and_shapes,
    ),
    Case(
        name="shards",
        title="1 to 4 shards of the tokens at once on this machine, records of all shards together",
        make_work=token_work,
        contenders=tuple(
            contender
            for copies in SHARDS
            for contender in (
                Contender("millstream", threads=None, copies=copies),
                Contender("grain", threads=None, mode="DataLoader", copies=copies),
                Contender("pytorch", copies=copies),
                Contender("bare", mode="read singly", copies=copies),
            )
        ),
        goals=(
            Goal(
                "4 shards together at least as fast as 1",
                1,
                Pick("millstream", copies=1),
                Pick("millstream", copies=4),
            ),
        ),
    ),
)
