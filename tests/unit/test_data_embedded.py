"""The embedded text: real prose, deterministic, cleaned."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_diloco.apps.data import embedded as opened
from hf_diloco.apps.data.embedded import cached_documents, clean, embedded_documents
from hf_diloco.errors import ConfigError
from tests.processes import ROOT


def digest(documents: list[str]) -> str:
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return embedded_documents()


def test_is_english_in_quantity(documents: list[str]) -> None:
    text = " ".join(documents)
    assert len(text) > 1_000_000
    words = text.split()
    assert 0.03 < words.count("the") / len(words) < 0.1
    assert len(set(documents)) == len(documents)


@pytest.mark.real_start  # hash seeds differ
def test_is_the_same_in_a_fresh_process_with_an_empty_cache(documents: list[str], tmp_path: Path) -> None:
    names = (
        "from hf_diloco.apps.data.embedded import embedded_documents; from tests.unit.test_data_embedded import digest"
    )
    command = [sys.executable, "-c", f"{names}; print(digest(embedded_documents()))"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert ended.stdout.strip() == digest(documents)
    (kept,) = (tmp_path / "hf-diloco").iterdir()
    assert json.loads(kept.read_text()) == documents


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small library: one module, and one that is left out."""
    folder = tmp_path / "library"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "left_out.py").write_text(f'"""{"Not prose. " * 20}"""')
    (folder / "module.py").write_text(f'"""{"First text. " * 20}"""')
    return folder


def test_documents_are_parsed_once(sources: Path, tmp_path: Path) -> None:
    found = cached_documents(sources, tmp_path / "cache")
    assert any("First text." in text for text in found)
    assert not any("Not prose." in text for text in found)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(json.dumps(["kept"]))
    assert cached_documents(sources, tmp_path / "cache") == ("kept",)


def test_a_changed_source_is_parsed_again(sources: Path, tmp_path: Path) -> None:
    cached_documents(sources, tmp_path / "cache")
    (sources / "module.py").write_text(f'"""{"Second text. " * 20}"""')
    assert any("Second text." in text for text in cached_documents(sources, tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["", "[", "[1, 2]", "{}", "[]"])
def test_a_damaged_cache_is_parsed_again(sources: Path, tmp_path: Path, damage: str) -> None:
    found = cached_documents(sources, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(damage)
    assert cached_documents(sources, tmp_path / "cache") == found
    assert tuple(json.loads(kept.read_text())) == found


def test_a_cache_that_cannot_be_written_is_done_without(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert cached_documents(sources, tmp_path / "cache") == cached_documents(sources, None)


def test_clean() -> None:
    text = """Title
    =====

    See :func:`~os.path.join` and ``os.sep``.

    >>> 1 + 1
    2



    The end.   """
    assert clean(text) == "Title\n\nSee os.path.join and os.sep.\n\n2\n\nThe end."


def test_python_without_sources_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(opened, "_standard_library", lambda: tmp_path_factory.mktemp("stdlib"))
    with pytest.raises(ConfigError, match="comes without the sources"):
        embedded_documents()
