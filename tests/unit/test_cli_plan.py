"""From a run file to the commands that start its islands."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_diloco.cli import devices
from hf_diloco.cli.plan import LaunchOptions, Plan, load_options, make_plan
from hf_diloco.cli.run import run_launch, run_simulation
from hf_diloco.cli.script import plan_script
from hf_diloco.errors import ConfigError
from hf_diloco.utils.urls import host_and_port
from tests.processes import ROOT

RUN: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "training": {"max_steps": 4},
    "diloco": {"num_islands": 2, "sync_every": 2},
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    return tmp_path


def run_file(folder: Path, **changes: object) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RUN, "output": str(folder / "runs"), **changes}))
    return path


def planned(options: LaunchOptions) -> Plan:
    return make_plan(load_options(options), options)


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


def test_all_islands_with_their_own_ports_and_one_rendezvous(folder: Path) -> None:
    plan = planned(LaunchOptions(run_file(folder), ("training.max_steps=8",)))
    assert [island.number for island in plan.islands] == [0, 1]
    assert plan.rendezvous is not None
    assert plan.rendezvous.startswith("tcp://127.0.0.1:")
    ports = {option(island.command, "--main_process_port") for island in plan.islands}
    assert len(ports | {plan.rendezvous.rsplit(":", 1)[1]}) == 3
    for number, island in enumerate(plan.islands):
        assert island.folder == folder / "runs" / "tiny" / f"island-{number}"
        assert island.environment["HF_DILOCO_ISLAND"] == str(number)
        assert island.environment["HF_DILOCO_NUM_ISLANDS"] == "2"
        assert island.environment["HF_DILOCO_RENDEZVOUS"] == plan.rendezvous
        assert island.environment["HF_DILOCO_LAUNCHED"] == "1"
        assert island.command[-3:] == ("hf_diloco.apps.lm", str(folder / "tiny.yaml"), "training.max_steps=8")
    assert not (folder / "runs").exists(), "planning writes nothing"


@pytest.mark.parametrize(
    "name",
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR"),
        "ACCELERATE_USE_CPU",  # would drop DeepSpeed silently
        "TORCHELASTIC_USE_AGENT_STORE",  # rank 0 would wait for a store that nobody keeps
        *("PET_NNODES", "PET_NPROC_PER_NODE"),  # defaults of torchrun's options, as Kubeflow sets them
        "OMPI_COMM_WORLD_LOCAL_RANK",  # DeepSpeed would refuse another LOCAL_RANK
    ],
)
def test_an_island_is_no_part_of_another_launchers_world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "3")
    for island in planned(LaunchOptions(run_file(folder))).islands:
        assert island.environment[name] is None


def test_settings_of_libraries_reach_the_islands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCHELASTIC_ENABLE_FILE_TIMER", "NCCL_DEBUG", "ACCELERATE_LOG_LEVEL", "SLURM_JOB_ID")
    for name in names:
        monkeypatch.setenv(name, "1")
    for island in planned(LaunchOptions(run_file(folder))).islands:
        assert not island.environment.keys() & set(names)


@pytest.mark.parametrize(
    ("deepspeed", "num_processes", "kind"),
    [("zero2.json", 1, "DEEPSPEED"), ("zero2.json", 2, "DEEPSPEED"), (None, 1, "NO"), (None, 2, "MULTI_GPU")],
)
def test_accelerate_configuration(folder: Path, deepspeed: str | None, num_processes: int, kind: str) -> None:
    plan = planned(LaunchOptions(run_file(folder, deepspeed=deepspeed, launch={"num_processes": num_processes})))
    for island in plan.islands:
        path = Path(option(island.command, "--config_file"))
        assert path == island.folder / "accelerate.yaml"
        values = yaml.safe_load(island.files[path])
        assert (values["distributed_type"], values["num_processes"]) == (kind, num_processes)
        assert values["use_cpu"] is False


def test_own_accelerate_configuration(folder: Path) -> None:
    (folder / "mine.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 3\n")
    own = run_file(folder, accelerate="mine.yaml", deepspeed="zero2.json", launch={"threads": 5})
    island = planned(LaunchOptions(own)).islands[0]
    assert option(island.command, "--config_file") == str(folder / "mine.yaml")
    assert option(island.command, "--num_processes") == "3"
    assert not island.files
    overridden = planned(LaunchOptions(own, ("launch.num_processes=2",))).islands[0]
    assert option(overridden.command, "--num_processes") == "2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: DEEPSPEED\nnum_machines: 2\n", "num_machines=2"),
        ("distributed_type: MULTI_GPU\n", "set distributed_type: DEEPSPEED"),
        ("just words", "expected `key: value` lines"),
        ("a: [", "not valid YAML"),
        ("num_processes: " + "1" * 5000, "more than 300 digits"),
        ("num_processes: two", "has num_processes 'two': give a whole number"),
    ],
)
def test_accelerate_configurations_that_cannot_work(folder: Path, text: str, message: str) -> None:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        planned(LaunchOptions(run_file(folder, accelerate="mine.yaml", deepspeed="zero2.json")))


def test_multi_cpu_is_refused(folder: Path) -> None:
    (folder / "mine.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match="starts one process only"):
        planned(LaunchOptions(run_file(folder, accelerate="mine.yaml")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\n",
            "the run file has a block fsdp: set distributed_type: FSDP",
        ),
        ("distributed_type: FSDP\nnum_processes: 2\n", "is for FSDP1: set fsdp_config: {fsdp_version: 2}"),
    ],
)
def test_accelerate_configurations_that_do_not_go_with_fsdp2(folder: Path, text: str, message: str) -> None:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        planned(LaunchOptions(run_file(folder, accelerate="mine.yaml", fsdp={})))


def test_fsdp2_needs_no_accelerate_configuration_of_its_own(folder: Path) -> None:
    island = planned(LaunchOptions(run_file(folder, fsdp={}, launch={"num_processes": 2}))).islands[0]
    assert yaml.safe_load(island.files[island.folder / "accelerate.yaml"])["distributed_type"] == "MULTI_GPU"


@pytest.mark.parametrize("num_processes", [2, 5])
def test_replicas_that_cannot_be_sharded(folder: Path, num_processes: int) -> None:
    file = run_file(folder, fsdp={"num_replicas": 2}, launch={"num_processes": num_processes})
    with pytest.raises(
        ConfigError, match=f"fsdp.num_replicas: 2 replicas .*, but the island has {num_processes} ranks"
    ):
        planned(LaunchOptions(file))


def test_one_island_alone(folder: Path, free_port: int) -> None:
    url = f"tcp://10.1.2.3:{free_port}"
    plan = planned(LaunchOptions(run_file(folder), island=1, rendezvous=url))
    assert [island.number for island in plan.islands] == [1]
    assert plan.islands[0].environment["HF_DILOCO_RENDEZVOUS"] == url
    assert f'diloco.rendezvous="{url}"' in plan.islands[0].command


def test_one_island_alone_needs_a_rendezvous_and_a_number_that_exists(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 islands need a place to meet"):
        planned(LaunchOptions(run_file(folder), island=1))
    with pytest.raises(ConfigError, match="island 2 does not exist"):
        planned(LaunchOptions(run_file(folder), island=2, rendezvous="tcp://h:1"))
    with pytest.raises(ConfigError, match="--island NUMBER"):
        planned(LaunchOptions(run_file(folder), ("diloco.island=1",)))


def test_environment_beats_the_file_and_the_command_line_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("HF_DILOCO_NUM_ISLANDS", "3")
    monkeypatch.setenv("HF_DILOCO_ISLAND", "7")  # of another run: all islands of this one are started
    monkeypatch.setenv("HF_DILOCO_RENDEZVOUS", f"tcp://127.0.0.1:{free_port}")
    plan = planned(LaunchOptions(run_file(folder)))
    assert len(plan.islands) == 3
    assert plan.rendezvous == f"tcp://127.0.0.1:{free_port}"
    assert len(planned(LaunchOptions(run_file(folder), num_islands=1)).islands) == 1


def test_what_the_environment_says_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be left over from another run."""
    monkeypatch.setenv("HF_DILOCO_ISLAND", "1")
    alone = LaunchOptions(run_file(folder), island=1)
    refused = r"ISLAND=1 in the environment starts island 1 alone, .* unset"
    with pytest.raises(ConfigError, match=refused):
        planned(alone)
    with pytest.raises(ConfigError, match=refused):
        plan_script(["echo"], island=1, num_islands=2)
    with pytest.raises(ConfigError, match=r"^--islands beside --simulate 2"):  # and not --island, which nobody gave
        run_simulation(replace(alone, num_islands=2), 2, dry_run=True)
    monkeypatch.setenv("HF_DILOCO_RENDEZVOUS", "tcp://10.0.0.1:29400")
    told = "island 1 (HF_DILOCO_ISLAND) of 2, meeting at tcp://10.0.0.1:29400 (HF_DILOCO_RENDEZVOUS); full logs"
    assert planned(alone).describe().startswith(told)


