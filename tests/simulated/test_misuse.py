"""Callbacks and loops that are used in another way than they are made for say so, and say what to do."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_diloco import (
    DiLoCoCallback,
    DiLoCoConfig,
    GossipCallback,
    GossipConfig,
    OneBitAdam,
    OneBitCallback,
    OuterLoop,
)
from hf_diloco.errors import CheckpointError, ConfigError, FingerprintError, IslandLostError, UnsupportedError
from hf_diloco.trainer.arguments import check_arguments
from hf_diloco.trainer.gossip_steps import check_eval_sizes, check_gossip_arguments
from hf_diloco.trainer.refusals import REFUSALS
from tests.islands import try_islands
from tests.programs.trainer_island import Tokens, make_model
from tests.trainers import make_trainer

# Every argument of transformers 5.24 that is not on the list: it acts within an island, between rounds, or not at all
# on what islands agree on. A field of a later version is to be decided: here, or in REFUSALS.
HARMLESS = """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_kwargs warmup_steps weight_decay gradient_accumulation_steps average_tokens_across_devices
    max_grad_norm label_smoothing_factor bf16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm logging_dir
    warmup_ratio report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_steps save_on_each_node hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    metric_for_best_model greater_is_better ignore_data_skip full_determinism seed data_seed use_cpu
    accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics
    do_train do_eval do_predict resume_from_checkpoint local_rank
"""


def test_every_training_argument_is_decided() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    refused = {refusal.setting for refusal in REFUSALS} & fields
    harmless = set(HARMLESS.split())
    assert not harmless & refused
    assert fields - refused - harmless == set(), "decide: add them to REFUSALS, or to HARMLESS above"


# Callbacks


def test_layers_to_wrap_must_be_in_the_model(tmp_path: Path) -> None:
    """Called by hand, as a Trainer takes up FSDP in a distributed training alone."""
    fsdp: dict[str, Any] = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayr"}}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fsdp)
    model = make_model(lora=False, tied=True, seed=1)
    with pytest.raises(ConfigError, match=r"the model has no 'LlamaDecoderLayr' .did you mean LlamaDecoderLayer"):
        DiLoCoCallback(sync_every=2).on_init_end(args, TrainerState(), TrainerControl(), model=model)


class ScheduleFreeSGD(torch.optim.SGD):
    """Stands for those of the package schedulefree, which is not installed here."""


def test_a_schedule_free_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=2))
    trainer.optimizer = ScheduleFreeSGD(make_model(lora=False, tied=True, seed=1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"optim='ScheduleFreeSGD' cannot be used: .* each would end with another"):
        trainer.train()


@pytest.mark.parametrize("way", ["callback", "loop"])
def test_settings_that_deepspeed_ignores_are_told(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        **{"zero_optimization": {"stage": 1}, "gradient_cliping": 1.0, "data_types": {"grad_acum_dtype": "fp32"}},
        **{"_comment": "of whoever wrote this", "msamp": {}},
    }
    plugin = SimpleNamespace(deepspeed_config=config, enable_msamp=False)
    if way == "callback":
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        args.deepspeed_plugin = plugin
        check_arguments(DiLoCoConfig(), args)
    else:
        monkeypatch.setattr(AcceleratorState, "deepspeed_plugin", plugin)
        make_loop()
    (line,) = [line for line in caplog.messages if "deepspeed" in line]
    assert line == (
        "deepspeed: unknown setting gradient_cliping=1.0 (did you mean gradient_clipping?), which DeepSpeed ignores; "
        "unknown setting data_types.grad_acum_dtype='fp32' (did you mean grad_accum_dtype?), which DeepSpeed ignores"
    )


def one_twice() -> list[TrainerCallback]:
    return [DiLoCoCallback(sync_every=2)] * 2


def two_of_a_kind() -> list[TrainerCallback]:
    return [DiLoCoCallback(sync_every=2), DiLoCoCallback(sync_every=2)]


def two_kinds() -> list[TrainerCallback]:
    return [DiLoCoCallback(sync_every=2), GossipCallback(num_nodes=1)]


@pytest.mark.parametrize("make", [one_twice, two_of_a_kind, two_kinds])
def test_several_callbacks_are_refused(make: Callable[[], list[TrainerCallback]], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, *make())
    with pytest.raises(ConfigError, match=r"callbacks=\['\w+Callback', '\w+Callback'\] cannot be used"):
        trainer.train()
    assert trainer.state.global_step == 0


class Adding(TrainerCallback):
    """Adds a callback at the first step."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.add_callback(DiLoCoCallback(sync_every=2))


