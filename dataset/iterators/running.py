"""A straight chain as it runs: what is fixed when the first iterator of its end begins, and idle worker processes.

It runs on copies of the operations and of the user's datasets with random access. So every place computes the same, and
an operation that changes itself changes its copy. See `loader/checkpoints/fingerprint.py`.

When a pass over a dataset ends, or is abandoned, its workers stay warm, and the next `iter(dataset)` reuses them, as
iterators of a `DataLoader` do. They end with the dataset, when one of its iterators is closed, or after a minute.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, final

import numpy as np

from millstream.configuration import config
from millstream.dataset.nodes.lowering import lower, order_of
from millstream.dataset.nodes.node import Node, holds_nodes
from millstream.dataset.nodes.source_node import Own, Source, copied_with
from millstream.dataset.options import DEFAULTS, DatasetOptions
from millstream.dataset.step import folded
from millstream.loader.checkpoints.fingerprint import Fingerprint, Origin, snapshot_of
from millstream.loader.checkpoints.state import Stream, fingerprint_of_pipeline, stream_of
from millstream.loader.engine.staffing import ChosenWorkers, pools_of_processes
from millstream.loader.execution import Execution
from millstream.loader.measuring import Frontend, Profiler
from millstream.loader.pipeline.pipeline import UNLIMITED, FilterLimits, Pipeline, Tolerance
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.shards import first_dynamic
from millstream.loader.scheduling.feed import Feed
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.shared_threads import SharedThreads
from millstream.samplers.mixtures.mixing import Mixing
from millstream.sharding import NoSharding
from millstream.transforms import Transformation
from millstream.transforms.of_chains import DropAbsent, KeepAll, Present

if TYPE_CHECKING:
    from collections.abc import Hashable

    from millstream.loader.engine.crew import Crew

Lent = TypeVar("Lent")

_UNCHANGEABLE = (int, float, str, tuple, range, np.ndarray, Mixing, NoneType)
"""The types of the values of nodes that no user code can reach."""
_SINCE = "the first iterator of this dataset: build another dataset"


@final
class FixedChain:
    """The operations of a chain and the `MapDataset` that it reads, described once for all iterators.

    Args:
        end: the node of `map_dataset`, if there is one.
        since: the time of the description and the remedy, for errors.

    Attributes:
        map_dataset: the dataset; None for the operations after another stream.
        node: its node.
        operations: the operations after it.
    """

    def __init__(
        self, map_dataset: Any, end: Node | None, operations: Sequence[Transformation], since: str = _SINCE
    ) -> None:
        nodes = [] if end is None else _nodes_of(end)
        held = {id(node): _values_of(node) for node in nodes}
        values = [value for fields in held.values() for value in fields.values()]
        of_nodes = [value for value in values if isinstance(value, Transformation)]
        named = functools.partial(_named, nodes)
        self._origin = Origin(_sources_of(nodes), None, [*of_nodes, *operations], named, since)
        copies = iter(snapshot_of([*values, *operations]))
        copied = {key: {name: next(copies) for name in fields} for key, fields in held.items()}
        self.operations = tuple(copies)
        self.node: Any = end and folded(end, functools.partial(_rebuilt, copied))
        self.map_dataset: Any = map_dataset
        if map_dataset is not None and self.node is not None and self.node is not end:
            self.map_dataset = _with_node(map_dataset, self.node)
        self._fingerprints: dict[bool, Fingerprint] = {}
        self._pipelines: dict[tuple[Any, ...], Pipelines] = {}
        # By the `id` of a pipeline of this chain and the number of its local operations.
        self._compiled: dict[tuple[int, int], Plan] = {}
        self._streams: dict[tuple[Any, ...], Stream] = {}

    def check_unchanged(self) -> None:
        """Raises ValueError if the program has changed a plain value of an operation or a dataset since then."""
        self._origin.check_unchanged()

    def pipelines(self, limits: FilterLimits, tolerance: Tolerance | None, *, allows_none: bool) -> "Pipelines":
        key = limits, tolerance, allows_none
        if (known := self._pipelines.get(key)) is not None:
            return known
        # If two threads begin at the same time, both get the same, whose plans are found by their `id`.
        return self._pipelines.setdefault(key, Pipelines.of(self, limits, tolerance, allows_none=allows_none))

    def compiled(self, pipeline: Pipeline, num_local: int) -> Plan:
        """Returns the plan of one of these pipelines with local operations, which is compiled once."""
        key = id(pipeline), num_local
        if key not in self._compiled:
            is_same = pipeline.num_local == num_local
            self._compiled[key] = Plan(pipeline if is_same else dataclasses.replace(pipeline, num_local=num_local))
        return self._compiled[key]

    def stream_of(self, plan: Plan, described: Pipeline) -> Stream:
        """Returns the stream of a plan of this chain, with the fingerprint of another pipeline of it."""
        key = id(described), plan.one_to_one, plan.partition.global_block
        if key not in self._streams:
            self._streams[key] = stream_of(plan, self.fingerprint(described))
        return self._streams[key]

    def fingerprint(self, pipeline: Pipeline) -> Fingerprint:
        """Returns the fingerprint of the pipeline of this chain, which is described for its first iterator only."""
        skips_errors = pipeline.tolerance is not None
        if skips_errors not in self._fingerprints:
            self._fingerprints[skips_errors] = fingerprint_of_pipeline(pipeline)
        return self._fingerprints[skips_errors]


class Pipelines(NamedTuple):
    """The pipelines of a chain over the elements of a `MapDataset`.

    Attributes:
        described: the pipeline whose fingerprint states have.
        sparse: drops missing elements first.
        dense: requires an element at each position, so that it is 1:1; None if operations drop, split or regroup.
        checked: the dense one, with a check after each operation; None without a dense one.
        shown: the pipeline to display: with the operations of the MapDataset one by one, if possible.
    """

    described: Pipeline
    sparse: Pipeline
    dense: Pipeline | None
    checked: Pipeline | None
    shown: Pipeline

    @classmethod
    def of(cls, chain: FixedChain, limits: FilterLimits, tolerance: Tolerance | None, *, allows_none: bool) -> Self:
        node, dataset, operations = chain.node, chain.map_dataset, chain.operations
        order = order_of(node)
        dropping = operations if allows_none else (DropAbsent(), *operations)
        described = sparse = shown = Pipeline(dataset, order, order, dropping, NoSharding(), limits, tolerance)
        if tolerance is not None:
            # Elements that fail are dropped, whether or not others may be missing.
            sparse = shown = dataclasses.replace(described, operations=(KeepAll(), *dropping))
        if node.is_sparse or allows_none:
            return cls(described, sparse, None, None, shown)
        source, own_order, maps = lower(dataset, node)
        mapped = (*checked_maps(maps), *operations)
        whole = Pipeline(source, own_order, own_order, mapped, NoSharding(), limits, tolerance)
        # If the dense plan were not 1:1, the sparse one would cost no more.
        is_dense = first_dynamic(operations) is None
        if is_dense:
            described = whole
        if tolerance is not None:
            return cls(described, sparse, None, None, shown)
        checked = dataclasses.replace(whole, operations=tuple(checked_maps((*maps, *operations))))
        return cls(described, sparse, whole if is_dense else None, checked if is_dense else None, whole)


def checked_maps(maps: Sequence[Transformation]) -> list[Transformation]:
    """Returns the operations of a MapDataset with checks, so that none of them sees a missing element."""
    return [Present(), *(step for operation in maps for step in (operation, Present()))]


def _values_of(node: Node) -> dict[str, Any]:
    """Returns the values of a node that user code may change. Sources are shared, as by loaders."""
    if isinstance(node, Own):
        return node.attributes if _is_copied(node.dataset) else {}
    if isinstance(node, Source):
        return {}
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    values = {name: value for name, value in values.items() if not isinstance(value, _UNCHANGEABLE)}
    return {name: value for name, value in values.items() if not holds_nodes(value)}


def _is_copied(dataset: Any) -> bool:
    """Returns False for a user's dataset with a `__del__`: that of a copy would close what the original reads."""
    return not hasattr(type(dataset), "__del__")


