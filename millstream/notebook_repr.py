"""Things that a notebook shows as a picture, where they stand at the end of a cell."""

from collections.abc import Sequence
from typing import ClassVar


class Pictured:
    """Has a picture: its kind, its name with its parameters, and its parts in proportion if it has any."""

    _picture_kind: ClassVar[str]

    def _picture_parts(self) -> Sequence[tuple[str, float]]:
        """Returns what it consists of, with sizes or weights: by default, of nothing that is worth a picture."""
        return ()

    def _repr_html_(self) -> str:
        from millstream import html_fragments  # noqa: PLC0415  (for notebooks)
        from millstream.descriptions import described  # noqa: PLC0415

        title, parts = described(self, with_defaults=False), self._picture_parts()
        shown = [html_fragments.proportions(parts)] if parts else []
        return html_fragments.figure(html_fragments.card(self._picture_kind, title, *shown))
