"""Mixtures: what many components in equal shares cost, beside one source of the same records."""

from collections.abc import Callable

from suite import data
from suite.case import Case, Contender, Goal, Pick
from suite.contenders import fork_server, modes
from suite.scale import Scale
from suite.steps import identity, tokens_in_graph, tokens_of
from suite.work import Map, Mixture, Work

BATCH_SIZE = 256
COMPONENTS = (2, 64, 1000)
TINY_COMPONENTS = 8
"""The largest number of components in a mere trial run."""


def _case(
    name: str,
    title: str,
    components: int,
    mixture: Callable[[int, int], Mixture],
    *,
    counts: tuple[int, int, int],
    step: Map,
    threads: int | None,
    share: float,
    in_memory: bool,
) -> Case:
    def work(scale: Scale) -> Work:
        tiny, quick, full = counts
        number = scale.pick(tiny=min(components, TINY_COMPONENTS), quick=components, full=components)
        return Work(mixture(scale.pick(tiny=tiny, quick=quick, full=full), number), (step,), BATCH_SIZE)

    return Case(
        name=f"{name}_{components}",
        title=f"{components:,} components {title}, in equal shares, batch {BATCH_SIZE}",
        make_work=work,
        contenders=(
            *modes("millstream", threads=threads),
            *modes("millstream_one_source", threads=threads),
            *modes("grain", "Dataset", threads=threads),
            *(() if components > 64 else (Contender("tensorflow"), Contender("tensorflow", mode="batches first"))),
            *(() if in_memory or components > 64 else fork_server("mosaicml")),
            Contender("bare", mode="loop"),
        ),
        goals=(
            Goal(
                f"{share} of one source of the same records, without workers",
                share,
                Pick("millstream_one_source", 0),
                Pick("millstream", 0),
            ),
            *(
                [Goal("30 times Grain, without workers", 30, Pick("grain", 0), Pick("millstream", 0))]
                if in_memory
                else []
            ),
        ),
    )


CASES = (
    *(
        _case(
            "mix",
            "of ints in memory",
            components,
            data.integer_components,
            counts=(2048, 1 << 20, 1 << 20),
            step=Map(identity, identity, identity),
            threads=0,
            share=0.87,
            in_memory=True,
        )
        for components in COMPONENTS
    ),
    *(
        _case(
            "mix_files",
            "of 1 KB records in ArrayRecord files",
            components,
            data.token_components,
            counts=(1024, 64_000, 256_000),
            step=Map(tokens_of, tokens_in_graph, tokens_in_graph),
            threads=None,
            share=0.8,
            in_memory=False,
        )
        for components in COMPONENTS
    ),
)
