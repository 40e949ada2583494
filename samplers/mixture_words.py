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
    words = [
        f"component_{_word(number, name)}={_component_words(sampler, length)}"
        for number, ((name, sampler), length) in enumerate(zip(samplers.items(), lengths, strict=True))
    ]
    if sum(map(len, words)) > _SHOWN_COMPONENTS:
        words = [f"components={len(words)}{_crc(words)}"]
    all_lengths = ":".join(map(str, source_lengths))
    words.append(f"source_lengths={all_lengths if len(all_lengths) <= _SHOWN_WEIGHTS else _crc([all_lengths])}")
    weights = [(part.start, weight_words(part.weights)) for part in parts]
    words += [f"weights_from_{start}={text}" for start, text in weights[:_SHOWN_PARTS]]
    if rest := weights[_SHOWN_PARTS:]:
        words.append(f"weights_from_{rest[0][0]}={len(rest)}{_crc([f'{start} {text}' for start, text in rest])}")
    return " ".join(["MixtureSampler", *words])


def weight_words(weights: Sequence[int]) -> str:
    """Returns the weights, or how many there are and a checksum."""
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
