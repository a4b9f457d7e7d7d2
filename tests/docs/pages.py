"""The project's Markdown pages taken apart: fenced blocks, headings, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (?P<reason>.+) -->$")
_HEADING = re.compile(r"^#+ +(?P<text>.+)$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the file.
        line: of the opening fence, from 1.
        language: what stands behind the fence.
        text: the lines between.
        not_run: why it is not run by a test; empty if it is.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    @property
    def name(self) -> str:
        """Where it stands: `README.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, of one language or of all."""
    return [block for block in _blocks(page) if language in (None, block.language)]


def all_blocks(language: str) -> list[Block]:
    """The fenced blocks of one language on all pages."""
    return [block for page in PAGES for block in blocks(page, language)]


def links(page: Path) -> list[str]:
    """Where a page's links lead."""
    return [match["target"] for match in _LINK.finditer(_prose(page))]


def anchors(page: Path) -> set[str]:
    """What links into a page may name behind the `#`, as GitHub makes it from the headings."""
    headings = (match["text"] for line in _prose(page).splitlines() if (match := _HEADING.match(line)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _prose(page: Path) -> str:
    """The page without its fenced blocks."""
    inside, kept = False, []
    for line in page.read_text().splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def _blocks(page: Path) -> Iterator[Block]:
    opened: tuple[int, str, str, str] | None = None
    body: list[str] = []
    before = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            reason = _NOT_RUN.match(before)
            opened = (number, fence["language"], fence["indent"], reason["reason"] if reason else "")
            body = []
        elif fence and opened is not None:
            start, language, indent, not_run = opened
            text = "".join(line.removeprefix(indent) + "\n" for line in body)
            yield Block(page, start, language, text, not_run)
            opened = None
        elif opened is not None:
            body.append(line)
        before = line
    assert opened is None, f"{page}: the block of line {opened and opened[0]} has no end"
