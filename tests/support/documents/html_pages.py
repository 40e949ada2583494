"""Pages taken apart: that they are whole, what they say, and that they ask for nothing outside."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A page taken apart: its text, and that each tag is closed and nothing outside is asked for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag; what is loaded from elsewhere is none of ours."""
        assert tag not in {"link", "iframe", "object"}
        for name, value in attrs:
            assert name not in {"href", "src"} or (value or "").startswith(("data:", "#", "https://ui.perfetto.dev"))
        self.tags.append(tag)
        if tag not in {"meta", "img", "br"}:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Each tag is closed in its turn."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collects the text, styles and scripts left out."""
        if not self._open or self._open[-1] not in {"style", "script"}:
            self.text += data
