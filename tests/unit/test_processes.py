"""The helper that other tests start processes with: what it reports, and that nothing survives it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import ROOT, Processes, run

SLEEP = "import time; print('asleep', flush=True); time.sleep(60)"
DETACH = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print("child", child.pid, flush=True)
"""


def test_run_returns_exit_code_and_both_streams() -> None:
    completed = run([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"], expect=1)
    assert completed.returncode == 1
    assert sorted(completed.output.split()) == ["err", "out"]


def test_failure_shows_command_exit_code_and_output() -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit code 3 instead of 0: .*python.*\nreason"):
        run([sys.executable, "-c", "import sys; print('reason'); sys.exit(3)"])


def test_timeout_shows_output() -> None:
    with Processes() as processes:
        process = processes.spawn([sys.executable, "-c", SLEEP])
        process.wait_for("asleep")
        with pytest.raises(AssertionError, match=r"(?s)still runs after 0.1 s: .*asleep"):
            process.wait(timeout=0.1)


def test_environment_is_changed_by_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOVED", "x")
    program = "import os; print(os.environ.get('REMOVED'), os.environ['ADDED'])"
    assert run([sys.executable, "-c", program], env={"REMOVED": None, "ADDED": 7}).output == "None 7\n"


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_are_forked_also_after_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that libraries leave behind must not cost all later tests an interpreter a process."""
    program = "import sys; modules = vars(sys)['modules']; print('torch' in modules)"
    for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "1")
    assert run([sys.executable, "-c", program]).output == "True\n"
    monkeypatch.setenv("TORCH_LOGS", "")  # read when torch is imported
    with pytest.warns(UserWarning, match="started anew, as TORCH_LOGS differ"):
        assert run([sys.executable, "-c", program]).output == "False\n"


def test_kills_descendants_in_sessions_of_their_own() -> None:
    with Processes() as processes:
        parent = processes.spawn([sys.executable, "-c", DETACH])
        child = psutil.Process(int(parent.wait_for(r"child (\d+)")[1]))
        parent.wait()
        assert [process.pid for process in processes.alive()] == [child.pid]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_wait_for_fails_when_the_process_ends_without() -> None:
    with Processes() as processes, pytest.raises(AssertionError, match=r"exit code 0 without 'round 1'"):
        processes.spawn([sys.executable, "-c", "print('round 0')"]).wait_for("round 1")


FAILING = """
import sys
from tests.processes import Processes

def test_it():
    with Processes() as processes:
        processes.spawn([sys.executable, "-c", "print('said by one')"]).wait()
        processes.spawn([sys.executable, "-c", "print('said by two'); raise SystemExit(3)"]).wait(expect=3)
        raise AssertionError("the reason")
"""


def test_a_failed_test_shows_the_end_of_every_process(tmp_path: Path) -> None:
    hooks = "from tests.conftest import pytest_runtest_makereport, pytest_runtest_protocol"
    (tmp_path / "conftest.py").write_text(hooks)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(FAILING)
    pytest_here = [sys.executable, "-m", "pytest", str(tmp_path), "-p", "no:cacheprovider"]
    output = run(pytest_here, env={"PYTHONPATH": ROOT, "HF_DILOCO_TEST_FORKS": 0}, cwd=tmp_path, expect=1).output
    assert re.search(r"(?s)the reason.*process 0, exit code 0: .*\nsaid by one\n", output), output
    assert re.search(r"(?s)process 1, exit code 3: .*\nsaid by two\n", output), output


def test_a_word_is_looked_for_in_the_files_whose_tests_have_it_in_their_names(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tests.selection']")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .")
    (tmp_path / "test_one.py").write_text("print('imports one')\ndef test_apple(): assert True")
    (tmp_path / "test_two.py").write_text("print('imports two')\ndef test_pear(): assert True")

    def imported(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-s", *options]
        environment = {"PYTHONPATH": ROOT, "HF_DILOCO_TEST_FORKS": 0, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1}
        output = run(command, env=environment, cwd=tmp_path, expect=None).output
        return sorted(re.findall("imports (one|two)", output))

    assert imported("-k", "pear") == ["one", "two"], "no names are known"
    assert imported("-k", "pear") == ["two"]
    assert imported("-k", "apple or pear") == ["one", "two"]
    assert imported("-k", "not pear") == ["one", "two"]
    assert imported("-k", "plum") == ["one", "two"], "nobody has it: names may have changed"
    (tmp_path / "test_one.py").write_text("print('imports one')\ndef test_pear_as_well(): assert True")
    assert imported("-k", "pear") == ["one", "two"], "a file that has changed is looked at"
    assert imported("-k", "pear", "-p", "no:cacheprovider") == ["one", "two"]


def test_a_program_that_is_asked_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    program = f"""
import sys, time
from tests.processes import Processes
with Processes() as processes:
    child = processes.spawn([sys.executable, "-c", {SLEEP!r}])
    child.wait_for("asleep")
    print("child", child.pid, flush=True)
    time.sleep(60)
"""
    with Processes() as processes:
        parent = processes.spawn([sys.executable, "-c", program])
        child = psutil.Process(int(parent.wait_for(r"child (\d+)")[1]))
        parent.terminate()
        parent.wait(60, expect=143)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
