"""Secrets of settings, URLs and the environment appear in nothing that is written; no terminal obeys a report."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_diloco import errors
from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.cli.island import Island
from hf_diloco.cli.main import app
from hf_diloco.cli.plan import IslandPlan
from hf_diloco.errors import ConfigError, IslandLostError
from hf_diloco.report import load_run, print_report, summarise, write_html
from hf_diloco.utils.redact import redact, redact_text

ROOT = Path(__file__).parents[2]
TOKEN = "hf_QqRrSsTtUuVvWwXxYyZz0123"
SECRETS = {
    "training.hub_token=s3cr3t": "training.hub_token=***",
    "https://me:s3cr3t@hub.example/x": "https://***@hub.example/x",
    "https://h/c?sv=1&sig=s3cr3t%3D&a=b": "https://h/c?sv=1&sig=***&a=b",
    "https://h/c?X-Amz-Credential=s3cr3t&X-Amz-Signature=s3cr3t": "https://h/c?X-Amz-Credential=***&X-Amz-Signature=***",
    "AWS_SECRET_ACCESS_KEY='s3cr3t here' HF_DILOCO_KEY=s3cr3t x": "AWS_SECRET_ACCESS_KEY=*** HF_DILOCO_KEY=*** x",
    "{'hub_token': 's3cr3t', 'x': 1}": "{'hub_token': '***', 'x': 1}",
    "HF_DILOCO_IDENTITY=-----BEGIN PRIVATE KEY-----\ns3cr3t\n-----END PRIVATE KEY----- x": "HF_DILOCO_IDENTITY=*** x",
    "{'HF_DILOCO_IDENTITY': 's3cr3t'}": "{'HF_DILOCO_IDENTITY': '***'}",
    "-----BEGIN EC PRIVATE KEY-----\ns3cr3t": "***",
    f"401 for token {TOKEN}.": "401 for token hf_***.",
}
HARMLESS = [
    "pad_token=<pad> max_tokens=5 num_tokens: 8 key_file=/x/y",
    "s3://bucket/run tcp://127.0.0.1:29400 tcp://[::1]:29400 file:///a@b/c",
    "the run's key (HF_DILOCO_KEY or key_file), hf_diloco_something, tokenizer=a/b",
    "HF_DILOCO_IDENTITY, identity_file=/x/y, -----BEGIN PUBLIC KEY-----",
]


@pytest.mark.parametrize(("text", "shown"), SECRETS.items())
def test_secrets_in_text_are_hidden(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown
    assert str(ConfigError(text)) == shown
    assert str(IslandLostError(text, [1])) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_other_text_stays(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize("part", ["a.", "a-", "a:", "'a.", "key=", 'token="', "a://", "-----BEGIN PRIVATE KEY-----"])
def test_long_text_of_others_takes_no_time(part: str) -> None:
    """Errors of the package quote what other islands say, in records of up to 4 MiB."""
    began = time.process_time()
    redact_text(part * (100_000 // len(part)))
    assert time.process_time() - began < 5, "the time grows as the square of the length"


def test_the_environment_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    private = "-----BEGIN PRIVATE KEY-----\ns3cr3t\n-----END PRIVATE KEY-----"
    monkeypatch.setenv("HF_DILOCO_IDENTITY", private)
    monkeypatch.setenv("HF_DILOCO_KEY", "s3cr3t")
    shown = CliRunner().invoke(app, ["env"]).output
    assert "HF_DILOCO_IDENTITY" in shown
    assert "s3cr3t" not in shown


def test_secrets_in_settings_are_hidden_by_their_names() -> None:
    settings = {
        "training": {"hub_token": "s3cr3t", "push_to_hub_token": "s3cr3t", "hub_private_repo": None, "max_steps": 5},
        "environment": {"WANDB_API_KEY": "s3cr3t", "HF_DILOCO_KEY": "s3cr3t", "PATH": "/bin"},
        "tokenizer": {"pad_token": "<pad>"},
        "urls": ["https://me:s3cr3t@h/x"],
        "token": "",
    }
    shown = redact(settings)
    assert "s3cr3t" not in str(shown)
    assert shown["training"] == {
        "hub_token": "***",
        "push_to_hub_token": "***",
        "hub_private_repo": None,
        "max_steps": 5,
    }
    assert (shown["tokenizer"], shown["token"]) == ({"pad_token": "<pad>"}, "")


def test_every_error_of_the_package_hides_them() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DiLoCoError)]
    assert len(kinds) > 10
    for kind in kinds:
        assert "s3cr3t" not in str(kind("rendezvous https://me:s3cr3t@h/x"))


def test_a_wrong_setting_with_a_secret_name_does_not_show_its_value(tmp_path: Path) -> None:
    for override in ("diloco.hub_token=s3cr3t", "diloco.rendezvous=s3://me:s3cr3t@bucket/run"):
        with pytest.raises(ConfigError) as caught:
            read_run_file(RunFile, ROOT / "configs" / "quickstart.yaml", [override])
        assert "***" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)


def test_run_json_report_progress_and_log_hide_them(tmp_path: Path) -> None:
    from hf_diloco.apps.common.process import write_run_json
    from hf_diloco.trainer.progress import Progress

    overrides = [f"output={tmp_path}", "name=told", "model.path=null"]
    config = "model.config={model_type: llama, hub_token: s3cr3t, url: http://u:s3cr3t@h}"
    run = read_run_file(RunFile, ROOT / "configs" / "quickstart.yaml", [*overrides, config])
    folder = run.island_folder()
    folder.mkdir(parents=True)
    write_run_json(run)
    plan = IslandPlan(0, folder, ("true", "training.hub_token=s3cr3t"), {"HF_TOKEN": "s3cr3t"}, {})
    Island(plan).kill(after=60)
    Progress(folder, 5).update(message="cannot reach https://u:s3cr3t@h")
    (folder / "metrics.jsonl").write_text("")
    page = write_html(load_run(run.folder), tmp_path / "report.html")
    for path in (run.folder / "run.json", folder / "progress.json", folder / "log.txt", page):
        assert "s3cr3t" not in path.read_text(), path
        assert "***" in path.read_text(), path


def test_a_report_of_an_older_run_hides_them(tmp_path: Path) -> None:
    (tmp_path / "island-0").mkdir()
    (tmp_path / "island-0" / "metrics.jsonl").write_text("")
    (tmp_path / "run.json").write_text(json.dumps({"training": {"hub_token": "s3cr3t"}}))
    assert "s3cr3t" not in write_html(load_run(tmp_path), tmp_path / "report.html").read_text()


def test_no_terminal_obeys_a_sample_a_name_or_a_warning(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e<script>alert(1)</script>"
    (tmp_path / "island-0").mkdir()
    (tmp_path / "island-0" / "metrics.jsonl").write_text("")
    report = summarise(load_run(tmp_path))
    report = report.model_copy(update={"name": evil, "sample": evil, "warnings": [evil]})
    out = io.StringIO()
    print_report(report, Console(file=out, width=200))
    assert not [char for char in out.getvalue() if not char.isprintable() and char != "\n"]
    assert out.getvalue().count("owned") == 3
    page = write_html(load_run(tmp_path), tmp_path / "report.html", report).read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
