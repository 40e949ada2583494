"""A recording as a drawing: a lane for each who worked, time from left to right, and memory beneath."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from millstream.html_fragments import escaped
from millstream.loader.reporting.chrome_trace import batches_text, lanes_of
from millstream.loader.reporting.quantities import bytes_text, seconds_text
from millstream.loader.threads.profiler import Event
from millstream.loader.threads.recorder import TRAINER, TRAINS, WAITS, Sample, Span

SECONDS_SHOWN = 10.0
"""How much of a recording is drawn: its end."""

WIDTH = 1000
"""The units across a drawing. What is nearer to each other than one of them is drawn as one."""

LANE = 20
GUTTER = 190
MEMORY_HEIGHT = 90

STYLE = """
.millstream svg{width:100%;height:auto;font:14px system-ui,sans-serif}
.millstream svg text{fill:var(--ms-text)}
.millstream svg .ms-lane{fill:var(--ms-box)}
.millstream svg .ms-waits{fill:var(--ms-hot)}
.millstream svg .ms-trains{fill:var(--ms-line)}
.millstream svg .ms-event{stroke:var(--ms-hot);stroke-width:1.5}
.millstream a{color:var(--ms-bar)}
.millstream svg polyline{fill:none;stroke-width:1.5}
"""
"""What the drawings need beside the style of all pictures."""


def timeline(spans: Sequence[Span], events: Iterable[Event]) -> str:
    """Returns the last seconds of a recording as a drawing; "" where nothing was recorded."""
    if not spans:
        return ""
    stop = max(span.stop for span in spans)
    start = max(min(span.start for span in spans), stop - SECONDS_SHOWN)
    shown = [span for span in spans if span.stop > start]
    rows = [
        ("the trainer", [span for span in shown if span.what in (WAITS, TRAINS)]),
        *(
            (f"{who}'s own work" if who == TRAINER else who, own)
            for who in lanes_of(shown)
            if (own := [span for span in shown if span.who == who and span.what not in (WAITS, TRAINS)])
        ),
    ]
    colours = _colours(shown)
    scale = WIDTH / max(stop - start, 1e-9)
    body = [
        _lane(number, name, own, start=start, scale=scale, colours=colours) for number, (name, own) in enumerate(rows)
    ]
    height = LANE * len(rows)
    for event in events:
        if start <= event.at <= stop:
            x = GUTTER + (event.at - start) * scale
            title = f"<title>{escaped(event.text)}</title>"
            body.append(f'<line class="ms-event" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}">{title}</line>')
    return _drawing(height, body, stop - start) + _legend(colours)


def memory_drawing(memory: Sequence[Sample]) -> str:
    """Returns the memory of each process over time as a drawing; "" where there are no two looks at it."""
    if len({sample.at for sample in memory}) < 2:
        return ""
    start, stop = memory[0].at, max(sample.at for sample in memory)
    most = max(sample.num_bytes for sample in memory)
    body = [f'<text x="0" y="12">at most {escaped(bytes_text(most))}</text>']
    whose = list(dict.fromkeys(sample.who for sample in memory))
    for number, who in enumerate(whose):
        points = " ".join(
            f"{GUTTER + (sample.at - start) / (stop - start) * WIDTH:.1f},"
            f"{MEMORY_HEIGHT * (1 - sample.num_bytes / most):.1f}"
            for sample in memory
            if sample.who == who
        )
        title = f"<title>{escaped(who)}</title>"
        body.append(f'<polyline points="{points}" style="stroke:{_hue(number)}">{title}</polyline>')
    names = {who: _hue(number) for number, who in enumerate(whose)}
    return _drawing(MEMORY_HEIGHT, body, stop - start) + _legend(names)


def _lane(number: int, name: str, spans: Sequence[Span], *, start: float, scale: float, colours: dict[str, str]) -> str:
    y = number * LANE
    parts = [
        f'<text x="0" y="{y + 14}">{escaped(name)}</text>',
        f'<rect class="ms-lane" x="{GUTTER}" y="{y + 2}" width="{WIDTH}" height="{LANE - 4}"></rect>',
    ]
    for what, first, last, text in _pieces(spans, start, scale):
        look = f'class="ms-{what}"' if what in (WAITS, TRAINS) else f'style="fill:{colours[what]}"'
        parts.append(
            f'<rect {look} x="{GUTTER + first:.1f}" y="{y + 3}" width="{last - first:.1f}" height="{LANE - 6}">'
            f"<title>{escaped(text)}</title></rect>"
        )
    return "".join(parts)


def _pieces(spans: Sequence[Span], start: float, scale: float) -> Iterator[tuple[str, float, float, str]]:
    """Yields what is drawn in a lane: what, from where to where, and what is said about it."""
    ordered = sorted(spans, key=lambda span: span.start)
    for (what, _), run in itertools.groupby(ordered, key=lambda span: (span.what, int((span.start - start) * scale))):
        pieces = list(run)
        first, last = max(0.0, (pieces[0].start - start) * scale), (max(one.stop for one in pieces) - start) * scale
        yield what, first, max(last, first + 0.4), _text(pieces)


def _text(spans: Sequence[Span]) -> str:
    seconds = seconds_text(sum(span.stop - span.start for span in spans))
    text = f"{spans[0].what}: {seconds}{f' in {len(spans)} pieces' if len(spans) > 1 else ''}"
    blocks = [block for span in spans for block in span.blocks or ()]
    if blocks:
        text += f", {batches_text(min(blocks), max(blocks))}"
    return text + "".join(f"\n{stage}: {seconds_text(spent)}" for span in spans[:1] for stage, spent in span.stages)


def _drawing(height: int, body: Sequence[str], seconds: float) -> str:
    axis = (
        f'<text x="{GUTTER}" y="{height + 14}">{escaped(seconds_text(seconds))} ago</text>'
        f'<text x="{GUTTER + WIDTH}" y="{height + 14}" text-anchor="end">the end</text>'
    )
    return f'<svg viewBox="0 0 {GUTTER + WIDTH} {height + 18}" role="img">{"".join(body)}{axis}</svg>'


def _colours(spans: Iterable[Span]) -> dict[str, str]:
    whats = dict.fromkeys(span.what for span in spans if span.what not in (WAITS, TRAINS))
    return {what: _hue(number + 1) for number, what in enumerate(whats)}


def _hue(number: int) -> str:
    # From green to violet: red is what waits.
    return f"hsl({90 + (110 + number * 137.5) % 230:.0f} 55% 55%)"


def _legend(colours: dict[str, str]) -> str:
    keys = "".join(
        f'<span class="ms-key" style="background:{colour}"></span>{escaped(name)}' for name, colour in colours.items()
    )
    return f'<div class="ms-soft">{keys}</div>'
