"""Renderings of objects at the end of a notebook cell."""

from collections.abc import Sequence
from typing import ClassVar


class Pictured:
    """An object that a notebook renders as a box: its kind, its description, and bars of its parts."""

    _picture_kind: ClassVar[str]

    def _picture_bars(self) -> Sequence[tuple[str, Sequence[tuple[str, float]]]]:
        """Returns the bars, each with a caption and the names and sizes of its parts; none by default."""
        return ()

    def _repr_html_(self) -> str:
        from millstream import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)
        from millstream.descriptions import described  # noqa: PLC0415

        bars = [html_fragments.proportions(parts, caption) for caption, parts in self._picture_bars()]
        title = described(self, with_defaults=False)
        return html_fragments.figure(html_fragments.card(self._picture_kind, title, *bars))
