"""The fingerprint of a mixture: its components and weights, as a text of bounded length."""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.samplers.mixtures.mixing_schedule import Phase

_SHOWN_COMPONENTS, _SHOWN_WEIGHTS = 280, 64
"""The maximum number of characters for the components, and for the weights of a phase; more are checksums."""

MAX_LISTED_COMPONENTS = 20
"""The maximum number of components of which each has a text of its own; more are one checksum."""


def first_turns(phases: Sequence[Phase], count: int) -> tuple[int | None, ...]:
    """Returns for each component the start of the first phase in which it has a turn; None if it never has one."""
    return tuple(next((phase.start for phase in phases if phase.weights[number]), None) for number in range(count))


def mixture_fingerprint(
    names: Sequence[Any],
    samplers: Mapping[Any, Any],
    lengths: Sequence[int | None],
    phases: Sequence[Phase],
    always: Sequence[str],
) -> tuple[str, dict[str, int]]:
    """Returns the fingerprint of a mixture, and by name the positions from which on some of its texts count.

    A component counts from its first turn on, by its name, wherever it is in the list: the order before is the same
    without it. The order of the components that have a turn counts as that of their weights.

    Args:
        names: the names of all components.
        samplers: the samplers of the components by name, without those that were left out.
        lengths: the number of elements of each component that begins again, unless its fingerprint has it.
        phases: the phases of the schedule, by positions of records.
        always: further texts.
    """
    starts: dict[str, int] = {}
    first, later = [], []
    turns = first_turns(phases, len(names))
    for name, turn, length in zip(names, turns, lengths, strict=True):
        if turn is None or name not in samplers:
            continue
        label, own = f"component_{label_of(name)}", _component_text(samplers[name], length)
        if turn == 0:
            first.append((label, own))
        else:
            starts[f"{label}_from_{turn}"] = turn
            later.append((f"{label}_from_{turn}", own))
    if sum(len(label) + len(own) for label, own in first) > _SHOWN_COMPONENTS:
        first = [(label, _crc([own])) for label, own in first]
    if len(first) > MAX_LISTED_COMPONENTS:
        first = [("components", f"{len(first)}{_crc([f'{label}={own}' for label, own in first])}")]
    weights = [(f"weights_from_{phase.start}", _weights_text(names, phase.weights)) for phase in phases]
    starts |= {f"weights_from_{phase.start}": phase.start for phase in phases}
    texts = [f"{name}={text}" for name, text in (*first, *later, *weights)]
    return " ".join(["MixtureSampler", *always, *texts]), starts


def _weights_text(names: Sequence[Any], weights: Sequence[int]) -> str:
    """Returns the weights above 0 by name, or how many there are and a checksum.

    Of components without names it returns all weights, but for zeros at the end.
    """
    if isinstance(names[0], str):
        shown = [f"{label_of(name)}:{weight}" for name, weight in zip(names, weights, strict=True) if weight]
        text = ",".join(shown)
    else:
        shown = list(map(str, weights[: 1 + max(number for number, weight in enumerate(weights) if weight)]))
        text = ":".join(shown)
    return text if len(text) <= _SHOWN_WEIGHTS else f"{len(shown)}{_crc([text])}"


def _component_text(sampler: Any, length: int | None) -> str:
    own = getattr(sampler, "fingerprint", None)
    first, *rest = str(own() if callable(own) else type(sampler).__qualname__).split(" ")
    rest += [] if length is None else [f"length={length}"]
    return f"{first}({','.join(rest)})"


def _crc(texts: Sequence[str]) -> str:
    return f"#{zlib.crc32(' '.join(texts).encode()):08x}"


def label_of(name: object) -> str:
    """Returns the name of a component as a part of an identifier: with a checksum if other characters are left out."""
    text = str(name)
    plain = re.sub(r"[^0-9A-Za-z]+", "_", text)
    return plain if plain == text else f"{plain}_{zlib.crc32(text.encode()):08x}"
