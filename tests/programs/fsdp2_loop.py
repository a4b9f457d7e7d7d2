"""One rank of an island that trains a tiny Llama with FSDP2 in a hand-written loop.

Settings, as JSON: by ("accelerate", its plugin; or "hand", `fully_shard`), bf16, lora, offload, checkpointing, mesh
(its shape), batch (of the island), config (DiLoCoConfig fields), folder, steps, save_at (a step), resume_from (a
folder), result (file).
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
)
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_diloco import DiLoCoConfig, OuterLoop
from tests.programs.mesh_loop import compute_loss
from tests.programs.trainer_island import Tokens, make_model


def prepare(settings: dict[str, Any]) -> tuple[Accelerator, nn.Module, Any, Any]:
    by_hand = settings["by"] == "hand"
    state = PartialState(cpu=True)
    if not by_hand:
        state.distributed_type = DistributedType.MULTI_GPU  # else Accelerate leaves FSDP out
    shape = settings.get("mesh", [2])
    replicas = None if by_hand or len(shape) == 1 else ParallelismConfig(*shape)
    # Page-locked memory, the default, can be had only where there is an accelerator.
    offload = CPUOffloadPolicy(pin_memory=False) if settings.get("offload") else OffloadPolicy()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_offload=offload,
        activation_checkpointing=settings.get("checkpointing", False),
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if settings.get("bf16") and not by_hand else "no",
        fsdp_plugin=None if by_hand else plugin,
        parallelism_config=replicas,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = make_model(lora=settings.get("lora", False), tied=True, seed=1)
    batch = settings.get("batch", 4) // accelerator.num_processes
    loader = accelerator.prepare(DataLoader(Tokens(settings["config"]["island"]), batch_size=batch))
    if by_hand:
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if settings.get("bf16") else MixedPrecisionPolicy()
        )
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for module in [one for one in model.modules() if isinstance(one, LlamaDecoderLayer)]:
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    if by_hand:
        return accelerator, model, accelerator.prepare(optimizer), loader
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, loader


def save(folder: Path, by: str, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    if by == "accelerate":
        accelerator.save_state(str(folder))
        return
    weights, moments = get_state_dict(model, optimizer.optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "inner")


def load(folder: Path, by: str, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    if by == "accelerate":
        accelerator.load_state(str(folder))
        return
    weights, moments = get_state_dict(model, optimizer.optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "inner")
    set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    atexit.register(time.sleep, 0.2)  # Gloo's threads may abort an interpreter that shuts down
    accelerator, model, optimizer, loader = prepare(settings)
    assert isinstance(model, FSDPModule)
    resume_from, step = settings.get("resume_from"), 0
    if resume_from:
        load(Path(resume_from), settings["by"], accelerator, model, optimizer)
        step = json.loads((Path(resume_from) / "diloco" / "outer.json").read_text())["global_step"]
        loader = accelerator.skip_first_batches(loader, step)
    hashes, config = [], DiLoCoConfig(**settings["config"])
    with OuterLoop(
        accelerator, model, optimizer, config, output_dir=settings["folder"], resume_from=resume_from
    ) as outer:
        for batch in loader:
            accelerator.backward(compute_loss(model(input_ids=batch["input_ids"], use_cache=False), batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
            if report := outer.step(weight=settings.get("batch", 4)):
                hashes.append(report.outer_hash)
            step += 1
            if step == settings.get("save_at"):
                write = partial(save, by=settings["by"], accelerator=accelerator, model=model, optimizer=optimizer)
                outer.save_checkpoint(write=write)
            if step == settings["steps"]:
                break
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters: dict[str, Any] = {name: one for name, one in model.named_parameters() if one.requires_grad}
    weights = {name: one.full_tensor().detach() for name, one in parameters.items()}
    if accelerator.is_main_process:
        torch.save((weights, hashes), settings["result"])
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
