"""docs/features.md names tests that exist."""

from __future__ import annotations

import re

from tests.processes import ROOT


def test_every_feature_has_a_test_that_exists() -> None:
    rows = (ROOT / "docs" / "features.md").read_text().splitlines()[6:]
    named = [re.findall(r"`(tests/\S+\.py)::(test_\w+)`", row) for row in rows]
    assert len(named) == 25
    for row, tests in zip(rows, named, strict=True):
        assert tests, f"no test in: {row}"
        for file, name in tests:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
