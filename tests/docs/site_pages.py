"""The built documentation site taken apart: links, anchors, what it loads, and the elements of an article."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from markdown_it import MarkdownIt

_TABLES = {"table", "tr", "th", "td"}
_COUNTED = _TABLES | {"li", "ul", "ol", "pre", "h1", "h2", "h3", "h4", "p", "strong", "em", "a", "code"}
_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src"}
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # kinds of <link> that load nothing


@dataclass
class Parsed(HTMLParser):
    """What a page of HTML holds.

    Attributes:
        links: where its links lead.
        anchors: what links into it may name.
        loaded: what a browser loads to show it.
        elements: how often each element is in the article; without the marks beside headings.
    """

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    elements: Counter[str] = field(default_factory=Counter)
    _in_article: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values["id"]} if "id" in values else set()
        self._in_article |= tag == "article"
        if tag in _LOADED and _LOADED[tag] in values and values.get("rel") not in _NOT_LOADED:
            self.loaded.append(values[_LOADED[tag]])
        if tag == "a":
            self.links.append(values.get("href", ""))
        if self._in_article and tag in _COUNTED and values.get("class") != "headerlink":
            self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._in_article &= tag != "article"


def parse(path: Path) -> Parsed:
    """One page of the site."""
    return _parse(path.read_text())


def elements_on_a_code_host(page: Path) -> Counter[str]:
    """The elements of a Markdown page by the rules of CommonMark, with tables."""
    return _parse(f"<article>{MarkdownIt('commonmark').enable('table').render(page.read_text())}</article>").elements


def _parse(text: str) -> Parsed:
    parsed = Parsed()
    parsed.feed(text)
    return parsed
