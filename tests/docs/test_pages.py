"""README and docs say what is so: links lead somewhere, and lists are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest
import yaml
from packaging.version import Version

from hf_diloco import errors
from hf_diloco.apps.common.yaml_file import read_yaml
from hf_diloco.apps.lm.runfile import ModelBlock, RunFile
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.config.base import ENV_FOLDER, ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.store.credentials import ENV_IDENTITY
from hf_diloco.store.signing import ENV_KEY
from scripts.site import run_file_tables
from tests.docs.pages import PAGES, Block, all_blocks, anchors, blocks, links
from tests.processes import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.md"


def by_name(value: Any) -> str:
    return value.name if isinstance(value, Block) else str(value.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_blocks_have_a_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= {"bash", "json", "python", "text", "yaml"}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{link} leads nowhere"
        assert file.is_relative_to(ROOT), f"{link} leads out of the project"
        assert not anchor or anchor in anchors(file), f"{link}: no such heading; there are {sorted(anchors(file))}"


def test_readme_lists_every_page() -> None:
    linked = {link for link in links(README) if link.startswith("docs/")}
    assert linked == {f"docs/{page.name}" for page in PAGES if page != README}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"\b(?:configs|scripts|examples|benchmarks|docs|hf_diloco|tests)/[\w./-]*\w", page.read_text())
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize("block", all_blocks("python"), ids=by_name)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.name, "exec")


@pytest.mark.parametrize("block", all_blocks("json"), ids=by_name)
def test_json_is_valid(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=by_name)
def test_yaml_is_of_a_run_file(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(block.text)
    values, _ = read_yaml(path)
    if "distributed_type" in values:  # an accelerate configuration
        assert yaml.safe_load(block.text)["distributed_type"] == "DEEPSPEED"
        return
    if isinstance(values.get("deepspeed"), str):
        values["deepspeed"] = str(ROOT / values["deepspeed"])
    kind = VisionRun if VisionRun.meeting_name in values else RunFile
    kind.model_validate({"name": "run", "training": {"max_steps": 1}, **values})


def test_training_blocks_are_trainings_arguments(tmp_path: Path) -> None:
    from hf_diloco.apps.common.arguments import check_training

    checked = 0
    for block in all_blocks("yaml"):
        path = tmp_path / "run.yaml"
        path.write_text(block.text)
        values, _ = read_yaml(path)
        if "training" in values:
            check_training(values["training"])
            checked += 1
    assert checked >= 2


# run-file.md and vision.md

RUN_FILE_PAGES = pytest.mark.parametrize("page", list(run_file_tables.PAGES), ids=lambda page: page.stem)


@pytest.mark.skipif(Version(pydantic.VERSION) < Version("2.11"), reason="pydantic writes 0.0 where later ones write 0")
def test_tables_show_the_default_of_each_setting_of_the_model() -> None:
    text = (ROOT / "docs" / "run-file.md").read_text()
    for name, field in ModelBlock.model_fields.items():
        default = "null" if field.default is None else f"`{field.default}`"
        assert re.search(rf"^\| `{name}` \| [^|]+ \| {default} \|", text, re.MULTILINE)


@RUN_FILE_PAGES
def test_run_file_tables_are_the_schema(page: Path) -> None:
    assert page.read_text() == run_file_tables.with_tables(page), "run: python -m scripts.site.run_file_tables"


def test_the_table_of_what_is_refused_is_the_list() -> None:
    page = run_file_tables.TRAINER_PAGE
    assert run_file_tables.blocks_with_tables(page.read_text()) == [run_file_tables.NO_OUTER_LOOP]
    assert page.read_text() == run_file_tables.with_tables(page), "run: python -m scripts.site.run_file_tables"


@RUN_FILE_PAGES
def test_every_block_of_the_schema_has_a_table(page: Path) -> None:
    kind = run_file_tables.PAGES[page]
    found = run_file_tables.blocks_with_tables(page.read_text())
    # What all run files have is on the first page.
    elsewhere = {"launch", "push_to_hub"} if kind is VisionRun else set()
    refused = [run_file_tables.REFUSED] if kind is RunFile else []
    assert sorted(found) == sorted([*(set(run_file_tables.blocks(kind)) - elsewhere), *refused])


@RUN_FILE_PAGES
def test_every_key_has_a_meaning(page: Path) -> None:
    for block in run_file_tables.blocks(run_file_tables.PAGES[page]):
        rows = run_file_tables.table(page, block).splitlines()[2:]
        assert rows
        assert not [row for row in rows if row.endswith("|  |")]


# errors.md


def test_every_error_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(errors.__all__)


def test_the_tree_of_errors_is_the_codes() -> None:
    drawn = re.compile(r"^( *[ ├└─│]*)(\w+Error|StopRequested)\b", re.MULTILINE)
    (tree,) = [block.text for block in blocks(DOCS / "errors.md", "text")]
    in_code = "\n".join(line.removeprefix("    ") for line in str(errors.__doc__).splitlines())
    assert drawn.findall(tree) == drawn.findall(in_code)
    assert sorted(name for _, name in drawn.findall(tree)) == sorted(errors.__all__)


# metrics.md


def named_metrics() -> set[str]:
    return set(re.findall(r"^\| `(diloco/\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))


def test_metrics_are_those_that_the_callback_logs() -> None:
    from hf_diloco.trainer.record import LOGGED

    assert named_metrics() == {f"diloco/{name}" for name in LOGGED} | {"diloco/outer_loss"}


# protocol.md, deepspeed.md, launching.md, benchmarks.md


def test_every_record_of_a_round_is_explained() -> None:
    from hf_diloco.membership import unanimity

    text = (DOCS / "protocol.md").read_text()
    kinds = re.findall(r"^    (\w+)  +\S", str(unanimity.__doc__), re.MULTILINE)
    assert kinds == ["offer", "plan", "vote", "outcome"]
    assert not [kind for kind in kinds if not re.search(rf"^\| {kind} \| `rounds/R/A/{kind}", text, re.MULTILINE)]
    assert f"keeps the last {unanimity.KEPT_ATTEMPTS}" in text


def test_every_record_in_an_object_store_is_explained() -> None:
    from hf_diloco.membership import decisions, heartbeats as members, round_records
    from hf_diloco.rounds import elastic_rounds
    from hf_diloco.store import log

    text = (DOCS / "protocol.md").read_text()
    paths = re.findall(r"^    (\S+\.json) ", str(log.__doc__), re.MULTILINE)
    assert len(paths) == 14
    assert not [path for path in paths if f"| `{path}` |" not in text]
    kinds = get_args(round_records.OutcomeRecord.model_fields["kind"].annotation)
    assert not [kind for kind in kinds if f"`{kind}`" not in text]
    assert f"After {elastic_rounds.MAX_IN_A_ROW} aborted attempts" in text
    assert f"A round has {decisions.MAX_ATTEMPTS} attempts." in text
    assert f"every {members.HEARTBEAT_SECONDS:g} s" in text
    assert f"for {members.LEASE_SECONDS:g} s (the lease)" in text


def test_every_deepspeed_layout_is_listed() -> None:
    from hf_diloco.inner import zero

    text = (DOCS / "deepspeed.md").read_text()
    assert not [name for name in zero.LAYOUTS if f"`{name}`" not in text]
    oldest, too_new = zero.TESTED_VERSIONS
    assert f"checked against DeepSpeed {oldest}" in text
    assert f"from {too_new} on" in text


def test_environment_variables_are_listed() -> None:
    rows = set(re.findall(r"^\| `(HF_DILOCO_\w+)` \|", (DOCS / "launching.md").read_text(), re.MULTILINE))
    whole_run = {ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS, ENV_KEY, ENV_IDENTITY}
    assert rows == {*whole_run, ENV_FOLDER, "HF_DILOCO_DEBUG"}


def test_defaults_in_prose_are_the_codes() -> None:
    fresh = DiLoCoConfig()
    tuning = (DOCS / "tuning.md").read_text()
    for name in ("sync_every", "outer_lr"):
        assert f"`{name}: {getattr(fresh, name)}`" in tuning
    assert f"`outer_momentum: {fresh.outer_momentum}`" in tuning.replace("\n", " ")
    assert fresh.join_timeout == 600
    assert "`join_timeout` (ten minutes)" in (DOCS / "launching.md").read_text()
    assert fresh.sync_timeout == 1800
    assert "`sync_timeout` (30 minutes)" in README.read_text()


# methods.md


def test_the_table_of_methods_is_the_registry() -> None:
    from hf_diloco.methods.outer import METHODS

    text = (DOCS / "methods.md").read_text()
    rows = re.findall(r"^\| \[`(\w[\w-]*)`\]\(#[\w-]+\) \| (.+) \| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    of = {name: DiLoCoConfig(method=name) for name in METHODS}
    assert sorted(rows) == [
        (
            name,
            METHODS[name].summary,
            *(f"{getattr(one, key):g}" for key in ("sync_every", "outer_lr", "outer_momentum")),
        )
        for name, one in sorted(of.items())
    ]
    options = {option for method in METHODS.values() for option in method.Options.model_fields}
    assert not [option for option in options if f"`options.{option}`" not in text]


# streaming.md, tuning.md


def test_defaults_of_streaming_are_the_codes() -> None:
    section = (DOCS / "streaming.md").read_text().split("## Settings")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? \|", section, re.MULTILINE))
    streams = {"num_fragments"} | {name for name in DiLoCoConfig.model_fields if name.startswith("fragment_")}
    assert rows.keys() == streams
    fresh = DiLoCoConfig()
    for name, default in rows.items():
        assert (yaml.safe_load(default) if default != "none" else []) == getattr(fresh, name)


def test_fragments_that_are_shown_are_those_that_are_cut() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_diloco.apps.lm.model import _SHAPES
    from hf_diloco.inner.fragments import cut_into_fragments, describe_fragments

    (shown,) = [block.text for block in blocks(DOCS / "streaming.md", "text") if block.text.startswith("fragment 0")]
    shape = AutoConfig.for_model("llama", vocab_size=32_000, tie_word_embeddings=True, **_SHAPES["llama-150m"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert describe_fragments(cut_into_fragments(sizes, 4, "strided"), sizes) == shown.strip()


def test_bits_of_every_payload_are_the_codecs() -> None:
    from hf_diloco.codecs import CODECS

    section = (DOCS / "tuning.md").read_text().split("## Payload")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.MULTILINE))
    bits = {name: 8 * codec.block_bytes / codec.block_values for name, codec in CODECS.items()}
    assert {name: float(text) for name, text in rows.items()} == {
        name: round(value, 3) for name, value in bits.items()
    }


def test_benchmark_columns_are_the_programs() -> None:
    program = (ROOT / "benchmarks" / "quality_c4.py").read_text()
    section = (DOCS / "benchmarks.md").read_text().split("## Whether it learns")[1].split("Measured on")[0]
    columns = re.findall(r"^\| ([a-zA-Z ]+) \|", section, re.M)
    assert columns[0] == "column"
    assert len(columns) > 4
    assert all(f'"{name}"' in program for name in columns[1:])
    overhead = (ROOT / "benchmarks" / "overhead.py").read_text()
    assert all(f'"{name}": {name}' in overhead for name in ("training", "sync", "memory"))


def test_make_demo_is_the_command_that_readme_names() -> None:
    recipe = re.search(r"^demo:.*\n\t(?P<line>.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    command = re.sub(r"^.*/(hf-diloco)", r"\1", recipe["line"]).removesuffix(" $(ARGS)")
    assert command in [line for block in blocks(README, "bash") for line in block.text.splitlines()]
