"""Every command in README and docs is run, over run files that are made short; what cannot be run is at least parsed.

A block that cannot be run says why in a comment before it: `<!-- not run: needs two machines -->`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_diloco.apps.common.yaml_file import read_yaml
from tests.docs.command_lines import check, check_shell, commands
from tests.docs.pages import Block, all_blocks, blocks
from tests.processes import ROOT, Completed, find_free_port, run

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEMO = "hf-diloco launch quickstart\n"
TIMEOUT = 280

BASH = all_blocks("bash")
RUN = [block for block in BASH if not block.not_run]
NOT_RUN = [block for block in BASH if block.not_run]
PYTHON = [block for block in all_blocks("python") if not block.not_run]


def by_name(value: Block | Path) -> str:
    return value.name


def is_slow(block: Block) -> bool:
    """Whether it trains anything but the demo; or looks at such a run, or draws."""
    takes_long = re.search(r"hf-diloco launch(?!.*--dry-run)|train_lm\.py|examples/|runs/watched|--draw", block.text)
    return bool(takes_long) and block.text != DEMO


def in_tiers(blocks: list[Block]) -> list[Any]:
    return [pytest.param(block, marks=pytest.mark.slow if is_slow(block) else ()) for block in blocks]


class Project:
    """A copy of the project in which small runs take four steps. Each shell text is run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("examples", "benchmarks", "hf_diloco", "scripts", "train_lm.py", "Makefile"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "configs", folder / "configs")
        for name in (
            "quickstart",
            "bucket",
            "vision/quickstart",
            "recipes/snoo",
            "recipes/slowmo",
            "recipes/overlap_local_sgd",
            "recipes/muloco",
            "recipes/fsdp2",
        ):
            self._shorten(folder / "configs" / f"{name}.yaml")
        self._done: dict[str, Completed] = {}

    @staticmethod
    def _shorten(path: Path) -> None:
        settings, _ = read_yaml(path)
        settings["training"] |= {
            "max_steps": 4,
            "warmup_steps": 1,
            "logging_steps": 1,
            "eval_steps": 2,
            "save_steps": 2,
        }
        if "diloco" in settings:
            settings["diloco"]["sync_every"] = 2
            settings["data"] |= {"sequence_length": 32, "num_eval_sequences": 8}
            settings["tokenizer"] = {"train": {"vocab_size": 400, "max_megabytes": 0.2}}
            settings["sample"]["num_tokens"] = 8
        path.write_text(yaml.safe_dump(settings))

    def shell(self, text: str) -> Completed:
        """What the text does in bash; every command of it must succeed, also those in the background.

        Where a longer text that begins with it has run, it has run, too.
        """
        text = next((done for done in self._done if done.startswith(text)), text)
        if text not in self._done:
            env = {
                "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
                "PYTHONPATH": self.folder,  # so that `quickstart` is the short one of this copy
            }
            script = re.sub(
                r"^wait$", 'for job in $(jobs -p); do wait "$job"; done', _with_free_ports(text), flags=re.M
            )
            if text != DEMO:  # which shows that the name is found, in a process that begins as a reader's does
                script = re.sub(r"(?<=launch )quickstart\b", "configs/quickstart.yaml", script)
            self._done[text] = run(
                [sys.executable, "-m", "tests.docs.shell", script], env=env, cwd=self.folder, timeout=TIMEOUT
            )
        return self._done[text]


def _with_free_ports(text: str) -> str:
    ports = {port: str(find_free_port()) for port in sorted(set(re.findall(r"\b29[45]\d\d\b", text)))}
    return re.sub(r"\b29[45]\d\d\b", lambda match: ports[match[0]], text)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    copy = Project(tmp_path_factory.mktemp("project"))
    copy.shell(DEMO)  # what `make demo` runs; later commands look at this run
    return copy


@pytest.mark.distributed
@pytest.mark.parametrize("block", in_tiers(RUN), ids=by_name)
def test_command_runs(block: Block, project: Project) -> None:
    project.shell(block.text)


@pytest.mark.distributed
@pytest.mark.parametrize("block", NOT_RUN, ids=by_name)
def test_other_commands_are_understood(block: Block) -> None:
    check_shell(block.text)
    found = commands(block.text)
    assert found
    for words in found:
        check(words)


def test_most_commands_are_run() -> None:
    assert len(RUN) >= len(NOT_RUN) / 2
    assert DEMO in {block.text for block in RUN}


