"""One short try of the Hub, before its libraries are imported."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from hf_diloco.apps.common import hub
from hf_diloco.apps.lm.runfile import load_run_file
from tests.clocks import LONG
from tests.processes import find_free_port, run


class Refusing(BaseHTTPRequestHandler):
    """Has nothing to give, but is there."""

    def do_HEAD(self) -> None:
        self.send_error(404)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[str]:
    served = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


def test_any_answer_will_do(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", LONG)
    monkeypatch.setenv("HF_ENDPOINT", server)
    hub.use_cache_without_hub(is_needed=True)
    assert "HF_HUB_OFFLINE" not in os.environ


def test_without_an_answer_the_cache_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "SECONDS", LONG)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{find_free_port()}")
    hub.use_cache_without_hub(is_needed=True)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be reached" in line
    assert "Connection refused" in line
    hub.use_cache_without_hub(is_needed=True)
    assert not capsys.readouterr().err, "said once"


def test_who_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        hub.use_cache_without_hub(is_needed=True)
        assert time.monotonic() - begin < LONG
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_who_needs_nothing_of_the_hub_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_try", lambda url: pytest.fail("asked"))
    hub.use_cache_without_hub(is_needed=False)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ([], False),
        (["data.source=c4"], True),
        (["data={source: hub, path: org/name}"], True),
        (["model={path: org/name}"], True),
        (["model={path: ./here}"], False),
        (["tokenizer={path: org/name}"], True),
    ],
)
def test_what_is_of_the_hub(settings: list[str], needs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("run.yaml").write_text("training: {max_steps: 3}\n")
    assert load_run_file("run.yaml", settings).needs_hub is needs


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hf_diloco.apps.lm", "hf_diloco.cli validate", "hf_diloco.cli estimate"])
def test_a_model_that_cannot_be_had_is_one_error_without_retries(tmp_path: Path, module: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"training: {{max_steps: 3}}\noutput: {tmp_path}/runs\nmodel: {{path: org/name}}\n")
    env = {"HF_HUB_OFFLINE": None, "HF_DATASETS_OFFLINE": None, "HF_ENDPOINT": f"http://127.0.0.1:{find_free_port()}"}
    output = run([sys.executable, "-m", *module.split(), path], env=env, expect=2 if "cli" in module else 1).output
    assert output.count("cannot be reached") == 1
    assert "Retrying" not in output
    assert re.search(r"cannot load 'org/name': .* give a folder of this machine", output), "one line"
