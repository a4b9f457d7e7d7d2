"""Which island a process is: an error where nobody said, and a word where it is alone or waits."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_diloco import DiLoCoCallback, DiLoCoConfig, GossipCallback, OuterLoop
from hf_diloco.apps.common.load import read_run_file
from hf_diloco.apps.lm import train as lm
from hf_diloco.apps.lm.runfile import DiLoCoBlock, RunFile
from hf_diloco.apps.vision import train as vision
from hf_diloco.apps.vision.runfile import GossipBlock, VisionRun
from hf_diloco.errors import ConfigError
from hf_diloco.gossip.config import GossipConfig
from hf_diloco.gossip.open import open_node
from hf_diloco.inner.island import IslandGroup
from hf_diloco.rounds.open import open_session
from hf_diloco.trainer.gossip_start import check_gossip
from tests.processes import ROOT, Processes
from tests.programs.trainer_island import make_model
from tests.trainers import make_trainer

NOWHERE = "tcp://127.0.0.1:9"
NO_NUMBER = r"there are 2 {unit}s, and this one has no number: set HF_DILOCO_ISLAND \(or {unit}=\) .* from 0 to 1"


def test_one_of_several_islands_needs_a_number(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(num_islands=2, rendezvous=NOWHERE, join_timeout=0.2))
    with pytest.raises(ConfigError, match=NO_NUMBER.format(unit="island")):
        trainer.train()


def test_a_callback_takes_its_number_as_it_takes_every_setting() -> None:
    assert DiLoCoCallback(num_islands=2, island=1, rendezvous=NOWHERE).config.island == 1
    assert GossipCallback(num_nodes=2, node=1, rendezvous=NOWHERE).config.node == 1
    for kind, settings in ((DiLoCoCallback, DiLoCoConfig), (OuterLoop, DiLoCoConfig), (GossipCallback, GossipConfig)):
        assert not set(inspect.signature(kind).parameters) & set(settings.model_fields), "a setting is out of reach"


def test_one_of_several_nodes_needs_a_number(tmp_path: Path) -> None:
    callback = GossipCallback(num_nodes=2, rendezvous=NOWHERE, join_timeout=0.2)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=NO_NUMBER.format(unit="node")):
        callback.make_optimizer(make_model(lora=False, tied=True, seed=1), args)


@pytest.mark.parametrize(("block", "unit"), [(DiLoCoBlock, "island"), (GossipBlock, "node")])
def test_a_run_file_leaves_the_number_to_whoever_starts_it(
    block: Any, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {f"num_{unit}s": 2, "rendezvous": NOWHERE}
    assert unit not in block(**settings).resolve().model_fields_set
    assert block(**settings, **{unit: 0}).resolve().model_fields_set >= {unit}
    monkeypatch.setenv("HF_DILOCO_ISLAND", "1")
    assert getattr(block(**settings).resolve(), unit) == 1


@pytest.mark.parametrize(("old", "new"), [("num_islands", "num_nodes"), ("island", "node")])
def test_the_old_names_of_nodes_are_refused_with_the_new_ones(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{old}=2: .* say {new}=2$"):
        GossipConfig(**{old: 2})


@pytest.mark.parametrize(("kind", "train", "unit"), [(RunFile, lm.train, "island"), (VisionRun, vision.train, "node")])
def test_a_run_without_a_number_ends_before_anything_is_written(
    kind: Any, train: Any, unit: str, tmp_path: Path
) -> None:
    file = {RunFile: "configs/quickstart.yaml", VisionRun: "configs/vision/quickstart.yaml"}[kind]
    run = read_run_file(kind, ROOT / file, [f"output={tmp_path}", f"{kind.meeting_name}.rendezvous={NOWHERE}"])
    assert run.meeting.num_islands > 1
    numbers = rf"this one has no number.* from 0 to {run.meeting.num_islands - 1}"
    with pytest.raises(ConfigError, match=rf"{unit}s, and {numbers}"):
        train(run)
    assert not list(tmp_path.iterdir())


def test_the_environment_gives_the_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DILOCO_ISLAND", "0")
    url = f"file://{tmp_path}/store"
    session = open_session(DiLoCoConfig(num_islands=2, min_islands=1, rendezvous=url), IslandGroup())
    assert session.config.island == 0


@pytest.mark.parametrize("unit", ["island", "node"])
def test_who_is_alone_says_how_to_be_several(unit: str, caplog: pytest.LogCaptureFixture) -> None:
    def begin(**settings: Any) -> None:
        if unit == "island":
            open_session(DiLoCoConfig(**settings), IslandGroup())
        else:
            config = GossipConfig(**settings)
            open_node(config, check_gossip(config), IslandGroup())

    begin(**{f"num_{unit}s": 1})
    assert caplog.messages == []
    begin()
    (line,) = caplog.messages
    assert line.startswith(f"this {unit} trains alone, as num_{unit}s is not set")
    assert "HF_DILOCO_NUM_ISLANDS, HF_DILOCO_ISLAND and HF_DILOCO_RENDEZVOUS" in line


@pytest.mark.distributed
def test_who_waits_is_seen_in_a_script_that_sets_up_no_logging(tmp_path: Path, free_port: int) -> None:
    settings = {"output_dir": str(tmp_path), "result": str(tmp_path / "result"), "diloco": {"sync_every": 2}}
    meeting = {
        "HF_DILOCO_NUM_ISLANDS": 2,
        "HF_DILOCO_ISLAND": 0,
        "HF_DILOCO_RENDEZVOUS": f"tcp://127.0.0.1:{free_port}",
    }
    program = str(ROOT / "tests" / "programs" / "trainer_island.py")
    with Processes() as processes:
        island = processes.spawn([sys.executable, program, json.dumps(settings)], env={**meeting, "PYTHONPATH": ROOT})
        island.wait_for(rf"island 0: .*waiting for island 1.* at tcp://127\.0\.0\.1:{free_port} \(\d+ s of 600 s\)")