def test_a_callback_that_is_added_while_training_is_refused(tmp_path: Path) -> None:
    adding = Adding()
    adding.trainer = make_trainer(tmp_path, adding)
    with pytest.raises(ConfigError, match=r"give it to the Trainer before trainer\.train\(\)"):
        adding.trainer.train()


def outer_weights() -> None:
    with DiLoCoCallback().outer_weights():
        pass


def outer_weights_of_islands_that_have_only_met() -> None:
    callback = DiLoCoCallback()
    assert callback.common_checkpoint("nothing") is None
    with callback.outer_weights():
        pass


def mean_weights() -> None:
    with GossipCallback(num_nodes=1).mean_weights():
        pass


@pytest.mark.parametrize("use", [outer_weights, outer_weights_of_islands_that_have_only_met, mean_weights])
def test_weights_that_are_not_there_yet(use: Callable[[], None]) -> None:
    with pytest.raises(ConfigError, match=r"training has not begun with this .*weights\(\) during training or after"):
        use()


def test_a_frozen_model_is_refused_before_islands_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):  # which the island's program sets
        monkeypatch.delenv(name, raising=False)
    callback = DiLoCoCallback(sync_every=2, num_islands=2, island=1, rendezvous="tcp://127.0.0.1:9", join_timeout=300)
    trainer = make_trainer(tmp_path, callback)
    assert trainer.model is not None
    trainer.model.requires_grad_(False)
    trainer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UnsupportedError, match="no trainable parameter"):
        trainer.train()


class Unfreezes(TrainerCallback):
    """Unfreezes the embeddings after a step, as schedules of fine-tuning do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            kwargs["model"].requires_grad_(True)


def test_a_parameter_that_is_unfrozen_amid_training_ends_it_after_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=2), Unfreezes())
    assert trainer.model is not None
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    with pytest.raises(
        UnsupportedError, match=r"parameter model.embed_tokens.weight has been unfrozen since training"
    ):
        trainer.train()
    assert (tmp_path / "checkpoint-4" / "diloco" / "outer.json").exists()
    trainer.train()  # in which it is exchanged
    assert trainer.state.global_step == 4


class Replaces(TrainerCallback):
    """Loads weights after a step, in the place of the parameters."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            kwargs["model"].load_state_dict(kwargs["model"].state_dict(), assign=True)


def test_a_parameter_that_is_replaced_amid_training_ends_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=2), Replaces())
    with pytest.raises(UnsupportedError, match=r"parameter model.embed_tokens.weight is gone since training began"):
        trainer.train()


def test_a_fact_that_is_compared_anyway_cannot_be_given_otherwise(tmp_path: Path) -> None:
    make_trainer(tmp_path, DiLoCoCallback(sync_every=2, fingerprint={"max_steps": 4})).train()
    with pytest.raises(
        ConfigError, match=r"fingerprint\['max_steps'\] is 5, but this process has 4: hf_diloco already compares it"
    ):
        make_trainer(tmp_path, DiLoCoCallback(sync_every=2, fingerprint={"max_steps": 5})).train()


def test_evaluating_and_predicting_without_training_meet_nobody(tmp_path: Path) -> None:
    callback = DiLoCoCallback(num_islands=2, island=1, rendezvous="tcp://127.0.0.1:9", join_timeout=300)
    trainer = make_trainer(tmp_path, callback)
    assert "eval_loss" in trainer.evaluate()
    metrics = trainer.predict(Tokens(1, size=8)).metrics
    assert metrics is not None
    assert metrics["test_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("abc", "fingerprint is a dict of facts by name"),
        ({"x": [1, 2]}, r"fingerprint\['x'\] is a list"),
        ({"x": torch.ones(2)}, r"fingerprint\['x'\] is a Tensor"),
        ({3: "x"}, r"fingerprint\[3\] is a str"),
        ({"x": math.nan}, r"fingerprint\['x'\] is nan: give a finite number"),
    ],
)
def test_facts_that_cannot_be_compared(given: Any, message: str) -> None:
    for make in (DiLoCoCallback, GossipCallback):
        with pytest.raises(TypeError, match=message):
            make(fingerprint=given)
    with pytest.raises(TypeError, match=message):
        make_loop(fingerprint=given)


