"""The launcher with real processes that stand in for training: islands end well, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.cli.guard import TERMINATE_GRACE
from hf_diloco.cli.island import Island
from hf_diloco.cli.log import FAILED, FINISHED, Outcome
from hf_diloco.cli.plan import IslandPlan
from hf_diloco.config.base import ENV_FOLDER
from hf_diloco.errors import WAS_STOPPED, ConfigError
from hf_diloco.trainer.progress import Progress
from tests.clocks import AT_ONCE, wait_until
from tests.launch.stand_in import PROGRAM
from tests.processes import Process, Processes
from tests.records import wait_for_step

LONG: Mapping[str, object] = {"steps": 1200}  # a minute: longer than any of these tests


def launch(
    processes: Processes, folder: Path, *behaviours: Mapping[str, object], grace: float = 20, goes_on: bool = False
) -> Process:
    words = ["goes on"] * goes_on
    return processes.spawn([*PROGRAM, "launch", folder, json.dumps(behaviours), str(grace), *words])


def checkpoints(folder: Path, island: int) -> list[str]:
    return [path.name for path in (folder / f"island-{island}").glob("checkpoint-*")]


def pids(folder: Path, island: int) -> dict[str, int]:
    """The agent (accelerate's place), its rank, and the guard above them."""
    found: dict[str, int] = json.loads((folder / f"island-{island}" / "pids.json").read_text())
    return found | {"guard": psutil.Process(found["agent"]).ppid()}


def assert_nothing_left(processes: Processes) -> None:
    left = [(process.pid, process.cmdline()) for process in processes.alive()]
    assert not left, left


def test_islands_finish(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, {"steps": 20}, {"steps": 10})
    output = launched.wait(expect=0).output
    assert "island 0 │ round 2 done" in output
    assert "island 1 │ done, step 10/10" in output
    assert "noise" not in output, "library noise belongs into the log alone"
    assert "noise" in (tmp_path / "island-0" / "log.txt").read_text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", output), "control characters without a terminal"
    assert_nothing_left(processes)


def test_one_fails_and_the_others_save(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG, {"fail_at": 5, "after": [0, 2]}, LONG)
    output = launched.wait(expect=1).output
    assert "failed: island 1: exit code 1: RuntimeError: the loss is not finite" in output
    assert "launcher │ islands 0 and 2 finish the step and write a checkpoint" in output
    assert checkpoints(tmp_path, 0)
    assert checkpoints(tmp_path, 2)
    assert_nothing_left(processes)


def test_where_the_others_go_on_the_reason_of_a_failure_is_told_at_once(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG, {"fail_at": 5}, goes_on=True)
    launched.wait_for("launcher │ island 1 failed, exit code 1: RuntimeError: the loss is not finite")
    launched.wait_for("the other islands go on; the same command")
    launched.interrupt()
    launched.wait(expect=1)


def test_a_failure_before_training_ends_the_others_at_once(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, {"starting": 60}, {"fail_at": 1})
    completed = launched.wait(expect=1)
    assert "training has not begun, ending island 0" in completed.output
    assert completed.seconds < AT_ONCE
    assert_nothing_left(processes)


@pytest.mark.parametrize(
    ("fail_at", "told"), [(1, "; once its cause is gone, the same command"), (3, "; the same command")]
)
def test_the_way_back_of_one_that_failed(tmp_path: Path, processes: Processes, fail_at: int, told: str) -> None:
    """One that has not begun to train would fail again."""
    launched = launch(processes, tmp_path, LONG, {"fail_at": fail_at}, goes_on=True)
    launched.wait_for(f"the other islands go on{told} with --island K --rendezvous tcp://there:1 brings island K back")
    launched.interrupt()
    launched.wait(expect=1)


def test_the_way_back_of_a_node(tmp_path: Path, processes: Processes) -> None:
    """The launcher of a script learns only from its progress that it trains nodes."""
    failing = {"fail_at": 3, "says": {"noun": "node"}}
    launched = launch(processes, tmp_path, LONG, failing, goes_on=True)
    launched.wait_for("go on; the same command with --node K --rendezvous tcp://there:1 brings node K back, but not")
    launched.interrupt()
    launched.wait(expect=1)


@pytest.mark.parametrize(("fail_at", "unit"), [(3, "node"), (1, "island")])
def test_a_script_may_say_that_the_others_go_on(fail_at: int, unit: str, tmp_path: Path, processes: Processes) -> None:
    """The launcher does not know whether it trains nodes. One that fails before it trains has not said so itself."""
    says = {"noun": unit, "survives_losses": True}
    launched = launch(processes, tmp_path, {**LONG, "says": says}, {"fail_at": fail_at, "after": [0], "says": says})
    launched.wait_for(f"the other {unit}s go on")
    launched.interrupt()
    launched.wait(expect=1)


@pytest.mark.real_start
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_stops_with_checkpoints(tmp_path: Path, processes: Processes, number: signal.Signals) -> None:
    launched = launch(processes, tmp_path, LONG, LONG)
    wait_for_step(launched, tmp_path, 0, 1)
    os.kill(launched.pid, number)
    launched.wait(expect=3)
    assert checkpoints(tmp_path, 0)
    assert checkpoints(tmp_path, 1)
    assert_nothing_left(processes)


def test_an_island_that_saved_as_asked_has_not_failed(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG, {**LONG, "misses_the_others": True})
    wait_for_step(launched, tmp_path, 0, 1)
    launched.interrupt()
    assert "island 1 stopped, with a checkpoint (round 3 did not take place" in launched.wait(expect=3).output


def test_what_an_island_that_saved_as_asked_said_last_is_no_reason(tmp_path: Path, processes: Processes) -> None:
    """As after a second Ctrl-C, at which torchrun ends with an error of its own."""
    launched = launch(processes, tmp_path, {**LONG, "ended_after_saving": True})
    wait_for_step(launched, tmp_path, 0, step=11)
    launched.interrupt()
    output = launched.wait(expect=3).output
    assert "round 1 done" in output
    assert re.search(r"island 0 stopped, with a checkpoint$", output, re.MULTILINE), output


def test_an_island_whose_folder_takes_no_file_keeps_no_other_from_its_checkpoint(
    tmp_path: Path, processes: Processes
) -> None:
    launched = launch(processes, tmp_path, LONG, LONG)
    wait_for_step(launched, tmp_path, 0, 1)
    (tmp_path / "island-0" / "stop").symlink_to(tmp_path / "no folder" / "stop")
    launched.interrupt()
    assert "island 0 cannot be asked for a checkpoint, ending it" in launched.wait(expect=130).output
    assert checkpoints(tmp_path, 1)
    assert_nothing_left(processes)


def test_ctrl_c_while_waiting_after_a_failure(tmp_path: Path, processes: Processes) -> None:
    launched = launch(
        processes, tmp_path, {**LONG, "stubborn": True}, {**LONG, "fail_at": 20, "after": [0]}, grace=100
    )
    launched.wait_for("island 0 finishes the step")
    launched.interrupt()
    launched.wait_for("launcher │ ending island 0", timeout=AT_ONCE)
    launched.wait(expect=1)
    assert_nothing_left(processes)


def test_ctrl_c_before_training(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, {"starting": 60}, {"starting": 60})
    launched.wait_for("island 1 │ starting")
    launched.interrupt()
    assert launched.wait(expect=130).seconds < AT_ONCE
    assert_nothing_left(processes)


def test_second_ctrl_c_does_not_wait(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG, {**LONG, "stubborn": True}, grace=100)
    wait_for_step(launched, tmp_path, 0, 1)
    launched.interrupt()
    launched.wait_for("island 0 stopped")
    begin = time.monotonic()
    launched.interrupt()
    launched.wait(expect=130)
    assert time.monotonic() - begin < TERMINATE_GRACE + AT_ONCE
    assert checkpoints(tmp_path, 0)
    assert_nothing_left(processes)


def test_third_ctrl_c_kills_at_once(tmp_path: Path, processes: Processes) -> None:
    """Also an island whose guard hangs, which the second one would leave twice the time."""
    launched = launch(processes, tmp_path, LONG, {**LONG, "stubborn": True}, grace=100)
    wait_for_step(launched, tmp_path, 0, 1)
    launched.interrupt()
    launched.wait_for("island 0 stopped")
    os.kill(pids(tmp_path, 1)["guard"], signal.SIGSTOP)
    launched.interrupt()
    launched.wait_for("launcher │ ending island 1")
    begin = time.monotonic()
    launched.interrupt()
    launched.wait(expect=130)
    assert time.monotonic() - begin < 2 * TERMINATE_GRACE
    assert_nothing_left(processes)


def test_an_island_that_does_not_train_yet_is_not_waited_for(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, {"starting": 60}, LONG)
    wait_for_step(launched, tmp_path, 1)
    launched.interrupt()
    output = launched.wait(expect=130).output
    assert "Ctrl-C: island 1 finishes the step and writes a checkpoint" in output
    assert "launcher │ island 0 ended" in output
    assert checkpoints(tmp_path, 1)
    assert_nothing_left(processes)


def test_patience_ends_after_the_grace(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, {**LONG, "stubborn": True}, grace=1)
    wait_for_step(launched, tmp_path, 0)
    launched.interrupt()
    assert "no end after 1 s, ending island 0" in launched.wait(expect=130).output
    assert_nothing_left(processes)


def test_an_island_that_has_trained_is_waited_for(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, {"steps": 2, "ending": 60}, grace=1)
    launched.wait_for("island 0 │ done")
    launched.interrupt()
    assert "Ctrl-C: waiting for island 0 to end (up to 1 s)" in launched.wait(expect=130).output


def test_an_island_stopped_by_somebody_else_stops_all(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG, LONG)
    wait_for_step(launched, tmp_path, 0, 1)
    (tmp_path / "island-1" / "stop").touch()
    assert "launcher │ island 0 finishes the step and writes a checkpoint" in launched.wait(expect=3).output
    assert checkpoints(tmp_path, 0)


@pytest.mark.real_start
@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_killed_island_leaves_no_orphan(tmp_path: Path, processes: Processes, victim: str) -> None:
    launched = launch(processes, tmp_path, LONG, LONG)
    wait_for_step(launched, tmp_path, 0, 1)
    os.kill(pids(tmp_path, 1)[victim], signal.SIGKILL)
    output = launched.wait(expect=1).output
    assert "failed: island 1: SIGKILL" in output
    assert checkpoints(tmp_path, 0)
    assert_nothing_left(processes)


@pytest.mark.real_start
def test_an_island_whose_guard_is_killed_can_come_back(tmp_path: Path, processes: Processes) -> None:
    """Its rank trained on, unseen, and held the log: a start of the island was refused."""
    launched = launch(processes, tmp_path, LONG, LONG, goes_on=True)
    wait_for_step(launched, tmp_path, 0, 1)
    killed = pids(tmp_path, 1)
    os.kill(killed["guard"], signal.SIGKILL)
    deadline = time.monotonic() + AT_ONCE
    while {killed["agent"], killed["rank"]} & {process.pid for process in processes.alive()}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    launched.interrupt()
    assert "launcher │ island 0 stopped, with a checkpoint" in launched.wait(expect=1).output
    assert_nothing_left(processes)


@pytest.mark.real_start
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG, LONG)
    wait_for_step(launched, tmp_path, 0, 1)
    launched.kill()
    deadline = time.monotonic() + 60
    while processes.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_nothing_left(processes)


