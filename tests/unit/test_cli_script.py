"""From a command of the user's own to the commands that start its islands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_diloco.cli import devices
from hf_diloco.cli.main import app
from hf_diloco.cli.plan import Plan
from hf_diloco.cli.script import plan_script
from hf_diloco.config.base import ENV_FOLDER, ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    return tmp_path


def plan(*command: str, **options: Any) -> Plan:
    return plan_script(command, **options)


def test_each_island_is_told_who_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    planned = plan("python", "mine.py", "--lr", "3", num_islands=2)
    rendezvous = planned.rendezvous
    assert rendezvous is not None
    assert rendezvous.startswith("tcp://127.0.0.1:")
    for number, island in enumerate(planned.islands):
        assert island.command == (str(BIN / "python"), "mine.py", "--lr", "3")
        assert island.folder == Path("runs", "mine", f"island-{number}")
        told = island.environment
        assert (told[ENV_ISLAND], told[ENV_NUM_ISLANDS], told[ENV_RENDEZVOUS]) == (str(number), "2", rendezvous)
        assert told[ENV_FOLDER] == str(folder / island.folder)
        assert told["OMP_NUM_THREADS"] == "4"
        assert told["RANK"] is None
    assert not planned.crowding


@pytest.mark.parametrize("name", ["../x", "a\x1b[2J", ""])
def test_a_name_is_that_of_a_folder_below_the_output(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--name: .* cannot be a run's name"):
        plan("python", "mine.py", name=name)


def test_one_of_many_needs_a_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="rendezvous"):
        plan("python", "mine.py", num_islands=2, island=1)
    (only,) = plan("python", "mine.py", num_islands=2, island=1, rendezvous="tcp://10.0.0.1:29400").islands
    assert only.environment[ENV_ISLAND] == "1"
    assert only.environment["OMP_NUM_THREADS"] == "8"


def test_the_environment_says_how_many_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NUM_ISLANDS, "3")
    monkeypatch.setenv(ENV_RENDEZVOUS, "file:///there")
    planned = plan("python", "mine.py")
    assert len(planned.islands) == 3
    assert planned.rendezvous == "file:///there"
    for wrong in ("many", "0", "-3"):
        monkeypatch.setenv(ENV_NUM_ISLANDS, wrong)
        with pytest.raises(ConfigError, match=rf"num_islands: .*{wrong}.*HF_DILOCO_NUM_ISLANDS"):
            plan("python", "mine.py")


@pytest.mark.parametrize(
    ("launcher", "option"),
    [
        (("torchrun", "--nproc_per_node", "2"), "--master_port"),
        (("torchrun", "--nproc-per-node=2"), "--master_port"),
        (("deepspeed", "--num_gpus", "2"), "--master_port"),
        (("accelerate", "launch", "--num_processes", "2"), "--main_process_port"),
        (("accelerate-launch", "--num_processes=2"), "--main_process_port"),
        (("python", "-m", "torch.distributed.run", "--nproc_per_node", "2"), "--master_port"),
        (("python3", "-u", "-m", "accelerate.commands.launch", "--num_processes", "2"), "--main_process_port"),
        (("python", "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2"), "--main_process_port"),
    ],
)
def test_launchers_get_ports_and_cores_of_their_own(launcher: tuple[str, ...], option: str) -> None:
    islands = plan(*launcher, "mine.py", num_islands=2).islands
    ports = {island.command[island.command.index(option) + 1] for island in islands}
    assert len(ports) == 2
    for island in islands:
        without = [word for word in island.command if word not in (option, *ports)]
        assert without == [str(BIN / launcher[0]), *launcher[1:], "mine.py"]
        assert island.environment["OMP_NUM_THREADS"] == "2"
        assert island.folder.parent == Path("runs", "mine")


def test_options_of_the_script_are_its_own() -> None:
    script = ("mine.py", "--num_processes", "8", "--master_port", "5")
    planned = plan("torchrun", "--nproc_per_node", "2", *script, num_islands=2)
    for island in planned.islands:
        assert island.command[-5:] == script
        assert island.environment["OMP_NUM_THREADS"] == "2"
    (alone,) = plan("python", *script).islands
    assert alone.environment["OMP_NUM_THREADS"] == "8"


def test_a_port_for_all_islands_is_refused() -> None:
    command = ("torchrun", "--master_port=29500", "mine.py")
    assert plan(*command).islands[0].command[1:] == command[1:]
    with pytest.raises(ConfigError, match=r"--master_port=29500: .*leave it out"):
        plan(*command, num_islands=2)


def test_threads_that_wait_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert plan("python", "mine.py").islands[0].environment["GOMP_SPINCOUNT"] == expected


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert "2 islands with 8 threads each keep 16 cores busy" in plan("python", "mine.py", num_islands=2).crowding
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS=all"):
        plan("python", "mine.py")


def test_devices_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    islands = plan("python", "mine.py", num_islands=2).islands
    assert [island.environment["CUDA_VISIBLE_DEVICES"] for island in islands] == ["0,1", "2,3"]
    shared = plan("python", "mine.py", num_islands=5)
    assert [island.environment["CUDA_VISIBLE_DEVICES"] for island in shared.islands] == ["0", "1", "2", "3", "0"]
    assert "5 islands share 4 CUDA devices (0, 1, 2, 3)" in shared.crowding


@pytest.mark.parametrize(
    ("num_processes", "expected"),
    [(1, ["0", "1", "2"]), (2, ["0,1", "2,3", "0,1"]), (4, ["0,1,2,3"] * 3), (8, ["0,1,2,3"] * 3)],
)
def test_an_island_has_a_device_for_each_process(
    num_processes: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    islands = plan("torchrun", f"--nproc_per_node={num_processes}", "mine.py", num_islands=3).islands
    assert [island.environment["CUDA_VISIBLE_DEVICES"] for island in islands] == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "a command is missing after"),
        (("pyhton", "mine.py"), "pyhton: no such program"),
        (("python", "yours.py"), "yours.py: no such file"),
    ],
)
def test_a_wrong_command_is_told_before_anything_starts(command: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--", "python", "mine.py"], "quickstart before `--`"),
        (["--resume", "never", "--", "python", "mine.py"], "--resume never before `--`"),
        (["--islands", "2"], "launch what"),
        (["--islands", "2", "--rendezvous", "memory://a", "--", "python", "mine.py"], "share no memory: use file:"),
        (["--"], "a command is missing after"),
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["launch", *arguments], catch_exceptions=False)


def test_dry_run_takes_options_of_the_script_as_they_are() -> None:
    command = ["launch", "--islands", "2", "--name", "ours", "--dry-run", "--", "python", "mine.py", "--name", "its"]
    output = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert output.count("mine.py --name its") == 2
    assert "runs/ours/island-1" in output
    assert not Path("runs").exists()
