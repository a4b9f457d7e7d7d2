"""What `hf-diloco init` has containers do, done by processes of this machine: nothing here runs containers.

What stands for the containers' own names and paths is put in: the rendezvous' host name, the pods' folders.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_diloco.config.base import ENV_ISLAND
from tests.deployed import RUN_FILE, assert_run_has_ended, progress, wait_until
from tests.processes import Process, Processes, find_free_port, run

PROGRAM = [sys.executable, "-m", "hf_diloco.cli"]


@dataclass(frozen=True)
class Containers:
    """Commands and environments of containers, and where their run folder is here."""

    islands: list[tuple[list[str], dict[str, object]]]
    run_folder: Path
    server: list[str] | None = None

    def start(self, processes: Processes, island: int) -> Process:
        command, environment = self.islands[island]
        return processes.spawn([*PROGRAM, *command[1:]], env=environment, cwd=self.run_folder.parents[1])


def init(folder: Path, engine: str, *arguments: str) -> list[dict[str, Any]]:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN_FILE))
    run([*PROGRAM, "init", engine, "run.yaml", "--image", "image", *arguments], cwd=folder)
    (path,) = (folder / "deploy" / "run" / engine).iterdir()
    return list(yaml.safe_load_all(path.read_text()))


def compose(folder: Path) -> Containers:
    address = f"127.0.0.1:{find_free_port()}"
    (file,) = init(folder, "compose")
    commands = {
        name: [word.replace("rendezvous:29400", address) for word in service["command"]]
        for name, service in file["services"].items()
    }
    return Containers(
        [(commands[f"island-{number}"], {}) for number in range(2)], folder / "runs" / "run", commands["rendezvous"]
    )


def kubernetes(folder: Path) -> Containers:
    address = f"127.0.0.1:{find_free_port()}"
    config, job = init(folder, "kubernetes", "--rendezvous", f"http://{address}/run")
    (folder / "mounted.yaml").write_text(config["data"]["run.yaml"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    paths = {"/hf-diloco/run.yaml": str(folder / "mounted.yaml"), "/runs": str(folder / "pods")}
    command = [paths.get(word, word) for word in container["command"]]
    server = ["hf-diloco", "rendezvous", address, "--folder", str(folder / "store")]
    return Containers([(command, {ENV_ISLAND: number}) for number in range(2)], folder / "pods" / "run", server)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", [compose, kubernetes], ids=["compose", "kubernetes"])
def test_an_island_is_stopped_and_comes_back(engine: Any, tmp_path: Path) -> None:
    containers: Containers = engine(tmp_path)
    folders = [containers.run_folder / f"island-{number}" for number in range(2)]
    assert containers.server is not None
    with Processes() as processes:
        server = processes.spawn([*PROGRAM, *containers.server[1:]])
        server.wait_for("islands meet at")
        stays, goes = (containers.start(processes, number) for number in range(2))
        wait_until(lambda: all(int(str(progress(one)["round"])) >= 1 for one in folders), "no first round")
        goes.terminate()  # what `docker compose stop` and an eviction do
        goes.wait(expect=3)
        if engine is kubernetes:  # a new pod finds an empty folder
            shutil.rmtree(folders[1])
        else:
            assert list(folders[1].glob("checkpoint-*"))
        returned = containers.start(processes, 1)
        for island in (stays, returned):
            island.wait(timeout=600)
        assert_run_has_ended(*folders)
        containers.start(processes, 0).wait(timeout=600)
    assert progress(folders[0])["round"] == progress(folders[1])["round"], "started again, it takes the result"
