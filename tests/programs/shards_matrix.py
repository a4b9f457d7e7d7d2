"""One rank that makes real engines, one after another, and checks their shards and both partitions.

    torchrun ... -m tests.programs.shards_matrix RESULT.json [CELL ...]

Rank 0 writes, after each cell, what failed in it on any rank.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

from hf_diloco.inner import frozen, open_shards, partition
from hf_diloco.inner.base import BufferShards, Shards
from hf_diloco.inner.fragments import FragmentShards, cut_into_fragments
from hf_diloco.inner.island import IslandGroup
from hf_diloco.inner.partition import AlignedPartition, LanePartition, Partition, choose_partition, layout_of
from tests.programs.shards_engines import VOCABULARY, Engine, groups_of_optimizer, make_engine, make_model, trainable
from tests.programs.shards_reference import Reference, whole, working_weights
from tests.programs.shards_table import Cell, cells_for

NUM_WINDOWS = 6  # in which the values of one cell move
NUM_LANES = (1, 2, 3, 5)
BUFFER_LANES = (2, 5)  # of the inner optimizer's buffers, which are cut by the same code


@dataclass
class Findings:
    """What was seen in one cell: failed checks of the shards, of the partitions and of the inner optimizer.

    `step_error` is how far the steps were from the reference's, as a part of their length.
    """

    name: str
    shards: list[str] = field(default_factory=list)
    partition: list[str] = field(default_factory=list)
    inner: list[str] = field(default_factory=list)
    step_error: float = 0.0
    seconds: float = 0.0


class Examination:
    """The checks of one cell on one rank."""

    def __init__(self, cell: Cell, island: IslandGroup) -> None:
        self.found = Findings(cell.name)
        self._cell = cell
        self._island = island
        self._engine: Engine = make_engine(cell, island.size)
        self._start = working_weights(self._engine)
        self._reference = Reference(cell, self._engine)
        self._shards: Shards = open_shards(self._engine.module, self._engine.optimizer, island.size)
        self._generator = torch.Generator().manual_seed(5)  # the same values on every rank

    def run(self) -> Findings:
        begin = time.monotonic()
        try:
            self._check_layout()
            self._check_start()
            self._check_frozen()
            self._step(seed=10)
            self._check_masters_are_the_engines()
            self._check_written()
            self._step(seed=20)
            self._check_partitions()
            self._check_inner()
        finally:
            self._engine.close()
        self.found.seconds = time.monotonic() - begin
        return self.found

    # Shards

    def _expect(self, condition: bool, text: str) -> None:
        if not condition:
            self.found.shards.append(f"rank {self._island.rank}: {text}")

    def _check_layout(self) -> None:
        shards, reference = self._shards, self._reference
        self._expect(list(shards.sizes.items()) == list(reference.sizes.items()), "names or sizes differ")
        self._expect(shards.num_parameters == sum(reference.sizes.values()), "num_parameters differs")
        counts = torch.zeros(shards.num_parameters, dtype=torch.int64)
        for segment in shards.segments():
            first = shards.offsets()[segment.name] + segment.start
            counts[first : first + segment.numel] += 1
            self._expect(segment.start + segment.numel <= shards.sizes[segment.name], f"{segment.name}: too long")
        dist.all_reduce(counts)
        expected = self._island.size if shards.is_replicated else 1
        self._expect(bool((counts == expected).all()), f"covered {counts.unique().tolist()} times, not {expected}")
        self._expect(shards.is_replicated != self._cell.is_sharded, f"is_replicated is {shards.is_replicated}")

    def _check_frozen(self) -> None:
        """What the first rank tells of frozen weights is what the model as it was made tells, in the same dtype."""
        if self._cell.zero_init or self._island.rank:
            return
        model = make_model(self._cell)
        found = self._shards.frozen
        if "bfloat16" in found:
            model.bfloat16()
        self._expect(found == frozen.frozen_weights(model), f"frozen weights: {found}")
        self._expect(bool(found) == (self._cell.adapt != "all"), f"frozen weights with {self._cell.adapt}: {found}")

    def _check_start(self) -> None:
        self._expect_equal(self._masters(), self._reference.masters(), "masters at the start")
        if not self._cell.zero_init:
            for name, parameter in make_model(self._cell).named_parameters():
                same = torch.equal(parameter.to(self._start[name].dtype), self._start[name])
                self._expect(same, f"{name} was changed by the engine's making")

    def _step(self, seed: int, allowed: float = 0.01) -> None:
        """A step of training starts from the masters as they are, and ends with working copies that agree."""
        before = self._masters()
        batches = self._batches(seed)
        self._engine.step(batches)
        self._reference.step(batches)
        after = self._masters()
        moved = float((after - before).norm())
        error = float((after - self._reference.masters()).norm()) / moved
        self.found.step_error = max(self.found.step_error, error)
        # Between ranks, 16-bit gradients are summed in 16 bits, as in no reference that keeps to fp32.
        # Muon multiplies in bf16, where some processors round products of other shapes otherwise; and it makes much
        # of the rounding of a gradient: it raises small singular values to 1.
        is_exact, is_muon = self._cell.numbers == "fp32", self._cell.optimizer == "muon"
        allowed = (0.05 if is_exact else 0.2) if is_muon else (1e-5 if is_exact else allowed)
        self._expect(moved > 0.01, f"a step moved the masters by {moved:.2g} only")
        self._expect(error <= allowed, f"a step missed the reference's by {error:.2g} of its length")
        self._check_working_copies(after, f"after step {seed}")

    def _check_masters_are_the_engines(self) -> None:
        """They are what the engine's public interface says that they are."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self._cell.fsdp is not None:
            masters = self._by_name(self._masters())  # which reshards: all parameters are DTensors then
            for name, parameter in trainable(self._engine.module):
                public = cast(Any, parameter).full_tensor().float()
                self._expect_equal(masters[name].view_as(public), public, f"{name} by full_tensor()")
            return
        if "round_robin_gradients" in self._cell.zero:  # safe_get_full_fp32_param is wrong there
            return
        masters = self._by_name(self._masters())
        for name, parameter in self._engine.module.named_parameters():
            public = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if public is not None:
                self._expect_equal(masters[name].view_as(public), public, f"{name} by safe_get_full_fp32_param")
            elif parameter.requires_grad:
                self._expect(self._shards.is_replicated, f"{name} is not known to DeepSpeed")

    def _check_written(self) -> None:
        """Straight after a step, as a callback does it: ZeRO-3 has some parameters gathered then."""
        self._engine.step(self._batches(15))
        self._reference.step(self._batches(15))
        values = self._new_values()
        shards, offsets = self._shards, self._shards.offsets()
        for segment in shards.segments():
            first = offsets[segment.name] + segment.start
            segment.values.copy_(values[first : first + segment.numel])
        shards.commit()
        self._reference.write(values)
        self._expect_equal(self._masters(), self._reference.masters(), "masters after writing")
        self._check_masters_are_the_engines()
        self._check_logits("after commit")  # first: to look at the copies is to gather them anew under ZeRO-3
        self._check_working_copies(self._masters(), "after commit")

    def _check_working_copies(self, masters: torch.Tensor, when: str) -> None:
        working = working_weights(self._engine)
        rounded = self._cell.stage == 3 and self._cell.numbers == "autocast"  # gathered in bf16 where that suffices
        for name, master in self._by_name(masters).items():
            copy = working[name].bfloat16() if rounded else working[name]
            expected = master.to(copy.dtype).view_as(copy)
            self._expect_equal(copy, expected, f"working copy of {name} {when}")
        for name in working.keys() - self._shards.sizes.keys():
            self._expect_equal(working[name], self._start[name], f"frozen {name} {when}")

    def _check_logits(self, when: str) -> None:
        tokens = self._batches(30)[0]
        self._expect_equal(self._engine.logits(tokens), self._reference.logits(tokens), f"logits {when}")

    # Partitions

    def _check_partitions(self) -> None:
        partition.WINDOW_VALUES = self._shards.num_parameters // NUM_WINDOWS
        if not self._shards.is_replicated or self._island.size == 1:
            self._check_partition("aligned", AlignedPartition(self._shards, self._island))
        for num_lanes in NUM_LANES:
            self._check_partition(f"{num_lanes} lanes", LanePartition(self._shards, self._island, num_lanes))
        self._check_fragments()
        self._check_logits("after scattering")
        self._step(seed=40)

    def _check_partition(self, name: str, cut: Partition) -> None:
        traffic = Traffic()
        with traffic:
            out = torch.full((cut.numel,), torch.nan)
            cut.gather(out)
            gathered = self._masters()
            self._expect_cut(torch.equal(out, _take(gathered, cut)), f"{name}: gather")
            values = self._new_values()
            self._reference.write(values)
            expected = self._reference.masters()
            cut.scatter(_take(expected, cut))
            self._expect_cut(torch.equal(self._masters(), expected), f"{name}: scatter")
        self._check_working_copies(expected, f"after scatter in {name}")
        lengths = [part.numel() for part in cut.split(out)]
        self._expect_cut(lengths == cut.lane_sizes and len(lengths) == len(cut.lanes), f"{name}: {lengths}")
        self._check_cover(name, cut)
        self._expect_cut(
            traffic.largest <= partition.WINDOW_VALUES, f"{name}: {traffic.largest} values under way at once"
        )
        moves = isinstance(cut, LanePartition) and self._island.size > 1
        as_due = traffic.count >= 2 if moves else traffic.count == 0
        self._expect_cut(as_due, f"{name}: {traffic.count} transfers inside the island")
        self._expect_exchanged(name, traffic, self._shards.num_parameters)

    def _check_fragments(self) -> None:
        """Each is written by itself, as Streaming DiLoCo does it; masters of other fragments stay."""
        for names in cut_into_fragments(self._shards.sizes, 2, "strided"):
            fragment = FragmentShards(self._shards, names)
            cut = choose_partition(fragment, self._island, [layout_of(fragment, self._island)])
            masters, values = self._by_name(self._masters()), self._by_name(self._new_values())
            self._reference.write(torch.cat([values[name] if name in names else masters[name] for name in masters]))
            expected = self._reference.masters()
            with (traffic := Traffic()):
                cut.scatter(_take(torch.cat([self._by_name(expected)[name] for name in names]), cut))
            self._expect_cut(torch.equal(self._masters(), expected), f"fragment of {names}: scatter")
            self._expect_exchanged(f"fragment of {names}", traffic, fragment.num_parameters)
            self._check_working_copies(expected, f"after scatter of {names}")

    def _expect_exchanged(self, name: str, traffic: Traffic, num_values: int) -> None:
        """Replicas have given each other the fp32 values that were written and no more, once each."""
        num_bytes, expected = traffic.broadcast_bytes, 4 * num_values * (self._cell.fsdp or {}).get("replicas", 0)
        (total,) = self._island.sum([num_bytes])
        self._expect_cut(total == expected, f"{name}: {total:g} bytes between replicas, not {expected}")

    def _check_cover(self, name: str, cut: Partition) -> None:
        """The ranks' vectors together hold every element once."""
        counts = torch.zeros(self._shards.num_parameters, dtype=torch.int64)
        for start, length in cut.intervals:
            counts[start : start + length] += 1
        dist.all_reduce(counts)
        self._expect_cut(bool((counts == 1).all()), f"{name}: covers {counts.unique().tolist()} times")

    def _expect_cut(self, condition: bool, text: str) -> None:
        if not condition:
            self.found.partition.append(f"rank {self._island.rank}: {text}")

    # The inner optimizer

    def _check_inner(self) -> None:
        """Its parameter groups, their learning rates at the last step, and its buffers: zeroed, read, written."""
        inner, rates = self._shards.inner, [0.011, 0.007, 0.005]
        groups = groups_of_optimizer(self._cell, [(name, name) for name in self._shards.sizes])
        numbered = {name: number for number, group in enumerate(groups) for name in group["params"]}
        self._expect_inner(inner.groups == numbered, f"groups are {inner.groups}")
        if self._cell.optimizer == "fused":  # a stand-in whose step torch does not see
            return
        inner.watch()
        for group, rate in zip(self._engine.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
        inner.check_buffers("zero")
        inner.zero_buffers()
        self._reference.begin_anew(rates[: len(groups)])
        self._step(seed=50, allowed=0.05)  # Adam's first step makes much of the rounding of a gradient
        for name in inner.buffers if self._cell.optimizer != "muon" else ():  # its momentum lies otherwise
            found, expected = whole(BufferShards(self._shards, name)), self._reference.buffer(name)
            error = float((found - expected).norm() / expected.norm())
            allowed = 1e-5 if self._cell.numbers == "fp32" else 0.05
            self._expect_inner(error <= allowed, f"{name} is off by {error:.2g} of its length")
            self._check_buffer_written(name)
        self._reference.write(self._masters())  # without what the step from zeroed buffers made of rounding
        self._step(seed=60, allowed=0.05)  # from the buffers as they were written
        for group in self._engine.optimizer.param_groups:
            group["lr"] = 0.5  # as a scheduler, after the step
        self._expect_inner(inner.rates == rates[: len(groups)], f"rates are {inner.rates}")

    def _check_buffer_written(self, name: str) -> None:
        """What a partition of a buffer scatters is in the optimizer's state, and gathered again."""
        buffer = BufferShards(self._shards, name)
        cuts: list[Partition] = [LanePartition(buffer, self._island, num_lanes) for num_lanes in BUFFER_LANES]
        if not buffer.is_replicated or self._island.size == 1:
            cuts.append(AlignedPartition(buffer, self._island))
        for cut in cuts:
            values = self._new_values().abs() + 0.01  # second moments are not negative
            self._reference.write_buffer(name, values)
            cut.scatter(_take(values, cut))
            written = self._reference.buffer(name)  # in the optimizer's format
            self._expect_inner(torch.equal(whole(buffer), written), f"{name}: scatter in {type(cut).__name__}")
            gathered = torch.empty(cut.numel)
            cut.gather(gathered)
            self._expect_inner(torch.equal(gathered, _take(written, cut)), f"{name}: gather in {type(cut).__name__}")

    def _expect_inner(self, condition: bool, text: str) -> None:
        if not condition:
            self.found.inner.append(f"rank {self._island.rank}: {text}")

    # Values

    def _expect_equal(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if not torch.equal(actual, expected):
            difference = float((actual.float() - expected.float()).abs().max())
            self._expect(False, f"{what}: differs by {difference:.2g}")

    def _masters(self) -> torch.Tensor:
        return whole(self._shards)

    def _by_name(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self._shards.sizes, whole.split(list(self._shards.sizes.values())), strict=True))

    def _new_values(self) -> torch.Tensor:
        return torch.randn(self._shards.num_parameters, generator=self._generator) * 0.1

    def _batches(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed + self._island.rank)
        return [torch.randint(VOCABULARY, (2, 9), generator=generator) for _ in range(self._cell.accumulation)]


class Traffic:
    """Watches what moves inside the island.

    Attributes:
        count: all-to-alls.
        largest: the most values that one of them sends or receives.
        broadcast_bytes: that this rank sends or receives in broadcasts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.largest = 0
        self.broadcast_bytes = 0
        self._real, self._real_broadcast = dist.all_to_all_single, dist.broadcast

    def __enter__(self) -> None:
        def watched(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.largest = max(self.largest, output.numel(), input.numel())
            return self._real(output, input, *args, **kwargs)

        def watched_broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.broadcast_bytes += tensor.numel() * tensor.element_size()
            return self._real_broadcast(tensor, *args, **kwargs)

        dist.all_to_all_single, dist.broadcast = watched, watched_broadcast

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.broadcast = self._real, self._real_broadcast


def _take(whole: torch.Tensor, cut: Partition) -> torch.Tensor:
    return torch.cat([whole[start : start + length] for start, length in cut.intervals] or [torch.empty(0)])


def main() -> None:
    path, *names = sys.argv[1:]
    torch.set_num_threads(1)
    frozen.LEAST_VALUES = 300  # the model is small
    atexit.register(time.sleep, 0.2)  # Gloo's threads may abort an interpreter that shuts down
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    Accelerator(cpu=True)  # its wrapper around DeepSpeed's optimizers asks for it
    island = IslandGroup(timeout=60)
    gc.freeze()  # DeepSpeed collects garbage often, which need not search the imported libraries each time
    results = []
    for cell in cells_for(island.size):
        if names and cell.name not in names:
            continue
        print(f"[rank {island.rank}] {cell.name}", flush=True)
        found = Examination(cell, island).run()
        everywhere = [Findings(**item) for item in island.gather(asdict(found))]
        found.shards = [text for item in everywhere for text in item.shards]
        found.partition = [text for item in everywhere for text in item.partition]
        found.inner = [text for item in everywhere for text in item.inner]
        results.append(asdict(found))
        if island.is_leader:
            Path(path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
