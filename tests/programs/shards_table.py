"""The combinations of DeepSpeed settings, models and optimizers in which shards are tested. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

ALL_RANKS = (1, 2)


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        stage: of ZeRO; None trains without DeepSpeed (DDP if there are several ranks).
        numbers: fp32; bf16 with fp32 masters; `autocast` in bf16; or bf16 parameters without any fp32 master.
        optimizer: torch's AdamW handed to DeepSpeed, or the AdamW of DeepSpeed's JSON file; `fused` stands for
            DeepSpeed's own kernels, which decide how ZeRO-0 keeps its masters; or the Muon of its JSON file.
        adapt: train LoRA adapters, perhaps of one row or column each, or freeze some of the parameters, or train all.
        tied: the output layer shares the weights of the embedding.
        groups: two parameter groups, with and without weight decay, instead of one.
        accumulation: micro-batches an optimizer step.
        zero: further keys of the block "zero_optimization".
        config: further keys of DeepSpeed's JSON.
        zero_init: the model is partitioned while it is made, as `from_pretrained` does under ZeRO-3.
        ranks: the numbers of ranks that it runs with.
        fsdp: without DeepSpeed, by FSDP2: arguments of `fully_shard`, or "offload" or "checkpointing": true, or
            "replicas": how many.
    """

    name: str
    stage: int | None = None
    numbers: Literal["fp32", "bf16", "autocast", "bf16 parameters"] = "fp32"
    optimizer: Literal["client", "json", "fused", "muon"] = "client"
    adapt: Literal["all", "lora", "lora of rank 1", "frozen"] = "all"
    tied: bool = True
    groups: bool = True
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    zero_init: bool = False
    ranks: tuple[int, ...] = ALL_RANKS
    fsdp: dict[str, Any] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the masters."""
        return self.stage in (1, 2, 3) or self.fsdp is not None


def _cells() -> Iterator[Cell]:
    yield Cell("plain", ranks=(1, 2, 3))
    yield Cell("plain autocast lora", numbers="autocast", adapt="lora", accumulation=2)
    yield Cell("plain bf16 parameters", numbers="bf16 parameters", adapt="frozen", tied=False)
    yield from _fsdp2_cells()
    for stage in (0, 1, 2, 3):
        three = (1, 2, 3) if stage else ALL_RANKS
        yield Cell(f"zero{stage} fp32 client", stage, ranks=three)
        yield Cell(f"zero{stage} fp32 json", stage, optimizer="json", tied=False, groups=False)
        yield Cell(f"zero{stage} bf16 client", stage, "bf16", tied=False, accumulation=2, ranks=three)
        yield Cell(f"zero{stage} bf16 json", stage, "bf16", "json", groups=False)
        yield Cell(f"zero{stage} fp32 lora", stage, adapt="lora", accumulation=2)
        yield Cell(f"zero{stage} bf16 lora", stage, "bf16", "json", adapt="lora", ranks=three)
        yield Cell(f"zero{stage} bf16 frozen", stage, "bf16", adapt="frozen", tied=False)
    offload = {"offload_optimizer": {"device": "cpu"}}
    for stage in (1, 2, 3):
        yield Cell(f"zero{stage} fp32 offload", stage, accumulation=2, zero=offload)
        yield Cell(f"zero{stage} bf16 offload", stage, "bf16", "json", adapt="lora", zero=offload)
        autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        yield Cell(f"zero{stage} autocast", stage, "autocast", tied=False, config=autocast)
    round_robin = {"round_robin_gradients": True}
    for stage in (1, 2):
        yield Cell(f"zero{stage} fp32 round robin", stage, zero=round_robin, ranks=(2, 3))
        yield Cell(f"zero{stage} bf16 round robin", stage, "bf16", adapt="frozen", zero=round_robin, ranks=(2, 3))
        yield Cell(
            f"zero{stage} bf16 aligned parameters", stage, "bf16", zero={"parameter_alignment": True}, ranks=(2,)
        )
    fp32_gradients = {"data_types": {"grad_accum_dtype": "fp32"}}
    yield Cell("bf16 optimizer", 1, "bf16", config=fp32_gradients, ranks=(1, 2, 3))
    yield Cell(
        "bf16 optimizer json lora", 1, "bf16", "json", adapt="lora", accumulation=2, config=fp32_gradients, ranks=(2,)
    )
    yield Cell("zero2 bf16 fp32 gradients", 2, "bf16", accumulation=2, config=fp32_gradients, ranks=(2,))
    yield Cell("zero2 overlap", 2, zero={"overlap_comm": True, "contiguous_gradients": True}, ranks=(2,))
    yield Cell("zero0 bf16 fused", 0, "bf16", "fused")
    yield Cell("zero0 fp32 fused", 0, optimizer="fused", ranks=(2,))
    for stage in (1, 2, 3):
        whole = {"reduce_scatter": False}  # what ZeRO-3 needs for Muon
        yield Cell(f"zero{stage} fp32 muon", stage, optimizer="muon", zero=whole, ranks=(1, 2, 3))
        yield Cell(f"zero{stage} bf16 muon", stage, "bf16", "muon", tied=False, accumulation=2, zero=whole, ranks=(2,))
        yield Cell(f"zero{stage} fp32 muon offload", stage, optimizer="muon", zero={**whole, **offload}, ranks=(2,))
    yield Cell("zero0 fp32 muon", 0, optimizer="muon", ranks=(2,))
    yield Cell("bf16 optimizer muon", 1, "bf16", "muon", config=fp32_gradients, ranks=(2,))
    small_muon = {"sub_group_size": 1000, "reduce_scatter": False, "save_muon_momentum_buffer_in_memory": True}
    yield Cell("zero3 fp32 muon sub-groups", 3, optimizer="muon", zero=small_muon, ranks=(2,))
    small = {"sub_group_size": 1000}
    yield Cell("zero3 fp32 sub-groups", 3, zero=small)
    yield Cell("zero3 bf16 sub-groups offload", 3, "bf16", "json", tied=False, zero={**small, **offload}, ranks=(2,))
    yield Cell("zero3 fp32 all persistent", 3, zero={"stage3_param_persistence_threshold": 1_000_000})
    some = {"stage3_param_persistence_threshold": 100}
    yield Cell("zero3 bf16 some persistent", 3, "bf16", adapt="frozen", zero=some, ranks=(1, 2, 3))
    yield Cell("zero3 bf16 offload all", 3, "bf16", zero={**offload, "offload_param": {"device": "cpu"}}, ranks=(2,))
    yield Cell("zero3 bf16 secondary", 3, "bf16", zero={"zero_hpz_partition_size": 2}, ranks=(2,))
    yield Cell("zero3 fp32 zero.Init", 3, zero_init=True)
    yield Cell("zero3 bf16 zero.Init lora", 3, "bf16", "json", adapt="lora", zero_init=True)


def _fsdp2_cells() -> Iterator[Cell]:
    yield Cell("fsdp2 fp32", fsdp={}, ranks=(1, 2, 3))
    yield Cell("fsdp2 bf16", numbers="bf16", fsdp={}, accumulation=2, ranks=(1, 2, 3))
    yield Cell("fsdp2 untied", fsdp={}, tied=False, groups=False, ranks=(2,))
    yield Cell("fsdp2 lora", adapt="lora", fsdp={}, accumulation=2, ranks=(2,))
    yield Cell("fsdp2 bf16 empty shards", numbers="bf16", adapt="lora of rank 1", fsdp={}, ranks=(2, 3))
    yield Cell("fsdp2 frozen", adapt="frozen", fsdp={}, tied=False, ranks=(2, 3))
    yield Cell("fsdp2 bf16 parameters", numbers="bf16 parameters", fsdp={}, tied=False, ranks=(2,))
    yield Cell("fsdp2 bf16 offload", numbers="bf16", fsdp={"offload": True}, ranks=(2,))
    yield Cell("fsdp2 checkpointing", fsdp={"checkpointing": True}, ranks=(2,))
    yield Cell("fsdp2 bf16 replicas", numbers="bf16", fsdp={"replicas": 2}, ranks=(2, 4))
    yield Cell("fsdp2 replicas empty shards", adapt="lora of rank 1", fsdp={"replicas": 2}, ranks=(4,))
    yield Cell("fsdp2 kept after forward", fsdp={"reshard_after_forward": False}, ranks=(2,))


CELLS = list(_cells())


def cells_for(num_ranks: int) -> list[Cell]:
    """The cells that run with that many ranks."""
    return [cell for cell in CELLS if num_ranks in cell.ranks]
