"""The text rendering of a loader, for terminals."""

from collections.abc import Iterator

from millstream.loader.reporting.phrases import is_bottleneck, mixture_texts, stages_by_location, trainer_text
from millstream.loader.reporting.quantities import seconds_text, share_text
from millstream.loader.reporting.snapshot import LoaderSnapshot, StageSnapshot


def render_text(snapshot: LoaderSnapshot) -> str:
    """Returns a loader as lines of text: its stages, where they run and, after a first batch, their durations."""
    return "\n".join(_lines(snapshot))


def _lines(snapshot: LoaderSnapshot) -> Iterator[str]:
    yield f"DataLoader, shard {snapshot.shard}"
    yield f"  source  {snapshot.source.name}"
    yield f"  order   {snapshot.order.name}"
    yield from (f"  {text}" for text in mixture_texts(snapshot))
    width = max(len(stage.label) for stage in snapshot.stages)
    for location, stages in stages_by_location(snapshot):
        yield f"  ┌ {location}"
        for stage in stages:
            yield f"  │ {_stage_line(snapshot, stage, width)}".rstrip()
            yield from (f"  │     {leaf}" for leaf in stage.structure or ())
        yield "  └"
    yield f"  trainer: {trainer_text(snapshot.measured)}"


def _stage_line(snapshot: LoaderSnapshot, stage: StageSnapshot, width: int) -> str:
    if not snapshot.pipeline_seconds:
        return stage.label
    batches = snapshot.measured.batches
    each = f"{seconds_text(stage.seconds / batches)} a batch" if batches else ""
    mark = "  <- slowest" if is_bottleneck(snapshot, stage) else ""
    return f"{stage.label:<{width}}  {each:>15}  {share_text(snapshot.share(stage)):>5}{mark}"
