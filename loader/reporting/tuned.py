"""What tuning a loader has found: the settings, what was measured, and a picture of it."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, final

from millstream.html_fragments import card, escaped, figure, words
from millstream.loader.reporting.quantities import bytes_text, count_text
from millstream.loader.threads.options import ReadOptions

WIDTH = 80
"""Lines have this many characters at most, the call that comes first aside."""

BAR = 10
"""How wide the longest bar is in a terminal."""

FASTER = 1.05
"""What is faster by less than this is said to be as fast."""

UNTOUCHED = "what to read, its order, the operations and the shard, nor stall_timeout and enable_profiling"
"""What decides about the batches, and what has nothing to do with speed."""


@final
@dataclasses.dataclass(frozen=True, order=True)
class Settings:
    """What a loader may be given without a change of its batches. In order: the cheaper come first.

    Attributes:
        worker_count: how many worker processes.
        num_threads: how many threads read ahead, in the trainer's process or in each worker.
        worker_buffer_size: how many finished batches each worker keeps ready.
        prefetch_buffer_size: how many records the threads may have ready or in work where there are no workers.
    """

    worker_count: int
    num_threads: int
    worker_buffer_size: int
    prefetch_buffer_size: int

    @property
    def read_options(self) -> ReadOptions:
        """The threads, as a loader takes them."""
        return ReadOptions(num_threads=self.num_threads, prefetch_buffer_size=self.prefetch_buffer_size)

    @property
    def label(self) -> str:
        """What it is in few words."""
        threads = count_text(self.num_threads, "thread")
        if self.worker_count:
            workers = count_text(self.worker_count, "worker")
            each = " each" if self.worker_count > 1 else ""
            return f"{workers}, {threads}{each}, {count_text(self.worker_buffer_size, 'batch')} ahead"
        return f"no workers, {threads}, {count_text(self.prefetch_buffer_size, 'record')} ahead"


@final
@dataclasses.dataclass(frozen=True)
class Measurement:
    """How fast a loader is with some settings, where nothing is done with its batches.

    Attributes:
        settings: which.
        batches_per_second: the best of some runs of equal length: what disturbs only makes slower.
        records_per_second: the records that were used up for these.
        memory_bytes: what the batches ahead take, by the size of the first one, and worker processes beside them.
        runs: how many runs there were.
    """

    settings: Settings
    batches_per_second: float
    records_per_second: float
    memory_bytes: int
    runs: int


@final
@dataclasses.dataclass(frozen=True)
class Tuning:
    """What to write, and why. Printed, it is a page; a notebook shows it as a picture.

    Attributes:
        chosen: the settings to use: the cheapest ones that are nearly as fast as the fastest, within the memory.
        current: the settings that the loader has.
        measurements: what was measured, the cheapest settings first.
        memory_limit: how many bytes the loader may take.
        too_large: settings that were not tried, or not chosen, because they take more.
        untried: settings for which there was no time.
        num_cores: how many cores this process may use.
    """

    chosen: Settings
    current: Settings
    measurements: tuple[Measurement, ...]
    memory_limit: int
    too_large: tuple[Settings, ...] = ()
    untried: tuple[Settings, ...] = ()
    num_cores: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments to give to `DataLoader` or `load`, beside those that say what to load."""
        buffer_size = self.chosen.worker_buffer_size
        return {
            "worker_count": self.chosen.worker_count,
            **({} if buffer_size == 1 else {"worker_buffer_size": buffer_size}),
            "read_options": self.chosen.read_options,
        }

    @property
    def text(self) -> str:
        """What to write: a call with these arguments."""
        return f"DataLoader(..., {', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escaped(note)}</li>" for note in _notes(self))
        parts = (words({"": _found(self)}), _drawing(self), f"<ul>{notes}</ul>")
        return figure(card("tuned", self.text, *parts), style=_STYLE)


def _lines(tuning: Tuning) -> Iterator[str]:
    yield tuning.text
    yield ""
    yield from textwrap.wrap(_found(tuning), WIDTH)
    yield ""
    width = max(len(measurement.settings.label) for measurement in tuning.measurements)
    best = max(measurement.records_per_second for measurement in tuning.measurements)
    yield f"{'':<5} {'':<{width}} {'':<{BAR}} {'records/s':>10} {'memory':>7}"
    for measurement in tuning.measurements:
        full = round(BAR * measurement.records_per_second / best)
        bar = "█" * full + "░" * (BAR - full)
        yield (
            f"{next(iter(_marks(tuning, measurement.settings)), ''):<5} {measurement.settings.label:<{width}} {bar} "
            f"{measurement.records_per_second:>10,.0f} {bytes_text(measurement.memory_bytes):>7}"
        )
    yield ""
    for note in _notes(tuning):
        yield from textwrap.wrap(note, WIDTH, initial_indent="* ", subsequent_indent="  ")


