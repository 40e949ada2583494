"""What a mixture says of itself: its components and weights, in words of bounded length."""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.samplers.mixing_schedule import Part

_SHOWN_COMPONENTS, _SHOWN_WEIGHTS, _SHOWN_PARTS = 280, 32, 8
"""How many characters of a fingerprint say what the components are, and the weights of a part; and of how many parts.

So that all of them stay below what a state shows of a sampler.
"""


def mixture_words(
    samplers: Mapping[Any, Any], lengths: Sequence[int | None], source_lengths: Sequence[int], parts: Sequence[Part]
) -> str:
    """Returns the fingerprint of a mixture.

    Args:
        samplers: the components' samplers by name, as they were given.
        lengths: after how many elements each component begins anew; None where none of its words say that.
        source_lengths: how many records each source has.
        parts: from which position on there are which weights.
    """
    begins = [
        next((part.start for part in parts if part.weights[number]), None) for number in range(len(source_lengths))
    ]
    words, later = [], []
    for number, ((name, sampler), length) in enumerate(zip(samplers.items(), lengths, strict=True)):
        label, own = f"component_{_word(number, name)}", _component_words(sampler, length)
        if begins[number] == 0:
            words.append(f"{label}={own}")
        elif begins[number] is not None:
            # Before its first turn, the order is the same without it.
            later.append(f"{label}_from_{begins[number]}={own}")
    if sum(map(len, words)) > _SHOWN_COMPONENTS:
        words = [f"components={len(words)}{_crc(words)}"]
    if sum(map(len, later)) > _SHOWN_COMPONENTS:
        first = min(begin for begin in begins if begin)
        later = [f"components_from_{first}={len(later)}{_crc(later)}"]
    words += later
    # Sources after the last one that has a turn from the beginning leave the record keys of the others as they are.
    counted = 1 + max(number for number, begin in enumerate(begins) if begin == 0)
    all_lengths = ":".join(map(str, source_lengths[:counted]))
    words.append(f"source_lengths={all_lengths if len(all_lengths) <= _SHOWN_WEIGHTS else _crc([all_lengths])}")
    weights = [(part.start, weight_words(part.weights)) for part in parts]
    words += [f"weights_from_{start}={text}" for start, text in weights[:_SHOWN_PARTS]]
    if rest := weights[_SHOWN_PARTS:]:
        words.append(f"weights_from_{rest[0][0]}={len(rest)}{_crc([f'{start} {text}' for start, text in rest])}")
    return " ".join(["MixtureSampler", "batches=permuted", *words])


def weight_words(weights: Sequence[int]) -> str:
    """Returns the weights, without zeros at the end, or how many there are and a checksum."""
    weights = weights[: 1 + max(number for number, weight in enumerate(weights) if weight)]
    text = ":".join(map(str, weights))
    return text if len(text) <= _SHOWN_WEIGHTS else f"{len(weights)}{_crc([text])}"


def _component_words(sampler: Any, length: int | None) -> str:
    own = getattr(sampler, "fingerprint", None)
    first, *rest = str(own() if callable(own) else type(sampler).__qualname__).split(" ")
    rest += [] if length is None else [f"length={length}"]
    return f"{first}({','.join(rest)})"


def _crc(texts: Sequence[str]) -> str:
    return f"#{zlib.crc32(' '.join(texts).encode()):08x}"


def _word(number: int, name: object) -> str:
    """Returns the number of a component, and its name as far as it is made of plain letters."""
    return str(number) if name == number else f"{number}_{re.sub(r'[^0-9A-Za-z]+', '_', str(name))}"
