"""Wrong settings and meetings that cannot work: one clear error each, before training, through the command line."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from tests.equivalence.runs import LAUNCH, Runs
from tests.processes import ROOT, Process, Processes, find_free_port, run
from tests.secret_files import make_secrets

# What needs transformers or the data to be seen: errors of the island itself.
WRONG_FOR_THE_ISLAND = {
    "training.learning_rte=0.1": ["training.learning_rte", "learning_rate"],
    "deepspeed.zero_optimization.stage=7 tokenizer.path=a/b": ["deepspeed: zero_optimization.stage: ", "got 7"],
    "tokenizer.train=null tokenizer.path=no-such-tokenizer": ["no-such-tokenizer"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def the_error(output: str) -> str:
    """The one line that says what is wrong; there is no traceback."""
    assert "Traceback" not in output, output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert lines, output
    return lines[0]


@pytest.mark.distributed
@pytest.mark.parametrize("override", WRONG_FOR_THE_ISLAND)
def test_wrong_for_the_island(runs: Runs, override: str) -> None:
    command: list[str | Path] = [
        sys.executable,
        ROOT / "train_lm.py",
        runs.write("wrong-island", {}),
        "diloco.num_islands=1",
        *override.split(),
    ]
    error = the_error(run(command, expect=1, timeout=120).output)
    assert all(part in error for part in WRONG_FOR_THE_ISLAND[override]), error


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["file", "variable"])
def test_a_key_that_is_too_short(runs: Runs, tmp_path: Path, where: str) -> None:
    key = tmp_path / "run.key"
    key.touch(mode=0o600)
    key.write_text("swordfish\n")
    overrides = ["diloco.rendezvous=file:///no/such", *([f"diloco.key_file={key}"] if where == "file" else [])]
    command: list[str | Path] = [*LAUNCH, runs.write("wrong", {}), *overrides]
    output = run(command, env={"HF_DILOCO_KEY": "swordfish"}, expect=2, timeout=120).output
    error = the_error(output)
    assert (f"key_file={key}" if where == "file" else "HF_DILOCO_KEY") in error
    assert "9 bytes, fewer than 16: make one by" in error
    assert "swordfish" not in output
    assert not (runs.folder / "wrong").exists()


@pytest.mark.distributed
def test_a_revoked_identity(runs: Runs, tmp_path: Path) -> None:
    secrets = make_secrets(tmp_path, 2)
    (public,) = secrets["identities"][1]
    listed = {**secrets["identities"], 1: [f"{public} until 3"]}
    settings = {key: str(secrets[key]) for key in ("key_file", "identity_file")}
    run_file = runs.write("wrong", {"diloco": {**settings, "identities": listed}})
    error = the_error(run([*LAUNCH, run_file, "diloco.rendezvous=file:///no/such"], expect=2, timeout=120).output)
    assert f"island 1 shows the identity {public}, which counts until round 3 only (identities.1)" in error
    assert "make a new one by `hf-diloco keys make FILE`, list it on all islands, and give it to island 1" in error
    assert not (runs.folder / "wrong").exists()


def start(processes: Processes, runs: Runs, island: int, rendezvous: str, *overrides: str, name: str) -> Process:
    settings = [f"--island={island}", f"--rendezvous={rendezvous}", "diloco.join_timeout=40", *overrides]
    return processes.spawn([sys.executable, ROOT / "train_lm.py", runs.write(name, {}), *settings])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.config.hidden_size=64", ["trainable parameters differs", "island 0: ", "island 1: "]),
        ("diloco.payload=bf16", ["payload differs (island 0: fp32, island 1: bf16)"]),
        ("diloco.sync_every=5", ["sync_every differs (island 0: 4, island 1: 5)"]),
    ],
)
def test_islands_that_do_not_train_the_same(processes: Processes, runs: Runs, override: str, named: list[str]) -> None:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    islands = [
        start(processes, runs, 0, rendezvous, name="unequal"),
        start(processes, runs, 1, rendezvous, override, name="unequal"),
    ]
    for island in islands:
        error = the_error(island.wait(timeout=120, expect=1).output)
        assert all(part in error for part in named), error
        assert "make it equal" in error


@pytest.mark.distributed
def test_nobody_at_the_rendezvous(processes: Processes, runs: Runs) -> None:
    port = find_free_port()
    island = start(processes, runs, 1, f"tcp://127.0.0.1:{port}", "diloco.join_timeout=2", name="alone")
    error = the_error(island.wait(timeout=120, expect=1).output)
    assert f"nobody answers at tcp://127.0.0.1:{port} after 2 s" in error
    assert "Is island 0 running there" in error


@pytest.mark.distributed
def test_an_island_that_never_comes(processes: Processes, runs: Runs) -> None:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    island = start(processes, runs, 0, rendezvous, "diloco.join_timeout=2", name="waiting")
    error = the_error(island.wait(timeout=120, expect=1).output)
    assert "[1]" in error
    assert "join_timeout" in error


@pytest.mark.distributed
def test_port_in_use(processes: Processes, runs: Runs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        island = start(processes, runs, 0, f"tcp://127.0.0.1:{port}", name="port")
        error = the_error(island.wait(timeout=120, expect=1).output)
    assert f"port {port} on 127.0.0.1 is in use" in error
    assert "choose another port" in error


@pytest.mark.distributed
def test_two_processes_with_one_number(processes: Processes, runs: Runs, tmp_path: Path) -> None:
    rendezvous = f"tcp://127.0.0.1:{find_free_port()}"
    three = "diloco.num_islands=3"  # the third never comes: the first two wait in the meeting
    islands = [start(processes, runs, 0, rendezvous, three, name="twice")]
    islands += [
        start(processes, runs, 1, rendezvous, three, f"output={tmp_path / str(k)}", name="twice") for k in (0, 1)
    ]
    deadline = time.monotonic() + 120
    while not any(island.popen.poll() is not None for island in islands) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [island for island in islands[1:] if island.popen.poll() is not None]
    assert len(ended) == 1  # the other holds the number and goes on
    error = the_error(ended[0].wait(expect=1).output)
    assert "another process has already joined this run as island 1" in error
    assert "HF_DILOCO_ISLAND" in error


# In an object store


def island_in(store: str, runs: Runs, name: str, *overrides: str, island: int = 0) -> list[str | Path]:
    """The command of an island whose run meets in a store."""
    command: list[str | Path] = [sys.executable, ROOT / "train_lm.py", runs.write(name, {}), f"--rendezvous={store}"]
    return [*command, f"--island={island}", *overrides]


@pytest.mark.distributed
def test_a_store_that_cannot_be_written(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = f"file://{tmp_path}/file/store"
    error = the_error(run(island_in(store, runs, "unwritable"), expect=1, timeout=120).output)
    assert f"the rendezvous {store} cannot be opened" in error
    assert "the folder must be writable" in error


@pytest.mark.distributed
def test_a_second_process_of_an_island_that_lives(processes: Processes, runs: Runs, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    first = processes.spawn(island_in(store, runs, "double"))  # waits for island 1
    wait_for_file(tmp_path / "store" / "heartbeats" / "0" / "000001.json", first)
    second = run(island_in(store, runs, "double", f"output={tmp_path}"), expect=1, timeout=120)
    error = the_error(second.output)
    assert f"another process runs as island 0 of this run (process {first.pid} on " in error
    assert "--island or HF_DILOCO_ISLAND" in error
    assert first.popen.poll() is None


@pytest.mark.distributed
def test_a_run_of_another_setting_or_key(processes: Processes, runs: Runs, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    first = processes.spawn(island_in(store, runs, "other"))
    wait_for_file(tmp_path / "store" / "run.json", first)
    unequal = island_in(store, runs, "other", "diloco.sync_every=2", island=1)
    error = the_error(run(unequal, expect=1, timeout=120).output)
    assert "sync_every differs (the run, begun by island 0: 4; island 1: 2); make it equal" in error
    stranger = island_in(store, runs, "other", island=1)
    error = the_error(run(stranger, env={"HF_DILOCO_KEY": "k" * 32}, expect=1, timeout=120).output)
    assert f"the run at {store} was begun with another key" in error
    assert "HF_DILOCO_KEY or key_file" in error


@pytest.mark.distributed
def test_islands_that_never_come_to_the_store(runs: Runs, tmp_path: Path) -> None:
    alone = island_in(f"file://{tmp_path}/store", runs, "few", "diloco.join_timeout=2")
    error = the_error(run(alone, expect=1, timeout=120).output)
    assert "islands [1] have not joined within 2 s (join_timeout)" in error
    assert "fewer than 2 (min_islands)" in error


@pytest.mark.distributed
def test_a_checkpoint_of_another_run(runs: Runs, tmp_path: Path) -> None:
    changes = {"diloco": {"num_islands": 1}, "training": {"save_strategy": "steps", "save_steps": 4}}
    commands: dict[str, list[str | Path]] = {
        name: [sys.executable, ROOT / "train_lm.py", runs.write(name, changes)] for name in ("one-run", "another-run")
    }
    for name, command in commands.items():
        run([*command, f"--rendezvous=file://{tmp_path}/{name}"], timeout=120)
    store = f"file://{tmp_path}/another-run"
    error = the_error(run([*commands["one-run"], f"--rendezvous={store}"], expect=1, timeout=120).output)
    assert "the checkpoint belongs to run " in error
    assert f"and {store} holds run " in error
    assert "start in another run folder" in error


def wait_for_file(path: Path, writer: Process) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert writer.popen.poll() is None, f"no {path}: {writer.state}"
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.1)
