"""Tiny Llamas and the engines that train them: plain PyTorch, DDP, FSDP2 or DeepSpeed, as a `Cell` says."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.ops.adam import FusedAdam
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.programs.shards_table import Cell

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its compilation takes 17 s

LEARNING_RATE = 1e-2
ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-3}  # a large eps: rounding of tiny gradients does not grow
VOCABULARY = 61


def make_model(cell: Cell, zero_config: dict[str, Any] | None = None) -> nn.Module:
    """The model, in fp32; sizes are odd, so that no parts come out equal."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=21,
        intermediate_size=27,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=6,
        tie_word_embeddings=cell.tied,
    )
    made_by: AbstractContextManager[Any] = nullcontext()
    if zero_config:
        made_by = deepspeed.zero.Init(config_dict_or_path=zero_config)
    with made_by:
        model: nn.Module = LlamaForCausalLM(config)
    if cell.adapt.startswith("lora"):
        torch.manual_seed(2)
        rank = 1 if cell.adapt == "lora of rank 1" else 3
        model = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))
    if cell.adapt == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "layers.0.mlp" not in name and "norm" not in name
    return model.bfloat16() if cell.numbers == "bf16 parameters" else model


def split_groups(cell: Cell, named: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as the Trainer makes them: no weight decay on norms."""
    if not cell.groups:
        return [{"params": [tensor for _, tensor in named], "weight_decay": 0.1}]
    decayed = [tensor for name, tensor in named if "norm" not in name]
    others = [tensor for name, tensor in named if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def groups_of_optimizer(cell: Cell, named: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The groups that the optimizer ends up with: DeepSpeed splits each one for Muon and Adam."""
    groups = split_groups(cell, named)
    if cell.optimizer != "muon":
        return groups
    names = {id(tensor): name for name, tensor in named}
    halves = []
    for group in groups:
        for use_muon in (True, False):
            half = [one for one in group["params"] if is_for_muon(names[id(one)]) is use_muon]
            halves += [{**group, "params": half, "use_muon": use_muon}] if half else []
    return halves


def is_for_muon(name: str) -> bool:
    """Whether it is a matrix of a hidden layer of this model."""
    return not any(word in name for word in ("embed", "lm_head", "norm"))


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's Muon as its JSON makes it, here of whole matrices."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    settings = [{"lr": LEARNING_RATE, **({} if group["use_muon"] else ADAM), **group} for group in groups]
    return MuonWithAuxAdam(settings, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={})


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in named_parameters(model) if parameter.requires_grad]


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All of them, named as in the model as it was made."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), one) for name, one in model.named_parameters()]


def autocast(cell: Cell) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if cell.numbers == "autocast" else nullcontext()


