"""The `hf-diloco` program itself: help, errors, exit codes, and how quickly it is there."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_diloco import __version__
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.cli.__main__ import main as start
from hf_diloco.cli.main import app, main
from hf_diloco.errors import ConfigError
from tests.processes import Completed, run

PROGRAM = [sys.executable, "-m", "hf_diloco.cli"]


def hf_diloco(*arguments: str | Path, expect: int = 0) -> Completed:
    return run([*PROGRAM, *arguments], timeout=120, expect=expect, env={"NO_COLOR": "1", "COLUMNS": "100"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["launch", "--help"],
        ["report", "--help"],
        ["status", "--help"],
        ["estimate", "--help"],
        ["doctor", "--help"],
    ],
)
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from hf_diloco.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'datasets', 'accelerate', 'numpy', 'matplotlib'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    run([sys.executable, "-c", code, *arguments], timeout=120)


def test_help_shows_commands_and_examples() -> None:
    for command in ("launch", "report", "status", "config-schema"):
        assert command in hf_diloco("--help").output
    assert "hf-diloco launch quickstart" in hf_diloco("launch", "--help").output
    assert "--html" in hf_diloco("report", "--help").output


@pytest.mark.parametrize("arguments", [["launch", "--help"], ["topology", "ring"], ["launch", "--", "echo", "said"]])
def test_a_terminal_without_some_characters_shows_all_others(tmp_path: Path, arguments: list[str]) -> None:
    env = {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    output = run([*PROGRAM, *arguments], timeout=60, cwd=tmp_path, env=env).output
    assert {"--help": "gs://?", "ring": "DecentLaM", "said": "island 0 ? said"}[arguments[-1]] in output


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands: list[list[str]] = [[]]
    for names in commands:  # grows as it goes
        found: Any = typer.main.get_command(app)
        for name in names:
            found = found.commands[name]
        commands += [[*names, name] for name in getattr(found, "commands", {})]
        with pytest.raises(SystemExit, match="0"):
            app([*names, "--help"], prog_name="hf-diloco")
        told = " ".join(capsys.readouterr().out.split())
        assert f"Usage: {' '.join(['hf-diloco', *names])} [OPTIONS]" in told
        assert found.help.split(". ")[0].split("\n")[0] in told
    assert ["store", "check"] in commands


def test_version() -> None:
    assert hf_diloco("--version").output.strip() == f"hf-diloco {__version__}"


def test_config_schema_is_that_of_run_files() -> None:
    schema = json.loads(hf_diloco("config-schema").output)
    assert {"model", "training", "diloco", "deepspeed"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_the_schema_takes_what_run_files_may_say() -> None:
    for kind, block in ((RunFile, "DiLoCoBlock"), (VisionRun, "GossipBlock")):
        schema = kind.model_json_schema()
        assert schema["required"] == ["training"]  # the name is that of the file, where it is not given
        one, several = schema["$defs"][block]["properties"]["identities"]["additionalProperties"]["anyOf"]
        assert (one["type"], several["type"]) == ("string", "array")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "missing.yaml"], "missing.yaml"),
        (["launch", "{run}", "diloco.sync_evry=3"], "sync_every"),
        (["report", "no/such/run"], "no/such/run"),
        (["report", "{folder}", "page.html"], "--html"),
        (["checkpoint", "inspect", "{folder}"], "holds no whole checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("training: {max_steps: 3}\ndiloco: {num_islands: 2}\n")
    words = [text.format(run=run_file, folder=tmp_path) for text in arguments]
    monkeypatch.setattr("sys.argv", ["hf-diloco", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    output = "".join(capsys.readouterr())
    assert re.fullmatch(r"error: [^\n]+\n", output), output
    assert message in output


def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["hf-diloco", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    return capsys.readouterr().err


def test_a_working_directory_that_is_gone_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the working directory has been deleted" in error_of(monkeypatch, capsys, "compare", "one", "two")


@pytest.mark.parametrize("command", [["status"], ["dashboard"], ["store", "check"]])
def test_a_rendezvous_that_is_none_is_told_with_where_it_comes_from(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = error_of(monkeypatch, capsys, *command, "a:b")
    assert given.startswith(f"error: rendezvous 'a:b': {' '.join(command)} needs the place where the run's islands")
    for value in ("foo", "a:b"):
        monkeypatch.setenv("HF_DILOCO_RENDEZVOUS", value)
        told = error_of(monkeypatch, capsys, *command)
        assert told == given.replace("a:b", value).replace("\n", " (from HF_DILOCO_RENDEZVOUS)\n")


def test_ctrl_c_while_the_program_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, *asked: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hf_diloco.cli.main")
    monkeypatch.setattr("sys.meta_path", [Interrupted()])
    with pytest.raises(SystemExit, match="130"):
        start()


@pytest.mark.parametrize("arguments", [["topology", "ring"], ["launch", "--dry-run", "--", "echo", "said"]])
def test_what_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["hf-diloco", *arguments])
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)  # on a disk without space
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1


def test_launch_alone_shows_its_help() -> None:
    result = CliRunner().invoke(app, ["launch"], prog_name="hf-diloco")
    assert result.exit_code == 0
    assert "Usage: hf-diloco launch [OPTIONS]" in " ".join(result.output.split())


def test_whoever_looks_for_a_defect_gets_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hf-diloco", "report", "no/such/run"])
    monkeypatch.setenv("HF_DILOCO_DEBUG", "1")
    with pytest.raises(ConfigError, match="no/such/run"):
        main()


def test_unknown_options_and_commands_are_usage_errors() -> None:
    assert "--ilsand" in hf_diloco("launch", "run.yaml", "--ilsand", "1", expect=2).output
    assert "lunch" in hf_diloco("lunch", expect=2).output


@pytest.mark.distributed
def test_dry_run_shows_a_command_for_each_island_and_starts_none(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"training: {{max_steps: 3}}\noutput: {tmp_path}/runs\ndiloco: {{num_islands: 2}}\n")
    output = hf_diloco("launch", run_file, "--dry-run", "--name", "dry").output
    lines = [line for line in output.splitlines() if not line.startswith("#") and line]
    assert len(lines) == 2
    for number, line in enumerate(lines):
        assert f"HF_DILOCO_ISLAND={number} " in line
        assert f"-m hf_diloco.apps.lm {run_file} " in line
    assert not (tmp_path / "runs").exists()
