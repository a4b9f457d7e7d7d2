"""Run files: every ready one loads; precedence; and each mistake with its clear error, found without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.common.load import kind_of, parse_command_line, read_run_file
from hf_diloco.apps.common.process import write_run_json
from hf_diloco.apps.common.shipped import shipped_names
from hf_diloco.apps.lm.runfile import RunFile, load_run_file
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.config.base import ENV_ISLAND, ENV_NUM_ISLANDS, ENV_RENDEZVOUS
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.errors import ConfigError
from tests.processes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

MINIMAL = "training: {max_steps: 100}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


def load(folder: Path, text: str, *overrides: str) -> RunFile:
    return load_run_file(write(folder, text), overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_ready_run_file_loads(path: Path) -> None:
    run = load_run_file(path)
    assert run.name == path.stem
    assert run.max_steps % run.diloco.sync_every == 0, "the final model would not be the outer one"
    assert run.diloco.outer_momentum < 0.9 or run.max_steps // run.diloco.sync_every >= 50


def test_defaults(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL)
    assert (run.name, run.output, run.max_steps) == ("run", "runs", 100)
    assert run.model.preset == "llama-tiny"
    assert (run.data.source, run.data.streaming) == ("embedded", False)
    assert run.island_folder() == Path("runs/run/island-0")
    assert run.diloco.resolve() == DiLoCoConfig()


def test_c4_streams_its_english_part_and_evaluates_on_its_validation_split(tmp_path: Path) -> None:
    data = load(tmp_path, MINIMAL, "data.source=c4").data
    assert (data.streaming, data.name, data.split, data.eval_split) == (True, "en", "train", "validation")
    assert not load(tmp_path, MINIMAL, "data.source=c4", "data.streaming=false").data.streaming


@pytest.mark.parametrize("name", shipped_names())
def test_what_a_run_has_recorded_is_a_run_file(tmp_path: Path, name: str) -> None:
    kind = kind_of(name)
    run = read_run_file(kind, name, [f"output={tmp_path}"])
    write_run_json(run)
    recorded = run.folder / "run.json"
    assert kind_of(recorded) is kind
    assert read_run_file(kind, recorded) == run


@pytest.mark.parametrize(("kind", "name"), [(RunFile, "vision/quickstart"), (VisionRun, "quickstart")])
def test_a_run_file_of_another_task_is_told_as_such(kind: type[BaseRun], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is no run file for {kind.module}: start it by hf_diloco.apps"):
        parse_command_line(kind, "train", "", [name])


def test_dump_loads_again(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL, "diloco.num_islands=3")
    assert RunFile.model_validate(run.model_dump(mode="json")) == run


def test_scalars_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    training = load(
        tmp_path, "training: {max_steps: 1, learning_rate: 1e-3, eval_strategy: no, optim_args: 1_0}"
    ).training
    assert training == {"max_steps": 1, "learning_rate": 0.001, "eval_strategy": "no", "optim_args": 10}


class TestPrecedence:
    TEXT = MINIMAL + "diloco: {num_islands: 4, island: 1, rendezvous: 'tcp://yaml:1', sync_every: 10}\n"

    def test_file(self, tmp_path: Path) -> None:
        diloco = load(tmp_path, self.TEXT).diloco
        assert (diloco.num_islands, diloco.island, diloco.rendezvous) == (4, 1, "tcp://yaml:1")

    def test_environment_beats_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_ISLAND, "2")
        monkeypatch.setenv(ENV_NUM_ISLANDS, "5")
        monkeypatch.setenv(ENV_RENDEZVOUS, "tcp://environment:2")
        diloco = load(tmp_path, self.TEXT).diloco
        assert (diloco.num_islands, diloco.island, diloco.rendezvous) == (5, 2, "tcp://environment:2")

    def test_command_line_beats_both(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_ISLAND, "2")
        path = write(tmp_path, self.TEXT)
        run = parse_command_line(
            RunFile,
            "train_lm.py",
            "",
            [str(path), "diloco.island=1", "--island", "3", "diloco.sync_every=25", "--name", "x"],
        )
        assert (run.diloco.island, run.diloco.sync_every, run.name) == (3, 25, "x")

    def test_an_alternative_takes_the_place_of_the_files(self, tmp_path: Path) -> None:
        text = MINIMAL + "model: {preset: llama-60m}\ntokenizer: {train: {vocab_size: 400}}\n"
        run = load(tmp_path, text, "model.path=org/name", "tokenizer.path=org/name")
        assert (run.model.preset, run.model.path, run.tokenizer.train) == (None, "org/name", None)
        assert load(tmp_path, text, "model.config.model_type=gpt2").model.config == {"model_type": "gpt2"}
        with pytest.raises(ConfigError, match="got preset and path"):
            load(tmp_path, text, "model.path=org/name", "model.preset=llama-60m")

    def test_an_empty_variable_counts_as_unset(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENV_ISLAND, "")
        assert load(tmp_path, self.TEXT).diloco.island == 1


class TestFiles:
    def test_are_found_beside_the_run_file_then_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        here, beside = tmp_path / "here", tmp_path / "beside"
        for folder in (here, beside):
            folder.mkdir()
            write(folder, "{}", "both.json")
        write(here, "{}", "only_here.json")
        monkeypatch.chdir(here)
        path = write(beside, MINIMAL + "deepspeed: both.json\n")
        assert load_run_file(path).deepspeed == str(beside / "both.json")
        assert load_run_file(path, ["deepspeed=only_here.json"]).deepspeed == str(here / "only_here.json")
        assert load_run_file(path, ["deepspeed=both.json"]).deepspeed == str(here / "both.json"), "as typed there"

    def test_globs_are_expanded_in_order(self, tmp_path: Path) -> None:
        for name in ("b.jsonl", "a.jsonl", "c.txt"):
            write(tmp_path, "", name)
        run = load(tmp_path, MINIMAL + "data: {source: files, files: ['*.jsonl']}")
        assert run.data.files == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]

    def test_names_that_look_like_patterns(self, tmp_path: Path) -> None:
        folder = tmp_path / "try [1]"
        folder.mkdir()
        for name in ("a.jsonl", "b[1].txt", "b1.txt"):
            write(folder, "", name)
        run = load(folder, MINIMAL + "data: {source: files, files: ['*.jsonl', 'b[1].txt']}")
        assert run.data.files == [str(folder / "a.jsonl"), str(folder / "b[1].txt")]

    def test_a_hub_id_stays_as_it_is(self, tmp_path: Path) -> None:
        assert load(tmp_path, MINIMAL, "model={path: org/name}").model.path == "org/name"


# text of the file, overrides, what the error must say
WRONG = {
    "no training": ("seed: 1\n", [], "training: field required"),
    "empty": ("# nothing yet\n", [], "run.yaml: is empty; a run file needs at least"),
    "max_steps elsewhere": (MINIMAL, ["training.max_steps=abc"], "command line: training: max_steps must be a whole"),
    "part of a key": (MINIMAL, ["diloco.delay=3"], "did you mean fragment_sync_delay?"),
    "schemes": (MINIMAL, ["diloco.rendezvous=ftp://x"], "s3, gs, az, http, https"),
    "max_steps as null": (MINIMAL, ["training.max_steps=null"], "training: max_steps must be a whole number"),
    "no max_steps": ("training: {learning_rate: 1.0}", [], "line 1: training: max_steps must be a whole number"),
    "epochs": ("training: {max_steps: 3, num_train_epochs: 1}", [], "set max_steps instead"),
    "a setting of the Trainer": (
        MINIMAL + "max_steps: 3\n",
        [],
        "line 2: unknown setting max_steps=3 (did you mean training.max_steps?)",
    ),
    "a setting of a block": (MINIMAL, ["sync_every=5"], "setting sync_every=5 (did you mean diloco.sync_every?)"),
    "unknown block": (MINIMAL + "trainig: {}\n", [], "line 2: unknown setting trainig={} (did you mean training?)"),
    "unknown key": (MINIMAL + "diloco:\n  sync_evry: 3\n", [], "line 3: unknown setting diloco.sync_evry"),
    "unknown data key": (MINIMAL + "data: {sequence_lenght: 3}\n", [], "did you mean sequence_length?"),
    "range": (MINIMAL + "diloco: {outer_momentum: 1.5}\n", [], "line 2: diloco.outer_momentum: input should be less"),
    "type": (MINIMAL + "seed: soon\n", [], "line 2: seed: input should be a valid integer"),
    "two problems": (MINIMAL, ["seed=-1", "data.sequence_length=0"], "got -1; command line: data.sequence_length"),
    "choice": (MINIMAL, ["model.preset=llama-2b"], "'llama-tiny', 'llama-60m'"),
    "two models": (MINIMAL, ["model={preset: llama-60m, path: org/name}"], "got preset and path"),
    "no model": (MINIMAL, ["model={preset: null}"], "got none"),
    "model type": (MINIMAL, ["model={config: {hidden_size: 3}}"], "needs a model_type"),
    "two tokenizers": (MINIMAL, ["tokenizer={path: gpt2, train: {vocab_size: 400}}"], "exclude each other"),
    "tiny vocabulary": (MINIMAL, ["tokenizer.train.vocab_size=100"], "greater than or equal to 300, got 100"),
    "files without files": (MINIMAL, ["data.source=files"], "files is missing"),
    "hub without path": (MINIMAL, ["data.source=hub"], "path is missing"),
    "ignored setting": (MINIMAL, ["data.path=org/name"], "path belongs to source hub, but source is embedded"),
    "ignored split": (MINIMAL, ["data.split=test"], "split belongs to source hub or c4, but source is embedded"),
    "ignored eval_split": (
        MINIMAL,
        ["data={source: hub, path: a/b, eval_split: test, eval_files: [run.yaml]}"],
        "eval_split has no effect beside eval_files",
    ),
    "column of embedded": (MINIMAL, ["data.text_column=body"], "no columns"),
    "seed of a stream": (
        MINIMAL,
        ["data.source=c4", "training.data_seed=1"],
        "training.data_seed has no effect on a stream",
    ),
    "embedded stream": (MINIMAL, ["data.streaming=true"], "cannot be streamed"),
    "domains": (MINIMAL, ["data.shares=domains"], "one domain a file"),
    "one file for a list": (MINIMAL, ["data={source: files, files: a.txt}"], "'a.txt': write data.files=[a.txt]"),
    "no match": (MINIMAL, ["data={source: files, files: ['none-*.txt']}"], "data.files: no file matches 'none"),
    "no DeepSpeed file": (MINIMAL + "deepspeed: zero9.json\n", [], "line 2: deepspeed: no file 'zero9.json'"),
    "no key": (MINIMAL, ["diloco.key_file=no-such.key"], "diloco.key_file: no file 'no-such.key'"),
    "no model folder": (MINIMAL, ["model={path: ./nothing}"], "model.path: no file './nothing'"),
    "island": (MINIMAL + "diloco: {island: 2, num_islands: 2}\n", [], "island 2 does not exist in a run of 2"),
    "rendezvous": (MINIMAL, ["diloco.rendezvous=host:80"], "scheme must be tcp"),
    "rendezvous in memory": (
        MINIMAL,
        ["diloco.num_islands=2", "diloco.rendezvous=memory://here"],
        "'memory://here': islands are processes, and share no memory: use file:///DIR",
    ),
    "processes": (MINIMAL, ["launch.num_processes=0"], "launch.num_processes: input should be greater than or"),
    "name": (MINIMAL, ["name=../x"], "name: '../x' cannot be a run's name, as its folder is called so: use letters"),
    "long name": (MINIMAL, ["name=" + "x" * 256], "name: string should have at most 255 characters"),
    "override": (MINIMAL, ["training.max_steps"], "expected KEY=VALUE"),
    "override into a value": (MINIMAL + "seed: 1\n", ["seed.x=1"], "seed is 1 here"),
    "twice": (MINIMAL + "seed: 1\nseed: 2\n", [], "line 3: not valid YAML: seed is given twice"),
    "not YAML": (MINIMAL + "data: {source: files\n", [], "line 3: not valid YAML"),
    "a glob": (MINIMAL + "data: {files: [*.txt]}\n", [], "found '.': a text that begins with * needs quotes, as '*.t"),
    "a glob of a name": (MINIMAL, ["data.files=*x"], "alias 'x': a text that begins with * needs quotes, as '*.txt'"),
    "a list": ("- training\n", [], "expected `key: value` lines"),
    "an empty document": ("---\n", [], "run.yaml: is empty; a run file needs at least"),
    "a sample without end": (MINIMAL + "sample: {num_tokens: 1000000000}\n", [], "less than or equal to 100000, got"),
    "not a block": (MINIMAL + "sample: The\n", [], "sample: expected a block of `key: value` lines (num_tokens, pro"),
    "a block without settings": (MINIMAL + "launch:\n", [], "got None; give it some, or leave it out"),
    "not the block of islands": (MINIMAL + "diloco: 3\n", [], "line 2: diloco: expected a block of `key: value`"),
    "a value for the block of islands": (MINIMAL, ["diloco=5"], "command line: diloco: expected a block of `key: val"),
    "DeepSpeed's settings": (MINIMAL + "deepspeed: 5\n", [], "or a block of them, got 5"),
    "not a file": (MINIMAL + "diloco: {key_file: 3}\n", [], "line 2: diloco.key_file: expected the name of a file"),
    "no identity": (MINIMAL, ["diloco.identity_file=''"], "command line: diloco.identity_file: '' is no file: give"),
    "no checkpoint": (MINIMAL, ["launch.resume=''"], "launch.resume: string should have at least 1 character, got ''"),
    "no file": (MINIMAL + "model: {path: ''}\n", [], "line 2: model.path: no file ''"),
    "a folder for files": (MINIMAL, ["data={source: files, files: [/usr]}"], "a folder: write /usr/*.jsonl, or the"),
    "a list as key": (MINIMAL + "name: {{ name }}\n", [], "line 2: not valid YAML: a list or a block in the place of"),
    "tag": (MINIMAL + "seed: !!int x\n", [], "not valid YAML: a value does not fit its !!tag"),
    "not of JSON": (MINIMAL + "deepspeed: {a: !!binary aGk=}\n", [], "line 2: not valid YAML: could not determine a"),
    "a number as key": (MINIMAL + "deepspeed: {3: 4}\n", [], "line 2: deepspeed: its keys must be names of set"),
    "control character": (MINIMAL + "\x07", [], 'not allowed in "<unicode string>", position'),
    "pattern": (MINIMAL, ["diloco={num_fragments: 1, fragment_patterns: ['(']}"], "'(' is no regular expression"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "message"), WRONG.values(), ids=WRONG)
def test_wrong(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "setting", "value"),
    [
        (["diloco.outer_momentum=null"], ("diloco", "outer_momentum"), 0.9),
        (["diloco.method=local-sgd", "diloco.outer_momentum=null"], ("diloco", "outer_momentum"), 0.0),
        (["diloco.outer_momentum=null", "diloco.outer_momentum=0.3"], ("diloco", "outer_momentum"), 0.3),
        (["diloco.outlier_factor=null"], ("diloco", "outlier_factor"), None),
        (["diloco.options=null"], ("diloco", "options"), {}),
        (["name=null"], ("name",), "run"),
        (["training.learning_rate=null"], ("training",), {"max_steps": 10, "data_seed": 3}),
        (["training.data_seed=null"], ("training",), {"max_steps": 10, "learning_rate": 1, "data_seed": None}),
    ],
)
def test_null_leaves_out_what_the_file_says_where_it_is_no_value(
    overrides: list[str], setting: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    run: object = load(
        tmp_path,
        """
        name: own
        training: {max_steps: 10, learning_rate: 1, data_seed: 3}
        diloco: {outer_momentum: 0.5, outlier_factor: 3}
        """,
        *overrides,
    )
    for name in setting:
        run = getattr(run, name)
    assert run == value


def test_a_null_does_not_come_from_a_variable_that_is_not_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"diloco\.num_islands: input should be a valid integer, got None$"):
        load(tmp_path, f"{MINIMAL}\ndiloco: {{num_islands: null}}")


def test_a_wrong_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ISLAND, "first")
    with pytest.raises(ConfigError, match=f"environment variable {ENV_ISLAND}: diloco.island: .*'first'"):
        load(tmp_path, MINIMAL)


def test_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"no such file \(did you mean .*quickstart.yaml\?\)"):
        load_run_file(tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match="is a folder: give a run file"):
        load_run_file(tmp_path)


def test_broken_deepspeed_file(tmp_path: Path) -> None:
    write(tmp_path, "{'stage': 2}", "zero.json")
    with pytest.raises(ConfigError, match=r"line 2: deepspeed: .*zero\.json is not valid JSON"):
        load(tmp_path, MINIMAL + "deepspeed: zero.json\n")
    write(tmp_path, '{"zero_optimization": {"stage": 2, "stage": 3}}', "zero.json")
    with pytest.raises(ConfigError, match=r"line 2: deepspeed: .*zero\.json is not valid JSON: stage is given twice"):
        load(tmp_path, MINIMAL + "deepspeed: zero.json\n")


def test_domains_need_a_file_an_island(tmp_path: Path) -> None:
    write(tmp_path, "", "a.jsonl")
    with pytest.raises(ConfigError, match="1 files cannot serve 2 islands"):
        load(tmp_path, MINIMAL, "data={source: files, files: ['a.jsonl'], shares: domains}", "diloco.num_islands=2")


def test_a_stream_is_read_without_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.dataloader_num_workers: 2, but a stream is read by rank 0"):
        load(tmp_path, MINIMAL, "data.source=c4", "training.dataloader_num_workers=2")


def test_tokens_that_are_weighed_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_by='tokens' needs .* include_num_input_tokens_seen='all'"):
        load(tmp_path, "{training: {max_steps: 4}, diloco: {weight_by: tokens}}")
    load(tmp_path, MINIMAL, "diloco.weight_by=tokens", "training.include_num_input_tokens_seen=all")
    load(tmp_path, MINIMAL, "diloco.weight_by=tokens", "diloco.enabled=false")


def test_several_islands_need_a_rendezvous_only_when_they_start(tmp_path: Path) -> None:
    run = load(tmp_path, MINIMAL, "diloco.num_islands=2")
    with pytest.raises(ConfigError, match="need a place to meet"):
        run.diloco.resolve()


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from hf_diloco.apps.lm.runfile import load_run_file; "
        f"load_run_file({str(ROOT / 'configs' / 'quickstart.yaml')!r}); "
        "print([name for name in ('torch', 'transformers', 'datasets', 'deepspeed') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_accelerate_files_are_understood_by_accelerate(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert ("deepspeed" in path.stem) == (config.distributed_type == "DEEPSPEED")
    assert ("fsdp2" in path.stem) == (config.distributed_type == "FSDP")
    assert not config.use_cpu, "it would drop DeepSpeed"


def test_users_are_not_offered_what_only_tests_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, MINIMAL, "diloco.rendezvous=ftp://x")
    assert "memory" not in str(caught.value)
