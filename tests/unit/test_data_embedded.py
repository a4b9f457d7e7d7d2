"""The embedded text: real prose, deterministic, cleaned."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from hf_diloco.data import embedded
from hf_diloco.data.embedded import clean, embedded_documents
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


def test_is_the_same_in_a_fresh_process(documents: list[str]) -> None:
    names = "from hf_diloco.data.embedded import embedded_documents; from tests.unit.test_data_embedded import digest"
    command = [sys.executable, "-c", f"{names}; print(digest(embedded_documents()))"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == digest(
        documents
    )


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
    monkeypatch.setattr(embedded, "_standard_library", lambda: tmp_path_factory.mktemp("stdlib"))
    with pytest.raises(ConfigError, match="comes without the sources"):
        embedded_documents()