class Ending(TrainerCallback):
    """Ends training on its own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_callback_that_ends_training_alone_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_diloco"):
        make_trainer(tmp_path, DiLoCoCallback(sync_every=4), Ending()).train()
    assert "training ended after 2 of 4 steps: another callback ended it" in caplog.text
    assert "Let it end after a multiple of sync_every (4) steps" in caplog.text, "max_steps is one already"


# The loop


def make_loop(**arguments: Any) -> OuterLoop:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made = {
        "accelerator": accelerator,
        "model": prepared,
        "optimizer": optimizer,
        "config": DiLoCoConfig(sync_every=1),
    }
    return OuterLoop(**{**made, **arguments})


def sgd(kind: type[torch.optim.SGD] = torch.optim.SGD) -> torch.optim.SGD:
    return kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"accelerator": torch.nn.Linear(1, 1)}, TypeError, "accelerator is a Linear: call OuterLoop"),
        ({"model": "gpt2"}, TypeError, "model is a str: call OuterLoop"),
        ({"optimizer": None}, ConfigError, "optimizer is a NoneType that this Accelerator has not prepared"),
        ({"optimizer": sgd()}, ConfigError, "optimizer is a SGD that this Accelerator has not prepared"),
        ({"model": torch.nn.Linear(3, 1)}, ConfigError, "trains none of the parameters of model, a Linear"),
    ],
    ids=["accelerator", "model", "no optimizer", "optimizer", "another model"],
)
def test_a_loop_of_other_things(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_loop(**arguments)


def test_a_loop_refuses_schedule_free_optimizers(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, ScheduleFreeSGD(model.parameters(), lr=0.1))
    loop = OuterLoop(accelerator, model, optimizer, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="optim='ScheduleFreeSGD' cannot be used"), loop:
        pass


def test_ranks_that_accelerate_does_not_count_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts them on a machine without accelerators, where no `use_cpu` or `cpu` is given."""
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    callback = OneBitCallback(OneBitAdam([torch.nn.Parameter(torch.ones(1))], lr=0.1, freeze_step=2))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    message = "torch.distributed has 2 ranks, and Accelerate counts 1: .* set use_cpu=True"
    for check in (
        partial(check_arguments, DiLoCoConfig(), args),
        partial(check_gossip_arguments, args),
        partial(callback.on_train_begin, args, TrainerState(), TrainerControl()),
        make_loop,
    ):
        with pytest.raises(ConfigError, match=message):
            check()


@pytest.mark.parametrize("weight", [-3, float("nan"), float("inf"), "4", [1], torch.tensor([3, 4])], ids=str)
def test_weights_of_steps_that_are_none(weight: Any, tmp_path: Path) -> None:
    config = DiLoCoConfig(sync_every=1, weight_by="examples")
    with make_loop(config=config, output_dir=tmp_path) as outer:
        with pytest.raises(ConfigError, match=r"step\(weight=.*\): give the number of examples"):
            outer.step(weight=weight)
        assert outer.step(weight=torch.tensor(4)).weight == 4  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("count", ["ten", -3, 0, 12.5, True], ids=str)
@pytest.mark.parametrize("name", ["num_steps", "num_rounds"])
def test_counts_that_are_none(name: str, count: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"OuterLoop\(..., {name}=.*\): give a whole number from 1 on"):
        make_loop(output_dir=tmp_path, **{name: count})


def test_a_loop_is_not_stepped_while_it_shows_the_outer_parameters(tmp_path: Path) -> None:
    with make_loop(config=DiLoCoConfig(sync_every=2), output_dir=tmp_path) as outer:
        outer.step()
        with outer.outer_weights(), pytest.raises(ConfigError, match=r"step\(\) within outer_weights\(\)"):
            outer.step()
        outer.step()


