"""Workers on a cluster, which here is this machine: what the way to them costs, and what they win."""

from suite.case import Case, Contender, Goal, Measurement, Pick, Run
from suite.cases.files import image_work, labels_and_shapes, token_work
from suite.cases.tiny import plain_work
from suite.cases.workers import measure_first_batch
from suite.peers.clusters import RAY_ACTORS, SERVICE, start

WORKERS = 2

CONTENDERS = (
    Contender("millstream", workers=WORKERS),
    Contender("millstream", workers=WORKERS, mode=RAY_ACTORS),
    Contender("tensorflow", workers=WORKERS, mode=SERVICE),
    Contender("tensorflow", workers=WORKERS, mode=f"{SERVICE}, batches first"),
    Contender("ray_data", workers=WORKERS),
)

GOALS = (
    Goal("by Ray actors, at least Ray Data", 1, Pick("ray_data"), Pick("millstream", mode=RAY_ACTORS)),
    Goal("by Ray actors, at least tf.data service", 1, Pick("tensorflow"), Pick("millstream", mode=RAY_ACTORS)),
)


def measure_first_batch_there(run: Run) -> Measurement:
    start(run.contender)
    return measure_first_batch(run)


CASES = (
    Case(
        name="cluster_tiny",
        title=f"ints in memory, identity map, batch 256, {WORKERS} workers on a cluster: what the way costs",
        make_work=plain_work,
        contenders=CONTENDERS,
        goals=GOALS,
    ),
    Case(
        name="cluster_images",
        title=f"JPEG 256 x 256 from files: decode, crop, flip, batch 64, {WORKERS} workers on a cluster",
        make_work=image_work,
        contenders=CONTENDERS,
        goals=GOALS,
        view=labels_and_shapes,
    ),
    Case(
        name="cluster_first_batch",
        title=f"seconds to the first batch of the tokens, {WORKERS} new workers on a cluster that is there",
        make_work=token_work,
        contenders=CONTENDERS,
        goals=GOALS,
        measure=measure_first_batch_there,
        unit="s",
        higher_is_better=False,
    ),
)
