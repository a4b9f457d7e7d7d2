"""The documentation site: it builds without a warning, says everything that the code has, and needs nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from mkdocs.config import load_config

from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.cli.main import app
from hf_diloco.codecs import CODECS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.methods.gossip import METHODS as GOSSIP_METHODS
from hf_diloco.methods.outer import METHODS
from hf_diloco.methods.topology import GRAPHS
from scripts.site import reference
from scripts.site.run_file_tables import blocks
from tests.docs.site_pages import elements_on_a_code_host, parse
from tests.processes import ROOT, run

DOCS = sorted((ROOT / "docs").glob("*.md"))
LIGHT = {"NO_MKDOCS_2_WARNING": 1}


def pages_in_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from pages_in_nav(below)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], env=LIGHT, cwd=ROOT)
    return folder


@pytest.mark.parametrize("page", [page.name for page in DOCS])
def test_every_page_has_its_place(page: str) -> None:
    nav = list(pages_in_nav(load_config(str(ROOT / "mkdocs.yml")).nav))
    assert nav.count(page) == 1, f"docs/{page}: add it to mkdocs.yml's nav, once"


def test_a_page_that_is_not_in_nav_fails_the_build(tmp_path: Path) -> None:
    lonely = tmp_path / "docs"
    lonely.mkdir()
    (lonely / "index.md").write_text("# Home\n")
    (lonely / "lonely.md").write_text("# Lonely\n\n[nowhere](missing.md)\n")
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(text.replace("hooks:", "#") + "\nnav: [index.md]\n")
    failed = run([sys.executable, "-m", "mkdocs", "build"], env=LIGHT, cwd=tmp_path, expect=1)
    assert "lonely.md" in failed.output
    assert "missing.md" in failed.output


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_shows_what_a_code_host_shows(page: Path, site: Path) -> None:
    shown = parse(site / f"{page.stem}.html").elements
    assert shown == elements_on_a_code_host(page)


def test_every_link_leads_somewhere(site: Path) -> None:
    parsed = {path: parse(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(parsed) > len(DOCS)
    dead = []
    for path, page in parsed.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            found = (path.parent / target).resolve() if target else path
            if found not in parsed or (anchor and anchor not in parsed[found].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = {name for path in site.rglob("*.html") for name in parse(path).loaded}
    assert loaded
    assert not [name for name in loaded if "//" in name]


# Pages that are made from the code


def test_every_command_has_its_entry(site: Path) -> None:
    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield name, command
        for below, one in getattr(command, "commands", {}).items():
            yield from walk(one, f"{name} {below}")

    text = (site / "reference" / "commands.html").read_text()
    anchors = parse(site / "reference" / "commands.html").anchors
    found = dict(walk(typer.main.get_command(app), "hf-diloco"))
    assert {"hf-diloco launch", "hf-diloco store check"} <= found.keys()
    assert not [name for name in found if name != "hf-diloco" and name.replace(" ", "-") not in anchors]
    options = {option for command in found.values() for one in command.params for option in getattr(one, "opts", ())}
    assert not [option for option in options if option.startswith("--") and option not in text]
    assert "<code>hf-diloco report runs/quickstart</code>" in text
    assert not re.findall(r"\[/?(?:bold|cyan)\]", text)  # a terminal's markup


@pytest.mark.parametrize(("kind", "page"), [(RunFile, "settings"), (VisionRun, "settings-vision")])
def test_every_setting_has_its_entry(kind: type[RunFile], page: str, site: Path) -> None:
    text = (site / "reference" / f"{page}.html").read_text()
    names = [key if block == "run" else f"{block}.{key}" for block, keys in blocks(kind).items() for key in keys]
    if kind is RunFile:
        assert {f"diloco.{key}" for key in DiLoCoConfig.model_fields} <= set(names)
    assert not [name for name in names if f"<code>{name}</code>" not in text]


def test_everything_in_a_registry_has_its_entry(site: Path) -> None:
    anchors = parse(site / "reference" / "methods.html").anchors
    wanted: dict[str, Iterable[str]] = {
        "method": METHODS,
        "payload": CODECS,
        "gossip-method": GOSSIP_METHODS,
        "graph": GRAPHS,
    }
    assert not [
        f"{kind} {name}" for kind, names in wanted.items() for name in names if f"{kind}-{name}" not in anchors
    ]


def test_descriptions_end_before_their_arguments() -> None:
    text = reference.methods()
    assert "Args:" not in text
    assert "θ" in text or "theta" in text