def test_a_file_system_without_locks_keeps_no_island_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    island = Island(IslandPlan(0, tmp_path / "island-0", ("echo", "trained"), {}, {}))
    island.kill(after=60)
    assert island.new_lines()[-1] == "trained"
    assert island.outcome == Outcome(FINISHED)


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("exit 0", STOPPED),
        ("echo hf_diloco.errors.StopRequested: asked to stop; exit 1", STOPPED),  # by its next training
        ("echo ValueError: no such folder; exit 1", FAILED),
    ],
)
def test_how_a_script_ends_whose_training_was_stopped(tmp_path: Path, then: str, code: int) -> None:
    says = f'echo \'{{"state": "stopped"}}\' > {tmp_path}/progress.json; {then}'
    island = Island(IslandPlan(0, tmp_path, ("sh", "-c", says), {}, {}))
    island.kill(after=60)
    island.new_lines()
    assert island.outcome is not None
    assert island.outcome.code == code


@pytest.mark.parametrize(
    ("says", "has_stopped"),
    [
        ("exit 3", False),
        ("echo bad data; exit 3", False),
        (f"echo hf_diloco.errors.IslandLostError: island 1 left the run: '{WAS_STOPPED}'; exit 1", True),
    ],
)
def test_how_a_script_ends_that_nobody_has_stopped(tmp_path: Path, says: str, has_stopped: bool) -> None:
    """Its own exit code may be 3; and where another island was stopped, nothing has failed."""
    island = Island(IslandPlan(0, tmp_path, ("sh", "-c", says), {ENV_FOLDER: str(tmp_path)}, {}))
    island.kill(after=60)
    island.new_lines()
    assert island.outcome is not None
    assert island.outcome.has_stopped == has_stopped
    assert (island.outcome.error == "bad data") == ("bad data" in says)


