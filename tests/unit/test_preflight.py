"""`--dry-run` finds what an island would find before its first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_diloco.cli.plan import LaunchOptions
from hf_diloco.cli.run import run_launch
from hf_diloco.errors import DiLoCoError
from tests.processes import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
VISION = ROOT / "configs" / "vision" / "quickstart.yaml"

WRONG = {
    "training.max_step=3": "unknown setting training.max_step=3 .did you mean max_steps",
    "training.learning_rate=1e-3x": "training.learning_rate: input should be a valid number, got '1e-3x'",
    "training.lr_scheduler_type=cosin": "training.lr_scheduler_type: 'cosin' is not one of linear, .* mean cosine",
    "training.eval_strategy=none": "training.eval_strategy: 'none' is not one of no, steps, epoch",
    "training.optim=adam": "training.optim: 'adam' is not one of adamw_torch, ",
    "training.lr_scheduler_kwargs='{'": "training.lr_scheduler_kwargs: expected a block of `key",
    "training.torch_compile_mode=fast": "training.torch_compile_mode: 'fast' is not one of default, ",
    "training.torch_compile_backend=''": "training.torch_compile_backend: '' is not a valid DynamoBackend",
    "training.metric_for_best_model=''": "training.metric_for_best_model: no evaluation has ''; set it to one of loss",
    "training.eval_use_gather_object=true": "training: eval_use_gather_object cannot be set here: evaluations gather",
    "training.ddp_bucket_cap_mb=8": "training.ddp_bucket_cap_mb has no effect, as deepspeed takes the place of DDP",
    "training.ddp_timeout=0": "training.ddp_timeout: input should be greater than 0, got 0",
    "training.log_level_replica=loud": "training.log_level_replica: 'loud' is not one of passive, ",
    "training.lr_scheduler_kwargs={a: 1}": "lr_scheduler_type=cosine, lr_scheduler_kwargs={'a': 1}: .*argument 'a'",
    "training.lr_scheduler_kwargs=x": "training.lr_scheduler_kwargs: expected a block of `key: value` lines, got 'x'",
    "training.optim_args=x": "training.optim=adamw_torch.*, optim_args='x': not enough values",
    "training.dataloader_persistent_workers=true": "training.dataloader_.: persistent_workers option needs num_work",
    "training.log_level=loud": "training.log_level: 'loud' is not one of passive, ",
    "training.metric_for_best_model=f1": "training.metric_for_best_model: no evaluation has 'f1'",
    "training.torch_compile_backend=x": "training.torch_compile_backend: 'X' is not a valid DynamoBackend",
    "training.accelerator_config=nosuch": "training.accelerator_config: no file 'nosuch'; give a JSON file",
    "training.accelerator_config={gradient_accumulation_kwargs: {num_steps: 3}}": (
        "training.accelerator_config.gradient_accumulation_kwargs.num_steps: set training.gradient_accumulation_steps"
    ),
    "training.accelerator_config={gradient_accumulation_kwargs: {x: 3}}": "accumulation_kwargs: .*argument 'x'",
    "training.per_device_eval_batch_size=9999999": "input should be less than or equal to 1048576, got 9999999",
    "training.eval_accumulation_steps=0": "training.eval_accumulation_steps: input should be greater than 0, got 0",
    "training.data_seed=9223372036854775808": "training.data_seed: input should be less than 9223372036854775808",
    "training.label_names=[a]": "training: label_names cannot be set here",
    "training.fsdp=true": "training: fsdp cannot be set here: it has its own place",
    "fsdp={}": "deepspeed and fsdp both say how an island shards its model: set one of them to null",
    "training.fsdp_config={version: 1}": "fsdp_config={'version': 1} cannot be used: FSDP1",
    "training.load_best_model_at_end=true": "load_best_model_at_end=True cannot be used",
    "training.report_to=[mlflow]": "training.report_to: 'mlflow' is not installed here",
    "training.report_to=[tensorbord]": "'tensorbord' is not installed here .did you mean tensorboard",
    "deepspeed={zero_optimization: {stage: 7}}": "deepspeed: zero_optimization.stage: .*, got 7",
    "deepspeed={zero_optimization: {stge: 2}}": "deepspeed: zero_optimization.stge: extra inputs are not permitted",
    "deepspeed={zero_optimization: {}, optimizer: {type: AdamW, params: {lr: auto, torch_adam: true}}}": (
        'training.adam_beta2 has no effect: set deepspeed: optimizer.params.betas to "auto"'
    ),
    "deepspeed={zero_optimization: {}, scheduler: {type: WarmupLR}}": (
        "training.lr_scheduler_type has no effect, as deepspeed has its own scheduler: leave one of them out"
    ),
    "training.eval_strategy=null": "training: eval_steps has no effect without eval_strategy: set that too",
    "training.gradient_checkpointing_kwargs={x: 1}": "gradient_checkpointing_kwargs has no effect without activation_",
    "model.mask_share=0.3": "model: mask_share belongs to objective masked, but objective is causal",
    "training.optim=sgd": "training.adam_beta2 has no effect with training.optim=sgd: leave it out",
    "deepspeed={optimizer: {type: AdmW}, zero_optimization: {}}": (
        "deepspeed: optimizer.type: 'AdmW' is none .did you mean adam.*torch.op"
    ),
    "deepspeed={scheduler: {type: WarmupLr}, zero_optimization: {}}": (
        "scheduler.type: 'WarmupLr' is none .did you mean WarmupLR"
    ),
    "deepspeed={optimizer: {params: 3}}": "deepspeed: optimizer.params must be a block of `key: value` lines, got 3",
    "deepspeed={}": "deepspeed: it has no block zero_optimization: give it one",
    "deepspeed={zero_optimization: {}, train_micro_batch_size_per_gpu: 3}": (
        "deepspeed: it contradicts the block training: ds train_micro_batch_size_per_gpu=3 vs .*=4; set .* to .auto."
    ),
    "deepspeed={zero_optimization: {}, scheduler: {type: WarmupDecayLR, params: {total_num_steps: 7}}}": (
        "deepspeed: it contradicts the block training: ds scheduler.params.total_num_steps=7 vs hf max_steps=1200"
    ),
    "deepspeed={zero_optimization: {overlap_comm: auto}}": (
        "deepspeed: zero_optimization.overlap_comm: nothing takes the place of .auto.; give"
    ),
    "deepspeed={zero_optimization: {}, optimizer: {params: {lr: auto}}}": "deepspeed: optimizer.type is missing: give",
    "deepspeed={zero_optimization: {}, optimizer: {type: AdamW, params: {weight_decy: 0}}}": (
        "deepspeed: unknown setting optimizer.params.weight_decy=0 of AdamW .did you mean weight_decay"
    ),
    "deepspeed={zero_optimization: {}, optimizer: {type: muon, params: {momentun: 0}}}": (
        "deepspeed: unknown setting optimizer.params.momentun=0 of muon .did you mean momentum"
    ),
    "deepspeed={zero_optimization: {}, optimizer: {type: lr_scheduler}}": "optimizer.type: 'lr_scheduler' is none",
    "deepspeed={zero_optimization: {}, optimizer: {type: SGD, params: {momentun: 0}}}": (
        "deepspeed: unknown setting optimizer.params.momentun=0 of SGD .did you mean momentum"
    ),
    "deepspeed={zero_optimization: {}, scheduler: {type: WarmupLR, params: {warmup_steps: 3}}}": (
        "deepspeed: scheduler=WarmupLR, params={'warmup_steps': 3}: .*unexpected keyword argument 'warmup_steps'"
    ),
    "deepspeed={zero_optimization: {}, scheduler: {type: WarmupDecayLR}}": (
        "deepspeed: scheduler=WarmupDecayLR, params={}: .* 'total_num_steps'"
    ),
    "deepspeed={zero_optimization: {offload_optimizer: true}}": (
        "deepspeed: zero_optimization.offload_optimizer must be a block of `key: value` lines, got True"
    ),
    "deepspeed={zero_optimization: {}, gradient_clipping: {}}": "deepspeed: .*gradient_clipping={}",
    "deepspeed={zero_optimization: {stage: 3, offload_param: {device: nvme, nvme_path: /tmp}}}": (
        "deepspeed: zero_optimization.offload_param.device='nvme' cannot be used: .* set it to cpu"
    ),
    "deepspeed={zero_optimization: {}, tensor_parallel: {autotp_size: 2}}": (
        "deepspeed: tensor_parallel.autotp_size=2 cannot be used: .* cut by tensor parallelism"
    ),
    "deepspeed={zero_optimisation: {stage: 2}}": "no block zero_optimization .it has zero_optimisation.: give it one",
    "deepspeed={zero_optimization: {stage: auto}}": "deepspeed: zero_optimization.stage: .*0 to 3, got 'auto'",
    "deepspeed={zero_optimization: {stage: '3'}}": "deepspeed: zero_optimization.stage: .*0 to 3, got '3'",
    "deepspeed={zero_optimization: {}, gradient_cliping: 1, optimizer: {type: Lion, param: {}}}": (
        "unknown setting gradient_cliping=1 .did you mean gradient_clipping.., which DeepSpeed ignores; "
        "unknown setting optimizer.param={} .did you mean params"
    ),
    "deepspeed={zero_optimization: {}, prescale_gradients: no, flops_profiler: {top_modules: x}}": (
        "deepspeed: prescale_gradients: expected true or false, got 'no'; flops_profiler.top_modules: .* a number, got"
    ),
    "deepspeed={zero_optimization: {}, wall_clock_breakdown: maybe}": "wall_clock_breakdown: expected true or",
    "deepspeed={zero_optimization: {}, checkpoint: 3}": "deepspeed: checkpoint must be a block of `key: value` lines",
    "deepspeed={zero_optimization: {}, data_types: {grad_accum_dtype: int3}}": (
        "deepspeed: data_types.grad_accum_dtype: 'int3' is not one of fp32, bf16, fp16"
    ),
    "deepspeed={zero_optimization: {}, data_types: {grad_accum_dtype: bf16}}": (
        "deepspeed: data_types.grad_accum_dtype: 'bf16' does not go with training in fp32; leave it out"
    ),
    "deepspeed={bf16: 3}": "deepspeed: bf16 must be a block of `key: value` lines, got 3",
    "model.path=/nosuch": "model.path: no file '/nosuch'",
    "model.path=nobody/nothing": "model.path: cannot load 'nobody/nothing': .*`hf download nobody/nothing`",
    "model={config: {model_type: llama, hidden_sze: 3}}": "unknown setting hidden_sze=3 of llama",
    "model={config: {model_type: t5}}": "no causal language model can be made of t5",
    "model.config={model_type: gpt2, n_positions: 16}": "more than the 16 positions of the model",
    "tokenizer.path=nobody/nothing": "tokenizer.path: cannot load 'nobody/nothing'",
    "data={source: hub, path: nobody/nothing}": "data.*nobody/nothing",
    "launch.resume=/nosuch": "launch.resume: '/nosuch' is no checkpoint of a Trainer",
}


def dry_run(file: Path, *overrides: str) -> int:
    return run_launch(LaunchOptions(file, overrides), grace=1, dry_run=True)


@pytest.mark.parametrize(("override", "message"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_is_found(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(DiLoCoError, match=f"(?i){message}"):
        dry_run(QUICKSTART, f"output={tmp_path}", override)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "training.max_step=3": "unknown setting training.max_step=3",
        "training.save_total_limit=1": "save_total_limit=1 cannot be used",
        "data={source: idx, path: /nosuch}": "/nosuch",
        "data={source: hub, path: nobody/nothing}": "data.path: cannot load 'nobody/nothing'",
        "model.path=nobody/nothing": "model.path: .*nobody/nothing",
    }.items(),
)
def test_the_same_of_images(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(DiLoCoError, match=message):
        dry_run(VISION, f"output={tmp_path}", override)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(DiLoCoError) as caught:
        dry_run(
            QUICKSTART,
            f"output={tmp_path}",
            "training.max_step=3",
            "training.report_to=[mlflow]",
            "model.path=a/b",
            "launch.resume=/nosuch",
        )
    assert all(part in str(caught.value) for part in ("training.max_step", "mlflow", "model.path", "/nosuch"))


@pytest.mark.parametrize(("file", "unit"), [(QUICKSTART, "island"), (VISION, "node")], ids=["text", "images"])
def test_what_is_right_passes(tmp_path: Path, file: Path, unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(file, f"output={tmp_path}") == 0
    assert f"# {unit} 0" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_check_joins_no_other_launchers_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr("hf_diloco.cli.run.check_all", lambda _, plan: plan())
    assert dry_run(QUICKSTART, f"output={tmp_path}") == 0
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & os.environ.keys()


def test_settings_of_the_process_group_and_of_no_trackers_pass(tmp_path: Path) -> None:
    settings = ("training.ddp_backend=gloo", "training.report_to=null")
    assert dry_run(QUICKSTART, f"output={tmp_path}", *settings) == 0


def test_settings_that_deepspeed_knows_pass(tmp_path: Path) -> None:
    automatic = dict.fromkeys(("lr", "betas", "weight_decay"), "auto")
    settings = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {**automatic, "torch_adam": True}, "legacy_fusion": False},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "data_types": {"grad_accum_dtype": "float32", "buffer_dtype": None, "keep_in_fp32_modules": "auto"},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": None, "profile": False},
        "flops_profiler": {"enabled": False, "module_depth": -1, "output_file": None},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
        **{name: {} for name in ("wandb", "comet", "tensorboard", "csv_monitor", "comms_logger", "hybrid_engine")},
        **{name: {} for name in ("autotuning", "data_efficiency", "tensor_parallel", "timers", "compile", "pipeline")},
        **{"aio": {"block_size": 1}, "train_batch_size": 4, "steps_per_print": 10, "gradient_predivide_factor": 1},
        **dict.fromkeys(("prescale_gradients", "zero_force_ds_cpu_optimizer", "wall_clock_breakdown"), False),
        **{"communication_data_type": "fp32", "sequence_parallel_size": 1, "_comment": "of whoever wrote this"},
    }
    (tmp_path / "all.json").write_text(json.dumps(settings))
    changes = (f"deepspeed={tmp_path}/all.json", "training.max_grad_norm=1", "training.lr_scheduler_type=null")
    assert dry_run(QUICKSTART, f"output={tmp_path}", *changes) == 0


def test_replicas_of_shards_pass(tmp_path: Path) -> None:
    sharded = ("deepspeed=null", "fsdp={num_replicas: 2}", "launch.num_processes=4")
    assert dry_run(QUICKSTART, f"output={tmp_path}", *sharded) == 0


@pytest.mark.parametrize("use_cpu", ["true", "null"])
def test_fsdp_that_offloads_needs_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_cpu: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings = ("deepspeed=null", "fsdp={cpu_offload: true}", f"launch.use_cpu={use_cpu}")
    with pytest.raises(DiLoCoError, match=r"cpu_offload: .* needs an accelerator: set it to false"):
        dry_run(QUICKSTART, f"output={tmp_path}", *settings)


def test_offload_to_nvme_needs_a_folder(tmp_path: Path) -> None:
    zero = "{stage: 3, offload_optimizer: {device: nvme}}"
    settings = ("diloco.enabled=false", f"deepspeed={{zero_optimization: {zero}}}")
    with pytest.raises(DiLoCoError, match=r"offload_optimizer.device='nvme' needs nvme_path, a folder"):
        dry_run(QUICKSTART, f"output={tmp_path}", *settings)


def test_layers_to_wrap_must_be_in_the_model(tmp_path: Path) -> None:
    settings = ("deepspeed=null", "fsdp={transformer_layer_cls_to_wrap: [LlamaDecoderLayr]}")
    message = "transformer_layer_cls_to_wrap: the model has no 'LlamaDecoderLayr' .did you mean LlamaDecoderLayer"
    with pytest.raises(DiLoCoError, match=message):
        dry_run(QUICKSTART, f"output={tmp_path}", *settings)


def test_documents_are_opened(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"words": "some"}) + "\n")
    with pytest.raises(DiLoCoError, match="column"):
        dry_run(QUICKSTART, f"output={tmp_path}", f"data={{source: files, files: [{tmp_path}/text.jsonl]}}")
    assert dry_run(
        QUICKSTART,
        f"output={tmp_path}",
        f"data={{source: files, files: [{tmp_path}/text.jsonl], text_column: words}}",
    ) == 0  # fmt: skip


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.real_start
def test_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_diloco.cli", "launch", str(QUICKSTART), f"output={tmp_path}", "--dry-run"]
    completed = subprocess.run(
        [*command, "training.max_step=3"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert completed.returncode == 2
    assert "unknown setting training.max_step=3" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert "WARNING" not in completed.stdout + completed.stderr, "DeepSpeed's, of no accelerator"
