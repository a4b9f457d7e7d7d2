"""The final model on the Hub: one commit by one rank of island 0, after a whole run, by the real client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.chaos import run_file
from hf_diloco.apps.common.base import PushBlock
from hf_diloco.apps.common.hub import check_login, publish
from hf_diloco.errors import ConfigError
from tests.hub_server import HubServer
from tests.processes import run
from tests.store_servers import serving_app

# The processes of these tests have HF_HUB_OFFLINE=1, except where `env` takes it away.
ROUNDS, SYNC_EVERY = 2, 2
PUSH = {"repo": "somebody/model", "revision": "drafts"}
LAUNCH = [sys.executable, "-m", "hf_diloco.cli", "launch"]


@pytest.fixture
def hub() -> HubServer:
    return HubServer(branches=("main", "drafts"))


@pytest.fixture
def env(hub: HubServer) -> Iterator[dict[str, str | None]]:
    """Of processes that find this hub, and a token."""
    with serving_app(hub.app()) as address:
        yield {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": None, "HF_TOKEN": "hf_test", "OMP_NUM_THREADS": "1"}


def write(folder: Path, num_ranks: int) -> Path:
    """The run file of two islands."""
    settings = run_file(folder, ROUNDS, SYNC_EVERY, num_islands=2, max_islands=None, min_islands=None)
    settings["launch"]["num_processes"] = num_ranks
    settings |= {"fsdp": {} if num_ranks > 1 else None, "push_to_hub": PUSH}
    (file := folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.slow
@pytest.mark.distributed
def test_one_rank_of_one_island_pushes_once(tmp_path: Path, hub: HubServer, env: dict[str, str | None]) -> None:
    output = run([*LAUNCH, write(tmp_path, num_ranks=2)], env=env, timeout=240).output
    assert hub.is_private == {"somebody/model": True}
    ((branch, files),) = hub.commits
    assert branch == "drafts"
    model = tmp_path / "chaos" / "model"
    assert files == {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()
    assert b"- hf-diloco\n" in files["README.md"]  # a tag
    assert output.count("published: ") == 1


def test_it_goes_to_the_branch_that_is_named(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("# A model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with serving_app(hub.app()) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        for revision in (None, "drafts", "unknown"):
            publish(tmp_path, PushBlock(repo="somebody/model", private=False, revision=revision))
    files = {"README.md": b"# A model"}
    assert hub.commits == [("main", files), ("drafts", files)]
    assert hub.is_private == {"somebody/model": False}
    written = capsys.readouterr()
    assert written.out.count("published: ") == 2
    assert "Invalid rev id: unknown" in written.err
    assert written.err.endswith(f"push it with `hf upload somebody/model {tmp_path} --revision unknown`\n")


def test_a_hub_that_takes_nothing_is_only_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("# A model")
    publish(tmp_path, PushBlock(repo="somebody/model"))
    written = capsys.readouterr()
    assert not written.out
    assert written.err.startswith("warning: the model is not on the Hub (Cannot reach ")
    assert written.err.endswith(f"push it with `hf upload somebody/model {tmp_path} --private`\n")


def test_a_token_is_tried_before_training(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="push_to_hub: this machine has no token of the Hub: run `hf auth login`"):
        check_login()
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    check_login()  # the Hub is not asked
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving_app(hub.app()) as address:
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        with pytest.raises(ConfigError, match="push_to_hub: the Hub does not take this machine's token"):
            check_login()
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        check_login()