def test_a_script_that_is_ended_has_not_stopped_with_a_checkpoint(tmp_path: Path) -> None:
    """Even if it then ends with 3, for reasons of its own."""
    says = "trap 'exit 3' TERM; echo ready; sleep 60 & wait"
    island = Island(IslandPlan(0, tmp_path, ("sh", "-c", says), {ENV_FOLDER: str(tmp_path)}, {}))
    wait_until(lambda: "ready" in island.new_lines(), "the script begins")
    island.terminate()
    island.kill(after=60)
    island.new_lines()
    assert island.outcome is not None
    assert not island.outcome.has_stopped


def test_progress_of_an_earlier_start_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    Progress(tmp_path, 5).update(state="stopped")
    island = Island(IslandPlan(0, tmp_path, ("sleep", "60"), {}, {}))
    assert not island.progress.training_has_begun
    island.kill()


def test_progress_that_is_replaced_within_a_tick_of_the_file_systems_clock(tmp_path: Path) -> None:
    """The stop of a script was missed, and its launch ended as if the training was done."""
    island = Island(IslandPlan(0, tmp_path, ("true",), {}, {}))
    for state in ("training", "stopped"):
        Progress(tmp_path, 5).update(state=state)
        os.utime(tmp_path / "progress.json", ns=(0, 0))
        assert island.progress.state == state
    island.kill(after=60)


def test_an_output_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=r"island-0: Not a directory; give another --output"):
        Island(IslandPlan(0, tmp_path / "runs" / "island-0", ("echo",), {}, {}))


def test_an_output_on_a_full_disk(tmp_path: Path) -> None:
    plan = IslandPlan(0, tmp_path / "island-0", ("echo", "trained"), {}, {Path("/dev/full"): "settings"})
    with pytest.raises(ConfigError, match=r"island-0: No space left on device; give another --output"):
        Island(plan)


def test_a_run_folder_serves_one_launch_at_a_time(tmp_path: Path, processes: Processes) -> None:
    launched = launch(processes, tmp_path, LONG)
    wait_for_step(launched, tmp_path, 0)
    second = launch(processes, tmp_path, {"steps": 1})
    assert "island 0 of this run is running already" in second.wait(expect=1).output