def test_shorthands_are_passed_on(folder: Path) -> None:
    options = LaunchOptions(run_file(folder), name="123", output=str(folder / "out"), resume="never", num_islands=1)
    run, plan = load_options(options), planned(options)
    assert run.name == "123", "a name, not a number"
    assert run.folder == folder / "out" / "123"
    assert 'launch.resume="never"' in plan.islands[0].command
    assert options.resume_command(run) == (
        f"hf-diloco launch {folder}/tiny.yaml --num-islands 1 --name 123 --output {folder}/out --resume auto"
    )


def test_nodes_are_called_nodes_in_the_command_that_continues(free_port: int) -> None:
    file, url = ROOT / "configs" / "vision" / "quickstart.yaml", f"tcp://127.0.0.1:{free_port}"
    options = LaunchOptions(file, island=1, num_islands=3, rendezvous=url)
    run = load_options(options)
    assert (run.meeting.island, run.meeting.num_islands) == (1, 3)
    assert options.resume_command(run) == f"hf-diloco launch {file} --node 1 --num-nodes 3 --rendezvous {url}"


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_port_in_use_is_refused(folder: Path, host: str, family: socket.AddressFamily) -> None:
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with taken:
        url = f"tcp://{host_and_port(host, taken.getsockname()[1])}"
        with pytest.raises(ConfigError, match="in use by another program"):
            planned(LaunchOptions(run_file(folder), rendezvous=url))
        planned(LaunchOptions(run_file(folder), rendezvous=url, island=1))  # island 0 listens there: as it should


