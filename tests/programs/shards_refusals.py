"""One of two ranks that hands `open_shards` what it must refuse, made by the real libraries, and notes what it says.

torchrun --nproc_per_node 1 ... -m tests.programs.shards_refusals RESULT.json
torchrun --nproc_per_node 2 ... -m tests.programs.shards_refusals RESULT.json

On a single rank it saves the checkpoint that is then loaded on two.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_diloco.errors import CheckpointError, UnsupportedError
from hf_diloco.inner import open_shards
from hf_diloco.inner.checkpoints import load_engine
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import layout_of

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

Made = tuple[nn.Module, Any]
CPU = {"device": "cpu"}


def main() -> None:
    torch.set_num_threads(1)
    atexit.register(time.sleep, 0.2)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    island = IslandGroup(timeout=60)
    if island.size == 1:
        save_alone()
    else:
        found = {name: attempt(make, island) for name, make in CASES.items()}
        said = island.gather(found)
        assert said[0] == said[1], f"the ranks disagree: {said}"
        if island.is_leader:
            Path(sys.argv[1]).write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


def attempt(make: Callable[[], Made], island: IslandGroup) -> str:
    """What `open_shards`, or else the check of the ranks' shards together, says to it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model, optimizer = make()
            layout_of(open_shards(model, optimizer, island.size), island)
        except (UnsupportedError, CheckpointError) as error:
            return f"refused: {error}"
        finally:
            for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):  # which Accelerate sets
                os.environ.pop(name, None)
    return "opened" + "".join(f"; warned: {item.message}" for item in warned if "hf_diloco" in str(item.message))


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def by_deepspeed(stage: int, model: nn.Module | None = None, optimizer: Any = None, **blocks: Any) -> Made:
    """The engine's model and optimizer."""
    engine = engine_of(stage, model, optimizer, **blocks)
    return engine.module, engine.optimizer


def engine_of(stage: int, model: nn.Module | None = None, optimizer: Any = None, **blocks: Any) -> Any:
    """Of DeepSpeed; `optimizer=False` means none, `blocks` go into DeepSpeed's JSON."""
    model = model or small_model()
    zero = {"stage": stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000, **blocks.pop("zero", {})}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **blocks,
    }
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    optimizer = optimizer or None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def on_nvme(attribute: str) -> Made:
    """The flag that DeepSpeed sets with `device: nvme`; the device itself needs libaio and a compilation."""
    model, optimizer = by_deepspeed(3, zero={"offload_optimizer": CPU, "offload_param": CPU})
    assert getattr(optimizer, attribute) is False
    setattr(optimizer, attribute, True)
    return model, optimizer


def zenflow() -> Made:
    settings = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": False}
    return by_deepspeed(3, zero={"offload_optimizer": CPU, "zenflow": settings})


def derived() -> Made:
    """An optimizer that a later DeepSpeed may derive from one that is known."""
    model, optimizer = by_deepspeed(2)
    kind = type(optimizer)
    optimizer.__class__ = type("NovelZeroOptimizer", (kind,), {"__module__": kind.__module__})
    return model, optimizer


def muon_of_torch() -> Made:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    return by_deepspeed(2, model, torch.optim.Muon(model.parameters()))


def experts(stage: int) -> Made:
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "moe": MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2)})
    group = {"params": list(model.parameters()), "name": "all"}
    optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(group))
    return by_deepspeed(stage, model, optimizer)


def not_optimized(stage: int) -> Made:
    model = small_model()
    return by_deepspeed(stage, model, torch.optim.AdamW(model[0].parameters()))


def tensor_parallel(stage: int) -> Made:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return by_deepspeed(stage, LlamaForCausalLM(config), tensor_parallel={"autotp_size": 2})


def pipeline(stage: int) -> Made:
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())
    return by_deepspeed(stage, model, train_batch_size=2)


def fsdp2(**options: Any) -> Made:
    model = small_model()
    fully_shard(model, **{"mesh": init_device_mesh("cpu", (2,)), **options})
    return model, torch.optim.AdamW(model.parameters())


def fsdp2_by_columns() -> Made:
    return fsdp2(shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))


def fsdp2_of_a_part() -> Made:
    model = small_model()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters())


def fsdp2_beside_dtensors() -> Made:
    model = small_model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    distribute_module(model[1], mesh)
    return model, torch.optim.AdamW(model.parameters())


def fsdp2_partial() -> Made:
    """Values that are a sum over the ranks, as a gradient before it is reduced."""
    model, optimizer = fsdp2()
    mesh = init_device_mesh("cpu", (2,))
    partial = nn.Parameter(DTensor.from_local(torch.ones(8, 8), mesh, [Partial()]))
    model.get_submodule("0").register_parameter("weight", partial)
    return model, optimizer


def fsdp2_of_tensor_parallel() -> Made:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shards", "tensor"))
    model = parallelize_module(small_model(), mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shards"])
    return model, torch.optim.AdamW(model.parameters())


def fsdp2_quantised() -> Made:
    """A pair of tensors that poses as one: values that are not where the parameter seems to be."""
    model = small_model()
    weight = model.get_parameter("0.weight").detach()
    model[0].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters())


def fsdp2_on_meta() -> Made:
    with torch.device("meta"):
        model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters())


def fsdp2_after_the_optimizer() -> Made:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, optimizer