def test_a_loop_whose_state_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with make_loop(output_dir=tmp_path) as outer:
        with pytest.raises(CheckpointError, match="Not a directory"):
            outer.save_state(tmp_path / "file" / "state")
        outer.save_state(tmp_path / "state")


def test_a_sequence_length_that_is_text_is_a_fact_like_others(tmp_path: Path) -> None:
    make_trainer(tmp_path, DiLoCoCallback(sync_every=2, fingerprint={"sequence_length": "long"})).train()


def test_a_loop_is_entered_once_and_stepped_inside(tmp_path: Path) -> None:
    with make_loop(output_dir=tmp_path) as outer:
        with pytest.raises(ConfigError, match="entered before"), outer:
            pass
        outer.step()
    with pytest.raises(ConfigError, match="after the `with` block"):
        outer.step()
    with pytest.raises(ConfigError, match="entered before"), outer:
        pass
    assert outer.round == 1


def test_a_loop_within_another_at_the_same_place_is_refused(tmp_path: Path) -> None:
    """It would take the other's part in the run. After it, another one may begin there."""
    common: dict[str, Any] = {"num_islands": 2, "min_islands": 1, "island": 0, "sync_every": 1, "join_timeout": 0.3}
    loops = [
        make_loop(output_dir=tmp_path / name, config=DiLoCoConfig(rendezvous=f"file://{tmp_path / place}", **common))
        for name, place in [("outer", "a"), ("inner", "a"), ("elsewhere", "b"), ("later", "a")]
    ]
    with loops[0] as outer:
        with pytest.raises(ConfigError, match=r"inside the `with` block of another OuterLoop, .* island 0 at file://"):
            loops[1].__enter__()
        with loops[2]:
            pass
        assert outer.step() is not None
    with loops[3] as later:
        assert later.step() is not None


def test_loops_of_unequal_lengths_are_refused_when_they_meet(tmp_path: Path, free_port: int) -> None:
    def island_main(island: int) -> None:
        rendezvous = f"tcp://127.0.0.1:{free_port}"
        config = DiLoCoConfig(island=island, num_islands=2, rendezvous=rendezvous, join_timeout=60)
        loop = loops[island]
        loop.config = config
        with loop:
            raise AssertionError("the loop has begun")

    loops = [make_loop(num_steps=steps, output_dir=tmp_path / str(steps)) for steps in (8, 12)]
    for outcome in try_islands(2, island_main):
        assert isinstance(outcome, FingerprintError)
        assert "max_steps differs (island 0: 8, island 1: 12)" in str(outcome)


def test_eager_loops_of_unequal_lengths_end_with_the_first(tmp_path: Path, free_port: int) -> None:
    def island_main(island: int) -> None:
        rendezvous = f"tcp://127.0.0.1:{free_port}"
        config = DiLoCoConfig(method="eager", sync_every=2, island=island, num_islands=2, rendezvous=rendezvous)
        loops[island].config = config.model_copy(update={"exchange_timeout": 20.0})
        with loops[island] as outer:
            for _ in range(4 if island == 0 else 8):
                outer.step()

    loops = [make_loop(output_dir=tmp_path / str(island)) for island in range(2)]
    for outcome in try_islands(2, island_main):
        assert isinstance(outcome, IslandLostError)
        assert "island 0 ended with round 3, and others have more steps to take" in str(outcome)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, DiLoCoCallback(sync_every=2))
    trainer.optimizer = torch.optim.AdamW(make_model(lora=False, tied=True, seed=1).parameters())
    with pytest.raises(ConfigError, match="optimizer trains none of the parameters of model, a LlamaForCausalLM"):
        trainer.train()