def _nodes_of(end: Node) -> list[Node]:
    """Returns each node up to the sources once, sources first."""
    found: list[Node] = []
    folded(end, lambda one, _: found.append(one))
    return found


def _sources_of(nodes: Iterable[Node]) -> dict[str, Any]:
    """Returns the sources, by the names that errors give them."""
    found = {id(node.source): node.source for node in nodes if isinstance(node, Source)}
    names = [f"source {number}" for number in range(1, len(found) + 1)] if len(found) > 1 else ["source"]
    return dict(zip(names, found.values(), strict=False))


def sources_below(end: Node) -> Iterable[Any]:
    return _sources_of(_nodes_of(end)).values()


def _named(nodes: Iterable[Node]) -> dict[str, Any]:
    """Returns the values that are not operations, by the names that errors give them.

    Private attributes of the user's datasets are left out, because reading an element may change them.
    """
    named: dict[str, Any] = {}
    for node in nodes:
        values = {name: value for name, value in _values_of(node).items() if not isinstance(value, Transformation)}
        if isinstance(node, Own):
            kind = type(node.dataset).__name__
            values = {f"{kind}.{name}": value for name, value in values.items() if not name.startswith("_")}
        named |= values
    return named


def _rebuilt(copied: Mapping[int, Mapping[str, Any]], one: Node, above: list[Node]) -> Node:
    """Returns a node with copies of its values over other parents; the node itself if nothing has changed."""
    values = copied.get(id(one), {})
    is_same_above = all(new is old for new, old in zip(above, one.parents, strict=True))
    if isinstance(one, Own):
        if not _is_copied(one.dataset):
            return one
        return Own(_own_copy(one.dataset, values, above), tuple(above))
    if is_same_above and all(value is getattr(one, name) for name, value in values.items()):
        return one
    rebuilt = copy.copy(one)
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if holds_nodes(value):
            vars(rebuilt)[field.name] = above[0] if isinstance(value, Node) else tuple(above)
    vars(rebuilt).update(values)
    return rebuilt


