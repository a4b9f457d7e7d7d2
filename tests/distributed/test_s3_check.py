"""`hf-diloco store check` on a store that talks the real S3 protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_diloco.cli.main import app
from hf_diloco.store.objects import ObjectStore
from tests.islands import run_islands
from tests.meetings import Meeting
from tests.s3 import S3Server

pytestmark = pytest.mark.distributed


def test_junk_is_found_and_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        meeting = Meeting(tmp_path, 2, snapshot_every=2, keep_rounds=1)
        meeting.url = f"{server.url}/check"
        islands = run_islands(2, lambda island: meeting.island(island).train(4))
        run_islands(2, lambda island: islands[island].leave())
        store = ObjectStore(meeting.url)
        store.put("incarnations/0/999999.json", b"junk")
        store.put("elsewhere/notes.txt", b"mine")

        def check(*options: str, code: int) -> str:
            result = CliRunner().invoke(app, ["store", "check", meeting.url, *options])
            assert result.exit_code == code, result.output
            return result.output

        found = check("--deep", code=1)
        assert "damaged incarnations/0/999999.json" in found
        assert "1 damaged, 1 foreign" in found
        assert "moved to damaged/incarnations/0/999999.json" in check("--repair", code=1)
        store.delete(["elsewhere/notes.txt"])
        assert "nothing wrong" in check("--deep", code=0)
        assert store.get("damaged/incarnations/0/999999.json", 10) == b"junk"
        assert store.get("incarnations/0/999999.json", 10) is None
