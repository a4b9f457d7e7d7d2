"""The package as installed: cheap to import, its public names, what it ships."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

import hf_diloco
from hf_diloco import report
from tests.processes import ROOT, run

HEAVY = {"accelerate", "datasets", "deepspeed", "matplotlib", "numpy", "pandas", "torch", "transformers"}
CHEAP_MODULES = [
    "hf_diloco",
    "hf_diloco.cli.status",
    "hf_diloco.config.diloco",
    "hf_diloco.store.server",
]
"""Besides those of which other tests say more: the commands' help, run files, the report."""


def imported_by(*arguments: str | Path) -> tuple[set[str], str]:
    """The top-level packages that a fresh Python imports, and its output."""
    output = run([sys.executable, "-X", "importtime", *arguments]).output
    modules = re.findall(r"^import time:.*\| +(\S+)$", output, re.MULTILINE)
    return {module.partition(".")[0] for module in modules}, output


@pytest.mark.parametrize("module", CHEAP_MODULES)
def test_import_is_cheap(module: str) -> None:
    imported, _ = imported_by("-c", f"import {module}")
    assert "hf_diloco" in imported
    assert not imported & HEAVY


def test_who_codes_nothing_does_not_import_numba() -> None:
    imported, _ = imported_by("-c", "import hf_diloco.trainer.callback, hf_diloco.trainer.gossip_callback")
    assert "torch" in imported
    assert "numba" not in imported


def test_public_names_are_sorted_and_resolve() -> None:
    assert list(hf_diloco.__all__) == sorted(set(hf_diloco.__all__))
    assert {"DiLoCoCallback", "DiLoCoConfig", "DiLoCoError", "OuterLoop"} <= set(hf_diloco.__all__)
    assert {"Codec", "OuterMethod", "Topology", "make_topology"} <= set(hf_diloco.__all__), "for what users write"
    for package in (hf_diloco, report):
        assert set(package.__all__) <= set(dir(package))
    missing = [name for name in hf_diloco.__all__ if not hasattr(hf_diloco, name)]
    assert not missing


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DiLoCoCalback"):
        hf_diloco.DiLoCoCalback  # noqa: B018


def test_every_error_is_public() -> None:
    from hf_diloco import errors

    assert set(errors.__all__) <= set(hf_diloco.__all__)


def test_version_is_that_of_the_distribution() -> None:
    assert hf_diloco.__version__ == version("hf-diloco")


def test_the_repository_has_one_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    urls = project["project"]["urls"]
    home = urls["Repository"]
    assert all(url.startswith(f"{home}/") for name, url in urls.items() if name != "Repository")
    (links,) = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    assert links["replacement"].startswith(f"]({home}/blob/")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["version"]) == (home, hf_diloco.__version__)
    for page in ("README.md", "docs/install.md", "docs/first-run.md"):
        assert f"\ngit clone {home}\ncd {hf_diloco.__name__.replace('_', '-')}\n" in (ROOT / page).read_text()
    named = [path for path in (ROOT / "hf_diloco").rglob("*.py") if home in path.read_text()]
    assert not named, "read it from the package's metadata"


def test_ships_types_and_templates() -> None:
    package = files(hf_diloco)
    assert package.joinpath("py.typed").is_file()
    assert any(entry.name.endswith((".html", ".j2")) for entry in package.joinpath("templates").iterdir())


def test_no_test_imports_from_another() -> None:
    """What several share lies in modules of its own."""
    found = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(from|import) tests\.(\w+\.)*test_", path.read_text(), re.MULTILINE)
    ]
    assert not found
