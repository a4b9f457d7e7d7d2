"""MkDocs hooks: pages that are made from the code, and pages for files of the project that other pages link to.

The pages in docs/ are written to be read on a code host, where `../configs/bucket.yaml` is a link to a file. The site
has a page of its own for each such file and folder, so it needs no code host.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from scripts.site import reference

ROOT = Path(__file__).parents[2]
PAGES_OF_THE_ROOT = {name: name.lower() for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
"""Markdown files outside docs/ that are pages of the site as well, and where."""

_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
_COMMENT = re.compile(r"^<!-- .* -->$\n?", re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds all pages that are not in docs/."""
    texts = {uri: make() for uri, make in reference.pages().items()}
    texts |= {uri: (ROOT / name).read_text() for name, uri in PAGES_OF_THE_ROOT.items()}
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    wanted = [found for page in files.documentation_pages() for found in _linked(page)]
    while wanted:
        path = wanted.pop()
        if files.get_file_from_path(_site_path(path)) is None:
            outside_nav = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _site_path(path), content=_page_of(path), inclusion=outside_nav))
            wanted += _entries(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the project into links to their pages, and takes out comments, which are for tests."""
    source = page.file.src_uri
    if source.startswith("project/"):
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        path = _in_project(source, link["target"])
        if path is None:
            return link[0]
        return posixpath.relpath(_site_path(path), posixpath.dirname(source) or ".") + (link["anchor"] or "")

    return _LINK.sub(rewritten, _COMMENT.sub("\n", markdown))


def _linked(page: File) -> list[Path]:
    """Files and folders of the project, outside docs/, that a page links to."""
    found = (_in_project(page.src_uri, link["target"]) for link in _LINK.finditer(page.content_string))
    return [path for path in found if path and not path.is_relative_to(ROOT / "docs")]


def _in_project(source: str, target: str) -> Path | None:
    """Where a link leads, unless it is one between pages that the site leaves as it is."""
    names = {path: name for name, path in PAGES_OF_THE_ROOT.items()}
    folder = ROOT if source in names else (ROOT / "docs" / source).parent
    path = Path(os.path.normpath(folder / target))
    is_page = source not in names and path.is_relative_to(ROOT / "docs")
    return path if not is_page and path.is_relative_to(ROOT) and path.exists() else None


def _site_path(path: Path) -> str:
    """Where the page of a file or folder is in the site's source."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return PAGES_OF_THE_ROOT.get(name) or f"project/{name}{'/index' if path.is_dir() else ''}.md"


def _entries(path: Path) -> list[Path]:
    """What a folder shows."""
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith(("_", ".")))


def _page_of(path: Path) -> str:
    title = f"# `{path.relative_to(ROOT).as_posix()}`\n\n"
    if path.is_dir():
        return title + "".join(
            f"- [{entry.name}]({entry.name}{'/index' if entry.is_dir() else ''}.md)\n" for entry in _entries(path)
        )
    return f"{title}~~~~~~{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}~~~~~~\n"
