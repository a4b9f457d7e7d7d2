"""Takes shell text apart into commands, and asks each program's own parser whether it would understand its arguments.

For commands that a test cannot run: they need two machines, GPUs, a scheduler, the Hub.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.clocks import LONG
from tests.processes import ROOT, Processes, find_free_port, run
from tests.report_runs import write_run

_ASSIGNMENT = re.compile(r"\w+=")


def commands(text: str) -> list[list[str]]:
    """The simple commands of shell text, without assignments and `&`; `export` and `wait` are left out."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and _ASSIGNMENT.match(words[0]):
            words.pop(0)
        if words and words[-1] == "&":
            words.pop()
        if words and words[0] not in ("export", "wait"):
            found.append(words)
    return found


def check(words: Sequence[str]) -> None:
    """Raises `AssertionError` if the command would not be understood, or is of a program that is not known here."""
    program = words[0]
    assert program in _CHECKS, f"no check of {program!r}: run the block, or add a check"
    _CHECKS[program](list(words[1:]))


def check_shell(text: str) -> None:
    """Raises if bash does not understand the text."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, capture_output=True)


def _hf_diloco(words: list[str]) -> None:
    program = [sys.executable, "-m", "hf_diloco.cli"]
    if words[0] == "rendezvous":  # it would go on for ever, if the page's address were this machine's
        assert "is no address of this machine" in run([*program, *words], expect=2).output
        return
    if words[0] == "dashboard":
        _dashboard([*program, *words])
        return
    if words[0] == "status" and words[1].startswith("runs/"):  # of a run that has not begun
        with tempfile.TemporaryDirectory() as folder:
            write_run(Path(folder, words[1]))
            found = run([*program, *words], cwd=Path(folder), expect=2)
        assert "does not say where its islands meet" in found.output
        return
    if words[0] == "compare":
        with tempfile.TemporaryDirectory() as folder:
            for name in (word for word in words if word.startswith("runs/")):
                write_run(Path(folder, name))
            run([*program, *words], cwd=Path(folder))
        return
    if words[0] == "init":
        with tempfile.TemporaryDirectory() as folder:
            run([*program, *words, "--folder", folder])
        return
    if words[0] != "launch":
        run([*program, *words])
        return
    if "--" in words:  # a script that stands for the reader's own
        words = [*words[: words.index("--")], "--dry-run", "--", "python", "-c", "pass"]
        run([*program, *words])
        return
    here = [word.replace("tcp://HOST:", "tcp://127.0.0.1:") for word in words]
    completed = run([*program, *here, "--dry-run"], expect=None)
    # Tests have no network. Data of the Hub are tried last: with any other problem the line would begin with that.
    is_offline = re.search(r"^error: data: cannot read \S+: \w+: Couldn't reach", completed.output, re.MULTILINE)
    assert completed.returncode == (2 if is_offline else 0), completed.output


def _dashboard(command: list[str]) -> None:
    """Starts it, over a run of the name that is given; of a store there must at least be one."""
    where = command[command.index("dashboard") + 1]
    if "://" in where:
        told = "no run can be seen" if where.startswith("tcp:") else "there is no folder"
        assert told in run(command, expect=1).output
        return
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        write_run(Path(folder, where))
        program = processes.spawn([*command, "--listen", f"127.0.0.1:{find_free_port()}"], cwd=Path(folder))
        program.wait_for("open http://", LONG)
        program.interrupt()
        program.wait(LONG)


def _train_lm(words: list[str]) -> None:
    from hf_diloco.apps.common.load import parse_command_line
    from hf_diloco.apps.lm.runfile import RunFile

    assert words[0] == "train_lm.py"
    parse_command_line(
        RunFile, "train_lm.py", "", [str(ROOT / word) if word.endswith(".yaml") else word for word in words[1:]]
    )


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = _parse(get_args_parser(), words)
    _train_lm([parsed.training_script, *parsed.training_script_args])


def _accelerate(words: list[str]) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    parsed = _parse(launch_command_parser(), words[1:])
    if parsed.config_file:
        assert load_config_from_file(str(ROOT / parsed.config_file)).num_processes
    _train_lm([parsed.training_script, *parsed.training_script_args])


def _deepspeed(words: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    parsed = parse_args(words)
    _train_lm([parsed.user_script, *parsed.user_args])


def _python(words: list[str]) -> None:
    program = words[:2] if words[0] == "-m" else words[:1]
    _flags(words[len(program) :], run([sys.executable, *program, "--help"], cwd=ROOT).output)


def _hub(words: list[str]) -> None:
    from huggingface_hub.cli.hf import main

    program = f"import sys; from {main.__module__} import main; sys.argv[0] = 'hf'; main()"
    _flags(words[1:], run([sys.executable, "-c", program, words[0], "--help"], env={"COLUMNS": 200}).output)


def _make(words: list[str]) -> None:
    run(["make", "--dry-run", *words])


def _pip(words: list[str]) -> None:
    action, *rest = words
    assert action == "install"
    for what in rest:
        if what == "--no-deps":
            continue
        wanted = Requirement(f"hf-diloco{what[1:]}" if what.startswith(".") else what)
        if wanted.name == "hf-diloco":
            assert wanted.extras <= set(metadata("hf-diloco").get_all("Provides-Extra") or [])


def _git(words: list[str]) -> None:
    (home,) = (url for url in metadata("hf-diloco").get_all("Project-URL") or [] if url.startswith("Repository, "))
    assert words == ["clone", home.removeprefix("Repository, ")]


def _cd(words: list[str]) -> None:
    assert words == ["hf-diloco"], "what a clone is called"


def _deployed(words: list[str]) -> None:
    """A command of an engine, on a file of `hf-diloco init`; or on a secret."""
    files = [word for word in words if word.startswith("deploy/")]
    engines = {"islands.sbatch": "slurm", "compose.yaml": "compose", "job.yaml": "kubernetes"}
    engines |= {"island.yaml": "skypilot", "submit.sh": "ray"}
    assert files or words in (["job", "list"],) or words[:2] == ["create", "secret"]
    assert all(engines[Path(file).name] == Path(file).parent.name for file in files)


def _two_clusters(words: list[str]) -> None:
    path = ROOT / "scripts" / "two_clusters.sh"
    check_shell(path.read_text())
    assert (ROOT / words[0]).is_file()
    assert all("@" in place and ":" in place for place in words[1:3])
    assert words[3].startswith("tcp://")


def _flags(words: Sequence[str], help_text: str) -> None:
    unknown = [word for word in words if word.startswith("--") and word not in help_text]
    assert not unknown


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    try:
        return parser.parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"{parser.prog} does not understand {shlex.join(words)}") from error


_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "accelerate": _accelerate,
    "bash": _deployed,
    "cd": _cd,
    "deepspeed": _deepspeed,
    "git": _git,
    "hf": _hub,
    "hf-diloco": _hf_diloco,
    "make": _make,
    "pip": _pip,
    "docker": _deployed,
    "kubectl": _deployed,
    "python": _python,
    "ray": _deployed,
    "sbatch": _deployed,
    "sky": _deployed,
    str(Path("scripts/two_clusters.sh")): _two_clusters,
    "torchrun": _torchrun,
}