def fsdp2_left_out() -> Made:
    """What Accelerate hands on where FSDP was asked for, on CPU."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = small_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator.unwrap_model(model), optimizer


def deepspeed_left_out() -> Made:
    """What Accelerate hands on where DeepSpeed was asked for, with `cpu=True`."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = small_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator.unwrap_model(model), optimizer


def dtensors() -> Made:
    model = distribute_module(small_model(), init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters())


def fsdp1(use_orig_params: bool) -> Made:
    model = FullyShardedDataParallel(small_model(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters())


def layers_by_rank() -> Made:
    """A pipeline made by hand: nothing marks it, only the ranks together can tell."""
    model = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(8, 8)})
    return model, torch.optim.AdamW(model.parameters())


def frozen() -> Made:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    return model.requires_grad_(False), optimizer


def on_meta() -> Made:
    model = nn.Linear(8, 8, device="meta")
    return model, torch.optim.AdamW(model.parameters())


def not_contiguous() -> Made:
    model = nn.Linear(8, 4)
    model.weight = nn.Parameter(torch.zeros(8, 4).t())
    return model, torch.optim.AdamW(model.parameters())


def of_doubles() -> Made:
    model = nn.Linear(8, 4, dtype=torch.float64)
    return model, torch.optim.AdamW(model.parameters())


def of_complex_numbers() -> Made:
    model = nn.Linear(8, 4, dtype=torch.complex64)
    return model, torch.optim.AdamW(model.parameters())


def of_one_value() -> Made:
    """The bias, of which the second rank has nothing."""
    return by_deepspeed(3, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))


def folder_of(name: str) -> Path:
    return Path(sys.argv[1]).parent / name


def save_alone() -> None:
    engine = engine_of(2)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    engine.save_checkpoint(str(checkpoint := folder_of("of 1 rank")), tag="step")
    (leftover := checkpoint / "step_converted").mkdir()  # of a conversion that was killed
    (pointer := checkpoint / "latest_universal").write_text(leftover.name)
    (own := checkpoint / "step_universal").mkdir()  # made by hand
    load_engine(engine, str(checkpoint), tag="step")
    assert (leftover.exists(), pointer.exists(), own.exists()) == (False, False, True)
    own.rmdir()


def loaded(checkpoint: Path) -> Made:
    engine = engine_of(2)
    load_engine(engine, str(checkpoint), tag="step")
    return engine.module, engine.optimizer


def loaded_without_files() -> Made:
    """A checkpoint of three ranks, two of which were on another machine."""
    checkpoint = folder_of("of 3 ranks")
    (checkpoint / "step").mkdir(parents=True, exist_ok=True)
    (checkpoint / "step" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").touch()
    return loaded(checkpoint)


def loaded_without_a_shared_folder() -> Made:
    """Each rank's machine has a disk of its own, and only the first one's holds the checkpoint."""
    return loaded(folder_of("elsewhere" if dist.get_rank() else "of 1 rank"))


def version(number: str) -> Made:
    made = by_deepspeed(1)
    deepspeed.__version__ = number
    return made


# Tensor and pipeline parallelism come last: they leave DeepSpeed's process groups changed.
CASES: dict[str, Callable[[], Made]] = {
    "version as tested": lambda: by_deepspeed(1),
    "newer version": lambda: version("0.20.1"),
    "older version": lambda: version("0.19.7"),
    "development version": lambda: version("0.19.9+abcdef"),
    "optimizer on nvme": lambda: on_nvme("swap_optimizer"),
    "parameters on nvme": lambda: on_nvme("params_in_nvme_and_cpu"),
    "zenflow": zenflow,
    "no optimizer": lambda: by_deepspeed(3, optimizer=False),
    "unknown optimizer": derived,
    "muon of torch": muon_of_torch,
    "experts zero0": lambda: experts(0),
    "experts zero2": lambda: experts(2),
    "not optimized zero2": lambda: not_optimized(2),
    "not optimized zero3": lambda: not_optimized(3),
    "fsdp2": fsdp2,
    "fsdp2 by columns": fsdp2_by_columns,
    "fsdp2 of a part": fsdp2_of_a_part,
    "fsdp2 beside dtensors": fsdp2_beside_dtensors,
    "fsdp2 partial": fsdp2_partial,
    "fsdp2 of tensor parallel": fsdp2_of_tensor_parallel,
    "fsdp2 quantised": fsdp2_quantised,
    "fsdp2 on meta": fsdp2_on_meta,
    "fsdp2 after the optimizer": fsdp2_after_the_optimizer,
    "fsdp2 left out": fsdp2_left_out,
    "deepspeed left out": deepspeed_left_out,
    "dtensors": dtensors,
    "fsdp1": lambda: fsdp1(use_orig_params=True),
    "fsdp1 flat": lambda: fsdp1(use_orig_params=False),
    "layers by rank": layers_by_rank,
    "all frozen": frozen,
    "meta device": on_meta,
    "not contiguous": not_contiguous,
    "doubles": of_doubles,
    "complex numbers": of_complex_numbers,
    "one value zero3": of_one_value,
    "files of other machines": loaded_without_files,
    "folder of one machine": loaded_without_a_shared_folder,
    "folder of all machines": lambda: loaded(folder_of("of 1 rank")),
    "tensor parallel zero0": lambda: tensor_parallel(0),
    "tensor parallel zero1": lambda: tensor_parallel(1),
    "pipeline zero0": lambda: pipeline(0),
    "pipeline zero1": lambda: pipeline(1),
}


if __name__ == "__main__":
    main()