@pytest.mark.parametrize(
    ("rendezvous", "why"),
    [("tcp://no-host.invalid:29400", "has no address"), ("file://{file}", "is a file: name a folder")],
)
def test_a_place_where_nobody_can_meet_is_refused(folder: Path, rendezvous: str, why: str) -> None:
    file = run_file(folder)
    with pytest.raises(ConfigError, match=why):
        planned(LaunchOptions(file, rendezvous=rendezvous.format(file=file)))


@pytest.mark.parametrize(
    ("launch", "environment", "threads"),
    [
        ({"threads": 3}, "7", "3"),
        ({}, "7", "7"),
        ({"num_processes": 2}, None, "2"),  # 8 cores, 2 islands of 2 processes
        ({"num_processes": 8}, None, "1"),
    ],
)
def test_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, launch: dict[str, int], environment: str | None, threads: str
) -> None:
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    if environment:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    plan = planned(LaunchOptions(run_file(folder, launch=launch)))
    assert plan.islands[0].environment["OMP_NUM_THREADS"] == threads


def test_islands_share_out_the_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6,7")
    plan = planned(LaunchOptions(run_file(folder, launch={"num_processes": 2, "threads": 1})))
    assert [island.environment["CUDA_VISIBLE_DEVICES"] for island in plan.islands] == ["4,5", "6,7"]
    assert "share" not in plan.crowding
    with pytest.raises(ConfigError, match="an island of 5 processes needs 5 CUDA devices, but this machine has 4"):
        planned(LaunchOptions(run_file(folder, launch={"num_processes": 5})))
    on_cpu = planned(LaunchOptions(run_file(folder, launch={"num_processes": 3, "use_cpu": True})))
    assert "CUDA_VISIBLE_DEVICES" not in on_cpu.islands[0].environment


@pytest.mark.parametrize(("visible", "num_processes", "shares"), [("3", 1, ["3", "3"]), ("0,1,2", 2, ["0,1", "0,1"])])
def test_islands_share_gpus_where_there_are_too_few(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str, num_processes: int, shares: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = planned(LaunchOptions(run_file(folder, launch={"num_processes": num_processes, "threads": 1})))
    assert [island.environment["CUDA_VISIBLE_DEVICES"] for island in plan.islands] == shares
    assert f"2 islands share {num_processes} CUDA device" in plan.crowding
    assert "--island" in plan.crowding
    assert devices.num_sharing([share.split(",") for share in shares]) == 2


def test_gpus_that_are_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="shows no CUDA device"):
        planned(LaunchOptions(run_file(folder, launch={"use_cpu": False})))


