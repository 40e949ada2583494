"""The picture of a loader for terminals."""

from collections.abc import Iterator

from millstream.loader.reporting.locations import frames, is_bottleneck
from millstream.loader.reporting.phrases import trainer_text
from millstream.loader.reporting.quantities import seconds_text, share_text
from millstream.loader.reporting.snapshot import LoaderFacts, StageFacts


def text_picture(facts: LoaderFacts) -> str:
    """Returns a loader as lines of text: what comes from where, who does it and, once it has run, how long it takes."""
    return "\n".join(_lines(facts))


def _lines(facts: LoaderFacts) -> Iterator[str]:
    yield f"DataLoader, shard {facts.shard}"
    yield f"  source  {facts.source.name}"
    yield f"  order   {facts.order.name}"
    width = max(len(stage.label) for stage in facts.stages)
    for who, stages in frames(facts):
        yield f"  ┌ {who}"
        for stage in stages:
            yield f"  │ {_stage_line(facts, stage, width)}".rstrip()
            yield from (f"  │     {leaf}" for leaf in stage.structure or ())
        yield "  └"
    yield f"  trainer: {trainer_text(facts.measured)}"


def _stage_line(facts: LoaderFacts, stage: StageFacts, width: int) -> str:
    if not facts.pipeline_seconds:
        return stage.label
    batches = facts.measured.batches
    each = f"{seconds_text(stage.seconds / batches)} a batch" if batches else ""
    mark = "  <- slowest" if is_bottleneck(facts, stage) else ""
    return f"{stage.label:<{width}}  {each:>15}  {share_text(facts.share(stage)):>5}{mark}"