@pytest.mark.distributed
def test_demo_prints_the_table_and_leaves_the_model(project: Project) -> None:
    output = project.shell(DEMO).output
    (shown,) = blocks(ROOT / "README.md", "text")
    names = re.findall(r"^([a-z/-]+(?: [a-z]+)*)  +\S", shown.text, re.MULTILINE)
    assert len(names) >= 8
    assert [name for name in names if not re.search(rf"^{name}  ", output, re.MULTILINE)] == []
    assert (project.folder / "runs" / "quickstart" / "model" / "config.json").is_file()


@pytest.mark.distributed
def test_the_page_of_the_report_is_where_docs_say(project: Project) -> None:
    project.shell("hf-diloco report runs/quickstart\nhf-diloco report runs/quickstart --html\n")
    assert (project.folder / "runs" / "quickstart" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_islands_of_three_launchers_train_one_model(project: Project) -> None:
    (block,) = [block for block in RUN if "deepspeed --num_gpus" in block.text]
    losses = re.findall(r"evaluation loss of the outer weights: (\S+)", project.shell(block.text).output)
    assert len(losses) == 3
    assert len(set(losses)) == 1


@pytest.mark.distributed
def test_metrics_page_names_what_is_recorded(project: Project) -> None:
    sections = re.split(r"^### ", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)[1:]
    named = {section.split()[0]: set(re.findall(r"`(\w+)`", section)) for section in sections}
    lines = (project.folder / "runs/quickstart/island-0/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["event"] for record in records} == set(named) - {
        "missed",
        "refused",
    }  # which none of these islands has
    for record in records:
        keys = set(record) - {"event", "time", "step"}
        if record["event"] in ("train", "eval"):  # what the Trainer adds is its own
            assert keys >= named[record["event"]] - {"outer", "inner"}
        else:
            assert keys == named[record["event"]] - {"launched_in"}  # which only a script has


@pytest.mark.distributed
def test_checkpoint_page_names_what_is_saved(project: Project) -> None:
    (checkpoint, *_) = sorted((project.folder / "runs/quickstart/island-0").glob("checkpoint-*"))
    keys = json.loads((checkpoint / "diloco" / "outer.json").read_text()).keys()
    table = (ROOT / "docs" / "checkpoints.md").read_text().split("`outer.json` holds")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(keys)
    assert (checkpoint / "diloco" / "rank-00000.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("example", EXAMPLES, ids=by_name)
def test_example_runs_as_it_says(example: Path, project: Project) -> None:
    docstring = compile(example.read_text(), example.name, "exec").co_consts[0]
    text = "".join(f"{line[4:]}\n" for line in docstring.splitlines() if line.startswith("    "))
    assert text == f"hf-diloco launch --islands 2 -- python examples/{example.name}\n"
    # Both islands write to one terminal: a line may begin, and end, with a piece of the other's.
    output = project.shell(text).output
    last = dict(re.findall(r"island (\d): .*?([a-z]+ [a-z]+ [0-9a-f]+(?:\.\d+)?)", output))  # the last of each
    assert last.keys() == {"0", "1"}, output
    if example.stem != "trl_sft":  # which prints the island's own training loss
        assert last["0"] == last["1"]


# Python


def needs_a_run(block: Block) -> bool:
    return "runs/quickstart" in block.text


def stand_ins(folder: Path) -> dict[str, Any]:
    """What the pages' Python takes for granted: a model, arguments, data, and what Accelerate makes of them."""
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    tokens = torch.randint(64, (80, 16), generator=torch.Generator().manual_seed(1))
    ds = Dataset.from_dict({name: tokens.tolist() for name in ("input_ids", "labels")}).with_format("torch")
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    args = TrainingArguments(str(folder), max_steps=10, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=5)
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **shape))
    optimizer = torch.optim.AdamW(model.parameters())
    loader: DataLoader[Any] = DataLoader(ds, batch_size=8)
    prepared = accelerator.prepare(model, optimizer, loader)
    names = ("model", "optimizer", "loader")
    return {
        "Trainer": Trainer,
        "args": args,
        "ds": ds,
        "accelerator": accelerator,
        **dict(zip(names, prepared, strict=True)),
    }


@pytest.mark.parametrize("block", [block for block in PYTHON if not needs_a_run(block)], ids=by_name)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = stand_ins(tmp_path / "trainer")
    exec(compile(block.text, block.name, "exec"), names)
    if "outer.step()" in block.text:
        assert names["outer"].round == 10 // names["config"].sync_every
    if "trainer.train(" in block.text:
        assert names["trainer"].state.global_step == 10


@pytest.mark.distributed
@pytest.mark.parametrize("block", [block for block in PYTHON if needs_a_run(block)], ids=by_name)
def test_python_about_a_run_runs(block: Block, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    names: dict[str, Any] = {}
    exec(compile(block.text, block.name, "exec"), names)
    assert names["model"].num_parameters() > 0
