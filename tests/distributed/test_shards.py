"""Master weights of real engines, read and written in place; and what cannot be, refused with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.matrix import CELL_NAMES, findings
from tests.distributed.torchrun import torchrun
from tests.processes import run

INSIDE = "use DDP or DeepSpeed ZeRO inside the island"
REFUSED = {
    "optimizer on nvme": "DeepSpeed keeps the master weights on NVMe .*: use device cpu",
    "parameters on nvme": "DeepSpeed keeps the master weights on NVMe .*: use device cpu",
    "zenflow": "ZenFlow updates the master weights while training goes on.*: remove the block zenflow",
    "no optimizer": "DeepSpeedZeRoOffload keeps its master weights in a way that .*; use ZeRO stage 0, 1, 2 or 3",
    "unknown optimizer": "NovelZeroOptimizer keeps its master weights in a way that this package does not know",
    "muon of torch": "Muon needs whole matrices, which DeepSpeed flattens: .* name DeepSpeed's own Muon",
    "experts zero0": r"parameter moe\.\S*experts\.0\.weight belongs to a DeepSpeed MoE layer.*: use a model",
    "experts zero2": r"parameter moe\.\S*experts\.0\.weight belongs to a DeepSpeed MoE layer.*: use a model",
    "not optimized zero2": "no optimizer on this island trains 1.weight: hand it to the optimizer .*or freeze",
    "not optimized zero3": "no optimizer on this island trains 1.weight: hand it to the optimizer .*or freeze",
    "fsdp2 by columns": r"parameter 0.weight is placed as \(.*1.*\), and .*: .* without .* another shard_placement",
    "fsdp2 of a part": "parameter 1.weight is trained, but not sharded by FSDP2 .*: apply fully_shard to the whole",
    "fsdp2 beside dtensors": "parameter 1.weight is trained, but not sharded by FSDP2 .*: apply fully_shard to the",
    "fsdp2 partial": r"parameter 0.weight is placed as \(P.*\), and this package reads only",
    "fsdp2 of tensor parallel": r"parameter 0.weight is placed as \(.*, .*\), and .* tensor parallelism",
    "fsdp2 quantised": r"parameter 0.weight is quantised \(TwoTensor of torch.float32\): .*; freeze",
    "fsdp2 on meta": "parameter 0.weight has no data .*: load the model before training",
    "fsdp2 after the optimizer": "no optimizer on this island trains 0.weight: make the optimizer after fully_shard",
    "fsdp2 left out": "FSDP was asked for .*, but the model is not sharded: Accelerate leaves FSDP out on CPU",
    "deepspeed left out": "DeepSpeed was asked for .*, but the model trains without it: .* call accelerate.PartialSt",
    "fsdp1": "module FullyShardedDataParallel is sharded by FSDP1.*: use FSDP2",
    "fsdp1 flat": "module FullyShardedDataParallel is sharded by FSDP1.*: use FSDP2",
    "dtensors": "parameter 0.weight is sharded by .*DTensor.*: use FSDP2, DDP or DeepSpeed ZeRO inside",
    "tensor parallel zero0": r"parameter \S*q_proj.weight is tensor-parallel \(AutoTP\).*: use ZeRO inside",
    "tensor parallel zero1": r"parameter \S*q_proj.weight is tensor-parallel \(AutoTP\).*: use ZeRO inside",
    "pipeline zero0": "the ranks of a DeepSpeed PipelineModule hold different layers.*: use ZeRO inside",
    "pipeline zero1": "the ranks of a DeepSpeed PipelineModule hold different layers.*: use ZeRO inside",
    "layers by rank": f"the ranks of this island hold different parameters.*: {INSIDE}",
    "all frozen": "the model has no trainable parameter: nothing to synchronise",
    "meta device": "parameter weight has no data .*: load the model before training",
    "not contiguous": r"parameter weight is not contiguous in memory: call .contiguous\(\) on it",
    "doubles": r"parameter weight is float64, and islands keep and exchange float32: .*model.float\(\)",
    "complex numbers": "parameter weight has type torch.complex64: only floating-point parameters",
    "files of other machines": r"was written by 3 ranks, and this island has 2: .*of 1 ranks\), or start 3 ranks",
    "folder of one machine": "elsewhere/step_converted .* is not on this rank's disk: .* all machines of the island",
}
"""What is said to each case of `tests.programs.shards_refusals`."""

VERSIONS = {
    "fsdp2": None,
    "one value zero3": None,
    "folder of all machines": None,
    "version as tested": None,
    "development version": None,
    "newer version": "0.20.1",
    "older version": "0.19.7",
}


@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "name"), CELL_NAMES)
def test_shards_are_the_masters(num_ranks: int, name: str) -> None:
    """Segments cover each element as often as they say and are the values that DeepSpeed's public interface gives;
    values written through them are in the forward pass after `commit`, and the next step starts from them."""
    assert findings(num_ranks, name)["shards"] == []


@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "name"), CELL_NAMES)
def test_the_inner_optimizer_is_seen(num_ranks: int, name: str) -> None:
    """Parameter groups, learning rates of the last step, and its buffers wherever DeepSpeed has them: they can begin
    anew, and the next step starts from what is written into them."""
    assert findings(num_ranks, name)["inner"] == []


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What was said to each unsupported case on two ranks."""
    result: Path = tmp_path_factory.mktemp("refusals") / "result.json"
    for num_ranks in (1, 2):
        run(torchrun(num_ranks, "-m", "tests.programs.shards_refusals", result), timeout=120)
    return json.loads(result.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(refusals: dict[str, str], case: str) -> None:
    assert refusals[case].startswith("refused: ")
    assert re.search(REFUSED[case], refusals[case]), refusals[case]


@pytest.mark.distributed
@pytest.mark.parametrize("case", VERSIONS)
def test_untested_version_warns(refusals: dict[str, str], case: str) -> None:
    if VERSIONS[case] is None:
        assert refusals[case] == "opened"
    else:
        expected = f"opened; warned: DeepSpeed {VERSIONS[case]} is outside the range that hf_diloco was tested with"
        assert refusals[case].startswith(expected)


@pytest.mark.distributed
def test_every_case_is_in_the_tables(refusals: dict[str, str]) -> None:
    assert refusals.keys() == REFUSED.keys() | VERSIONS.keys()


@pytest.mark.distributed
def test_fsdp2_is_stale_until_it_is_resharded(tmp_path: Path) -> None:
    """After an evaluation the modules hold whole copies, and the next forward pass uses them, unless they are dropped
    before parameters are read and after they are written."""
    result = tmp_path / "result.json"
    run(torchrun(2, "-m", "tests.programs.fsdp2_stale", result), timeout=120)
    found = json.loads(result.read_text())
    assert found["is_whole"] is found["is_cut_to_be_read"] is True
    assert found["without_commit"] > 0.1
    assert found["with_commit"] == 0.0
