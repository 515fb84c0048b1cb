"""What a page of HTML would fetch or link, its text, and whether its tags are closed."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "img", "br", "hr")


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.tables = 0
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = ("src", "href", "srcset", "data")
        self.sources += [value for name, value in attrs if name in named and value]
        self.tables += tag == "table"
        self.open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
