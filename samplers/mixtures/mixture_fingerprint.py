"""The fingerprint of a mixture: its components and weights, as a text of bounded length."""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.samplers.mixtures.mixing_schedule import Phase

_SHOWN_COMPONENTS, _SHOWN_WEIGHTS = 280, 32
"""The maximum number of characters for the components, and for the weights of a phase; more are a checksum."""


def first_turns(phases: Sequence[Phase], count: int) -> tuple[int | None, ...]:
    """Returns for each component the start of the first phase in which it has a turn; None if it never has one."""
    return tuple(next((phase.start for phase in phases if phase.weights[number]), None) for number in range(count))


def mixture_fingerprint(
    samplers: Mapping[Any, Any],
    lengths: Sequence[int | None],
    source_lengths: Sequence[int],
    phases: Sequence[Phase],
    batches_of: int | None = None,
) -> tuple[str, dict[str, int]]:
    """Returns the fingerprint of a mixture, and by name the positions from which on some of its texts count.

    Of a component that begins again, `lengths` has the number of elements until then, unless its fingerprint has it.
    """
    starts: dict[str, int] = {}
    turns = first_turns(phases, len(source_lengths))
    always, later = [], []
    for number, ((key, sampler), length) in enumerate(zip(samplers.items(), lengths, strict=True)):
        label, own = f"component_{_label(number, key)}", _component_text(sampler, length)
        if turns[number] == 0:
            always.append(f"{label}={own}")
        elif (turn := turns[number]) is not None:
            # Before its first turn, the order is the same without it.
            first_key = sum(source_lengths[:number])
            starts[name := f"{label}_from_{turn}"] = turn
            later.append(f"{name}={own},first_key={first_key}")
    if sum(map(len, always)) > _SHOWN_COMPONENTS:
        always = [f"components={len(always)}{_crc(always)}"]
    # Sources after the last one that has a turn from the beginning leave the record keys of the others unchanged.
    counted = 1 + max(number for number, turn in enumerate(turns) if turn == 0)
    all_lengths = ":".join(map(str, source_lengths[:counted]))
    all_lengths = all_lengths if len(all_lengths) <= _SHOWN_WEIGHTS else _crc([all_lengths])
    weights = [f"weights_from_{phase.start}={_weights_text(phase.weights)}" for phase in phases]
    starts |= {f"weights_from_{phase.start}": phase.start for phase in phases}
    texts = [
        "MixtureSampler",
        "batches=permuted" if batches_of is None else f"batches_of={batches_of}",
        *always,
        f"source_lengths={all_lengths}",
        *later,
        *weights,
    ]
    return " ".join(texts), starts


def _weights_text(weights: Sequence[int]) -> str:
    """Returns the weights, without zeros at the end, or how many there are and a checksum."""
    weights = weights[: 1 + max(number for number, weight in enumerate(weights) if weight)]
    text = ":".join(map(str, weights))
    return text if len(text) <= _SHOWN_WEIGHTS else f"{len(weights)}{_crc([text])}"


def _component_text(sampler: Any, length: int | None) -> str:
    own = getattr(sampler, "fingerprint", None)
    first, *rest = str(own() if callable(own) else type(sampler).__qualname__).split(" ")
    rest += [] if length is None else [f"length={length}"]
    return f"{first}({','.join(rest)})"


def _crc(texts: Sequence[str]) -> str:
    return f"#{zlib.crc32(' '.join(texts).encode()):08x}"


def _label(number: int, name: object) -> str:
    """Returns the number of a component, and its name as far as it is made of plain letters."""
    return str(number) if name == number else f"{number}_{re.sub(r'[^0-9A-Za-z]+', '_', str(name))}"
