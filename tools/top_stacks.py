"""Stacks in the format of `faulthandler`, shortened: threads with equal stacks are counted, not repeated."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from millstream.loader.reporting.quantities import count_text
from millstream.tools.top_lines import HEAD, SOFT, Line, Segment

MIN_FRAMES = 2
"""Smallest number of frames to which a stack is shortened."""

_OWN = re.compile(r"/millstream/(?:loader|dataset)/|/threading\.py\"|^File \"<string>\"")
_HEAD = re.compile(r"^(?:Current thread|Thread) (.*) \(most recent call first\):$")


def stack_lines(stacks: Sequence[Mapping[str, str]]) -> Iterator[Line]:
    """Yields stacks as lines, the most recent call first.

    Args:
        stacks: the name of each process, and its stacks as text.
    """
    for one in stacks:
        yield []
        yield [Segment(f"Stacks of {one['who']}", HEAD), Segment(", the most recent call first", SOFT)]
        for (frames, number), names in _grouped(one["text"]).items():
            yield [Segment(f"  {names if number == 1 else count_text(number, 'thread')}", SOFT)]
            yield from ([Segment(f"    {frame}")] for frame in frames)


def _grouped(text: str) -> dict[tuple[tuple[str, ...], int], str]:
    """Returns the different stacks, each with the number of threads that have it and the name of one of them."""
    names: dict[tuple[str, ...], str] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for stack in text.split("\n\n"):
        lines = stack.strip("\n").splitlines()
        if not lines:
            continue
        head = _HEAD.match(lines[0])
        frames = _shortened([line.strip() for line in (lines[1:] if head else lines)])
        counts[frames] += 1
        names.setdefault(frames, head.group(1) if head else "")
    return {(frames, number): names[frames] for frames, number in counts.items()}


def _shortened(frames: list[str]) -> tuple[str, ...]:
    """Returns frames without the outermost ones of the library and of Python, but at least MIN_FRAMES."""
    last = max((number for number, frame in enumerate(frames) if not _OWN.search(frame)), default=-1)
    return tuple(frames[: max(last + 2, MIN_FRAMES)])