class FusedAdamWithoutKernel(FusedAdam):
    """DeepSpeed decides by this type how ZeRO-0 keeps its masters; the kernel itself would have to be compiled."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=LEARNING_RATE, **ADAM)
        self.__dict__.update({name: value for name, value in vars(self.inner).items() if name != "inner"})

    def step(self, closure: Any = None) -> None:
        self.inner.param_groups = self.param_groups
        self.inner.state = self.state
        self.inner.step()


class Engine:
    """Something that trains a model: `module` and `optimizer` are what a Trainer's callback is given."""

    module: nn.Module
    optimizer: Any

    def step(self, batches: list[torch.Tensor]) -> None:
        """One optimizer step over some micro-batches."""
        raise NotImplementedError

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of everything that would disturb the next engine."""


class PlainEngine(Engine):
    def __init__(self, cell: Cell, num_ranks: int) -> None:
        self._cell = cell
        self.module = make_model(cell)
        self._model: Any = DistributedDataParallel(self.module) if num_ranks > 1 else self.module
        self.optimizer = torch.optim.AdamW(split_groups(cell, trainable(self.module)), lr=LEARNING_RATE, **ADAM)

    def step(self, batches: list[torch.Tensor]) -> None:
        self._model.train()
        for number, tokens in enumerate(batches):
            last = number == len(batches) - 1
            wait = nullcontext() if last or self._model is self.module else self._model.no_sync()
            with wait:
                with autocast(self._cell):
                    loss = self._model(input_ids=tokens, labels=tokens).loss / len(batches)
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        self._model.eval()
        with torch.no_grad(), autocast(self._cell):
            return self._model(input_ids=tokens).logits


class Fsdp2Engine(PlainEngine):
    """As Accelerate does it: a unit a block, one of what is used last, which stays whole after the forward pass."""

    def __init__(self, cell: Cell, num_ranks: int) -> None:
        self._cell = cell
        self.module = self._model = model = make_model(cell)
        options = dict(cell.fsdp or {})
        if options.pop("offload", False):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if options.pop("checkpointing", False):
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
        if cell.numbers == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        replicas = options.pop("replicas", None)
        options["mesh"] = init_device_mesh("cpu", (num_ranks,))
        if replicas:
            shape = (replicas, num_ranks // replicas)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for module in [one for one in model.modules() if isinstance(one, LlamaDecoderLayer)]:
            fully_shard(module, **options)
        inner = model.get_submodule("base_model.model") if cell.adapt.startswith("lora") else model
        assert isinstance(inner, LlamaForCausalLM)
        last: list[nn.Module] = [inner.model.norm, inner.model.embed_tokens, inner.lm_head]
        fully_shard(last, **{**options, "reshard_after_forward": False})
        fully_shard(model, **options)
        self.optimizer = torch.optim.AdamW(split_groups(cell, trainable(model)), lr=LEARNING_RATE, **ADAM)

    @property
    def dtype(self) -> torch.dtype:
        """In which parameters are gathered for the forward pass."""
        return torch.float32 if self._cell.numbers == "fp32" else torch.bfloat16

    def step(self, batches: list[torch.Tensor]) -> None:
        self._model.train()
        for tokens in batches:
            (self._model(input_ids=tokens, labels=tokens).loss / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeedEngine(Engine):
    def __init__(self, cell: Cell, num_ranks: int) -> None:
        from accelerate.utils import DeepSpeedOptimizerWrapper

        config = deepspeed_config(cell, num_ranks)
        model = make_model(cell, config if cell.zero_init else None)
        groups = split_groups(cell, trainable(model))
        if cell.optimizer in ("json", "muon"):
            given: dict[str, Any] = {"model_parameters": groups}
        elif cell.optimizer == "client":
            given = {"optimizer": torch.optim.AdamW(groups, lr=LEARNING_RATE, **ADAM)}
        else:
            given = {"optimizer": FusedAdamWithoutKernel(groups)}
        self._engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False, **given)
        self.module = self._engine.module
        self.optimizer = DeepSpeedOptimizerWrapper(self._engine.optimizer)

    def step(self, batches: list[torch.Tensor]) -> None:
        self._engine.train()
        for tokens in batches:
            self._engine.backward(self._engine(input_ids=tokens, labels=tokens).loss)
            self._engine.step()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        self._engine.eval()
        with torch.no_grad():
            return self._engine(input_ids=tokens).logits

    def close(self) -> None:
        self._engine.destroy()


def deepspeed_config(cell: Cell, num_ranks: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": cell.stage, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
    if cell.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5_000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": cell.accumulation,
        "train_batch_size": 2 * cell.accumulation * num_ranks,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": cell.numbers == "bf16"},
        "zero_optimization": {**zero, **cell.zero},
        **cell.config,
    }
    if cell.optimizer == "json":
        params = {"lr": LEARNING_RATE, "torch_adam": True, "weight_decay": 0.1, **ADAM}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if cell.optimizer == "muon":
        params = {"lr": LEARNING_RATE, "torch_adam": True, "weight_decay": 0.1, **ADAM}
        config["optimizer"] = {"type": "Muon", "params": params}
    return config


def make_engine(cell: Cell, num_ranks: int) -> Engine:
    if cell.fsdp is not None:
        return Fsdp2Engine(cell, num_ranks)
    return PlainEngine(cell, num_ranks) if cell.stage is None else DeepSpeedEngine(cell, num_ranks)
