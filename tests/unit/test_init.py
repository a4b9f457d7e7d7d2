"""`hf-diloco init`: what it writes, what it refuses, and that nothing is written over."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from hf_diloco.apps.common.environment import STOPPED
from hf_diloco.apps.lm.runfile import RunFile, load_run_file
from hf_diloco.cli.engines import ENGINES, plan_deployment
from hf_diloco.cli.init import init as init_command
from hf_diloco.cli.main import app
from hf_diloco.cli.plan import LaunchOptions
from hf_diloco.config.base import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS
from hf_diloco.errors import ConfigError
from tests.deployed import wait_until
from tests.processes import ROOT, Processes, run

BUCKET = "s3://bucket/my-run"
SAMPLE = 'sample={prompt: "$HOME is $(HOME)"}'  # what the engines would otherwise fill in
RUN_FILE = {
    "name": "My.Run_1",
    "training": {"max_steps": 4},
    "deepspeed": "zero2.json",
    "diloco": {"num_islands": 3},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a run file."""
    monkeypatch.chdir(tmp_path)
    for name in (ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(ROOT / "configs" / "deepspeed" / "zero2.json", tmp_path)
    write_run_file()
    return tmp_path


def test_the_help_and_the_templates_are_of_the_same_engines() -> None:
    argument = get_type_hints(init_command, include_extras=True)["engine"].__metadata__[0]
    named = re.findall(r"\w+", argument.help.partition(":")[2].replace(" or ", " "))
    assert named == list(ENGINES)
    assert {path.name for path in (ROOT / "hf_diloco" / "templates" / "deploy").iterdir()} == {*ENGINES}


def write_run_file(**changes: Any) -> None:
    Path("run.yaml").write_text(yaml.safe_dump({**RUN_FILE, **changes}))


def init(engine: str, *arguments: str, run_file: str = "run.yaml") -> str:
    """The command in this process; returns what it prints."""
    result = CliRunner().invoke(app, ["init", engine, run_file, *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def written(engine: str, name: str) -> Path:
    return Path("deploy", "My.Run_1", engine, name)


def documents(engine: str) -> list[dict[str, Any]]:
    (path,) = Path("deploy", "My.Run_1", engine).iterdir()
    return list(yaml.safe_load_all(path.read_text()))


# All engines


def test_files_that_are_there_stay(folder: Path) -> None:
    script = folder / "deploy" / "My.Run_1" / "slurm" / "islands.sbatch"
    assert f"sbatch {script}" in init("slurm", "--rendezvous", BUCKET)
    script.write_text("mine")
    with pytest.raises(ConfigError, match="is there already: give --force"):
        init("slurm", "--rendezvous", BUCKET)
    assert script.read_text() == "mine"
    init("slurm", "--rendezvous", BUCKET, "--force")
    assert script.read_text().startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("slurm", [], "no rendezvous, but slurm decides"),
        ("slurm", ["--rendezvous", "tcp://10.0.0.1:29400"], "tcp://10.0.0.1:29400 is the address of island 0"),
        ("compose", ["--image", "i", "--rendezvous", "tcp://10.0.0.1:29400"], "`hf-diloco rendezvous`"),
        (
            "kubernetes",
            ["--image", "i", "--rendezvous", "file:///shared"],
            "islands of kubernetes do not see that folder",
        ),
        ("kubernetes", ["--rendezvous", BUCKET], "give --image"),
        ("compose", ["--image", "i", "--nodes-per-island", "2"], "--nodes-per-island 2"),
        ("skypilot", ["--image", "i", "--rendezvous", "file:///shared"], "islands of skypilot do not see that folder"),
        ("skypilot", ["--rendezvous", BUCKET], "give --image"),
        ("ray", [], "no rendezvous, but ray decides"),
        ("ray", ["--rendezvous", BUCKET, "--nodes-per-island", "2"], "or use slurm"),
        ("compose", ["--image", "i", "output=/elsewhere"], "/elsewhere/My.Run_1: containers see"),
        ("compose", ["--image", "i", f"model.path={__file__}"], f"{__file__}: containers see"),
        ("slurm", ["launch.use_cpu=true", "--gpus-per-island", "2"], "launch.use_cpu is true"),
        ("slurm", ["--rendezvous", BUCKET, "training.learning_rte=1"], "did you mean learning_rate"),
        ("slurm", ["--rendezvous", BUCKET, "--folder", "run.yaml/x"], "give another folder"),
        (
            "kubernetes",
            ["--image", "i", "--rendezvous", BUCKET, "data={source: files, files: [run.yaml]}"],
            "data.files: /",
        ),
        ("ray", ["--rendezvous", BUCKET, "diloco.method=mine.py:Mine"], "diloco.method: mine.py:Mine is a file"),
    ],
)
def test_what_cannot_work_is_refused(engine: str, arguments: list[str], message: str) -> None:
    Path("mine.py").write_text(
        "from hf_diloco.methods.outer.diloco import DiLoCo\n"
        "class Mine(DiLoCo): name, summary, paper = 'mine', 'as DiLoCo', ''\n"
    )
    with pytest.raises(ConfigError) as error:
        init(engine, *arguments)
    assert message in str(error.value)
    assert not Path("deploy").exists()


@pytest.mark.parametrize("engine", ["kubernetes", "skypilot", "ray"])
@pytest.mark.parametrize(
    ("setting", "file", "remedy"),
    [
        ("key_file", "run.key", "remove it, and give the key as HF_DILOCO_KEY there"),
        ("identity_file", "mine.pem", "name a path that they have"),
        ("identity_file", "island-{island}.pem", "name a path that they have"),
    ],
)
def test_secrets_of_this_machine_are_refused(folder: Path, engine: str, setting: str, file: str, remedy: str) -> None:
    (folder / file.replace("{island}", "2")).write_text("secret")
    with pytest.raises(ConfigError, match=rf"diloco\.{setting}: .* is a file of this machine, .*; {remedy}$"):
        init(engine, "--image", "i", "--rendezvous", BUCKET, f"diloco.{setting}={file}")


def test_an_identity_may_lie_on_the_islands_machines_alone() -> None:
    config, _ = kubernetes_files("diloco.identity_file=/secrets/{island}.pem")
    there = yaml.safe_load(config["data"]["run.yaml"])
    assert there["diloco"]["identity_file"] == "/secrets/{island}.pem"


def test_nodes_of_a_graph_are_refused(folder: Path) -> None:
    shutil.copy(ROOT / "configs" / "vision" / "quickstart.yaml", folder / "run.yaml")
    with pytest.raises(ConfigError, match="--node NUMBER"):
        init("slurm", "--rendezvous", "tcp://10.0.0.1:29400")


def test_an_unknown_engine_is_a_wrong_command() -> None:
    with pytest.raises(ConfigError, match=r"'sge': give one of slurm, compose, kubernetes, skypilot, ray$"):
        init("sge")


def test_islands_are_counted() -> None:
    assert "start 3 islands with:" in init("slurm", "--rendezvous", BUCKET)
    assert "start 1 island with:" in init("slurm", "--rendezvous", BUCKET, "--islands", "1", "--force")


# Slurm


def test_slurm_reads_paths_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "100% of \\it 'as' \"is\" #1"
    place.mkdir()
    monkeypatch.chdir(place)
    write_run_file(deepspeed=None)
    init("slurm", "--rendezvous", BUCKET)
    script = written("slurm", "islands.sbatch").read_text()
    # What Slurm's own reader does with quotes, backslashes and # is what a shell does.
    options = [shlex.split(line, comments=True)[0] for line in re.findall("^#SBATCH (.+)$", script, re.MULTILINE)]
    assert f"--chdir={place}" in options
    (output,) = (option for option in options if option.startswith("--output="))
    assert output == f"--output={place / written('slurm', 'island-%a.log')}".replace("100%", "100%%")


def test_slurm_reads_a_run_file_that_comes_with_the_package(folder: Path) -> None:
    init("slurm", "--rendezvous", BUCKET, run_file="quickstart")
    script = Path("deploy", "quickstart", "slurm", "islands.sbatch").read_text()
    (run_file,) = re.findall(r"\S+/quickstart.yaml", script)
    assert Path(run_file).is_file()


# Compose


def test_compose_is_given_no_run_file_outside_its_folder() -> None:
    with pytest.raises(ConfigError, match=r"/quickstart.yaml: containers see .* `hf-diloco configs copy`"):
        init("compose", "--image", "i", run_file="quickstart")


def compose_services(*arguments: str) -> dict[str, Any]:
    init("compose", "--image", "registry.example/hf-diloco:1", *arguments)
    (file,) = documents("compose")
    assert file["name"] == "my-run-1"
    services: dict[str, Any] = file["services"]
    return services


def test_compose_has_a_service_for_each_island_and_one_to_meet_at(folder: Path) -> None:
    services = compose_services("--gpus-per-island", "2", SAMPLE)
    assert sorted(services) == ["island-0", "island-1", "island-2", "rendezvous"]
    for number in range(3):
        service = services[f"island-{number}"]
        command = [word.replace("$$", "$") for word in service["command"]]
        assert command[:5] == ["hf-diloco", "launch", str(folder / "run.yaml"), "--island", str(number)]
        assert {SAMPLE, "launch.num_processes=2", "http://rendezvous:29400/My.Run_1"} <= set(command)
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(2 * number), str(2 * number + 1)]
        assert service["volumes"] == [{"type": "bind", "source": str(folder), "target": str(folder)}]