def _own_copy(dataset: Any, values: Mapping[str, Any], above: Sequence[Node]) -> Any:
    """Returns a dataset of the user's class with other attributes and parents."""
    parents = {id(old): _with_node(old, node) for old, node in zip(dataset.parents, above, strict=True)}
    own = {name: parents.get(id(value), value) for name, value in values.items()}
    return copied_with(dataset, {"_parents": tuple(parents.values()), "_blocks": None, **own})


def _with_node(dataset: Any, node: Node) -> Any:
    """Returns a dataset of the same class with another node; that of a user's own class belongs to the node."""
    if isinstance(node, Own):
        return node.dataset
    return copied_with(dataset, {"_node": node, "_blocks": None})


@final
class WarmWorkers:
    """Whatever the iterators of one dataset share. A copy of it, in any process, has nothing.

    It is the idle worker processes, by the pipeline they run, and their number if it is chosen at run time.

    Attributes:
        fixed: the chain that ends with the dataset, as it was when its first iterator began.
    """

    def __init__(self) -> None:
        self.fixed: FixedChain | None = None
        self._lent: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def lend(self, use: "Hashable", make: Callable[[], Lent]) -> Lent:
        """Returns the object that earlier iterators had for the same use, or a new one, which later ones get."""
        known: Lent | None = self._lent.get(use)
        # If two threads begin at the same time, both get the same.
        return self._lent.setdefault(use, make()) if known is None else known


@final
@dataclasses.dataclass(frozen=True)
class Shared:
    """The resources that all chains below one combination of datasets share.

    Attributes:
        threads: the threads of this process; None for a chain that is alone and has its own.
        reading: the threads for chains without threads of their own; None to start none.
        raises_absent: True to raise AbsentElement for a missing element of a chain, or for None between two of its
            operations; False to skip it.
        options: the options of the datasets above, for those that are opened below, whenever that is.
        crew: the worker processes of the iterator that draws from the combination. They also run the chains.
    """

    threads: SharedThreads | None = dataclasses.field(default_factory=SharedThreads)
    crew: "Crew | None" = None
    reading: ReadOptions | None = None
    raises_absent: bool = False
    options: DatasetOptions = DEFAULTS

    @property
    def is_alone(self) -> bool:
        """True for a chain that is below no combination."""
        return self.threads is None and self.crew is None

    def combined(self) -> "Shared":
        """Returns the resources for the datasets below a combination that has these."""
        return Shared(options=self.options) if self.is_alone else self


ALONE = Shared(None)


