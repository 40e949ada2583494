"""Where the time of millstream goes, by the profile that every loader keeps."""

from suite.case import Run
from suite.peers import PEERS
from suite.throughput import take_for, taker


def break_down(run: Run) -> dict[str, float]:
    """Returns µs per delivered record for each stage.

    Without workers and threads all stages lie inside `next`: what is left of it is the schedule and the iterator. With
    workers it is the time of all of them, added up; the hand-over is theirs and the trainer's.
    """
    work = run.work()
    stream = PEERS["millstream"].adapter().open(work, run.contender)
    run.gate()
    take = taker(stream.batches, work.batch_size, run.case)
    take_for(take, run.scale.warm_seconds, at_least=2)
    before = stream.loader.profile()
    records, _ = take_for(take, run.scale.seconds, at_least=2)
    after = stream.loader.profile()
    stream.close()
    stages = {stage: 1e6 * (after[stage] - before[stage]) / records for stage in after}
    inside = stages.pop("next")
    consumer = stages.pop("consumer")
    if run.contender.workers:
        return stages
    return {**stages, "the rest of next": inside - sum(stages.values()), "consumer": consumer}
