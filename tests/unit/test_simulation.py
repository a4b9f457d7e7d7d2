"""Ctrl-C while islands are threads of one process."""

from __future__ import annotations

import errno
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.apps.common.island_log import open_log
from hf_diloco.apps.common.simulation import train_together
from hf_diloco.apps.lm.runfile import load_run_file
from hf_diloco.errors import WAS_STOPPED, ConfigError, DiLoCoError, IslandLostError, StopRequested
from hf_diloco.gossip.threads import Turns
from hf_diloco.utils.files import STOP_FILE
from tests.clocks import AT_ONCE, LONG
from tests.full_disk import no_file_beyond
from tests.processes import ROOT, Processes


def test_an_interruption_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the disk is full for a moment."""
    touch, is_full = Path.touch, [True]

    def touch_if_there_is_space(self: Path) -> None:
        if is_full:
            is_full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        touch(self)

    monkeypatch.setattr(Path, "touch", touch_if_there_is_space)
    path = ROOT / "configs" / "quickstart.yaml"
    runs = [load_run_file(path, [f"output={tmp_path}", f"diloco.island={island}"]) for island in range(2)]

    def train(number: int) -> int:
        if number == 0:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # which wakes it, as the kernel does at Ctrl-C
            time.sleep(0.1)  # the handler runs there
        folder = runs[number].island_folder()
        deadline = time.monotonic() + LONG
        while not (folder / STOP_FILE).exists():
            assert time.monotonic() < deadline, f"island {number} was not told to stop"
            time.sleep(0.01)
        return STOPPED

    before = signal.getsignal(signal.SIGINT)
    assert train_together(runs, Turns(), train) == STOPPED
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("failure", [None, ValueError("rubbish")])
def test_who_is_asked_to_stop_before_it_trains_has_not_failed(tmp_path: Path, failure: Exception | None) -> None:
    path = ROOT / "configs" / "quickstart.yaml"
    settings = [f"output={tmp_path}", "diloco.num_islands=3"]
    runs = [load_run_file(path, [*settings, f"diloco.island={island}"]) for island in range(3)]
    errors = [StopRequested(), IslandLostError(f"island 0 left the run: {WAS_STOPPED}"), failure]

    def train(number: int) -> int:
        if error := errors[number]:
            raise error
        return STOPPED

    if failure is None:
        assert train_together(runs, Turns(), train) == STOPPED
    else:
        with pytest.raises(ValueError, match="rubbish"):
            train_together(runs, Turns(), train)


def test_a_run_folder_serves_one_simulation_or_launch_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart" / "island-1"
    with Processes() as processes:
        simulated = processes.spawn([sys.executable, "-m", "tests.programs.deaf_simulation", tmp_path])
        simulated.wait_for("training", LONG)
        with pytest.raises(DiLoCoError, match=f"island 1 .* is running already .*held by process {simulated.pid}"):
            open_log(folder, "island 1", "in vain")
        second = processes.spawn([sys.executable, "-m", "tests.programs.deaf_simulation", tmp_path])
        assert "island 0 of this run is running already" in second.wait(LONG, expect=1).output
    open_log(folder, "island 1", "and runs again").close()


def test_a_simulation_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    run = load_run_file(ROOT / "configs" / "quickstart.yaml", [f"output={tmp_path}"])
    with no_file_beyond(0), pytest.raises(ConfigError, match=r"island-0: .*; give another --output"):
        train_together([run], Turns(), lambda _: 0)


def test_a_second_interruption_ends_the_command_at_once(tmp_path: Path) -> None:
    with Processes() as processes:
        simulated = processes.spawn([sys.executable, "-m", "tests.programs.deaf_simulation", tmp_path])
        simulated.wait_for("training", LONG)
        simulated.popen.send_signal(signal.SIGINT)
        simulated.wait_for("writes a checkpoint", AT_ONCE)
        simulated.popen.send_signal(signal.SIGINT)
        simulated.wait(AT_ONCE, expect=-signal.SIGINT)