@pytest.mark.parametrize("way", ["node", "1-bit"])
def test_a_node_and_a_1_bit_optimizer_train_the_trainers_model(way: str, tmp_path: Path) -> None:
    """Of another model, such as this one before it got adapters, it would train nothing, and nothing would say so."""
    node = GossipCallback(num_nodes=1)
    base = make_model(lora=False, tied=True, seed=1)
    if way == "node":
        optimizer: Any = node.make_optimizer(base, TrainingArguments(str(tmp_path), use_cpu=True))
    else:
        optimizer = OneBitAdam(base.parameters(), lr=0.1, freeze_step=2)
    trainer = make_trainer(tmp_path, node if way == "node" else OneBitCallback(optimizer))
    trainer.optimizer = optimizer
    with pytest.raises(ConfigError, match=r"optimizer trains none of the parameters of model, a .* adapters included"):
        trainer.train()


def test_resuming_from_a_folder_that_the_trainer_does_not_resume_from(tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", DiLoCoCallback(sync_every=2), save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "a" / "checkpoint-2"
    trainer = make_trainer(tmp_path / "b", DiLoCoCallback(sync_every=2, resume_from_checkpoint=tmp_path / "none"))
    with pytest.raises(CheckpointError, match="none is not there: leave resume_from_checkpoint of DiLoCoCallback"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer = make_trainer(tmp_path / "b", DiLoCoCallback(sync_every=2, resume_from_checkpoint=checkpoint))
    with pytest.raises(CheckpointError, match=r"outer state of step 2, and the Trainer is at step 0: call"):
        trainer.train()


def test_a_callback_resumes_from_a_folder_only() -> None:
    wrong: Any = True
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=True\): give the folder.*trainer\.train\("):
        DiLoCoCallback(sync_every=2, resume_from_checkpoint=wrong)


@pytest.mark.parametrize("given", [3, True, ["a"], b"a"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (DiLoCoCallback, "stop_file"),
        (GossipCallback, "stop_file"),
        (make_loop, "output_dir"),
        (make_loop, "resume_from"),
    ],
)
def test_paths_that_are_none(make: Callable[..., Any], name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\w+\({name}={re.escape(repr(given))}\): give a path, or leave it out"):
        make(**{name: given})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"bind_address": "nonsense"}, "bind_address: 'nonsense' is no address of this machine"),
        ({"require_key": True}, "require_key=true, and there is no key"),
    ],
    ids=["address", "key"],
)
@pytest.mark.parametrize("more", [{}, {"exchange": "bucket"}], ids=["all must be there", "they come and go"])
@pytest.mark.parametrize("island", [0, 1])
def test_what_is_wrong_with_an_island_shows_before_it_waits(
    own: dict[str, Any], message: str, more: dict[str, Any], island: int, tmp_path: Path, free_port: int
) -> None:
    place: dict[str, Any] = {
        "island": island,
        "num_islands": 2,
        "rendezvous": f"tcp://127.0.0.1:{free_port}",
        "join_timeout": 1,
    }
    loop = make_loop(config=DiLoCoConfig(**place, **more, **own), output_dir=tmp_path)
    with pytest.raises(ConfigError, match=message), loop:
        pass
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, DiLoCoCallback(**place, **more, **own)).train()


@pytest.mark.parametrize("given", [0, -1, 1.5, math.nan, "8", True, {"books": 0}])
def test_numbers_of_examples_that_are_none(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_eval_examples=.*: give whole numbers above 0"):
        check_eval_sizes(given, None, num_nodes=2)


def test_a_node_listens_at_an_address_of_its_machine(tmp_path: Path, free_port: int) -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port}"
    callback = GossipCallback(GossipConfig(num_nodes=2, node=1, rendezvous=rendezvous, bind_address="nonsense"))
    with pytest.raises(ConfigError, match="bind_address: 'nonsense' is no address of this machine"):
        callback.make_optimizer(torch.nn.Linear(3, 1), TrainingArguments(str(tmp_path), use_cpu=True))


def test_a_node_refuses_a_memory_format_that_cannot_be_saved(tmp_path: Path) -> None:
    model: Any = torch.nn.Conv2d(3, 4, 3)
    args, callback = TrainingArguments(str(tmp_path), use_cpu=True), GossipCallback(num_nodes=1)
    callback.make_optimizer(model, args)
    with pytest.raises(UnsupportedError, match=r"parameter weight is not contiguous .* before make_optimizer\(\)"):
        callback.make_optimizer(model.to(memory_format=torch.channels_last), args)