def test_compose_with_a_store_keeps_none() -> None:
    services = compose_services("--gpus-per-island", "0", "--rendezvous", "file:///shared/store")
    assert sorted(services) == ["island-0", "island-1", "island-2"]
    assert "deploy" not in services["island-0"]
    assert services["island-0"]["volumes"][1]["source"] == "/shared/store"


def test_compose_takes_the_file(folder: Path) -> None:
    services = compose_services("--gpus-per-island", "1", SAMPLE)
    path = Path("deploy", "My.Run_1", "compose", "compose.yaml")
    programs = (["docker", "compose"], ["docker-compose"])
    found = next((words for words in programs if _works([*words, "version"])), None)
    if found is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    if found == ["docker-compose"]:  # the first Compose knew no name in the file
        path.write_text(path.read_text().replace('name: "my-run-1"\n', ""))
    understood = yaml.safe_load(run([*found, "-f", path, "config"], cwd=folder).output)["services"]
    assert understood.keys() == services.keys()
    # It prints what it would have to read again: with the dollars doubled.
    assert understood["island-1"]["command"] == services["island-1"]["command"]


def _works(command: list[str]) -> bool:
    return shutil.which(command[0]) is not None and run(command, expect=None).returncode == 0


# Kubernetes


def kubernetes_files(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    init("kubernetes", "--image", "registry.example/hf-diloco:1", "--rendezvous", BUCKET, *arguments)
    config, job = documents("kubernetes")
    return config, job


@pytest.mark.parametrize("num_gpus", ["0", "8"])
def test_kubernetes_accepts_the_files(num_gpus: str) -> None:
    for document in kubernetes_files("--gpus-per-island", num_gpus):
        for version in ("1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


def test_kubernetes_runs_an_index_for_each_island() -> None:
    _, job = kubernetes_files("--islands", "5", "--gpus-per-island", "8")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 5, 5)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container["env"][0]["name"] == ENV_ISLAND
    assert container["command"][-4:] == ["--num-islands", "5", "--rendezvous", BUCKET]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 120, "the launcher's --grace"


def test_the_run_file_of_pods_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = kubernetes_files("--gpus-per-island", "8", "diloco.sync_every=7", SAMPLE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "run.yaml").write_text(config["data"]["run.yaml"])
    there: RunFile = load_run_file("run.yaml", [])
    assert (there.name, there.diloco.sync_every, there.launch.num_processes) == ("My.Run_1", 7, 8)
    assert isinstance(there.deepspeed, dict)
    assert there.deepspeed["zero_optimization"]["stage"] == 2
    assert there.sample is not None
    assert there.sample.prompt == "$HOME is $(HOME)"
    assert str(tmp_path) not in config["data"]["run.yaml"]


@pytest.mark.parametrize("given", ["null", "{zero_optimization: {stage: 1}}"])
def test_the_run_file_of_pods_keeps_what_names_no_file(given: str) -> None:
    config, _ = kubernetes_files(f"deepspeed={given}")
    assert yaml.safe_load(config["data"]["run.yaml"])["deepspeed"] == yaml.safe_load(given)


@pytest.mark.parametrize("name", ["1e5", "123", "null"])
def test_names_that_yaml_would_take_for_something_else(name: str, tmp_path: Path) -> None:
    init("kubernetes", "--name", name, "--rendezvous", BUCKET, "--image", "image", "--folder", "pods")
    config = next(yaml.safe_load_all(Path("pods", "job.yaml").read_text()))
    Path("there.yaml").write_text(config["data"]["run.yaml"])
    assert load_run_file("there.yaml").name == name
    init("slurm", "--name", name, "--rendezvous", BUCKET, "--folder", "jobs")
    line = re.search(r"run\.yaml (\S+) &", Path("jobs", "islands.sbatch").read_text())
    assert line is not None
    assert load_run_file("run.yaml", shlex.split(line[1])).name == name


def test_numbers_of_deepspeeds_file_stay_numbers(folder: Path) -> None:
    settings = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    (folder / "ds.json").write_text(json.dumps(settings))
    config, _ = kubernetes_files("deepspeed=ds.json")
    (folder / "there.yaml").write_text(config["data"]["run.yaml"])
    assert load_run_file("there.yaml").deepspeed == settings


@pytest.mark.parametrize(("name", "label"), [("1b-run", "run-1b-run"), ("7", "run-7"), ("A_", "a"), ("_", "run")])
def test_the_name_for_engines_begins_with_a_letter(folder: Path, name: str, label: str) -> None:
    options = LaunchOptions(Path("run.yaml"), [f"name={json.dumps(name)}"], rendezvous=BUCKET)
    assert plan_deployment("skypilot", options, None, 1, "i", None).label == label


# SkyPilot


@pytest.mark.parametrize("num_gpus", [0, 8])
def test_skypilot_starts_a_job_for_each_island(folder: Path, num_gpus: int) -> None:
    arguments = ["--rendezvous", BUCKET, "--gpus-per-island", str(num_gpus), SAMPLE]
    output = init("skypilot", "--image", "registry.example/hf-diloco:1", *arguments)
    assert "for island in 0 1 2; do sky jobs launch --yes --async --name my-run-1-$island" in output
    task = yaml.safe_load(written("skypilot", "island.yaml").read_text())
    # Each key must be of SkyPilot's schema, which is too large a package for these tests.
    assert task.keys() == {"name", "resources", "envs", "file_mounts", "run", "config"}
    resources = task["resources"]
    assert resources.pop("accelerators", None) == (
        dict.fromkeys(("A100-80GB", "H100", "H200"), 8) if num_gpus else None
    )
    assert resources == {
        "image_id": "docker:registry.example/hf-diloco:1",
        "cpus": "64+" if num_gpus else "1+",
        "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 10, "recover_on_exit_codes": [STOPPED]},
    }
    assert task["envs"] == {ENV_ISLAND: None}
    assert task["file_mounts"] == {"~/hf-diloco/run.yaml": str(folder / written("skypilot", "run.yaml"))}
    assert (
        f"exec hf-diloco launch hf-diloco/run.yaml --output runs --num-islands 3 --rendezvous {BUCKET}" in task["run"]
    )
    (hook,) = task["config"]["hooks"]
    assert hook.keys() == {"run", "timeout"}
    assert hook["timeout"] > 120, "the launcher's --grace"
    assert load_run_file(written("skypilot", "run.yaml"), []).launch.num_processes == (num_gpus or 1)


def test_the_hook_of_skypilot_waits_for_the_checkpoint(folder: Path) -> None:
    init("skypilot", "--image", "i", "--rendezvous", BUCKET)
    task = yaml.safe_load(written("skypilot", "island.yaml").read_text())
    (folder / "hf-diloco").mkdir()
    program = folder / "bin" / "hf-diloco"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/bash\ntrap 'echo saved > saved; exit 3' TERM\ntouch started\nwhile :; do sleep .05; done"
    )
    program.chmod(0o755)
    environment = {"HOME": folder, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    with Processes() as processes:
        island = processes.spawn(["bash", "-c", task["run"]], env=environment)
        wait_until((folder / "started").exists, "not started")
        hook = processes.spawn(["bash", "-c", task["config"]["hooks"][0]["run"]], env=environment)
        island.wait(expect=3)
        assert (folder / "saved").exists()
        hook.wait()


# Ray


def test_ray_submits_a_job_for_each_island(folder: Path) -> None:
    output = init("ray", "--rendezvous", BUCKET, "--gpus-per-island", "2", "output=/shared/runs", SAMPLE)
    script = folder / written("ray", "submit.sh")
    assert f"bash {script}" in output
    program = folder / "bin" / "ray"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\nprintf "<%s>" "$@"; echo')
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    jobs = run(["bash", script], env=environment).output.splitlines()
    assert [job.rpartition("<python><island.py>")[2] for job in jobs] == ["<0>", "<1>", "<2>"]
    (job,) = run(["bash", script, "1"], env=environment).output.splitlines()
    assert job.startswith("<job><submit><--no-wait><--submission-id><my-run-1-1-")
    assert f"<--working-dir><{script.parent}>" in job
    assert '<{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "150"}}>' in job
    assert load_run_file(script.parent / "run.yaml", []).launch.num_processes == 2


def test_the_program_of_ray_is_for_this_run() -> None:
    init("ray", "--rendezvous", BUCKET, "--gpus-per-island", "2", "output=/shared/runs")
    text = written("ray", "island.py").read_text()
    (arguments,) = re.findall("^ARGUMENTS = (.+)$", text, re.MULTILINE)
    assert ast.literal_eval(arguments) == [
        *("run.yaml", "--output", "/shared/runs", "--num-islands", "3", "--rendezvous", BUCKET),
    ]
    assert "num_cpus=16,\n    num_gpus=2,\n" in text
    run([sys.executable, "-m", "ruff", "check", "--isolated", written("ray", "island.py").absolute()])


@pytest.mark.parametrize(("given", "threads"), [("16", "8"), ("3", "3"), (None, None)])
def test_rays_threads_for_a_task_are_shared_among_its_ranks(
    monkeypatch: pytest.MonkeyPatch, given: str | None, threads: str | None
) -> None:
    init("ray", "--rendezvous", BUCKET, "--gpus-per-island", "2")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=lambda **_: lambda function: function))
    program = runpy.run_path(str(written("ray", "island.py")))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:  # by Ray, the CPUs of the task; or by somebody
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert program["environment"]().get("OMP_NUM_THREADS") == threads


def test_shellcheck_accepts_what_submits_to_ray() -> None:
    init("ray", "--rendezvous", BUCKET)
    run([Path(sys.executable).parent / "shellcheck", written("ray", "submit.sh").absolute()])
