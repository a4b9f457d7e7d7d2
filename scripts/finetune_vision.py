"""Fine-tunes or trains an image classifier on nodes that average with their neighbours.

    hf-diloco launch configs/vision/quickstart.yaml                    # all nodes, each a process
    python scripts/finetune_vision.py configs/vision/quickstart.yaml --simulate 8     # all nodes in one process
    torchrun --nproc_per_node 8 scripts/finetune_vision.py RUN.yaml --node 0 --rendezvous tcp://HOST:29400

The last starts one node of eight ranks; so do `accelerate launch` and, for a single rank, `python`.
"""

from __future__ import annotations

from hf_diloco.apps.common.load import load_given, make_parser
from hf_diloco.apps.common.process import run_and_exit
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.apps.vision.train import DESCRIPTION, train
from hf_diloco.errors import ConfigError


def main() -> None:
    """Runs and exits: 0 finished, 3 stopped on request with checkpoints, 1 failed."""
    parser = make_parser("finetune_vision.py", DESCRIPTION)
    parser.add_argument(
        "--simulate", type=int, metavar="N", help="train N nodes in this process, for studies on one device"
    )
    given = vars(parser.parse_intermixed_args())
    num_nodes: int | None = given.pop("simulate")
    run_and_exit(lambda: _load(given, num_nodes), train if num_nodes is None else _simulate)


def _load(given: dict[str, object], num_nodes: int | None) -> VisionRun:
    if num_nodes is not None:
        if num_nodes < 1:
            raise ConfigError(f"--simulate {num_nodes}: a graph has at least one node")
        given = {**given, "num_islands": num_nodes, "island": 0}
    return load_given(VisionRun, given)


def _simulate(run: VisionRun) -> int:
    from hf_diloco.apps.vision.simulate import NodeSimulation

    return NodeSimulation(run, run.gossip.num_nodes).run()


if __name__ == "__main__":
    main()