@final
@dataclasses.dataclass(frozen=True)
class Running:
    """The execution of operations, and its limits.

    Attributes:
        reading: the threads, in this process or in each worker.
        shared: the resources of the combination that draws from this chain, or that it draws from with its workers.
        name: the name of this execution among all that share workers.
        num_local: the number of last operations that run in this process even if workers or threads run the others.
        local_reading: the threads that run these in advance; None to run them in the consumer's thread.
    """

    workers: MultiprocessingOptions
    reading: ReadOptions
    warm: WarmWorkers = dataclasses.field(default_factory=WarmWorkers)
    limits: FilterLimits = UNLIMITED
    shared: Shared = ALONE
    name: "Hashable" = None
    tolerance: Tolerance | None = None
    num_local: int = 0
    local_reading: ReadOptions | None = None

    def execution(
        self,
        stage: str,
        pipeline: Pipeline,
        frontend: Frontend,
        feed: Feed | None = None,
        chain: FixedChain | None = None,
    ) -> Execution:
        """Returns the execution of a pipeline, which is the same each time for one stage of a dataset.

        A pipeline of a `chain` is compiled once for all its executions.
        """
        name, reading, num_local = (self.name, stage), self.reading, self.num_local
        if self.shared.crew is not None and not self.workers.are_wanted:
            # The workers of the consumer run all operations.
            num_local = 0
        elif feed is not None and num_local == len(pipeline.operations):
            # Nothing is left for workers or other threads.
            reading, num_local = self.local_reading or ReadOptions(0, 0), 0
        elif not (self.workers.are_wanted or reading.reads_ahead):
            # All operations run in one place.
            reading, num_local = self.local_reading or reading, 0
        compiled = None if chain is None else chain.compiled(pipeline, num_local)
        if compiled is not None:
            pipeline = compiled.given
        elif pipeline.num_local != num_local:
            pipeline = dataclasses.replace(pipeline, num_local=num_local)
        use = stage, self.reading, self.limits, self.tolerance, config.py_debug_mode
        chosen = None
        if self.workers.chooses_workers and self.shared.crew is None:
            makes_batches = any(operation.makes_batches for operation in pipeline.operations)
            chosen = self.chosen(use, reading, makes_batches=makes_batches)
        execution = Execution(
            pipeline,
            self.workers,
            reading,
            feed,
            frontend=frontend,
            crew=self.shared.crew,
            name=name,
            threads=self.shared.threads,
            local_reading=self.local_reading,
            compiled=compiled,
            chosen=chosen,
        )
        if chain is not None and chain.node is not None:
            execution.keep_streams_here(functools.partial(sources_below, chain.node))
        if (pools := execution.pools) is not None and chosen is None:
            execution.pools = self.warm.lend(use, lambda: pools)
        return execution

    def chosen(self, use: "Hashable", reading: ReadOptions, *, makes_batches: bool) -> ChosenWorkers:
        """Returns the workers of "auto", which later iterators with the same use get, too."""
        make = functools.partial(ChosenWorkers, self.workers, reading, makes_batches=makes_batches)
        return self.warm.lend((use, self.workers), make)

    def crew_below(self, reading: ReadOptions, *, makes_batches: bool) -> "Crew":
        """Returns a new crew for all chains below a join, given the threads of each worker."""
        from millstream.loader.engine.crew import Crew  # noqa: PLC0415  (lazy: for workers)

        if not self.workers.chooses_workers:
            return Crew()
        from millstream.loader.engine.auto import AutoCrew  # noqa: PLC0415  (lazy: slow to import)

        use = "crew", reading, self.limits, self.tolerance, config.py_debug_mode
        return AutoCrew(self.chosen(use, reading, makes_batches=makes_batches))

    def staff(self, crew: "Crew", profiler: Profiler) -> None:
        """Lets the chains below a join that no operations follow start workers."""
        if (chooser := crew.as_auto) is not None:
            chooser.lead(profiler, self.workers.stall_timeout, {})
            return
        from millstream.loader.engine.processes import Processes  # noqa: PLC0415  (lazy: slow to import)

        use = "join", self.reading, self.limits, self.tolerance, config.py_debug_mode
        make = functools.partial(pools_of_processes, crew.pipelines(), self.workers, self.reading)
        pools = self.warm.lend(use, make)
        take = functools.partial(Processes, profiler=profiler, pools=pools, options=self.workers)
        crew.staff(take, self.workers.stall_timeout, pools)