def test_nvidia_smi_is_asked_when_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.cuda_devices() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-2)'\n")
    program.chmod(0o755)
    assert devices.cuda_devices() == ["0", "1"]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert devices.cuda_devices() == []
    program.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(devices, "ANSWER_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="nvidia-smi -L` does not answer"):
        devices.cuda_devices()


@pytest.mark.parametrize(
    ("visible", "found"), [("GPU-a, MIG-b", ["GPU-a", "MIG-b"]), ("", []), ("-1", []), ("2,-1,3", ["2"])]
)
def test_visible_devices(visible: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.cuda_devices() == found  # -1 hides what follows, as CUDA has it


@pytest.mark.parametrize("setting", ["training.learning_rte=1", "training.lr=1"])
def test_names_of_the_trainers_settings_are_checked_before_anything_starts(folder: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        run_launch(LaunchOptions(run_file(folder), (setting,)), grace=1.0, dry_run=False)
    assert not (folder / "runs").exists()


def test_the_folder_of_an_earlier_run_is_refused_before_anything_starts(folder: Path) -> None:
    (folder / "runs" / "tiny" / "island-1" / "checkpoint-4").mkdir(parents=True)
    planned(LaunchOptions(run_file(folder)))
    planned(LaunchOptions(run_file(folder), resume="never", island=0, rendezvous="tcp://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="island-1 holds checkpoints of an earlier run"):
        planned(LaunchOptions(run_file(folder), resume="never"))


def test_a_checkpoint_of_other_data_is_refused_with_the_way_to_train_its_model(folder: Path) -> None:
    old = folder / "runs" / "old"
    (old / "island-0" / "checkpoint-4").mkdir(parents=True)
    (old / "island-0" / "checkpoint-4" / "trainer_state.json").write_text("{}")
    (old / "run.json").write_text(json.dumps({"seed": 42, "data": {"sequence_length": 64}}))
    message = r"data.sequence_length=64, here data.sequence_length=256: .* begin that run with it as model.path"
    with pytest.raises(ConfigError, match=message):
        planned(LaunchOptions(run_file(folder), resume=f"{old}/island-0/checkpoint-4"))


def test_the_folder_of_a_run_of_another_kind_is_refused(folder: Path) -> None:
    """The model that it has trained would be overwritten."""
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "run.json").write_text(json.dumps({"name": "tiny", "gossip": {"num_nodes": 4}}))
    with pytest.raises(ConfigError, match="tiny holds a run of nodes, of another kind: choose another name"):
        planned(LaunchOptions(run_file(folder)))
    for text in ('{"diloco": {"num_islands": 2}}', "[]", "not JSON"):
        (folder / "runs" / "tiny" / "run.json").write_text(text)
        planned(LaunchOptions(run_file(folder)))


@pytest.mark.parametrize(
    ("output", "message"),
    {
        "file": "output: {folder}/file is a file, where the folder {folder}/file/tiny/island-0 is to be made",
        "loop": "output: {folder}/loop is a link to nothing",
        "x" * 300: "cannot be used: File name too long; name another folder",
    }.items(),
)
def test_where_no_folder_can_be_made_nothing_starts(folder: Path, output: str, message: str) -> None:
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(ConfigError, match=message.format(folder=folder)):
        planned(LaunchOptions(run_file(folder, output=str(folder / output))))


def test_the_home_folder_may_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "checkpoint-4").mkdir()
    (folder / "checkpoint-4" / "trainer_state.json").touch()
    plan = planned(LaunchOptions(run_file(folder, output="~/runs", launch={"resume": "~/checkpoint-4"})))
    assert plan.islands[0].folder == folder / "runs" / "tiny" / "island-0"
    file = run_file(folder, diloco={**RUN["diloco"], "identity_file": "~/key-{island}"})
    assert load_options(LaunchOptions(file)).meeting.identity_file == folder / "key-{island}"


@pytest.mark.parametrize("address", ["192.0.2.1", "no.such.host.invalid", "x" * 70])
def test_an_address_of_another_machine_is_refused_before_anything_starts(folder: Path, address: str) -> None:
    """192.0.2.0/24 is kept for documentation."""
    settings = {**RUN["diloco"], "bind_address": "127.0.0.1"}
    planned(LaunchOptions(run_file(folder, diloco=settings)))
    with pytest.raises(ConfigError, match=f"bind_address: '{address}' is no address of this machine"):
        planned(LaunchOptions(run_file(folder, diloco={**settings, "bind_address": address})))
    with pytest.raises(ConfigError, match="is no address of this machine"):  # nor for one that meets nobody
        planned(LaunchOptions(run_file(folder, diloco={"num_islands": 1, "bind_address": address})))


def test_an_option_of_a_wrong_type_is_told_once(folder: Path) -> None:
    settings = {"method": "overlap-local-sgd", "options": {"pull": [1]}}
    with pytest.raises(ConfigError) as caught:
        planned(LaunchOptions(run_file(folder, diloco={**RUN["diloco"], **settings})))
    assert str(caught.value).endswith("diloco.options.pull: expected a number, text, true or false, got [1]")
