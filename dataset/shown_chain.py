"""What the iterator of a chain shows of itself: as a loader does, without the steps that are there for its own sake."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millstream.dataset.absence import DropAbsent
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.loader.execution import Execution
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.profile import Profile
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.profiler import Profiler
from millstream.transforms.present import Present

if TYPE_CHECKING:
    from millstream.loader.showing.facts import LoaderFacts
    from millstream.loader.showing.summary import Summary
    from millstream.loader.tracing import Trace


class ShownIterator(DatasetIterator[Any]):
    """An iterator that says where its time goes, and what would make it faster."""

    _execution: Execution
    _options: tuple[MultiprocessingOptions, ReadOptions]

    def profile(self) -> Profile:  # noqa: D102  (as for any iterator)
        names = shown_labels(self._execution.pipeline)
        seconds = self._execution.profiler.read()
        return Profile({names[label]: spent for label, spent in seconds.items() if label in names})

    def summary(self) -> "Summary":  # noqa: D102  (as for any iterator)
        from millstream.loader.showing.summary import Summary  # noqa: PLC0415  (for those who look)

        return Summary(shown_facts(self._execution.plan, self._execution.profiler, self._options, {}))


def traced_chain(pipeline: Pipeline, options: tuple[MultiprocessingOptions, ReadOptions]) -> "Trace":
    """Returns what flows between the operations of a pipeline, found by making one element."""
    from millstream.loader.tracing import Trace, traced  # noqa: PLC0415  (for those who look)

    structures, names = traced(pipeline), shown_labels(pipeline)
    facts = shown_facts(Plan(pipeline), Profiler(pipeline.labels), options, structures)
    return Trace({names[label]: lines for label, lines in structures.items() if label in names}, facts)


def shown_facts(
    plan: Plan,
    profiler: Profiler,
    options: tuple[MultiprocessingOptions, ReadOptions],
    structures: Mapping[str, tuple[str, ...]],
) -> "LoaderFacts":
    """Returns what is known of a chain, as `facts_of` does of a loader."""
    from millstream.loader.facts_of_loader import facts_of  # noqa: PLC0415  (for those who look)

    facts, names = facts_of(plan, profiler, *options, structures), shown_labels(plan.pipeline)
    stages = [dataclasses.replace(stage, label=names[stage.label]) for stage in facts.stages if stage.label in names]
    return dataclasses.replace(facts, stages=tuple(stages))


def shown_labels(pipeline: Pipeline) -> dict[str, str]:
    """Returns what the parts of the work are called, by their labels in the pipeline, without steps of the chain's."""
    names = {label: label for label in Profiler(()).read()}
    operations = zip(pipeline.labels, pipeline.names, pipeline.operations, strict=True)
    shown = [(label, name) for label, name, operation in operations if not isinstance(operation, Present | DropAbsent)]
    return names | {label: f"operations[{number}], {name}" for number, (label, name) in enumerate(shown)}