def _marks(tuning: Tuning, settings: Settings) -> list[str]:
    """Returns what is to be said of some settings, the most important first."""
    return [
        name
        for name, is_it in (
            ("use", settings == tuning.chosen),
            ("yours", settings == tuning.current),
            ("large", settings in tuning.too_large),
        )
        if is_it
    ]


def _found(tuning: Tuning) -> str:
    """Returns what the advice is worth, in a sentence."""
    rates = {measurement.settings: measurement.records_per_second for measurement in tuning.measurements}
    chosen, current = rates[tuning.chosen], rates.get(tuning.current)
    text = f"{chosen:,.0f} records/s for a trainer that only waits, on {count_text(tuning.num_cores, 'core')}"
    if tuning.chosen == tuning.current:
        return f"{text}: the settings are as they should be."
    if current is None:
        return f"{text}; the settings that it has were not measured."
    if chosen < FASTER * current:
        return f"{text}: about as fast as now, for less."
    return f"{text}: {chosen / current:.1f} times as fast."


def _notes(tuning: Tuning) -> list[str]:
    notes = [f"At most {bytes_text(tuning.memory_limit)} of memory was allowed (memory=)."]
    if tuning.too_large:
        notes.append(f"More memory than that take: {_listed(tuning.too_large)}.")
    if tuning.untried:
        notes.append(f"There was no time for: {_listed(tuning.untried)}. Give it more (seconds=).")
    notes.append(f"The batches are the same with all of these. Tuning never touches {UNTOUCHED}.")
    return notes


def _listed(settings: Sequence[Settings]) -> str:
    return "; ".join(one.label for one in settings)


ROW, TEXT_WIDTH, BAR_WIDTH, NUMBER_WIDTH = 22, 300, 420, 260
"""The drawing: the height of a row, and the widths of its three columns."""

_STYLE = """
.millstream svg{width:100%;height:auto;font:12px system-ui,sans-serif}
.millstream svg text{fill:var(--ms-text)}
.millstream svg .ms-faint{fill:var(--ms-soft)}
.millstream svg .ms-rate{fill:var(--ms-line)}
.millstream svg .ms-use{fill:var(--ms-bar)}
.millstream ul{margin:.5em 0 0;padding-left:1.3em}
"""


def _drawing(tuning: Tuning) -> str:
    """Returns a bar for each measurement, as a drawing."""
    best = max(measurement.records_per_second for measurement in tuning.measurements)
    rows = []
    for number, measurement in enumerate(tuning.measurements):
        y, settings = number * ROW, measurement.settings
        length = BAR_WIDTH * measurement.records_per_second / best
        look = "ms-use" if settings == tuning.chosen else "ms-rate"
        number_text = f"{measurement.records_per_second:,.0f} records/s, {bytes_text(measurement.memory_bytes)}"
        title = f"{measurement.batches_per_second:,.1f} batches/s, the best of {count_text(measurement.runs, 'run')}"
        marks = _marks(tuning, settings)
        mark = f"  ← {', '.join(marks)}" if marks else ""
        faint = "" if settings == tuning.chosen else ' class="ms-faint"'
        rows.append(
            f'<g><title>{escaped(title)}</title><text x="0" y="{y + 15}"{faint}>{escaped(settings.label)}</text>'
            f'<rect class="{look}" x="{TEXT_WIDTH}" y="{y + 4}" width="{length:.1f}" height="{ROW - 8}" rx="3"></rect>'
            f'<text x="{TEXT_WIDTH + BAR_WIDTH + 10}" y="{y + 15}"{faint}>'
            f"{escaped(number_text + mark)}</text></g>"
        )
    width = TEXT_WIDTH + BAR_WIDTH + NUMBER_WIDTH
    return f'<svg viewBox="0 0 {width} {ROW * len(rows) + 4}" role="img">{"".join(rows)}</svg>'
