"""One rank of an island that trains a tiny Llama with the Trainer: settings come as JSON, the result goes to a file.

Settings: output_dir, result, zero (null, 0..3), fsdp (null, or `fsdp_config`), full_disk_at (a step), bf16,
own_optimizer ("AdamW" of DeepSpeed), offload, lora, data_seed, per_device_batch, accumulation, max_steps, save_steps,
schedule, resume (a folder, or "common"), adds_callback (it is made before DeepSpeed is imported, and added once the
Trainer is made), fail_at, extra (TrainingArguments), diloco (null or DiLoCoConfig fields; island, num_islands and
rendezvous: environment).
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""What a launcher tells a single rank; DeepSpeed wants to hear it."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a counting pattern with noise: learnable, and made from a seed alone."""

    def __init__(self, seed: int, size: int = 512, length: int = 16, vocabulary: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(vocabulary, (size, 1), generator=generator)
        stride = torch.randint(1, 4, (size, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model(lora: bool, tied: bool, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=52,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    return model


def deepspeed_settings(settings: dict[str, Any]) -> dict[str, Any] | None:
    stage = settings.get("zero")
    if stage is None:
        return None
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 100_000}  # the default takes 2 GB a process
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = settings.get("persistence", 0)
    if settings.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    zero.update(settings.get("zero_extra", {}))
    whole: dict[str, Any] = {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        **settings.get("deepspeed_extra", {}),
    }
    if settings.get("own_optimizer"):
        whole["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
        }
    return whole


def made_callback(settings: dict[str, Any]) -> Any:
    from hf_diloco import DiLoCoCallback

    return DiLoCoCallback(**settings["diloco"])


def main() -> None:
    settings = json.loads(sys.argv[1])
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    held = sys.modules.pop("deepspeed", None)  # a forked process has imported it, a user's has not
    added = [made_callback(settings)] if settings.get("adds_callback") else []
    sys.modules.update({"deepspeed": held} if held else {})
    if settings.get("zero") is not None:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []

    class Recorder(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
        ) -> None:
            if logs and "loss" in logs:
                losses.append(logs["loss"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == settings.get("fail_at"):
                os.kill(os.getpid(), 9)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """The disk takes no file as long as those of a checkpoint, from one step to the next."""
            is_full = state.global_step + 1 == settings.get("full_disk_at")
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000 if is_full else hard, hard))

    # TrainingArguments first: under DeepSpeed they decide how a model is made.
    args = TrainingArguments(
        output_dir=settings["output_dir"],
        use_cpu=True,
        deepspeed=deepspeed_settings(settings),
        per_device_train_batch_size=settings.get("per_device_batch", 4),
        gradient_accumulation_steps=settings.get("accumulation", 1),
        max_steps=settings.get("max_steps", 6),
        learning_rate=settings.get("learning_rate", 3e-3),
        lr_scheduler_type=settings.get("schedule", "constant"),
        bf16=settings.get("bf16", False),
        logging_steps=1,
        save_strategy="steps" if settings.get("save_steps") else "no",
        save_steps=settings.get("save_steps", 500),
        report_to=[],
        disable_tqdm=True,
        seed=7,
        **({} if settings.get("fsdp") is None else {"fsdp": True, "fsdp_config": settings["fsdp"]}),
        **settings.get("extra", {}),
    )
    if settings.get("fsdp") is not None:
        from accelerate.utils import DistributedType

        args.distributed_state.distributed_type = DistributedType.MULTI_GPU  # else Accelerate leaves FSDP out
    model = make_model(settings.get("lora", False), settings.get("tied", True), settings.get("model_seed", 1))
    callbacks: list[Any] = [Recorder()]
    if settings.get("diloco") is not None and not added:
        callbacks.append(made_callback(settings))
        if settings.get("resume") == "common":
            settings["resume"] = str(callbacks[-1].common_checkpoint(settings["output_dir"]))
    trainer = Trainer(model, args, train_dataset=Tokens(settings.get("data_seed", 0)), callbacks=callbacks)
    for callback in added:
        trainer.add_callback(callback)
    if settings.get("zero") is not None:
        assert trainer.is_deepspeed_enabled
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    if settings.get("zero") is not None:
        assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    weights = gather_weights(trainer)
    if args.process_index == 0:
        Path(settings["result"]).parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, settings["result"] + ".pt")
        Path(settings["result"]).write_text(json.dumps({"losses": losses, "steps": trainer.state.global_step}))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def gather_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The working copies, which the forward pass uses, of all trainable parameters."""
    if trainer.is_fsdp_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model)
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        return {name: value for name, value in state.items() if name in trained}
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    if hasattr(next(iter(parameters.values())), "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: p.detach().clone() for name, p in parameters.items()}
    return {name: p.detach().clone() for name, p in parameters.items()}


if __name__ == "__main__":
    main()
